"""One trace from the request to the last frame, over processes that die."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared import keys
from shared.keys import JobId
from tests.support.adapter_tasks import TasksProcess
from tests.support.otlp import PATIENCE_S, Collector, Spanned
from tests.support.ports import free_port
from tests.support.stack import Process, Stack

SECRET = "unmistakable words"
LEASE_S = 2.0


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector, pytest.MonkeyPatch.context() as patch:
        for name, value in collector.variables.items():
            patch.setenv(name, value)
        yield collector


@pytest.fixture(scope="module")
def stack(collector: Collector) -> Iterator[Stack]:
    with Stack(engine="sim", sim_step_ms=30, lease_s=LEASE_S, all_poll_ms=200, heartbeat_s=0.5, grace_s=0) as stack:
        stack.start_gateway()
        stack.start_worker()
        stack.wait_ready()
        yield stack


class Request:
    """A stream under a trace of its own, read to its end."""

    _made = 0

    def __init__(self, stack: Stack, tokens: int) -> None:
        Request._made += 1
        self.trace = f"{Request._made:032x}"
        headers = {"traceparent": f"00-{self.trace}-{'a' * 16}-01"}
        body = {"model": "sim", "prompt": SECRET, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        self._http = httpx.Client(base_url=stack.url, timeout=120, trust_env=False)
        self._stream = self._http.stream("POST", "/v1/completions", json=body, headers=headers)
        self.response = self._stream.__enter__()
        assert self.response.status_code == 200
        self.job = JobId.parse(self.response.headers["x-ropeway-job-id"])
        self._lines = self.response.iter_lines()

    def until_tokens(self) -> None:
        """Wait for the first of them."""
        assert next(line for line in self._lines if line.startswith("data:"))

    def finish(self) -> None:
        assert [line for line in self._lines if line][-1] == "data: [DONE]"
        self._stream.__exit__(None, None, None)
        self._http.close()


def by_name(spans: list[Spanned]) -> dict[str, Spanned]:
    assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
    return {span.name: span for span in spans}


def holder(stack: Stack, job: JobId) -> tuple[str, Process]:
    """Owner and process of the worker that has a job."""
    with stack.redis.client() as client:
        owner = client.hget(keys.job(job), "owner")
    assert isinstance(owner, bytes)
    process = next(p for p in stack.processes if p.name == "worker" and owner.decode() in p.text())
    return owner.decode(), process


def attempts(spans: list[Spanned]) -> list[Spanned]:
    found = [span for span in spans if span.name == "attempt"]
    return sorted(found, key=lambda span: int(span.attributes["ropeway.attempt.epoch"]))


def second_worker(stack: Stack) -> None:
    _, port = stack.start_worker()
    wait_for(f"http://127.0.0.1:{port}/ready")


def wait_for(url: str) -> None:
    """Until an address answers 200."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError(url)


def test_one_tree_from_the_request_to_the_last_frame(stack: Stack, collector: Collector) -> None:
    request = Request(stack, tokens=5)
    request.finish()
    names = ["POST /v1/completions", "prepare", "submit sim", "stream", "queue", "attempt", "prefill", "decode"]
    spans = by_name(collector.trace(request.trace, *names))
    assert set(spans) == set(names)
    server, submit, attempt = spans["POST /v1/completions"], spans["submit sim"], spans["attempt"]
    assert server.parent == "a" * 16
    assert {spans[name].parent for name in ("prepare", "submit sim", "stream")} == {server.id}
    assert {spans[name].parent for name in ("queue", "attempt")} == {submit.id}
    assert {spans[name].parent for name in ("prefill", "decode")} == {attempt.id}
    assert {server.service, attempt.service} == {"ropeway-gateway", "ropeway-worker"}
    assert (submit.kind, spans["queue"].kind, attempt.kind) == ("producer", "consumer", "consumer")
    assert attempt.attributes["gen_ai.usage.output_tokens"] == 5
    assert attempt.attributes["ropeway.worker.id"] == attempt.resource["service.instance.id"]
    assert spans["queue"].ended == pytest.approx(attempt.began, abs=5e6)
    assert attempt.began <= spans["prefill"].began <= spans["prefill"].ended == spans["decode"].began
    assert spans["decode"].ended <= attempt.ended
    assert not any(SECRET.encode() in body for body in collector.bodies)
    gateway = next(p for p in stack.processes if p.name == "gateway")
    assert f'"trace_id": "{request.trace}"' in gateway.text()


