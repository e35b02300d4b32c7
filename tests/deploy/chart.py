"""The chart, rendered by Helm's own library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "ropeway"
NAMESPACE = "models"
#: Oldest that the chart takes, one in the middle, and the newest whose schemas are there.
KUBERNETES = ("1.29.0", "1.33.0", "1.37.0")
#: Values that are rendered in all tests: each file shows other branches of the templates.
CASES = sorted(path.stem.removesuffix("-values") for path in (CHART / "ci").glob("*-values.yaml"))

Document = dict[str, Any]


def helm() -> Any:
    """Helm as a library; without it the test is skipped."""
    return pytest.importorskip("helm_python", reason="Helm's library is not installed (make helm installs it)").chart


def case(name: str) -> dict[str, Any]:
    """Values of a case."""
    return yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text("utf-8")) or {}


@cache
def _chart() -> Any:
    return helm().Chart.load(str(CHART))


def render(values: Mapping[str, Any]) -> list[Document]:
    """Every document of a release named `rel`."""
    files = _chart().render(dict(values), name="rel", namespace=NAMESPACE)
    return [
        document
        for path, text in sorted(files.items())
        if not path.endswith("NOTES.txt")
        for document in yaml.safe_load_all(text)
        if document
    ]


@cache
def rendered(name: str) -> list[Document]:
    """The documents of a case. Shared: do not change them."""
    return render(case(name))


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    """Those of some kinds."""
    return [document for document in documents if document["kind"] in kinds]


def named(documents: list[Document], kind: str, name: str) -> Document:
    """The one of a kind and name."""
    (found,) = [d for d in of_kind(documents, kind) if d["metadata"]["name"] == name]
    return found


@dataclass(frozen=True)
class PodOf:
    """A pod as a document makes it.

    Attributes:
        labels: that selectors look at.
        spec: of the pod.
        component: gateway, tasks, worker, redis or test.
    """

    name: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def container(self) -> Mapping[str, Any]:
        (container,) = self.spec["containers"]
        return container  # type: ignore[no-any-return]

    @property
    def env(self) -> dict[str, Any]:
        """Values of variables by name; None where they come from a secret."""
        return {entry["name"]: entry.get("value") for entry in self.container["env"]}

    @property
    def mounts(self) -> list[str]:
        return [mount["mountPath"] for mount in self.container["volumeMounts"]]


def pods(documents: list[Document]) -> Iterator[PodOf]:
    """Every pod that these documents make."""
    for document in documents:
        if document["kind"] == "Pod":
            yield PodOf(document["metadata"]["name"], document["metadata"]["labels"], document["spec"])
        elif document["kind"] in ("Deployment", "StatefulSet"):
            template = document["spec"]["template"]
            yield PodOf(document["metadata"]["name"], template["metadata"]["labels"], template["spec"])
