"""The command line, up to where a process would start."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import ropeway
from ropeway import cli, options, processes
from ropeway.client import APIError
from ropeway.options import env_name, is_secret
from shared.settings import CommonSettings, GatewaySettings, WorkerSettings


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the developer's own, and wide, colourless output."""
    for name in {*GatewaySettings.model_fields, *WorkerSettings.model_fields}:
        monkeypatch.delenv(f"ROPEWAY_{name.upper()}", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Settings that a process was started with."""
    calls: list[Any] = []
    for room in ("gateway", "worker"):
        module = types.ModuleType(f"{room}.main")
        module.run = lambda settings, owner=None: calls.append(settings) or 0  # type: ignore[attr-defined, func-returns-value]
        monkeypatch.setitem(sys.modules, f"{room}.main", module)
    return calls


def test_version() -> None:
    assert ropeway.__version__ in run("version").output


def test_doctor_says_what_computes_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("doctor")
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.output.replace("cpu kernels", "kernels").splitlines())
    assert lines.keys() == {"python", "device", "cpus", "threads", "kernels", "greedy", "cache"}
    assert lines["kernels"].startswith(("native: built for ", "torch: "))
    monkeypatch.setenv("ROPEWAY_CPU_KERNELS", "torch")
    assert "torch: cpu_kernels is torch" in run("doctor").output
    assert "from all logits: the native CPU kernels are not used" in run("doctor").output
    monkeypatch.setenv("ROPEWAY_SCREEN_HEAD", "false")
    assert "from all logits: screen_head is off" in run("doctor").output


def test_doctor_without_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "ropeway.doctor", raising=False)
    result = run("doctor")
    assert result.exit_code == 1
    assert "pip install 'ropeway[worker]'" in result.output


def test_doctor_refuses_what_a_worker_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_CPU_KERNELS", "fast")
    assert run("doctor").exit_code == 2


@pytest.mark.parametrize(("command", "cls"), [("gateway", GatewaySettings), ("worker", WorkerSettings)])
def test_every_setting_has_an_option(command: str, cls: type[CommonSettings]) -> None:
    shown = run(command, "--help").output
    for name, field in cls.model_fields.items():
        assert (options.flag(name) in shown) is not is_secret_or_list(field), name


def is_secret_or_list(field: Any) -> bool:
    return is_secret(field) or "list" in str(field.annotation)


def test_serve_has_the_options_of_both() -> None:
    shown = run("serve", "--help").output
    for option in ("--redis", "--host", "--port", "--model", "--engine", "--dtype", "--max-num-seqs", "--data-dir"):
        assert option in shown


def test_options_reach_the_settings_and_win_over_the_environment(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROPEWAY_MAX_NUM_SEQS", "5")
    monkeypatch.setenv("ROPEWAY_BLOCK_SIZE", "32")
    arguments = ["--engine", "sim", "--max-num-seqs", "7", "--no-enable-prefix-caching", "--sim-step-ms", "0.5"]
    result = run("worker", *arguments, "--cache-dir", "/x", "--redis", "unix:///s")
    assert result.exit_code == 0, result.output
    (settings,) = started
    assert (settings.engine, settings.max_num_seqs, settings.block_size) == ("sim", 7, 32)
    assert (settings.enable_prefix_caching, settings.sim_step_ms, settings.cache_dir) == (False, 0.5, Path("/x"))
    assert settings.redis_url == "unix:///s"


def test_the_id_of_a_worker_is_well_formed_and_no_option_for_people(started: list[Any]) -> None:
    assert run("worker", "--owner", "0123456789abcdef" * 2).exit_code == 0 and len(started) == 1
    wrong = run("worker", "--owner", "me")
    assert wrong.exit_code == 2 and "32 hexadecimal digits" in wrong.output and len(started) == 1
    assert "--owner" not in run("worker", "--help").output


def test_the_exit_code_of_a_worker_is_that_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("worker.main")
    module.run = lambda settings, owner: 71  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "worker.main", module)
    assert run("worker").exit_code == 71


def test_without_options_the_defaults_hold(started: list[Any]) -> None:
    assert run("gateway").exit_code == 0
    assert started == [GatewaySettings()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gateway", "--port", "99999"], ["--port", "ROPEWAY_PORT", "65535", "99999"]),
        (["worker", "--max-num-seqs", "0"], ["--max-num-seqs", "greater than or equal to 1"]),
        (["worker", "--engine", "steam"], ["--engine", "auto", "sim"]),
        (["worker", "--block-size", "many"], ["--block-size"]),
        (["worker", "--no-such"], ["--no-such"]),
        (["submit", "hi", "--field", "stop"], ["--field stop", "NAME=JSON"]),
        (["submit", "hi", "--field", "stop=[x"], ["--field stop=[x", "not JSON"]),
        (["submit", "hi", "--field", "class=batch"], ["not JSON", "quotes: --field 'class=\"batch\"'"]),
        (["submit", "hi", "--field", "model=1"], ["the command sets model itself"]),
        (["submit", "hi", "--field", "self=1"], ["the command sets self itself"]),
        (["submit", "hi", "--class", "urgent"], ["--class", "high", "batch"]),
        (["submit", "hi", "--delay", "soon"], ["--delay"]),
        (["submit", "hi", "--field", "n=2", "--stream"], ["--stream", "--json"]),
    ],
)
def test_a_wrong_option_is_named_with_exit_code_2(started: list[Any], arguments: list[str], words: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and not started
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.output


def test_a_wrong_variable_is_named_in_one_line(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_LEASE_S", "soon")
    result = run("worker")
    assert result.exit_code == 2 and not started
    assert len(result.output.splitlines()) == 1 and "ROPEWAY_LEASE_S" in result.output


def test_a_variable_that_is_no_setting_is_said_with_the_one_that_is_meant(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not options.unknown_variables(
        {
            "ROPEWAY_MAX_NUM_SEQS": "2",
            "ROPEWAY_API_KEYS": "[]",
            "ROPEWAY_URL": "http://gateway",
            "ROPEWAY_API_KEY": "k",
            "ROPEWAY_TORCH": "cpu",
            "ROPEWAY_SERVICE_HOST": "10.0.0.1",
            "ROPEWAY_GATEWAY_SERVICE_PORT_HTTP": "80",
            "ROPEWAY_GATEWAY_PORT_80_TCP_ADDR": "10.0.0.1",
            "PATH": "/bin",
        }
    )
    monkeypatch.setenv("ROPEWAY_MAX_NUM_SEQ", "2")
    monkeypatch.setenv("ROPEWAY_WHATEVER", "secret")
    result = run("gateway")
    assert result.exit_code == 0 and started
    assert result.stderr.splitlines() == [
        "ropeway: ROPEWAY_MAX_NUM_SEQ is no setting; ROPEWAY_MAX_NUM_SEQS is one",
        "ropeway: ROPEWAY_WHATEVER is no setting (`ropeway config` lists all)",
    ]


def test_a_wrong_list_of_keys_is_named_but_not_shown(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("sk-secret", '["sk-secret", {}]', '{"sk-secret": 1}'):
        monkeypatch.setenv("ROPEWAY_API_KEYS", value)
        result = run("gateway")
        assert result.exit_code == 2 and not started
        assert "api_keys" in result.output.lower().replace("-", "_") and "sk-secret" not in result.output


def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for room, library in (("gateway", "fastapi"), ("worker", "torch")):
        monkeypatch.delitem(sys.modules, f"{room}.main", raising=False)
        monkeypatch.setattr(
            sys, "meta_path", [Missing(f"{room}.main", library), *(f for f in sys.meta_path if type(f) is not Missing)]
        )
        result = run(room)
        assert result.exit_code == 1
        assert result.output == f"ropeway: {library} is not installed: pip install 'ropeway[{room}]'\n"


class Missing:
    """An import hook: a module of ours whose library is missing."""

    def __init__(self, name: str, library: str) -> None:
        self._name, self._library = name, library

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self._name:
            raise ModuleNotFoundError(f"No module named {self._library!r}", name=self._library)


def test_a_missing_module_of_our_own_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gateway.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing("gateway.main", "gateway.app"), *sys.meta_path])
    assert isinstance(run("gateway").exception, ModuleNotFoundError)


def test_without_any_extra_the_client_commands_work_and_the_others_say_what_they_need() -> None:
    code = (
        "import sys\nfor name in ('pydantic_settings', 'msgspec', 'redis'): sys.modules[name] = None\n"
        "from ropeway.cli import main\nmain()"
    )
    for arguments, exit_code, said in (
        (["version"], 0, ropeway.__version__),
        (["submit", "--help"], 0, "Submit a job"),
        (["worker", "--engine", "sim"], 1, "pip install 'ropeway[worker]'"),
        (["serve", "--port", "1"], 1, "pip install 'ropeway[demo]'"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == exit_code, done.stderr
        assert said in done.stdout + done.stderr and "Traceback" not in done.stderr


def test_config_shows_everything_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROPEWAY_API_KEYS", '["sk-secret"]')
    monkeypatch.setenv("ROPEWAY_REDIS_URL", "redis://user:hunter2@host:1/0")
    monkeypatch.setenv("ROPEWAY_PORT", "9000")
    plain, as_json = run("config"), run("config", "--json")
    assert plain.exit_code == as_json.exit_code == 0
    for output in (plain.output, as_json.output):
        assert "sk-secret" not in output and "hunter2" not in output and "9000" in output
    shown = json.loads(as_json.output)
    for process, cls in (("gateway", GatewaySettings), ("worker", WorkerSettings)):
        rows = {row["name"]: row for row in shown[process]}
        assert list(rows) == list(cls.model_fields)
        assert all(row["description"] and row["env"] == env_name(cls, name) for name, row in rows.items())
        assert all(row["env"] in plain.output for row in rows.values())
    port = {row["name"]: row for row in shown["gateway"]}["port"]
    assert (port["value"], port["default"], port["env"]) == (9000, 8000, "ROPEWAY_PORT")
    assert "ROPEWAY_LEASE_S" not in run("config", "gateway").output


def test_serve_takes_redis_from_option_then_environment_then_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import ropeway.serve

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ropeway.serve, "serve", lambda *arguments: calls.append(arguments))
    monkeypatch.setenv("ROPEWAY_REDIS_URL", "redis://env")
    run("serve", "--redis", "redis://option", "--port", "0")
    run("serve", "--data-dir", "/d")
    monkeypatch.delenv("ROPEWAY_REDIS_URL")
    run("serve")
    assert [call[1] for call in calls] == ["redis://option", "redis://env", None]
    assert calls[0][0] == {"port": 0} and calls[1][2] == Path("/d")
    assert calls[2][2].name == "redis"


def test_a_demo_never_joins_the_redis_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import ropeway.demo

    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ropeway.demo, "demo", lambda *arguments: calls.append(arguments))
    monkeypatch.setenv("ROPEWAY_REDIS_URL", "redis://production")
    run("demo", "--prompt", "hi", "--max-tokens", "3", "--engine", "sim")
    ((given, redis_url, question),) = calls
    assert (given, redis_url, question.prompt, question.max_tokens) == ({"engine": "sim"}, None, "hi", 3)


def test_settings_as_environment_are_read_back_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "enable_prefix_caching": False,
        "max_num_seqs": 3,
        "sim_step_ms": 0.5,
        "cache_dir": Path("/x"),
        "pool": "p",
    }
    for name, value in options.as_environment(given).items():
        monkeypatch.setenv(name, value)
    assert WorkerSettings() == WorkerSettings(**given)  # type: ignore[arg-type]


def test_public_names_are_lazy() -> None:
    code = (
        "import sys, ropeway, ropeway.client\n"
        "assert set(ropeway.__all__) <= set(dir(ropeway))\n"
        "heavy = {'torch', 'redis', 'pydantic', 'msgspec', 'engine', 'shared', 'gateway', 'worker', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "from ropeway import SamplingParams\n"
        "assert SamplingParams.__module__ == 'shared.sampling' and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        ropeway.nothing  # noqa: B018
    assert (
        importlib.import_module("ropeway").SamplingParams is importlib.import_module("shared.sampling").SamplingParams
    )


def test_a_missing_library_of_a_public_name_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(vars(ropeway), "LLM", raising=False)
    monkeypatch.delitem(sys.modules, "engine.llm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Missing("engine.llm", "torch"), *sys.meta_path])
    with pytest.raises(ImportError, match=r"pip install 'ropeway\[worker\]'"):
        ropeway.LLM  # noqa: B018


def test_an_unneeded_check_passes_and_a_needed_one_fails() -> None:
    processes._needs("json", "gateway")
    assert run("serve", "--port", "99999").exit_code == 2


def test_config_shows_a_default_only_where_it_is_not_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("ROPEWAY_PORT", "9123")
    rows = {
        cells[1].strip(): cells
        for line in run("config", "gateway").stdout.splitlines()
        if (cells := line.split("│"))[1:]
    }
    assert [cell.strip() for cell in rows["ROPEWAY_PORT"][2:4]] == ["9123", "8000"]
    assert [cell.strip() for cell in rows["ROPEWAY_HOST"][2:4]] == ["127.0.0.1", ""]


@pytest.mark.parametrize(("command", "shown"), [("serve", "embedded"), ("demo", "embedded"), ("gateway", "6379")])
def test_help_says_which_redis_is_taken_without_an_option(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    (line,) = (line for line in run(command, "--help").stdout.splitlines() if "--redis-url" in line)
    assert shown in line


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", ["not the URL", "http://"]),
        ("http://127.0.0.1:9", ["cannot reach", "ropeway serve", "--url"]),
    ],
)
def test_a_gateway_that_is_not_there_comes_with_the_next_step(url: str, words: list[str]) -> None:
    done = run("submit", "hi", "--url", url)
    assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words)


@pytest.mark.parametrize(
    ("message", "param", "said"),
    [
        ("top_p: must be in (0, 1]", "body.top_p", ""),
        ("The value of top_p is wrong", "body.top_p", ""),
        ("no such thing", "body.model", " (model)"),
        ("another model", "body.mode", " (mode)"),
        ("messages[0].content: is empty", "body.messages[0].content", ""),
        ("the prompt is too long", "body", ""),
        ("away", None, ""),
    ],
)
def test_a_field_at_fault_is_named_once(message: str, param: str | None, said: str) -> None:
    from ropeway import submit

    assert submit._named(APIError(message, param=param, status=400)) == said
