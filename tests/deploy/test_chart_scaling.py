"""How the chart scales, what it refuses, and what it shows."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from benchmarks import autoscale
from gateway.routes.pools import router
from scripts import chart_schema
from tests.deploy.chart import CHART, helm, named, of_kind, pods, render, rendered


def test_the_defaults_are_those_that_were_simulated() -> None:
    scaled = named(rendered("defaults"), "ScaledObject", "rel-ropeway-smollm2-135m-instruct")["spec"]
    rules, behavior = autoscale.CHART, scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert scaled["minReplicaCount"] == rules.min_replicas
    assert scaled["pollingInterval"] == rules.polling_s
    assert scaled["cooldownPeriod"] == rules.cooldown_s
    assert scaled["initialCooldownPeriod"] == rules.initial_cooldown_s
    assert scaled["fallback"]["failureThreshold"] == rules.failures
    assert scaled["fallback"]["replicas"] == rules.fallback
    (trigger,) = scaled["triggers"]
    assert float(trigger["metadata"]["targetValue"]) == rules.target
    assert float(trigger["metadata"]["activationTargetValue"]) == rules.activation
    for name, direction in (("scaleUp", rules.up), ("scaleDown", rules.down)):
        assert behavior[name]["stabilizationWindowSeconds"] == direction.window_s
        assert behavior[name]["policies"] == [
            {"type": p.kind, "value": p.value, "periodSeconds": p.period_s} for p in direction.policies
        ]


def test_the_trigger_asks_a_route_of_the_gateway_that_is_there() -> None:
    documents = rendered("everything")
    (trigger,) = named(documents, "ScaledObject", "rw-llama-70b")["spec"]["triggers"]
    url = urlsplit(trigger["metadata"]["url"])
    service = named(documents, "Service", "rw-gateway")
    assert url.hostname == f"{service['metadata']['name']}.models.svc"
    assert url.port == service["spec"]["ports"][0]["port"]
    paths = {route.path for route in router.routes}  # type: ignore[attr-defined]
    assert url.path.replace("Llama-3.1-70B-Instruct", "{pool}") in paths
    asked = {p.name for route in router.routes for p in route.dependant.query_params}  # type: ignore[attr-defined]
    assert (
        parse_qs(url.query) == {"jobs_per_worker": ["256"], "target_s": ["5"]} and parse_qs(url.query).keys() <= asked
    )
    assert trigger["metadata"]["authMode"] == "bearer"
    (secret,) = named(documents, "TriggerAuthentication", "rw-load")["spec"]["secretTargetRef"]
    assert secret == {"parameter": "token", "name": "keys", "key": "metrics-key"}


def test_an_error_never_scales_to_zero() -> None:
    for name in ("defaults", "everything", "plain", "bundled"):
        for scaled in of_kind(rendered(name), "ScaledObject"):
            assert scaled["spec"]["fallback"]["replicas"] >= max(1, scaled["spec"]["minReplicaCount"])
    (prometheus,) = named(rendered("everything"), "ScaledObject", "rw-small")["spec"]["triggers"]
    assert prometheus["metadata"]["ignoreNullValues"] == "false"


@pytest.mark.parametrize(
    "values",
    [
        {"gatway": {}},
        {"gateway": {"replica": 1}},
        {"gateway": {"settings": {"max_body_byte": 2048}}},
        {"gateway": {"settings": {"max_body_bytes": 1}}},
        {"gateway": {"settings": {"api_keys": ["in plain sight"]}}},
        {"gateway": {"service": {"port": 0}}},
        {"pools": {"Upper": {}}},
        {"pools": {"gateway": {}}},
        {"pools": {"a": {"settings": {"grace_s": 1}}}},
        {"pools": {"a": {"settings": {"max_model_len": 0}}}},
        {"pools": {"a": {"scaling": {"idleReplicas": 1, "minReplicas": 2}}}},
        {"pools": {"a": {"scaling": {"idleReplicas": 0}}}},
        {"pools": {"a": {"scaling": {"minReplicas": 5, "maxReplicas": 4}}}},
        {"pools": {"a": {"scaling": {"maxReplicas": 0}}}},
        {"pools": {"a": {"scaling": {"external": True}}}},
        {"pools": {"a": {"scaling": {"fallback": {"replicas": 0}}}}},
        {"pools": {"a": {"scaling": {"trigger": "prometheus"}}}},
        {"pools": {"a": {"scaling": {"trigger": "redis-streams"}}}},
        {"pools": {"a": {"gpu": {"count": -1}}}},
        {"pools": {"a": {"lora": {"enabled": True}}}},
        {"pools": {"a": {"pool": "smollm2-135m-instruct"}}},
        {"redis": {"url": "http://redis"}},
        {"prometheus": {"rules": {"runbookUrl": ""}}},
        {
            "networkPolicy": {"gatewayFrom": [{"podSelector": {}}]},
            "prometheus": {"serviceMonitor": {"enabled": True}},
        },
        {"ingress": {"enabled": True}},
        {"httpRoute": {"enabled": True}},
        {"cache": {"mountPath": "relative"}},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    helm()
    with pytest.raises(Exception, match=r"(?i)(schema|additional|execution error|fail|must|not allowed|invalid)"):
        render(values)


def test_a_pool_of_the_chart_can_be_left_out_and_falsy_values_win_over_defaults() -> None:
    documents = render({
        "pools": {"smollm2-135m-instruct": None, "a": {"scaling": {"minReplicas": 0}}},
        "poolDefaults": {"scaling": {"minReplicas": 1}},
    })  # fmt: skip
    (scaled,) = of_kind(documents, "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] == "rel-ropeway-a"
    assert scaled["spec"]["minReplicaCount"] == 0


def test_a_chart_without_pools_is_a_gateway() -> None:
    documents = render({"pools": {"smollm2-135m-instruct": None}})
    assert of_kind(documents, "ScaledObject") == []
    assert {pod.component for pod in pods(documents)} == {"gateway", "tasks", "redis", "test"}


def test_who_may_call_the_gateway_leaves_in_those_that_have_to() -> None:
    policy = named(rendered("everything"), "NetworkPolicy", "rw-gateway")["spec"]
    peers = policy["ingress"][0]["from"]
    spaces = [
        p["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for p in peers if "podSelector" not in p
    ]
    assert spaces == ["ingress", "monitoring", "keda"]
    (test,) = [pod for pod in pods(rendered("everything")) if pod.component == "test"]
    own = [p["podSelector"]["matchLabels"] for p in peers if "podSelector" in p]
    assert any(labels.items() <= test.labels.items() for labels in own)
    assert "from" not in named(rendered("defaults"), "NetworkPolicy", "rel-ropeway-gateway")["spec"]["ingress"][0]


def test_nobody_gets_in_without_a_key_and_nothing_is_open_by_default() -> None:
    documents = rendered("defaults")
    assert {d["spec"]["type"] for d in of_kind(documents, "Service")} == {"ClusterIP"}
    secret = named(documents, "Secret", "rel-ropeway-auth")["stringData"]
    (key,) = json.loads(secret["api-keys"])
    assert len(key) == 40 and len(secret["metrics-key"]) == 40 and key != secret["metrics-key"]
    redis = named(documents, "Secret", "rel-ropeway-redis")["stringData"]
    assert f"requirepass {redis['password']}" in redis["redis.conf"] and redis["password"] in redis["redis-url"]
    assert {"appendonly yes", "maxmemory-policy noeviction"} <= set(redis["redis.conf"].splitlines())
    policies = {d["metadata"]["name"]: d["spec"] for d in of_kind(documents, "NetworkPolicy")}
    assert policies["rel-ropeway-redis"]["egress"] == []
    peers = [p["podSelector"]["matchLabels"] for p in policies["rel-ropeway-redis"]["ingress"][0]["from"]]
    allowed = {labels["app.kubernetes.io/component"] for labels in peers}
    assert allowed == {pod.component for pod in pods(documents)} - {"redis", "test"}


def test_streams_are_not_held_up_on_their_way() -> None:
    (ingress,) = of_kind(rendered("everything"), "Ingress")
    prefix = "nginx.ingress.kubernetes.io/"
    annotations = {name.removeprefix(prefix): v for name, v in ingress["metadata"]["annotations"].items()}
    assert annotations["proxy-buffering"] == "off" and annotations["proxy-http-version"] == "1.1"
    assert int(annotations["proxy-read-timeout"]) >= 3600 and annotations["proxy-body-size"] == "0"
    (route,) = of_kind(rendered("everything"), "HTTPRoute")
    assert {rule["timeouts"]["request"] for rule in route["spec"]["rules"]} == {"0s"}


def test_the_schema_of_values_fits_the_settings() -> None:
    assert chart_schema.PATH.read_text("utf-8") == chart_schema.text(), "run python scripts/chart_schema.py"
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    assert values.keys() == chart_schema.schema()["properties"].keys() - {"global"}
