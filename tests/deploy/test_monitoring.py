"""Alerts and dashboards: what they ask for exists, and what they mean is written down."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, ROOT, of_kind, render, rendered
from tests.support import metric_names

RULES = CHART / "alerts" / "ropeway.yaml"
ASKED = re.compile(r"\bropeway_[a-z0-9_]+")


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_dashboards_show_metrics_that_exist() -> None:
    known, panels = metric_names.sample_names(), 0
    for path in sorted((CHART / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text("utf-8"))["panels"]:
            for target in panel.get("targets", []):
                panels += 1
                assert set(ASKED.findall(target["expr"])) <= known, panel["title"]
    assert panels > 10


def test_alerts_ask_for_metrics_that_exist() -> None:
    known = metric_names.sample_names()
    assert len(alerts()) > 10
    for alert in alerts():
        asked = set(ASKED.findall(alert["expr"]))
        assert asked and asked <= known, alert["alert"]


def test_alerts_and_their_docs_agree() -> None:
    """Each leads to a section of its own, which says how bad it is, what it means, and has something to do."""
    sections = (ROOT / "docs" / "alerts.md").read_text("utf-8").split("\n## ")[1:]
    described = dict(section.split("\n", 1) for section in sections)
    assert list(described) == [alert["alert"] for alert in alerts()]
    for alert in alerts():
        name, severity = alert["alert"], alert["labels"]["severity"]
        assert alert["annotations"]["runbook_url"] == f"docs/alerts.md#{name.lower()}"
        assert described[name].lstrip().startswith(f"**{severity.capitalize()}.** "), name
        assert len(described[name].strip().split("\n\n")) >= 2, name


def test_the_chart_makes_a_rule_of_the_file() -> None:
    (rule,) = of_kind(rendered("everything"), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load(RULES.read_text("utf-8"))
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert not of_kind(rendered("defaults"), "PrometheusRule")


def test_the_runbooks_of_a_release_are_where_its_docs_are() -> None:
    (rule,) = of_kind(
        render({"prometheus": {"rules": {"enabled": True, "runbookUrl": "https://docs.example.com/ropeway/"}}}),
        "PrometheusRule",
    )
    urls = [each["annotations"]["runbook_url"] for group in rule["spec"]["groups"] for each in group["rules"]]
    assert len(urls) == len(alerts())
    assert all(re.fullmatch(r"https://docs\.example\.com/ropeway/alerts\.md#ropeway[a-z]+", url) for url in urls)


def promtool(*arguments: str | Path) -> str:
    """What Prometheus' own tool says."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (it comes with Debian's prometheus)")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_rules() -> None:
    assert f"{len(alerts())} rules found" in promtool("check", "rules", RULES)


def series(name: str, values: str) -> dict[str, str]:
    return {"series": name, "values": values}


def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    """Pool a has work and no worker, b has both, c has neither; a tenth of the requests fail; one job is given up."""
    needed = [
        series(f'ropeway_needed_workers{{pool="{pool}"}}', f"{n}x30") for pool, n in (("a", 2), ("b", 2), ("c", 0))
    ]
    ready = [
        series(f'ropeway_workers{{pool="{pool}",state="ready"}}', f"{n}x30")
        for pool, n in (("a", 0), ("b", 1), ("c", 0))
    ]
    requests = [
        series('ropeway_http_requests_total{route="/v1/models",status="200"}', "0+90x30"),
        series('ropeway_http_requests_total{route="/v1/models",status="500"}', "0+10x30"),
    ]
    dead = [series('ropeway_dead_letters_total{model_name="a"}', "0x10 1x20")]
    fired = {
        "RopewayNoWorker": [{"severity": "critical", "pool": "a"}],
        "RopewayServerErrors": [{"severity": "critical"}],
        "RopewayDeadLetters": [{"severity": "warning", "model_name": "a"}],
        "RopewayLoadUnknown": [],
        "RopewayWorkersDie": [],
    }
    notes = {alert["alert"]: alert["annotations"] for alert in alerts()}
    expected = [
        {
            "alertname": name,
            "eval_time": "15m",
            "exp_alerts": [
                {
                    "exp_labels": found,
                    "exp_annotations": {n: re.sub(r"{{ \$labels\.\w+ }}", "a", t) for n, t in notes[name].items()},
                }
                for found in alerts_
            ],
        }
        for name, alerts_ in fired.items()
    ]
    tests = [
        {"interval": "1m", "input_series": [*needed, *ready, *requests, *dead], "alert_rule_test": expected},
        {
            "interval": "1m",
            "input_series": [series("up", "1x30")],
            "alert_rule_test": [
                {
                    "alertname": "RopewayLoadUnknown",
                    "eval_time": "15m",
                    "exp_alerts": [
                        {
                            "exp_labels": {"severity": "critical"},
                            "exp_annotations": notes["RopewayLoadUnknown"],
                        }
                    ],
                }
            ],
        },
    ]
    path = tmp_path / "alerts_test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}), "utf-8")
    assert "SUCCESS" in promtool("test", "rules", path)
