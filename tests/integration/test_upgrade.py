"""Two versions side by side on one Redis: the commit before this one, and a next minor version with fields of its own.

`ROPEWAY_UPGRADE_FROM` names another commit.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from ropeway.client import Client, Event
from shared import keys
from shared.keys import JobId
from shared.protocol import WIRE_VERSION
from tests.support.other_versions import next_major, next_minor, previous, script_shas
from tests.support.stack import ROOT, Process, Stack, free_port

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "What is a ropeway?"}]
#: Other versions, by name, and how their code is had.
OTHERS = {"previous": previous, "next minor": next_minor}
#: Tokens, and so steps of ten milliseconds, of a job in whose midst workers go.
LONG = 600
WORKER = {"engine": "sim", "sim_step_ms": 10, "lease_s": 60, "step_timeout_s": 60, "grace_s": 0, "log_json": True}


@dataclass(frozen=True)
class Version:
    """A version, and its gateway."""

    code: Path
    url: str

    @property
    def client(self) -> Client:
        return Client(self.url)


class Both:
    """One Redis with a gateway of each version; workers come and go."""

    def __init__(self, stack: Stack, other: Path, *, made_up: bool) -> None:
        self.stack, self.made_up = stack, made_up
        ports = {ROOT: stack.gateway_port, other: free_port()}
        for code, port in ports.items():
            stack.start_gateway(port, code=code, pools=["sim"], log_json=True)
        self.mine, self.other = (Version(code, f"http://127.0.0.1:{port}") for code, port in ports.items())
        for port in ports.values():  # ready is what a model is known to
            stack.wait_ready(port=port, path="/health")

    @contextlib.contextmanager
    def worker(self, version: Version, **settings: object) -> Iterator[Process]:
        """A worker that is ready; told to go in the end, if it has not gone by then."""
        process, port = self.stack.start_worker(code=version.code, **settings)
        self.stack.wait_ready(port=port)
        yield process
        if process in self.stack.processes:
            self.end(process)

    def end(self, worker: Process, how: signal.Signals = signal.SIGTERM) -> None:
        code = worker.stop(how, timeout=120)
        self.stack.processes.remove(worker)
        assert code == (0 if how is signal.SIGTERM else -how), worker.text()[-3000:]


@pytest.fixture(scope="module", params=OTHERS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    other = tmp_path_factory.mktemp("version")
    OTHERS[request.param](other)
    with Stack(clean=True, **WORKER) as stack:
        yield Both(stack, other, made_up=request.param != "previous")


def answers(version: Version) -> tuple[str, str]:
    """A chat of this version's gateway, whole and streamed."""
    with openai.OpenAI(base_url=f"{version.url}/v1", api_key="none", max_retries=0) as client:
        request = {
            "model": "sim",
            "messages": QUESTION,
            "max_tokens": 12,
            "seed": 1,
            "extra_body": {"ignore_eos": True},
        }
        whole = client.chat.completions.create(**request)  # type: ignore[call-overload]
        chunks = list(client.chat.completions.create(**request, stream=True))  # type: ignore[call-overload]
    assert whole.usage.completion_tokens == 12
    return whole.choices[0].message.content, "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def submit(client: Client) -> str:
    return client.submit("hi", model="sim", max_tokens=LONG, ignore_eos=True, seed=1).id


def until_text(events: Iterator[Event]) -> list[Event]:
    """The first events, up to one with text."""
    seen = [next(events)]
    while not seen[-1].text():
        seen.append(next(events))
    return seen


