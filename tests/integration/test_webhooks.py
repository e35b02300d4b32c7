"""Webhooks from end to end: a real Redis, a gateway, a worker and tasks processes that die; receivers that do, too."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.webhook_signing import new_secret
from tests.support.adapter_tasks import TasksProcess
from tests.support.ports import free_port
from tests.support.receiver import Answer, Received, Receiver, receiver
from tests.support.stack import ROOT, Process, Stack

MODEL = "parrot"
OLD, SECRET = new_secret(), new_secret()
LOCAL: dict[str, Any] = {"webhook_http": True, "webhook_allow": ["127.0.0.0/8"]}
QUICK: dict[str, Any] = {
    "webhook_secrets": [SECRET, OLD], "webhook_poll_s": 0.1, "webhook_first_retry_s": 0.1, "webhook_timeout_s": 3,
    **LOCAL,
}  # fmt: skip


class System:
    """A stack with a tasks process, and more of them where a test wants."""

    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack, self.folder = stack, folder
        self.started: list[TasksProcess] = []
        self.http = httpx.Client(base_url=stack.url, timeout=60)

    def end(self) -> None:
        for process in self.started:
            process.stop(signal.SIGKILL)
        self.http.close()

    def tasks(self) -> TasksProcess:
        log = self.folder / f"tasks-{len(self.started)}.log"
        values = {"files_store": str(self.folder / "files"), "adapter_store": str(self.folder / "adapters")}
        process = TasksProcess(self.stack.redis.url, log, **values, **QUICK)
        self.started.append(process)
        process.wait_ready()
        return process

    def submit(self, server: Receiver, text: str = "the cabins go round", **more: Any) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 60}
        order = {"kind": "chat", "body": body, "callback_url": server.url, **more}
        response = self.http.post("/v1/jobs", json=order)
        assert response.status_code == 202, response.text
        return str(response.json()["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/jobs/{job_id}").json()
        return found

    def until(self, job_id: str, state: str, seconds: float = 120) -> dict[str, Any]:
        """The job's callback once it is in a state."""
        end = time.monotonic() + seconds
        while (callback := self.job(job_id)["callback"])["state"] != state:
            assert time.monotonic() < end, callback
            time.sleep(0.05)
        found: dict[str, Any] = callback
        return found

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ropeway", "webhooks", *arguments, "--redis", self.stack.redis.url],
            capture_output=True, text=True, cwd=ROOT, check=True,
        )  # fmt: skip
        return done.stdout


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with Stack(appendonly=True, sim_step_ms=2) as stack:
        stack.start_gateway(**LOCAL)
        stack.start_worker("tests.support.parrot_worker")
        stack.wait_ready()
        system = System(stack, tmp_path_factory.mktemp("webhooks"))
        system.tasks()
        yield system
        system.end()


def test_an_answer_comes_signed_and_once(system: System) -> None:
    with receiver() as server:
        job_id = system.submit(server, "round and round", metadata={"order": "7"})
        callback = system.until(job_id, "delivered")
        [received] = server.received
    for secret in (SECRET, OLD):
        event = received.verified(secret)
    job = system.job(job_id)
    assert event["type"] == "job.completed" and event["timestamp"].endswith("Z")
    assert received.id == "msg_" + job_id.rpartition(".")[2]
    assert received.headers["content-type"] == "application/json"
    assert event["data"] == {**job, "callback": event["data"]["callback"]}, "as GET shows the job"
    assert event["data"]["result"]["choices"][0]["message"]["content"] == "round and round"
    assert event["data"]["metadata"] == {"order": "7"}
    assert (callback["attempts"], callback["last_status"], callback["last_error"]) == (1, 204, None)


def test_other_ends_are_told_too(system: System) -> None:
    with receiver() as server:
        cancelled, deleted = (system.submit(server, delay_s=600) for _ in range(2))
        system.http.post(f"/v1/jobs/{cancelled}/cancel")
        assert system.http.delete(f"/v1/jobs/{deleted}").status_code == 200
        server.until(lambda: len(server.received) == 2)
        events = {received.verified(SECRET)["data"]["id"]: received.event for received in server.received}
    assert events[cancelled]["type"] == events[deleted]["type"] == "job.cancelled"
    assert events[cancelled]["data"]["result"]["choices"][0]["finish_reason"] is not None
    assert events[deleted]["data"]["result"] is None and events[deleted]["data"]["model"] == MODEL
    assert system.http.get(f"/v1/jobs/{deleted}").status_code == 404


def test_a_receiver_that_is_down_for_several_tries(system: System) -> None:
    answers = [Answer(500), Answer(503, {"retry-after": "1"}), Answer(302, {"location": "http://127.0.0.1:1/"})]
    answers += [Answer(delay_s=20), Answer(204)]
    with receiver(lambda _: answers.pop(0)) as server:
        job_id = system.submit(server)
        callback = system.until(job_id, "delivered")
        assert callback["attempts"] == 5 and len(set(server.ids())) == 1
        assert len({received.body for received in server.received}) == 1
        first, second = (int(server.received[n].headers["webhook-timestamp"]) for n in (1, 2))
        assert second > first, "the receiver asked for a pause"
        server.received[-1].verified(SECRET)


def test_a_receiver_that_wants_no_more(system: System) -> None:
    with receiver(Answer(410)) as server:
        job_id = system.submit(server)
        callback = system.until(job_id, "gone")
    assert callback["attempts"] == 1 and job_id in system.command("list", "--failed")


