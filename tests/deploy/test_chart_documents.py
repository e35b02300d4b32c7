"""Every document of the chart: valid on each version of Kubernetes, and fitting to the others."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.deploy import kinds
from tests.deploy.chart import (
    CASES,
    CHART,
    KUBERNETES,
    NAMESPACE,
    ROOT,
    Document,
    case,
    helm,
    of_kind,
    pods,
    render,
    rendered,
)

INFO = 1


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", CASES)
def test_lint_has_nothing_to_say(name: str, version: str) -> None:
    report = helm().lint(str(CHART), values=case(name), strict=True, kube_version=f"v{version}", namespace=NAMESPACE)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > INFO] == []


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", CASES)
def test_documents_fit_their_schemas(name: str, version: str) -> None:
    for document in rendered(name):
        kinds.check(document, version)


def test_what_the_page_shows_is_taken() -> None:
    """Values for production and an autoscaler of one's own, as docs/kubernetes.md has them."""
    page = (ROOT / "docs" / "kubernetes.md").read_text("utf-8")
    values, autoscaler = (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S))
    documents = render(values)
    assert len(of_kind(documents, "ScaledObject")) == len(values["pools"]) - 1
    for document in (*documents, autoscaler):
        for version in KUBERNETES:
            kinds.check(document, version)
    report = helm().lint(str(CHART), values=values, strict=True, kube_version=f"v{KUBERNETES[-1]}", namespace=NAMESPACE)
    assert report["errors"] == []


def test_the_check_of_schemas_can_fail() -> None:
    documents = rendered("everything")
    kind_of = {document["kind"]: document for document in documents}
    typo = kind_of["Deployment"] | {"spec": kind_of["Deployment"]["spec"] | {"replcas": 1}}
    unknown = kind_of["Service"] | {"kind": "Servise"}
    scaled = kind_of["ScaledObject"]
    field = scaled | {"spec": scaled["spec"] | {"coolDownPeriod": 1}}
    value = scaled | {"spec": scaled["spec"] | {"pollingInterval": 0}}
    for broken in (typo, unknown, field, value):
        with pytest.raises(Exception, match=r"(?i)(additional|no kind|minimum|replcas)"):
            kinds.check(broken, KUBERNETES[0])


def test_each_version_is_looked_at_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": [{"name": "a"}]}}
    gone = {"apiVersion": "flowcontrol.apiserver.k8s.io/v1beta3", "kind": "FlowSchema", "metadata": {"name": "a"}}
    new = {"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": "a"}}
    taken = {
        (document["kind"], version)
        for document in (pod, gone, new)
        for version in KUBERNETES
        if takes(version, document)
    }
    oldest, *newer = KUBERNETES
    assert taken == {("Pod", v) for v in KUBERNETES} | {("FlowSchema", oldest)} | {("ServiceCIDR", v) for v in newer}
    # Where a version is not there, the library would take the one before it.
    library = pytest.importorskip("kubernetes_validate")
    versions = [version for version in library.utils.all_versions() if version != KUBERNETES[1]]
    monkeypatch.setattr(library.utils, "all_versions", lambda: versions)
    assert takes(oldest, pod)
    with pytest.raises(LookupError, match="no schemas of Kubernetes"):
        kinds.check(pod, KUBERNETES[1])


def takes(version: str, document: Document) -> bool:
    """Whether a version knows the document's kind."""
    try:
        kinds.check(document, version)
    except LookupError:
        return False
    return True


def test_scaled_objects_fit_kedas_own_definition() -> None:
    if ("keda.sh/v1alpha1", "ScaledObject") not in kinds.definitions():
        pytest.skip("CHART_CRDS names no definition of ScaledObject: checked against the fields that the chart uses")
    for name in CASES:
        for document in of_kind(rendered(name), "ScaledObject"):
            kinds.check(document, KUBERNETES[-1])


def _selects(selector: dict[str, str], labels: Any) -> bool:
    return bool(selector) and selector.items() <= labels.items()


def _selectors(document: Document) -> list[dict[str, str]]:
    """Every selector in a document that must find pods of this release."""
    spec = document["spec"]
    if document["kind"] == "Service":
        return [spec["selector"]]
    if document["kind"] == "NetworkPolicy":
        peers = [
            peer for rule in spec["ingress"] + spec["egress"] for peer in rule.get("from", []) + rule.get("to", [])
        ]
        own = [peer["podSelector"]["matchLabels"] for peer in peers if "podSelector" in peer]
        return [spec["podSelector"]["matchLabels"], *own]
    return [spec["selector"]["matchLabels"]]


