"""Writes helm/ropeway/values.schema.json; with `--check` says whether it is current.

What a pool, the gateway and tasks take under `settings` comes from the settings classes, bounds included: a name that
no process knows, or a value that it would refuse, is refused when the chart is installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from shared.settings import CommonSettings, GatewaySettings, TasksSettings, WorkerSettings

PATH = Path(__file__).resolve().parents[1] / "helm" / "ropeway" / "values.schema.json"
Schema = dict[str, Any]

#: Settings that the chart sets itself, from values of its own. Secrets are none: they come from the auth secret.
OWN = {
    "gateway": {"host", "port", "pools", "shutdown_grace_s", "require_keys"},
    "tasks": {"tasks_health_host", "tasks_health_port"},
    "worker": {
        "model", "pool", "device", "max_num_seqs", "grace_s", "health_host", "health_port", "cache_dir",
        "enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras",
    },
}  # fmt: skip
EVERYWHERE = {*CommonSettings.model_fields, "tasks_redis_url", "webhook_allow", "webhook_http"}
CLASSES: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "tasks": TasksSettings,
    "worker": WorkerSettings,
}

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
FREE: Schema = {"type": "object"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
LIST: Schema = {"type": "array", "items": {"type": "object"}}
NAMES: Schema = {"type": "array", "items": NAME}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|[KMGTP]i?)?$"}
INTERVAL: Schema = {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}
OPTIONAL_TEXT: Schema = {"type": ["string", "null"]}
DIGEST: Schema = {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"}
PATH_TEXT: Schema = {"type": "string", "pattern": "^/[^/].*[^/]$"}


def whole(least: int, most: int | None = None) -> Schema:
    """An integer within bounds."""
    return {"type": "integer", "minimum": least} | ({} if most is None else {"maximum": most})


def one_of(*values: Any) -> Schema:
    """One of these."""
    return {"enum": list(values)}


def obj(properties: Schema, *required: str, **more: Any) -> Schema:
    """A map with these names and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        **({"required": list(required)} if required else {}),
        **more,
    }


def settings(process: str) -> Schema:
    """The settings of a process that may be given freely."""
    found = {}
    for name, field in CLASSES[process].model_json_schema()["properties"].items():
        if name not in OWN[process] | EVERYWHERE and not _is_secret(field):
            found[name] = {key: value for key, value in field.items() if key not in ("default", "title", "description")}
    return obj(found)


def _is_secret(field: Schema) -> bool:
    return '"password"' in json.dumps(field)


def image(*, pull: bool = True) -> Schema:
    """An image by repository, and tag or digest."""
    properties = {"repository": TEXT, "tag": TEXT, "digest": DIGEST}
    return obj(properties | ({"pullPolicy": one_of("Always", "IfNotPresent", "Never")} if pull else {}))


def workload(process: str, **own: Schema) -> Schema:
    """What gateway, tasks and pools have in common."""
    return obj(
        {
            "replicas": whole(0),
            "drainSeconds": whole(0, 86_400),
            "settings": settings(process),
            "extraEnv": LIST,
            "envFrom": LIST,
            "resources": FREE,
            "podAnnotations": TEXTS,
            "podLabels": TEXTS,
            "nodeSelector": TEXTS,
            "tolerations": LIST,
            "affinity": FREE,
            "topologyKeys": NAMES,
            "priorityClassName": TEXT,
            "pdb": obj({"enabled": FLAG, "maxUnavailable": {"type": ["integer", "string"], "minimum": 1}}),
            **own,
        }
    )


def scaling() -> Schema:
    """KEDA's part of a pool."""
    policy = obj(
        {"type": one_of("Percent", "Pods"), "value": whole(1), "periodSeconds": whole(1, 1800)},
        "type", "value", "periodSeconds",
    )  # fmt: skip
    direction = obj(
        {
            "stabilizationWindowSeconds": whole(0, 3600),
            "policies": {"type": "array", "items": policy, "minItems": 1},
            "selectPolicy": one_of("Max", "Min", "Disabled"),
        }
    )
    return obj(
        {
            "enabled": FLAG,
            "external": FLAG,
            "trigger": one_of("metrics-api", "prometheus"),
            "minReplicas": whole(0),
            "maxReplicas": whole(1),
            "idleReplicas": one_of(0, None),
            "target": {"type": "number", "minimum": 0.05, "maximum": 10},
            "targetSeconds": {"type": ["number", "null"], "exclusiveMinimum": 0},
            "pollingSeconds": whole(1),
            "cooldownSeconds": whole(0),
            "scaleUp": direction,
            "scaleDown": direction,
            "fallback": obj({"failureThreshold": whole(0), "replicas": whole(1)}),
            "annotations": TEXTS,
        }
    )


def pool() -> Schema:
    """A pool of workers, or what all of them have."""
    storage_class = {"storageClassName": OPTIONAL_TEXT}
    return workload(
        "worker",
        pool={"type": "string", "pattern": r"^([A-Za-z0-9][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*)?$", "maxLength": 96},
        model=TEXT,
        image=image(pull=False),
        maxNumSeqs=whole(1),
        gpu=obj({"count": whole(0, 16), "resource": NAME, "runtimeClassName": TEXT}),
        shmSize={"anyOf": [QUANTITY, one_of("")]},
        lora=obj(
            {
                "enabled": FLAG,
                "maxLoras": whole(1),
                "maxLoraRank": whole(1),
                "maxCpuLoras": {"type": ["integer", "null"], "minimum": 1},
            }
        ),
        cacheVolume=obj(
            {
                "existingClaim": TEXT,
                "sizeLimit": QUANTITY,
                "create": obj({"enabled": FLAG, "size": QUANTITY, "accessModes": NAMES, **storage_class}),
            }
        ),
        hubTokenSecret=TEXT,
        startupSeconds=whole(30),
        extraVolumes=LIST,
        extraVolumeMounts=LIST,
        scaling=scaling(),
        strategy=obj({"maxSurge": {"type": ["integer", "string"]}, "maxUnavailable": {"type": ["integer", "string"]}}),
    )


