"""The OpenAPI document, its page, and that no input whatever makes a route fail."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openapi_spec_validator import validate
from schemathesis.checks import not_a_server_error

from gateway.app import create_app
from gateway.docs import document_of
from shared.settings import GatewaySettings
from tests.support.stack import Stack

ROOT = Path(__file__).parents[2]
MODEL = "sim"
#: Inputs per operation; for a thorough run by hand set ROPEWAY_TEST_API_EXAMPLES, to 500 for instance.
EXAMPLES = int(os.environ.get("ROPEWAY_TEST_API_EXAMPLES", "15"))
OPERATIONS = [
    (method.upper(), path)
    for path, operations in document_of(create_app(GatewaySettings()))["paths"].items()
    for method in operations
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A gateway, and a simulated worker, so that whatever is taken also ends."""
    store = str(tmp_path_factory.mktemp("adapters"))
    limits = {"deadline_s": 5, "max_wait_s": 0.2, "keepalive_s": 1, "retention_s": 60}
    with Stack(engine="sim", sim_step_ms=0.1, max_num_seqs=64) as stack:
        stack.start_gateway(**limits, log_level="warning", adapter_store=store)
        stack.start_worker()
        stack.wait_ready()
        yield stack


@pytest.fixture(scope="module")
def api(stack: Stack) -> Any:
    return schemathesis.openapi.from_url(f"{stack.url}/openapi.json")


def test_the_document_is_valid(stack: Stack) -> None:
    document = httpx.get(f"{stack.url}/openapi.json").json()
    validate(document)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], f"{method} {path} says nothing of itself"
            assert "422" not in operation["responses"]


def test_every_path_is_documented() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    written = set(re.findall(r"/[a-z0-9_/{}.-]+", page.replace("{id}", "{}")))
    missing = [
        path
        for _, path in OPERATIONS
        if re.sub(r"\{\w+\}", "{}", path) not in {re.sub(r"\{\w*\}", "{}", w) for w in written}
    ]
    assert not missing


def test_the_page_needs_nothing_from_elsewhere(stack: Stack) -> None:
    answer = httpx.get(f"{stack.url}/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "openapi.json" in answer.text
    assert not re.findall(r"(?:https?:)?//[a-z]", answer.text.replace("<!doctype html>", "")), "an address"
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert httpx.get(f"{stack.url}/redoc").status_code == 404


def test_the_root_leads_to_all_of_it(stack: Stack) -> None:
    answer = httpx.get(f"{stack.url}/").json()
    assert answer["name"] == "Ropeway" and re.fullmatch(r"\d+\.\d+.*", answer["version"])
    for place in ("docs", "openapi"):
        assert httpx.get(f"{stack.url}{answer[place]}").status_code == 200
    assert httpx.get(f"{stack.url}{answer['api']}/models").status_code == 200


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_input_makes_a_route_fail(api: Any, stack: Stack, method: str, path: str) -> None:
    operation = api[path][method]
    known = _known(stack)

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(), real=st.integers(0, 3), name=st.sampled_from(known))
    def check(case: Any, real: int, name: str) -> None:
        # Ids and models made up go no further than the first look; so most are real ones.
        if real:
            for parameter in case.path_parameters or {}:
                case.path_parameters[parameter] = MODEL if parameter in ("model", "pool") else name
                if parameter == "response_id":
                    case.path_parameters[parameter] = f"resp_{name}"
            _give_model(case.body)
        case.validate_response(case.call(timeout=30), checks=[not_a_server_error])

    check()
    assert httpx.get(f"{stack.url}/health").status_code == 200


def _known(stack: Stack) -> list[str]:
    """Jobs that are there: one that has ended, one that is delayed."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    orders = [{"kind": "chat", "body": body}, {"kind": "chat", "body": body, "delay_s": 60}]
    answer = httpx.post(f"{stack.url}/v1/jobs", json={"jobs": orders})
    response = httpx.post(f"{stack.url}/v1/responses", json={"model": MODEL, "input": "x", "max_output_tokens": 2})
    return [*(job["id"] for job in answer.json()["data"]), response.json()["id"].removeprefix("resp_")]


def _give_model(body: Any) -> None:
    """Name the model that is there, in a body and in what it holds."""
    if isinstance(body, dict):
        if "model" in body or "messages" in body or "prompt" in body or "input" in body:
            body["model"] = MODEL
        for value in body.values():
            _give_model(value)
    elif isinstance(body, list):
        for value in body:
            _give_model(value)
