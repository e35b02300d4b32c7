"""compose.yaml as Compose itself reads it. No engine is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.settings import CommonSettings, GatewaySettings, TasksSettings, WorkerSettings
from tests.deploy.chart import ROOT
from tests.deploy.test_images import bases

CLASSES: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings, "tasks": TasksSettings, "worker": WorkerSettings, "worker-gpu": WorkerSettings,
}  # fmt: skip


@cache
def _read(arguments: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> str:
    program = shutil.which("docker-compose", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("docker-compose is not installed (make compose-check installs it)")
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **dict(environment)}
    command = [program, *arguments, "config", "--format", "json"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def services(*arguments: str, **environment: str) -> dict[str, Any]:
    """The services that these options start."""
    return dict(json.loads(_read(arguments, tuple(environment.items())))["services"])


def seconds(text: str) -> int:
    """Of a duration such as 1m15s."""
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


def test_up_is_all_and_profiles_add() -> None:
    plain = {"redis", "folders", "gateway", "tasks", "worker"}
    assert services().keys() == plain
    assert services("--profile", "gpu").keys() == plain | {"worker-gpu"}
    assert services("--profile", "monitoring").keys() == plain | {"prometheus", "grafana"}
    assert services("--profile", "tracing").keys() == plain | {"jaeger"}


def test_traces_go_where_the_usual_variables_say() -> None:
    assert services()["gateway"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == ""
    found = services("--profile", "*", OTEL_EXPORTER_OTLP_ENDPOINT="http://jaeger:4318")
    for name in CLASSES:
        assert found[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://jaeger:4318", name


def test_containers_are_not_root_and_write_only_where_something_is_mounted() -> None:
    for name, service in services("--profile", "*").items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"]
        if name != "folders":  # hands new volumes over, without a network
            assert re.fullmatch(r"[1-9]\d*:\d+", service["user"]), name
            assert not service.get("cap_add") and service["restart"] == "unless-stopped"
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name
    assert "ports" not in services()["redis"]


def test_images_are_pinned() -> None:
    for name, service in services("--profile", "*").items():
        assert re.search(r":v?\d+\.\d+\.\d+[\w.-]*$", service["image"]), name
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()


def test_images_of_others_are_those_of_one_file_and_taken_by_digest() -> None:
    found = services("--profile", "*")
    digested = {name: f"{image}@sha256:{'0' * 64}" for name, image in bases().items()}
    pinned = services("--profile", "*", **digested)
    for expected, shown in ((bases(), found), (digested, pinned)):
        images = {service["image"] for service in shown.values() if "build" not in service}
        own = {image for image in images if image.startswith("ropeway/")}
        assert images - own == set(expected.values()) - {expected["PYTHON_IMAGE"]}
        built = [service["build"]["args"] for service in shown.values() if "build" in service]
        assert len(built) == 3 and all(args == {"PYTHON_IMAGE": expected["PYTHON_IMAGE"]} for args in built)


def test_every_variable_is_a_setting_and_every_value_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = services("--profile", "*", ROPEWAY_API_KEYS='["k"]')
    for name, kind in CLASSES.items():
        service = found[name]
        assert service["command"] == [name.removesuffix("-gpu")]
        given = {n: v for n, v in service["environment"].items() if n.startswith("ROPEWAY_")}
        assert given.keys() <= {f"ROPEWAY_{field}".upper() for field in kind.model_fields}, name
        with monkeypatch.context() as patch:
            for variable, value in given.items():
                patch.setenv(variable, value)
            settings = kind()
        grace = getattr(settings, "shutdown_grace_s", getattr(settings, "grace_s", 20.0))
        assert seconds(service["stop_grace_period"]) >= grace + 10, name
        if isinstance(settings, GatewaySettings):
            assert [key.get_secret_value() for key in settings.api_keys] == ["k"]
            assert settings.pools == ["smollm2-135m-instruct"]


def test_redis_keeps_everything_and_asks_for_a_password() -> None:
    found = services(REDIS_PASSWORD="secret")
    command = found["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options == {"--appendonly": "yes", "--maxmemory-policy": "noeviction", "--requirepass": "secret"}
    for name in ("gateway", "tasks", "worker"):
        assert found[name]["environment"]["ROPEWAY_REDIS_URL"] == "redis://:secret@redis:6379/0"
        assert found[name]["depends_on"]["redis"]["condition"] == "service_healthy"


def test_caches_follow_one_value() -> None:
    for where in ("/var/cache/ropeway", "/data"):
        found = services("--profile", "gpu", **({} if where == "/var/cache/ropeway" else {"CACHE": where}))
        for name in CLASSES:
            service = found[name]
            caches = [v for n, v in service["environment"].items() if "CACHE" in n or n == "HF_HOME"]
            assert len(caches) >= 5 and all(value.startswith(where) for value in caches), name
            assert where in [volume["target"] for volume in service["volumes"]]


def test_files_that_are_mounted_are_there() -> None:
    for name, service in services("--profile", "*").items():
        for volume in service.get("volumes", []):
            assert volume["type"] != "bind" or Path(volume["source"]).exists(), (name, volume["source"])


def test_prometheus_has_the_alerts() -> None:
    config = yaml.safe_load((ROOT / "docker" / "prometheus" / "prometheus.yml").read_text("utf-8"))
    mounts = {
        volume["target"]: Path(volume["source"]) for volume in services("--profile", "*")["prometheus"]["volumes"]
    }
    (pattern,) = config["rule_files"]
    folder, _, names = pattern.rpartition("/")
    assert [path.name for path in mounts[folder].glob(names)] == ["ropeway.yaml"]
