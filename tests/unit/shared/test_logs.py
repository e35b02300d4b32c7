"""Logs: JSON off a terminal, ids bound, nothing that must not be read."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from shared import logs

TRACE = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_json_where_standard_error_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure()
    structlog.get_logger("room").info("started", port=1)
    (line,) = lines(capsys)
    assert (line["event"], line["port"], line["level"], line["logger"]) == ("started", 1, "info", "room")
    assert line["timestamp"].endswith("Z")


def test_ids_are_bound_and_unbound(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(json=True)
    log = structlog.get_logger()
    with logs.bind(job_id="j", trace=TRACE):
        log.info("inside")
        logging.getLogger("uvicorn").warning("port %d", 5)
    log.info("outside")
    inside, foreign, outside = lines(capsys)
    assert (inside["job_id"], inside["trace_id"]) == ("j", "a" * 32)
    assert (foreign["event"], foreign["job_id"], foreign["level"]) == ("port 5", "j", "warning")
    assert "job_id" not in outside and "trace_id" not in outside


@pytest.mark.parametrize("key", ["api_key", "api_keys", "Authorization", "password", "cookie", "headers"])
def test_credentials_are_dropped_at_debug_too(capsys: pytest.CaptureFixture[str], key: str) -> None:
    logs.configure("debug", json=True)
    structlog.get_logger().debug("e", **{key: "SECRET"}, request={"list": [{key: "SECRET", "kept": 1}]})
    captured = capsys.readouterr().err
    assert "SECRET" not in captured and '"kept": 1' in captured


@pytest.mark.parametrize("key", ["prompt", "text", "api_key", "Authorization", "token_ids", "messages", "password"])
@pytest.mark.parametrize("method", ["info", "warning", "error"])
def test_secrets_are_dropped_at_any_depth(capsys: pytest.CaptureFixture[str], key: str, method: str) -> None:
    logs.configure(json=True)
    getattr(structlog.get_logger(), method)("e", **{key: "SECRET"}, body_of={"list": [{key: "SECRET", "kept": 1}]})
    captured = capsys.readouterr().err
    assert "SECRET" not in captured and '"kept": 1' in captured


def test_debug_may_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("debug", json=True)
    structlog.get_logger().debug("e", prompt="visible")
    assert lines(capsys)[0]["prompt"] == "visible"


def test_the_level_is_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("warning", json=True)
    structlog.get_logger().info("quiet")
    logging.getLogger("x").info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(capsys)] == ["loud"]


@pytest.mark.parametrize("as_json", [True, False])
def test_a_traceback_shows_no_local_variables(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    logs.configure(json=as_json)
    prompt_of_a_client = "a confidential sentence"
    try:
        raise ValueError(len(prompt_of_a_client))
    except ValueError:
        structlog.get_logger().exception("failed")
    captured = capsys.readouterr().err
    assert "ValueError" in captured and "test_logs.py" in captured
    assert "confidential" not in captured.replace('"a confidential sentence"', "")


def test_configuring_again_does_not_double_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(json=True)
    logs.configure(json=True)
    structlog.get_logger().info("once")
    assert len(lines(capsys)) == 1


def test_text_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(json=False)
    structlog.get_logger().info("hello", prompt="SECRET")
    captured = capsys.readouterr().err
    assert "hello" in captured and "SECRET" not in captured and not captured.startswith("{")