def test_attempts_of_a_job_whose_worker_was_killed(stack: Stack, collector: Collector) -> None:
    second_worker(stack)
    request = Request(stack, tokens=100)
    request.until_tokens()
    owner, process = holder(stack, request.job)
    process.stop(signal.SIGKILL)
    request.finish()
    spans = collector.trace(request.trace, "attempt", "attempt", "stream", "POST /v1/completions")
    lost, completed = attempts(spans)
    assert lost.parent == completed.parent == next(span.id for span in spans if span.name == "submit sim")
    assert lost.failed and lost.attributes["ropeway.attempt.outcome"] == "lost"
    assert lost.attributes["ropeway.worker.id"] == owner != completed.attributes["ropeway.worker.id"]
    assert lost.ended - lost.began > LEASE_S * 1e9 and lost.ended == pytest.approx(completed.began, abs=5e6)
    assert not completed.failed and completed.attributes["ropeway.attempt.outcome"] == "completed"
    assert completed.attributes["gen_ai.usage.output_tokens"] == 100
    assert completed.attributes["ropeway.attempt.output_tokens"] < 100
    assert [span.name for span in spans].count("stream") == 1, "its client has noticed nothing"


def test_attempts_of_a_job_whose_worker_was_drained(stack: Stack, collector: Collector) -> None:
    second_worker(stack)
    request = Request(stack, tokens=100)
    request.until_tokens()
    _, process = holder(stack, request.job)
    assert process.stop(signal.SIGTERM) == 0, process.text()
    request.finish()
    spans = collector.trace(request.trace, "attempt", "attempt", "queue", "queue", "POST /v1/completions")
    released, completed = attempts(spans)
    assert not released.failed and released.attributes["ropeway.attempt.outcome"] == "released"
    assert completed.attributes["ropeway.attempt.outcome"] == "completed"
    waits = sorted((span for span in spans if span.name == "queue"), key=lambda span: span.began)
    assert waits[1].began >= released.began and waits[1].ended == pytest.approx(completed.began, abs=5e6)
    made = [span.attributes["ropeway.attempt.output_tokens"] for span in (released, completed)]
    assert sum(made) == 100 and min(made) > 0


def test_lines_of_a_batch_are_linked_to_whoever_made_it(stack: Stack, collector: Collector, tmp_path: Path) -> None:
    stack.start_gateway(port := free_port(), files_store=str(tmp_path))
    tasks = TasksProcess(stack.redis.url, tmp_path / "log", files_store=str(tmp_path))
    made, hidden = f"{0xB:032x}", f"{0xC:032x}"
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "sim", "prompt": SECRET, "max_tokens": 2},
    }
    try:
        tasks.wait_ready()
        wait_for(f"http://127.0.0.1:{port}/ready")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            file = http.post("/v1/files", files={"file": ("in.jsonl", json.dumps(line))}, data={"purpose": "batch"})
            order = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
            batches = [
                http.post("/v1/batches", json=order, headers={"traceparent": f"00-{trace}-{'a' * 16}-{flags}"}).json()
                for trace, flags in ((hidden, "00"), (made, "01"))
            ]
            until = time.monotonic() + PATIENCE_S
            while any(http.get(f"/v1/batches/{batch['id']}").json()["status"] != "completed" for batch in batches):
                assert time.monotonic() < until, tasks.log.read_text()
                time.sleep(0.1)
    finally:
        assert tasks.stop() == 0
    spans = collector.until(lambda found: any(span.name == "batch line" for span in found))
    (root,) = [span for span in spans if span.name == "batch line"]
    made_by = next(span for span in collector.trace(made, "POST /v1/batches") if span.name == "POST /v1/batches")
    assert root.parent == "" and root.links == [(made, made_by.id)] and root.trace != made
    assert (root.service, root.attributes["http.response.status_code"]) == ("ropeway-tasks", 200)
    tree = by_name(collector.trace(root.trace, "batch line", "prepare", "submit sim", "attempt"))
    assert tree["attempt"].parent == tree["submit sim"].id and tree["submit sim"].parent == root.id
    assert not any(SECRET.encode() in body for body in collector.bodies)
