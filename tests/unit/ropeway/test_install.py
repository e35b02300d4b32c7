"""The installation script: which build of torch it takes, and what it does ahead of the first start."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kernels.native_build import NativeUnavailableError, build, compiler, intact

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_script", ROOT / "scripts" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_bytecode_of_a_start_is_written_even_where_processes_write_none(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "started.py").write_text("answer = 42\n")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "STARTED", ("started",))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    install.compile_started()
    assert [file.name for file in (tmp_path / "__pycache__").iterdir()] == [
        f"started.{sys.implementation.cache_tag}.pyc"
    ]


def test_a_start_that_cannot_be_imported_is_said(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "STARTED", ("no_such_module",))
    install.compile_started()
    assert "starts will be slower" in capsys.readouterr().err


def test_kernels_are_built_for_the_first_start(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    try:
        compiler()
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert install.build_kernels().wait() == 0
    [folder] = (tmp_path / "ropeway" / "kernels").iterdir()
    assert intact(folder)
    assert build(tmp_path / "ropeway")[0].parent == folder


def test_without_a_compiler_the_installation_goes_on(
    install: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert install.build_kernels().wait() == 0
    assert "torch's kernels will compute on the CPU: no C++ compiler (no-such-compiler)" in capfd.readouterr().out


CUDA = ("2.13.0", ("filelock", "nvidia-cublas-cu13==13.1; platform_system == 'Linux'", "triton==3.5"))
CPU_BY_TAG = ("2.13.0+cpu", ("filelock",))
CPU_BY_REQUIREMENTS = ("2.13.0", ("filelock", "networkx>=2.5.1"))


@pytest.mark.parametrize(
    ("candidate", "cpu"),
    [
        (CUDA, False),
        (CPU_BY_TAG, True),
        (CPU_BY_REQUIREMENTS, True),
        (("2.13.0+cu130", ()), False),
        (("2.13.0+rocm7.0", ()), False),
        (("2.13.0", ("cuda-bindings",)), False),
        (("2.13.0", ("tritonclient", "cudaless")), True),
    ],
)
def test_what_counts_as_a_cpu_build(install: ModuleType, candidate: tuple[str, tuple[str, ...]], cpu: bool) -> None:
    assert install.Candidate(*candidate).is_cpu is cpu


@pytest.mark.parametrize(
    ("choice", "gpu", "candidate", "expected"),
    [
        ("auto", False, CUDA, True),
        ("auto", False, CPU_BY_TAG, False),
        ("auto", False, CPU_BY_REQUIREMENTS, False),
        ("auto", True, CUDA, False),
        ("cpu", True, CUDA, True),
        ("cpu", False, CPU_BY_TAG, False),
        ("cuda", False, CUDA, False),
        ("default", False, CUDA, False),
        ("default", True, CPU_BY_TAG, False),
    ],
)
def test_when_the_cpu_index_is_needed(
    install: ModuleType, choice: str, gpu: bool, candidate: tuple[str, tuple[str, ...]], expected: bool
) -> None:
    assert install.needs_cpu_index(choice, gpu, install.Candidate(*candidate)) is expected


def test_what_cannot_be_met_is_refused(install: ModuleType) -> None:
    with pytest.raises(install.InstallError, match="auto, cpu, cuda, default"):
        install.install_torch("rocm")
    with pytest.raises(install.InstallError, match=r"2\.13\.0\+cpu"):
        install.needs_cpu_index("cuda", True, install.Candidate(*CPU_BY_TAG))


def test_pins_are_read_from_the_constraints(install: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text("# torch==1.0\ntorchvision==0.1\nTorch==2.13.0  # why\nx==1; python_version < '3.12'\n")
    assert install.pin("torch", file) == "Torch==2.13.0"
    assert install.pin("x", file) == "x==1"
    with pytest.raises(install.InstallError, match="no pin of y"):
        install.pin("y", file)


def test_the_projects_own_constraints_pin_what_the_script_installs(install: ModuleType) -> None:
    for name in ("torch", *install.WITHOUT_DEPENDENCIES):
        assert install.pin(name).partition("==")[2]
    assert "+" not in install.pin("torch")


def test_a_report_of_pip_is_read(install: ModuleType) -> None:
    report = {"version": "1", "install": [{"metadata": {"version": "2.13.0", "requires_dist": ["triton"]}}]}
    assert install.parse_report(report) == install.Candidate("2.13.0", ("triton",))


def call_install_torch(install: ModuleType, monkeypatch: pytest.MonkeyPatch, candidate: object) -> list[str]:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "installed", lambda _: False)
    monkeypatch.setattr(install, "has_gpu", lambda: False)
    monkeypatch.setattr(install, "candidate_of", lambda _: candidate)
    monkeypatch.setattr(install, "pip_install", lambda *arguments: calls.append(arguments))
    install.install_torch("auto")
    (call,) = calls
    return list(call)


def test_the_cpu_index_is_the_only_one_of_its_call(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_install_torch(install, monkeypatch, install.Candidate(*CUDA))
    assert call[call.index("--index-url") + 1] == install.CPU_WHEELS
    assert "--extra-index-url" not in call and "--no-deps" in call
    monkeypatch.setenv("ROPEWAY_TORCH_INDEX", "http://mirror/cpu")
    assert "http://mirror/cpu" in call_install_torch(install, monkeypatch, install.Candidate(*CUDA))


def test_no_index_is_named_where_pip_takes_a_cpu_build(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--index-url" not in call_install_torch(install, monkeypatch, install.Candidate(*CPU_BY_TAG))


def test_the_project_is_found_in_the_folder_that_holds_a_clone_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "ropeway").symlink_to(ROOT)
    code = "import ropeway; from ropeway import SamplingParams; print(ropeway.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stderr}\n(`make venv` brings an older environment up to date)"
    assert Path(done.stdout.strip()).parts[-2:] == ("ropeway", "__init__.py")


def test_the_project_is_installed_by_its_path(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "install_torch", lambda _: None)
    monkeypatch.setattr(install, "pip_install", lambda *arguments: calls.append(arguments))
    assert install.main(["--extras", "gateway,worker"]) == 0
    assert "editable_mode=compat" in calls[0] and calls[0][-1] == f"{ROOT}[gateway,worker]"


def test_what_is_installed_stays(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version("pytest")
    assert install.installed(f"pytest=={version}")
    assert not install.installed("pytest==0.1") and not install.installed("no-such-package==1")
    monkeypatch.setattr(install, "installed", lambda _: True)
    monkeypatch.setattr(install, "pip_install", lambda *_: pytest.fail("nothing is to be installed"))
    install.install_torch("auto")