def redis() -> Schema:
    """Where Redis is, or the small one."""
    persistence = obj({"enabled": FLAG, "size": QUANTITY, "storageClassName": OPTIONAL_TEXT, "existingClaim": TEXT})
    bundled = obj(
        {
            "image": image(),
            "resources": FREE,
            "maxmemory": {"type": "string", "pattern": "^[0-9]+(kb|mb|gb)$"},
            "persistence": persistence,
            "nodeSelector": TEXTS,
            "tolerations": LIST,
            "priorityClassName": TEXT,
        }
    )
    url = {"type": "string", "pattern": r"^(redis(s?|s?\+sentinel|s?\+cluster)://.+)?$"}
    return obj({"existingSecret": TEXT, "url": url, "tasksUrl": url, "bundled": bundled})


def schema() -> Schema:
    """The whole."""
    autoscaling = obj(
        {
            "enabled": FLAG,
            "minReplicas": whole(1),
            "maxReplicas": whole(1),
            "targetCPUUtilizationPercentage": whole(1, 100),
        }
    )
    service = obj(
        {
            "type": one_of("ClusterIP", "NodePort", "LoadBalancer"),
            "port": whole(1, 65_535),
            "annotations": TEXTS,
        }
    )
    monitor = obj({"enabled": FLAG, "interval": INTERVAL, "labels": TEXTS})
    properties = {
        "nameOverride": TEXT,
        "fullnameOverride": TEXT,
        "images": obj({"gateway": image(), "worker": image(), "pullSecrets": LIST}),
        "logLevel": one_of("debug", "info", "warning", "error"),
        "auth": obj({"required": FLAG, "existingSecret": TEXT, "apiKeys": NAMES, "adminApiKeys": NAMES}),
        "redis": redis(),
        "serviceAccount": obj({"create": FLAG, "name": TEXT, "annotations": TEXTS}),
        "podSecurityContext": FREE,
        "cache": obj({"mountPath": PATH_TEXT}),
        "adapterStore": obj({"url": TEXT, "existingClaim": TEXT, "mountPath": PATH_TEXT}),
        "gateway": workload("gateway", autoscaling=autoscaling, service=service),
        "tasks": workload("tasks", enabled=FLAG, extraVolumes=LIST, extraVolumeMounts=LIST),
        "poolDefaults": {"$ref": "#/definitions/pool"},
        "pools": {
            "type": "object",
            "propertyNames": {
                "pattern": "^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$",
                "not": one_of("gateway", "tasks", "redis"),
            },
            "additionalProperties": {"$ref": "#/definitions/pool"},
        },
        "networkPolicy": obj(
            {
                "enabled": FLAG,
                "gatewayFrom": LIST,
                "metricsFrom": LIST,
                "kedaNamespace": NAME,
                "redisPorts": {"type": "array", "items": whole(1, 65_535), "minItems": 1},
                "redisTo": LIST,
                "workerHttps": FLAG,
                "tasksHttps": FLAG,
                "gatewayHttps": FLAG,
                "extraEgress": LIST,
            }
        ),
        "prometheus": obj(
            {
                "serverAddress": TEXT,
                "serviceMonitor": monitor,
                "podMonitor": monitor,
                "rules": obj({"enabled": FLAG, "labels": TEXTS, "runbookUrl": NAME}),
            }
        ),
        "webhooks": obj({"allow": NAMES, "http": FLAG}),
        "tracing": obj(
            {
                "endpoint": {"type": "string", "pattern": "^(https?://[^/].*)?$"},
                "ratio": {"type": "number", "minimum": 0, "maximum": 1},
                "to": LIST,
            }
        ),
        "grafana": obj({"dashboards": obj({"enabled": FLAG, "labels": TEXTS, "annotations": TEXTS})}),
        "ingress": obj(
            {
                "enabled": FLAG,
                "className": TEXT,
                "nginxStreaming": FLAG,
                "annotations": TEXTS,
                "hosts": NAMES,
                "tls": LIST,
                "readTimeoutSeconds": whole(60),
            }
        ),
        "httpRoute": obj({"enabled": FLAG, "annotations": TEXTS, "parentRefs": LIST, "hostnames": NAMES}),
        "global": FREE,
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart ropeway",
        **obj(properties),
        "definitions": {"pool": pool()},
    }


def text() -> str:
    """The file."""
    return json.dumps(schema(), indent=2) + "\n"


def main() -> int:
    """Entry point; answers the exit code."""
    if "--check" in sys.argv[1:]:
        current = PATH.exists() and PATH.read_text("utf-8") == text()
        if not current:
            print(f"{PATH.name} does not fit the settings: run python scripts/chart_schema.py", file=sys.stderr)
        return 0 if current else 1
    PATH.write_text(text(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