@pytest.mark.parametrize("name", CASES)
def test_selectors_find_pods_and_each_pod_one_controller(name: str) -> None:
    documents = rendered(name)
    labels = [pod.labels for pod in pods(documents)]
    for document in of_kind(documents, "Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        for selector in _selectors(document):
            assert any(_selects(selector, found) for found in labels), document["metadata"]["name"]
    services = of_kind(documents, "Service")
    for document in of_kind(documents, "ServiceMonitor"):
        (selector,) = _selectors(document)
        assert any(_selects(selector, service["metadata"]["labels"]) for service in services)
        (endpoint,) = document["spec"]["endpoints"]
        assert endpoint["authorization"]["credentials"]["key"] == "metrics-key"
    controllers = of_kind(documents, "Deployment", "StatefulSet")
    for document in controllers:
        (selector,) = _selectors(document)
        templates = {d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"] for d in controllers}
        assert [owner for owner, found in templates.items() if _selects(selector, found)] == [
            document["metadata"]["name"]
        ]
        spread = document["spec"]["template"]["spec"].get("topologySpreadConstraints", [])
        assert all(s["labelSelector"]["matchLabels"] == selector for s in spread)


@pytest.mark.parametrize("name", CASES)
def test_what_is_scaled_has_no_replicas_of_its_own(name: str) -> None:
    documents = rendered(name)
    scaled = {
        d["spec"]["scaleTargetRef"]["name"] for d in of_kind(documents, "ScaledObject", "HorizontalPodAutoscaler")
    }
    deployments = {d["metadata"]["name"]: d["spec"] for d in of_kind(documents, "Deployment")}
    assert scaled <= deployments.keys()
    scaled |= {key for key in deployments if key == "rel-ropeway-drafts"}  # by an autoscaler that is not the chart's
    assert {name for name, spec in deployments.items() if "replicas" not in spec} == scaled


@pytest.mark.parametrize("name", CASES)
def test_names_that_documents_point_to_are_there(name: str) -> None:
    documents = rendered(name)
    ports = {
        pod.name: {p["name"] for p in pod.container["ports"]} for pod in pods(documents) if "ports" in pod.container
    }
    everyone = set().union(*ports.values())
    for service in of_kind(documents, "Service"):
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= everyone
    for pod in pods(documents):
        volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
        for stateful in of_kind(documents, "StatefulSet"):
            if stateful["metadata"]["name"] == pod.name:
                claims = stateful["spec"].get("volumeClaimTemplates", [])
                volumes |= {claim["metadata"]["name"] for claim in claims}
        mounts = pod.container.get("volumeMounts", [])
        assert {mount["name"] for mount in mounts} == volumes, pod.name
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        names = [entry["name"] for entry in pod.container["env"]]
        assert len(names) == len(set(names)), pod.name


@pytest.mark.parametrize("name", CASES)
def test_secrets_that_are_read_are_made_here_or_named_in_values(name: str) -> None:
    documents = rendered(name)
    made = {d["metadata"]["name"]: d["stringData"] for d in of_kind(documents, "Secret")}
    given = {case(name).get("auth", {}).get("existingSecret"), case(name).get("redis", {}).get("existingSecret"), "hub"}
    assert not (made and given - {None, "hub"}), "nothing is made beside what is there"
    for pod in pods(documents):
        for entry in pod.container["env"]:
            reference = entry.get("valueFrom", {}).get("secretKeyRef")
            if reference is None or reference["name"] in given:
                continue
            assert reference.get("optional") or reference["key"] in made[reference["name"]], (pod.name, entry["name"])
    for document in of_kind(documents, "TriggerAuthentication"):
        for reference in document["spec"]["secretTargetRef"]:
            assert reference["name"] in given or reference["key"] in made[reference["name"]]
    authentications = {d["metadata"]["name"] for d in of_kind(documents, "TriggerAuthentication")}
    for document in of_kind(documents, "ScaledObject"):
        for trigger in document["spec"]["triggers"]:
            assert trigger.get("authenticationRef", {}).get("name") in authentications | {None}