def test_sent_once_more_it_has_the_same_id(system: System) -> None:
    with receiver() as server:
        job_id = system.submit(server)
        system.until(job_id, "delivered")
        system.command("redeliver", job_id)
        server.until(lambda: len(server.received) == 2)
        assert len(set(server.ids())) == 1
        assert server.received[0].event == server.received[1].event


def test_a_tasks_process_that_is_killed_at_it(system: System) -> None:
    """Whether the webhook arrived is not known then, so it is sent again under the same id."""
    hold = [Answer(delay_s=60)]
    with receiver(lambda _: hold.pop() if hold else Answer(204)) as server:
        job_id = system.submit(server)
        server.until(lambda: len(server.received) == 1)
        system.started[-1].stop(signal.SIGKILL)
        assert system.job(job_id)["callback"]["attempts"] == 1
        system.tasks()
        callback = system.until(job_id, "delivered")
        assert callback["attempts"] == 2 and len(set(server.ids())) == 1
        server.received[-1].verified(SECRET)


def test_a_tasks_process_that_is_told_to_stop_ends_what_it_is_at(system: System) -> None:
    with receiver(Answer(delay_s=1.0)) as server:
        job_id = system.submit(server)
        server.until(lambda: len(server.received) == 1)
        assert system.started[-1].stop(signal.SIGTERM) == 0
        assert system.job(job_id)["callback"]["state"] == "delivered"
        assert len(server.received) == 1
    system.tasks()


def test_killed_again_and_again_none_is_lost(system: System) -> None:
    dice, count = random.Random(3), 40
    answer: Callable[[Received], Answer] = lambda _: Answer(500 if dice.random() < 0.2 else 204)  # noqa: E731
    with receiver(answer) as server:
        jobs = [system.submit(server, f"cabin {n}") for n in range(count)]
        for _ in range(2):
            reached = len(server.received) + 3
            server.until(lambda least=reached: len(server.received) >= least or len(set(server.ids())) == count)  # type: ignore[misc]
            system.started[-1].stop(signal.SIGKILL)
            system.tasks()
        for job_id in jobs:
            system.until(job_id, "delivered")
        told = Counter(received.event["data"]["id"] for received in server.received)
        assert set(told) == set(jobs)
        by_id = {(received.id, received.body) for received in server.received}
        assert len(by_id) == count, "a repeat is the same, byte for byte"


def test_redis_is_killed_and_started_again(system: System) -> None:
    down = [True]
    with receiver(lambda _: Answer(500 if down[0] else 204)) as server:
        job_id = system.submit(server)
        server.until(lambda: len(server.received) >= 1)
        time.sleep(1.5)  # `everysec`: what was written has reached the disk
        system.stack.redis.kill()
        system.stack.redis.start()
        down[0] = False
        end = time.monotonic() + 120
        while time.monotonic() < end:
            response = system.http.get(f"/v1/jobs/{job_id}")
            if response.status_code == 200 and response.json()["callback"]["state"] == "delivered":
                break
            time.sleep(0.1)
        else:
            raise AssertionError(response.text)
        assert len(set(server.ids())) == 1


def test_metrics_and_logs(system: System) -> None:
    """What was delivered is counted behind the delivery: a process that is killed in between has told nobody."""
    total = 'ropeway_webhooks_total{outcome="delivered"}'

    def seen() -> dict[str, float]:
        text = httpx.get(f"http://127.0.0.1:{system.started[-1].port}/metrics", timeout=30).text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("ropeway_webhook"))
        return {name: float(value) for name, value in lines}

    before = seen()[total]
    with receiver() as server:
        for job_id in [system.submit(server, f"car {n}") for n in range(3)]:
            system.until(job_id, "delivered")
    end = time.monotonic() + 60
    while True:  # the outboxes are looked at once a round
        samples = seen()
        if (samples["ropeway_webhooks_pending"] == 0 and samples[total] >= before + 3) or time.monotonic() > end:
            break
        time.sleep(0.2)
    assert samples[total] >= before + 3 > 3
    assert samples['ropeway_webhooks_total{outcome="gone"}'] == 1
    assert samples['ropeway_webhook_tries_total{outcome="answered"}'] > 0
    assert samples["ropeway_webhooks_pending"] == 0 == samples["ropeway_webhook_oldest_seconds"]
    logs = "".join(process.log.read_text() for process in system.started)
    assert SECRET not in logs and "/hook" not in logs and "cabins" not in logs


@pytest.fixture
def backend(system: System) -> Iterator[str]:
    port = free_port()
    env = {"ROPEWAY_URL": system.stack.url, "PUBLIC_URL": f"http://127.0.0.1:{port}", "WEBHOOK_SECRET": SECRET}
    process = Process("backend", [sys.executable, "examples/fastapi_backend.py", str(port)], {**os.environ, **env})
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            assert process.popen.poll() is None, process.text()
            try:
                httpx.get(f"http://127.0.0.1:{port}/questions/none", timeout=5)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stop()


def test_the_example_of_a_backend(system: System, backend: str) -> None:
    asked = httpx.post(f"{backend}/questions", json={"question": "up and down"}, timeout=60)
    assert asked.status_code == 202, asked.text
    job_id = asked.json()["id"]
    system.until(job_id, "delivered")
    assert httpx.get(f"{backend}/questions/{job_id}", timeout=60).json() == {
        "status": "completed", "answer": "up and down",
    }  # fmt: skip
    forged = httpx.post(
        f"{backend}/webhooks", content=json.dumps({"data": {"id": job_id}}), timeout=60,
        headers={"webhook-id": "msg_1", "webhook-timestamp": str(int(time.time())), "webhook-signature": "v1,AAAA"},
    )  # fmt: skip
    assert forged.status_code == 401
