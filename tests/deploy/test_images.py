"""Image files: what hadolint says, and what it does not look at."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from shared.settings import GatewaySettings, TasksSettings, WorkerSettings
from tests.deploy.chart import ROOT

FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def lines(path: Path) -> list[str]:
    """Instructions, with those that go on over several lines in one."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text("utf-8"), flags=re.MULTILINE)
    return [line.strip() for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def bases() -> dict[str, str]:
    """Images of others, by the variable that names each."""
    text = (ROOT / "docker" / "bases.env").read_text("utf-8")
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))


def lint(path: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint is not installed (make docker-check installs it)")
    command = [program, "--config", str(ROOT / "docker" / "hadolint.yaml"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    done = lint(path)
    assert done.returncode == 0, done.stdout


def test_hadolint_would_say_something(tmp_path: Path) -> None:
    bad = tmp_path / "bad.Dockerfile"
    bad.write_text("FROM python\nRUN apt-get install curl\nCMD python -m gateway\n", "utf-8")
    assert lint(bad).returncode != 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_bases_are_pinned_and_processes_get_their_signals(path: Path) -> None:
    instructions = lines(path)
    (base,) = [line.partition("=")[2] for line in instructions if line.startswith("ARG PYTHON_IMAGE=")]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", base)
    assert base == bases()["PYTHON_IMAGE"]
    stages = {line.split()[3] for line in instructions if line.startswith("FROM ") and " AS " in line}
    for line in (line for line in instructions if line.startswith("FROM ")):
        assert line.split()[1] in stages | {"${PYTHON_IMAGE}"}
    # Exec form: a shell in between would keep SIGTERM for itself.
    for name in ("ENTRYPOINT", "CMD"):
        (line,) = [line for line in instructions if line.startswith(f"{name} ")]
        assert line.partition(" ")[2].startswith("["), line
    (health,) = [line for line in instructions if line.startswith("HEALTHCHECK ")]
    assert "CMD [" in health
    assert [line for line in instructions if line.startswith("USER ")] == ["USER 10001:10001"]
    assert 'ENTRYPOINT ["ropeway"]' in instructions


def test_images_of_others_have_exact_tags_and_the_chart_has_the_same() -> None:
    for name, image in bases().items():
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?", image), name
    values = yaml.safe_load((ROOT / "helm" / "ropeway" / "values.yaml").read_text("utf-8"))
    redis = values["redis"]["bundled"]["image"]
    tagged, _, digest = bases()["REDIS_IMAGE"].partition("@")
    assert (f"{redis['repository']}:{redis['tag']}", redis["digest"]) == (tagged, digest)


def test_variables_of_images_are_settings_and_caches_follow_one_value() -> None:
    known = {
        f"ROPEWAY_{name}".upper()
        for kind in (GatewaySettings, TasksSettings, WorkerSettings)
        for name in kind.model_fields
    }
    for path in FILES:
        variables = dict(re.findall(r"([A-Z_]+)=(\S+)", " ".join(l for l in lines(path) if l.startswith("ENV "))))  # noqa: E741
        assert {name for name in variables if name.startswith("ROPEWAY_")} <= known
        caches = {n: v for n, v in variables.items() if "CACHE" in n or n == "HF_HOME"}
        assert len(caches) >= 2 and all(value.startswith("${CACHE}") for value in caches.values())


def test_the_context_has_what_is_copied_and_nothing_private() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored and not any(name.startswith((".git", ".venv", "tests")) for name in allowed)
    copied = set()
    for path in FILES:
        for line in (line for line in lines(path) if line.startswith("COPY ") and "--from" not in line):
            copied.update(line.split()[1:-1])
    assert copied == allowed
    assert all((ROOT / name).exists() for name in allowed)


def test_the_health_check_tells_well_from_ill() -> None:
    status = 200

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def asked(*ports: int) -> int:
            command = [sys.executable, str(ROOT / "docker" / "healthcheck.py"), *map(str, ports)]
            return subprocess.run(command, check=False, timeout=60).returncode

        try:
            assert asked(server.server_port) == asked(1, server.server_port) == 0
            assert asked(1) == 1
            status = 503
            assert asked(server.server_port) == 1
        finally:
            server.shutdown()
            thread.join()
