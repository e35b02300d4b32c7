"""Schemas of the kinds that the chart makes: Kubernetes' own, and those of KEDA, Prometheus and Gateway API.

Kinds of others are checked against real definitions where `CHART_CRDS` names files or folders of them (separated by
colons; `make helm CRDS=...` sets it), else against what is written here: the fields that the chart uses, and no others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

jsonschema: Any = pytest.importorskip("jsonschema", reason="jsonschema is not installed (make helm installs it)")

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FREE: Schema = {"type": "object"}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}


def _obj(required: Schema, optional: Schema | None = None) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


_SECRET_KEY = _obj({"name": _TEXT, "key": _TEXT})
_ENDPOINT = _obj(
    {"port": _TEXT, "path": _TEXT, "interval": _TEXT}, {"authorization": _obj({"credentials": _SECRET_KEY})}
)
_RULE = _obj({"alert": _TEXT, "expr": _TEXT, "labels": _TEXTS, "annotations": _TEXTS}, {"for": _TEXT})
_GROUP = _obj({"name": _TEXT, "rules": _list(_RULE)})
_SELECTOR = _obj({"matchLabels": _TEXTS})
_TRIGGER = _obj(
    {"type": {"enum": ["metrics-api", "prometheus"]}, "metricType": {"const": "AverageValue"}, "metadata": _TEXTS},
    {"authenticationRef": _obj({"name": _TEXT})},
)
_SPECS: dict[tuple[str, str], Schema] = {
    ("keda.sh/v1alpha1", "ScaledObject"): _obj(
        {
            "scaleTargetRef": _obj({"name": _TEXT}),
            "minReplicaCount": _COUNT,
            "maxReplicaCount": {"type": "integer", "minimum": 1},
            "pollingInterval": {"type": "integer", "minimum": 1},
            "cooldownPeriod": _COUNT,
            "initialCooldownPeriod": _COUNT,
            "fallback": _obj({"failureThreshold": _COUNT, "replicas": _COUNT, "behavior": _TEXT}),
            "advanced": _FREE,
            "triggers": _list(_TRIGGER),
        },
        {"idleReplicaCount": {"const": 0}},
    ),
    ("keda.sh/v1alpha1", "TriggerAuthentication"): _obj(
        {"secretTargetRef": _list(_obj({"parameter": _TEXT, "name": _TEXT, "key": _TEXT}))}
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _obj(
        {"groups": _list(_obj({"name": _TEXT, "rules": _list(_RULE)}))}
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _obj({"selector": _SELECTOR, "endpoints": _list(_ENDPOINT)}),
    ("monitoring.coreos.com/v1", "PodMonitor"): _obj({"selector": _SELECTOR, "podMetricsEndpoints": _list(_ENDPOINT)}),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _obj(
        {
            "parentRefs": _list(_FREE),
            "rules": _list(_obj({"matches": _list(_FREE), "backendRefs": _list(_FREE), "timeouts": _TEXTS})),
        },
        {"hostnames": _list(_TEXT)},
    ),
}


def check(document: dict[str, Any], version: str) -> None:
    """Raise what is wrong with a document on a version of Kubernetes. A kind that nobody knows is wrong."""
    kind = (document["apiVersion"], document["kind"])
    if kind in _SPECS:
        jsonschema.validate(document, definitions().get(kind) or _own(kind))
        return
    kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    try:
        # For a version that it does not have it would take an older one.
        used = kubernetes.validate(document, version, strict=True)
    except kubernetes.SchemaNotFoundError as error:
        raise LookupError(f"Kubernetes {version} has no kind {' '.join(kind)}") from error
    if used != version.rpartition(".")[0]:
        raise LookupError(f"there are no schemas of Kubernetes {version}: {used} was looked at")


def definitions() -> dict[tuple[str, str], Schema]:
    """Real definitions by apiVersion and kind, as strict schemas; none where nothing names any."""
    return _definitions(os.environ.get("CHART_CRDS", ""))


@cache
def _definitions(places: str) -> dict[tuple[str, str], Schema]:
    found = {}
    for path in (Path(place) for place in places.split(":") if place):
        if not path.exists():
            raise FileNotFoundError(f"CHART_CRDS: {path} is not there")
        for file in sorted(path.glob("*.y*ml")) if path.is_dir() else [path]:
            for document in yaml.safe_load_all(file.read_text("utf-8")):
                found |= dict(_versions(document))
    return found


def _versions(document: Any) -> Iterator[tuple[tuple[str, str], Schema]]:
    if not document or document.get("kind") != "CustomResourceDefinition":
        return
    spec = document["spec"]
    for version in spec["versions"]:
        schema = _strict(version["schema"]["openAPIV3Schema"])
        schema["properties"] |= {"metadata": _FREE}
        yield (f"{spec['group']}/{version['name']}", spec["names"]["kind"]), schema


def _strict(schema: Any) -> Any:
    """A structural schema in which fields that it does not name are refused, as `kubectl` does by default."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: _strict(value) for name, value in schema.items()}
    fields = strict.get("properties")
    open_ended = "additionalProperties" in strict or strict.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(fields, dict) and strict.get("type") == "object" and not open_ended:
        strict["additionalProperties"] = False
    return strict


def _own(kind: tuple[str, str]) -> Schema:
    head = {"apiVersion": {"const": kind[0]}, "kind": {"const": kind[1]}, "metadata": _FREE}
    return _obj(head | {"spec": _SPECS[kind]})
