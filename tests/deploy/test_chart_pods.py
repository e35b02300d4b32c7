"""Pods of the chart against the processes that run in them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from gateway.app import create_app
from shared.probes import HealthServer
from shared.settings import CommonSettings, GatewaySettings, TasksSettings, WorkerSettings
from tests.deploy.chart import CASES, PodOf, named, pods, render, rendered

CLASSES: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "tasks": TasksSettings,
    "worker": WorkerSettings,
}
#: What secrets hold.
SECRET = {"ROPEWAY_REDIS_URL": "redis://:x@redis:6379/0", "ROPEWAY_API_KEYS": '["k"]', "ROPEWAY_METRICS_KEY": "m"}
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def ours(name: str) -> list[PodOf]:
    """Pods of a case that run a process of ours."""
    return [pod for pod in pods(rendered(name)) if pod.component in CLASSES]


def settings_of(pod: PodOf, monkeypatch: pytest.MonkeyPatch) -> CommonSettings:
    """The settings that the process makes of its environment."""
    with monkeypatch.context() as patch:
        for name, value in pod.env.items():
            given = value if value is not None else SECRET.get(name)
            if given is not None:
                patch.setenv(name, given)
        return CLASSES[pod.component]()


@pytest.mark.parametrize("name", CASES)
def test_every_variable_is_a_setting_and_every_value_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in ours(name):
        known = {f"ROPEWAY_{field}".upper() for field in CLASSES[pod.component].model_fields}
        assert {v for v in pod.env if v.startswith("ROPEWAY_")} <= known, pod.name
        assert pod.container["args"] == [pod.component]
        settings = settings_of(pod, monkeypatch)
        if isinstance(settings, GatewaySettings):
            assert settings.host == "0.0.0.0"
            assert bool(settings.api_keys) == bool(settings.metrics_key) == settings.require_keys == (name != "plain")


def test_traces_go_to_the_collector_of_the_values() -> None:
    for pod in ours("everything"):
        assert pod.env["ROPEWAY_OTLP_TRACES_ENDPOINT"] == "http://collector.observability:4318", pod.name
        assert (pod.env["OTEL_TRACES_SAMPLER"], pod.env["OTEL_TRACES_SAMPLER_ARG"]) == (
            "parentbased_traceidratio",
            "0.1",
        )
    assert not any(name.startswith("OTEL_") for pod in ours("defaults") for name in pod.env)
    for endpoint, port in (("https://c", 443), ("http://c/v1/traces", 80), ("https://c:4319/x", 4319)):
        documents = render({"tracing": {"endpoint": endpoint}})
        policy = named(documents, "NetworkPolicy", "rel-ropeway-worker")
        assert {"ports": [{"protocol": "TCP", "port": port}]} in policy["spec"]["egress"], endpoint
    egress = named(rendered("everything"), "NetworkPolicy", "rw-worker")["spec"]["egress"]
    (rule,) = [rule for rule in egress if rule["ports"][0]["port"] == 4318]
    assert rule["to"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "observability"}


def test_values_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {pod.name: settings_of(pod, monkeypatch) for pod in ours("everything")}
    gateway, worker, tasks = found["rw-gateway"], found["rw-llama-70b"], found["rw-tasks"]
    assert (
        isinstance(gateway, GatewaySettings) and isinstance(worker, WorkerSettings) and isinstance(tasks, TasksSettings)
    )
    assert (gateway.max_body_bytes, gateway.retention_s, gateway.shutdown_grace_s) == (16777216, 7200.5, 300)
    assert gateway.pools == ["Llama-3.1-70B-Instruct", "fixed", "small", "smollm2-135m-instruct"]
    assert (worker.pool, worker.max_num_seqs, worker.max_model_len) == ("Llama-3.1-70B-Instruct", 256, 32768)
    assert (worker.enable_lora, worker.max_loras, worker.max_lora_rank, worker.max_cpu_loras) == (True, 8, 64, 64)
    assert (worker.enable_prefix_caching, worker.device, worker.dtype) == (False, "cuda", "bfloat16")
    assert gateway.adapter_store == worker.adapter_store == tasks.adapter_store == "/mnt/adapters"


async def test_probes_ask_paths_that_the_processes_answer() -> None:
    app = create_app(GatewaySettings(redis_url="redis://127.0.0.1:1/0", pools=["a"], sweep_s=0))
    probes = HealthServer("127.0.0.1", 0, CollectorRegistry(), live=lambda: (True, {}), ready=lambda: (True, {}))
    bases = {"gateway": "http://gateway"} | dict.fromkeys(("worker", "tasks"), f"http://127.0.0.1:{probes.port}")
    mounts = {"http://gateway": httpx.ASGITransport(app)}
    answered = {}
    try:
        async with app.router.lifespan_context(app), httpx.AsyncClient(mounts=mounts) as http:
            for component, path in probed():
                answered[component, path] = (await http.get(bases[component] + path)).status_code
    finally:
        probes.close()
    # Redis is away here, and so the gateway lives and is not ready.
    expected = {(c, path): 200 for c in CLASSES for path in ("/health", "/ready")} | {("gateway", "/ready"): 503}
    assert answered == expected


def probed() -> set[tuple[str, str]]:
    """Components and paths of all probes, and those that Prometheus reads."""
    found = set()
    for pod in (pod for name in CASES for pod in ours(name)):
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        for probe in PROBES:
            get = pod.container[probe]["httpGet"]
            assert get["port"] in ports, pod.name
            found.add((pod.component, get["path"]))
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_grace_period_is_longer_than_what_happens_in_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in ours(name):
        grace = pod.spec["terminationGracePeriodSeconds"]
        settings = settings_of(pod, monkeypatch)
        if isinstance(settings, GatewaySettings):
            (command, pause) = pod.container["lifecycle"]["preStop"]["exec"]["command"]
            assert command == "sleep" and int(pause) >= 5
            assert grace >= int(pause) + settings.shutdown_grace_s + 10
        elif isinstance(settings, WorkerSettings):
            # See docs/operations.md: two times five seconds for the hand-over, and some for leaving.
            assert grace >= settings.grace_s + 15


def test_one_value_moves_all_of_the_end() -> None:
    documents = render({"gateway": {"drainSeconds": 7}, "poolDefaults": {"drainSeconds": 60}})
    by_component = {pod.component: pod for pod in pods(documents)}
    gateway, worker = by_component["gateway"], by_component["worker"]
    assert (gateway.env["ROPEWAY_SHUTDOWN_GRACE_S"], gateway.spec["terminationGracePeriodSeconds"]) == ("7", 47)
    assert (worker.env["ROPEWAY_GRACE_S"], worker.spec["terminationGracePeriodSeconds"]) == ("60", 90)


def test_the_start_has_the_time_that_a_model_takes() -> None:
    pool = named(rendered("everything"), "Deployment", "rw-llama-70b")["spec"]
    probe = pool["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 1800
    assert pool["progressDeadlineSeconds"] > 1800
    assert named(rendered("everything"), "ScaledObject", "rw-llama-70b")["spec"]["initialCooldownPeriod"] == 1800


@pytest.mark.parametrize("name", CASES)
def test_pods_are_restricted_and_write_only_where_something_is_mounted(name: str) -> None:
    for pod in pods(rendered(name)):
        security, container = pod.spec["securityContext"], pod.container["securityContext"]
        assert security["runAsNonRoot"] is True and security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert pod.spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.spec.keys()
        assert not any("hostPath" in volume for volume in pod.spec.get("volumes", []))
        if pod.component in CLASSES:
            written = [pod.env["HOME"], pod.env["TMPDIR"]]
            written += [v for n, v in pod.env.items() if "CACHE" in n or n == "HF_HOME"]
            assert len(written) >= 7
            assert all(any(f"{path}/".startswith(f"{mount}/") for mount in pod.mounts) for path in written), pod.name


def test_caches_follow_the_mount() -> None:
    for path in ("/var/cache/ropeway", "/data/weights"):
        (worker,) = [pod for pod in pods(render({"cache": {"mountPath": path}})) if pod.component == "worker"]
        caches = {n: v for n, v in worker.env.items() if "CACHE" in n or n == "HF_HOME"}
        assert path in worker.mounts and all(value.startswith(path) for value in caches.values())
        assert len(set(caches.values())) == len(caches)


def test_gpus_and_shared_memory() -> None:
    worker = named(rendered("everything"), "Deployment", "rw-llama-70b")["spec"]["template"]["spec"]
    (container,) = worker["containers"]
    assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": 4}
    assert container["image"].endswith("-cuda")
    shm = next(volume for volume in worker["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    (cpu,) = [pod for pod in pods(rendered("defaults")) if pod.component == "worker"]
    assert cpu.container["image"].endswith("-cpu") and cpu.env["ROPEWAY_DEVICE"] == "cpu"


def test_json_settings_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {"tasks": {"settings": {"adapter_roots": ["/a", "/b"]}}}
    (tasks,) = [pod for pod in pods(render(values)) if pod.component == "tasks"]
    assert json.loads(tasks.env["ROPEWAY_ADAPTER_ROOTS"]) == ["/a", "/b"]
    settings = settings_of(tasks, monkeypatch)
    assert isinstance(settings, TasksSettings) and [str(root) for root in settings.adapter_roots] == ["/a", "/b"]