def text_of(events: list[Event]) -> str:
    """The text of a stream that must be whole."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1)), "a gap or a repeat"
    assert [event.last for event in events] == [False] * (len(events) - 1) + [True]
    return "".join(event.text() for event in events)


def test_gateways_and_workers_of_both_serve_each_other(both: Both) -> None:
    said = set()
    for version in (both.other, both.mine):
        with both.worker(version):
            for gateway in (both.other, both.mine):
                said.update(answers(gateway))
                assert httpx.get(f"{gateway.url}/v1/pools/sim/load").json()["workers"]["ready"] == 1
    assert len(said) == 1 and "" not in said
    # A server knows scripts by the hash of their text: those of both are there, and none stands for one of the other.
    used = ("submit", "pull", "publish", "join", "heartbeat", "forget")
    shas = [script_shas(version.code) for version in (both.mine, both.other)]
    with both.stack.redis.client() as redis:
        assert all(redis.script_exists(*(found[name] for found in shas for name in used)))
    if both.made_up:
        assert all(shas[0][name] != shas[1][name] for name in used)


@contextlib.contextmanager
def asleep(worker: Process) -> Iterator[None]:
    """Stopped, so that another worker takes what comes."""
    worker.popen.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.popen.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("way", "end"), [("upgrade", signal.SIGTERM), ("rollback", signal.SIGTERM), ("upgrade", signal.SIGKILL)]
)
def test_a_stream_goes_on_at_the_other_version(both: Both, way: str, end: signal.Signals) -> None:
    first, second = (both.other, both.mine) if way == "upgrade" else (both.mine, both.other)
    lease = {"lease_s": 60 if end is signal.SIGTERM else 2}
    with (
        both.worker(first, **lease) as leaving,
        both.worker(second, **lease) as staying,
        first.client as old,
        second.client as new,
    ):
        undisturbed = old.wait(submit(old), timeout=120).text
        with asleep(staying):
            job = submit(old)
            events, elsewhere = old.events(job), new.events(job)
            seen = until_text(events)
        both.end(leaving, end)
        assert text_of([*seen, *events]) == undisturbed
        assert text_of(list(elsewhere)) == undisturbed
        shown = new.wait(job, timeout=120)
        attempts = 1 if end is signal.SIGTERM else 2
        assert (shown.status, shown.text, shown.data["attempts"]) == ("completed", undisturbed, attempts)
        with both.stack.redis.client() as redis:
            epoch = redis.hget(keys.job(JobId.parse(job)), "epoch")
        assert epoch == b"2", f"the other version went on with it\n{leaving.text()}\n{staying.text()}"


def test_jobs_that_one_version_queued_are_run_by_the_other(both: Both) -> None:
    for first, second in ((both.other, both.mine), (both.mine, both.other)):
        with first.client as client, second.client as reader:
            jobs = [
                client.submit("hi", model="sim", max_tokens=5, seed=n, job_class=name, metadata={"n": str(n)}).id
                for n, name in enumerate(("high", "normal", "batch"))
            ]
            cancelled = submit(client)
            reader.cancel(cancelled)
            with both.worker(second):
                for n, job in enumerate(jobs):
                    done, same = client.wait(job, timeout=120), reader.get(job)
                    assert done.status == "completed" and done.text and done.data["metadata"] == {"n": str(n)}
                    assert (same.text, same.data["usage"]) == (done.text, done.data["usage"])
            assert client.get(cancelled).status == reader.get(cancelled).status == "cancelled"


@pytest.fixture(scope="module")
def major(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("major")
    next_major(folder)
    return folder


@pytest.mark.parametrize("first", ["mine", "theirs"])
def test_another_major_version_keeps_out(major: Path, first: str) -> None:
    """Whichever was there first: workers of the other do not join, its gateways do not take jobs for the pool."""
    there, here, versions = ROOT, major, (WIRE_VERSION, WIRE_VERSION + 1)
    if first == "theirs":
        there, here, versions = here, there, versions[::-1]
    with Stack(**WORKER) as stack:
        stack.start_gateway(code=there)
        _, port = stack.start_worker(code=there)
        stack.wait_ready(port=port)
        stack.wait_ready()
        late, _ = stack.start_worker(code=here)
        assert late.popen.wait(120) == 78
        stack.processes.remove(late)
        assert f"pool sim speaks wire version {versions[0]}, this process speaks {versions[1]}" in late.text()
        other = free_port()
        stack.start_gateway(other, code=here, pools=["sim"])
        stack.wait_ready(port=other)
        body = {"model": "sim", "messages": QUESTION, "max_tokens": 3}
        refused = httpx.post(f"http://127.0.0.1:{other}/v1/chat/completions", json=body, timeout=60)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        message = refused.json()["error"]["message"]
        assert f"wire version {versions[0]}" in message and f"this process speaks {versions[1]}" in message
        served = httpx.post(f"{stack.url}/v1/chat/completions", json=body, timeout=60)
        assert served.status_code == 200, "those who were there first go on"
