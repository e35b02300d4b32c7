"""The judge sees what it must see: jobs, streams and logs that somebody has tampered with, one fault each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from shared import keys
from shared.jobs import Ending
from shared.keys import JobId
from shared.protocol import ChoiceFrame, ChoiceResult, Envelope, Frame, Result, TokenLogprob, WorkerInfo, encode
from tests.integration.gateway_harness import Gateway, Running, serve
from tests.support import jobs
from tests.support.chaos.adapters import ChaosAdapters, _Stay
from tests.support.chaos.aftermath import leftovers
from tests.support.chaos.clients import ChaosClient
from tests.support.chaos.ear import Ear
from tests.support.chaos.judge import Evidence, judge_adapter, judge_job, judge_witness
from tests.support.chaos.plan import Order, Way
from tests.support.chaos.run import Config, Report, collect, match
from tests.support.chaos.witness import Witness
from tests.unit.gateway import support

TEXTS = ("The", " cable", " never", " stops", ".")
WAYS: Sequence[Way] = ("stream", "whole", "follow", "library", "fetch")
READERS: Sequence[Way] = ("stream", "follow")
#: Rewrites the events of a stream.
Edit = Callable[[list[bytes]], list[bytes]]


class Tampering(httpx.AsyncBaseTransport):
    """Lets everything pass but the bodies of streams."""

    def __init__(self, edit: Edit) -> None:
        self._edit, self._inner = edit, httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            body = b"".join([chunk async for chunk in response.stream])  # type: ignore[union-attr]
            await response.aclose()
            events = [event + b"\n\n" for event in body.split(b"\n\n")[:-1]]
            return httpx.Response(response.status_code, headers=response.headers, stream=_Body(self._edit(events)))
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, events: list[bytes]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self._events:
            yield event


def order(way: Way, **behaviour: Any) -> Order:
    """Five tokens of a completion."""
    body: dict[str, Any] = {"model": support.MODEL, "prompt": "hello", "max_tokens": 5, "temperature": 0}
    if way in ("stream", "whole"):
        return Order(1, way, "/v1/completions", {**body, "stream": way == "stream"}, key="k", **behaviour)
    return Order(1, way, "/v1/jobs", {"kind": "completion", "body": body}, **behaviour)


def undisturbed(texts: Sequence[str] = TEXTS) -> list[ChoiceResult]:
    """What the worker of these tests says; token ids count up from 20."""
    ids = list(range(20, 20 + len(texts)))
    return [ChoiceResult(text="".join(texts), token_ids=ids, finish_reason="length")]


async def tokens(running: Running) -> None:
    """A frame per token."""
    for number, text in enumerate(TEXTS):
        await running.say(text, ids=[20 + number], finish="length" if text == TEXTS[-1] else None)


async def answer(running: Running) -> None:
    """A whole answer."""
    await running.start()
    await tokens(running)
    await running.finish(None)


@dataclass
class Trial:
    """A gateway, a worker played by hand, one client."""

    gateway: Gateway
    ear: Ear

    async def hear(
        self,
        asked: Order,
        *,
        edit: Edit | None = None,
        play: Callable[[Running], Any] = answer,
        patience_s: float = 20.0,
    ) -> Witness:
        """What a client sees of an order, while the worker does as told."""
        transport = None if edit is None else Tampering(edit)
        async with httpx.AsyncClient(transport=transport, timeout=10) as http:
            serving = asyncio.create_task(ChaosClient([self.gateway.url], http, patience_s).serve(asked))
            await play(await self.gateway.worker.pull())
            return await serving

    async def verdict(self, witness: Witness, expected: list[ChoiceResult] | None = None) -> set[str]:
        """Kinds of faults that the judge finds."""
        job_id = str(witness.job_id)
        wanted = undisturbed() if expected is None else expected

        def reference(order: Order | None, envelope: Envelope) -> list[ChoiceResult]:
            return wanted

        heard = self.ear.jobs[job_id].epochs
        evidence = await collect(self.gateway.store, job_id, witness.order, heard, reference)
        return {fault.kind for fault in [*judge_job(job_id, evidence), *judge_witness(witness, evidence)]}


@pytest.fixture
async def trial(valkey_url: str) -> AsyncIterator[Trial]:
    async with serve(valkey_url) as gateway, Ear(valkey_url) as ear:
        await ear.listens.wait()
        yield Trial(gateway, ear)


@pytest.mark.parametrize("way", WAYS)
async def test_an_undisturbed_job_is_faultless(trial: Trial, way: Way) -> None:
    assert await trial.verdict(await trial.hear(order(way))) == set()


@pytest.mark.parametrize("behaviour", [{"breaks": (1, 2, 4)}, {"breaks": (2,), "comes_back": True}])
@pytest.mark.parametrize("way", READERS)
async def test_a_client_that_drops_its_connections_is_faultless(trial: Trial, way: Way, behaviour: Any) -> None:
    witness = await trial.hear(order(way, **behaviour))
    assert await trial.verdict(witness) == set() and witness.drops == len(behaviour["breaks"])


@pytest.mark.parametrize("way", READERS)
@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        (lambda events: events[:2] + events[3:], "gap"),
        (lambda events: events[:3] + events[2:], "repeat"),
        (lambda events: [*events[:2], events[3], events[2], *events[4:]], "disorder"),
        (lambda events: [event.replace(b" never", b" always") for event in events], "different"),
        (lambda events: [event.replace(b" never", b" always") for event in events], "fenced"),
    ],
    ids=["gap", "repeat", "disorder", "wrong token", "a frame of nobody"],
)
async def test_a_doctored_event(trial: Trial, way: Way, edit: Edit, kind: str) -> None:
    assert kind in await trial.verdict(await trial.hear(order(way), edit=edit))


async def test_a_gap_and_a_repeat_of_tokens_under_good_numbers(trial: Trial) -> None:
    async def skips(running: Running) -> None:
        await running.start()
        await running.publish([running.frame("tokens", [ChoiceFrame(offset=0, ids=[20], text="The")])])
        await running.publish([running.frame("tokens", [ChoiceFrame(offset=2, ids=[22], text=" never")])])
        await running.publish([running.frame("tokens", [ChoiceFrame(offset=1, ids=[21], text=" cable")])])
        await running.finish("length")

    faults = await trial.verdict(await trial.hear(order("follow"), play=skips))
    assert {"gap", "repeat", "different"} <= faults


@pytest.mark.parametrize("way", WAYS)
async def test_another_answer_than_that_of_an_undisturbed_run(trial: Trial, way: Way) -> None:
    witness = await trial.hear(order(way))
    assert await trial.verdict(witness, undisturbed(("The", " cable", " often", " stops", "."))) == {"different"}


async def test_other_log_probabilities_than_those_of_an_undisturbed_run(trial: Trial) -> None:
    wanted = undisturbed()
    wanted[0].logprobs = [TokenLogprob(id=20, logprob=-1.0, rank=1)]
    assert await trial.verdict(await trial.hear(order("stream")), wanted) == {"different"}


async def test_another_request_than_the_clients(trial: Trial) -> None:
    witness = await trial.hear(order("stream"))
    witness.order.body["max_tokens"] = 6
    assert await trial.verdict(witness) == {"different"}


@pytest.mark.parametrize("way", WAYS)
async def test_a_job_that_never_ends(trial: Trial, way: Way) -> None:
    async def stalls(running: Running) -> None:
        await running.start()
        await running.say("The", ids=[20])

    witness = await trial.hear(order(way), play=stalls, patience_s=1.0)
    assert witness.failure is not None
    if witness.job_id is not None:
        assert "lost" in await trial.verdict(witness)


@pytest.mark.parametrize("way", WAYS)
async def test_a_job_that_is_cancelled_by_nobody(trial: Trial, way: Way) -> None:
    async def stops(running: Running) -> None:
        await running.start()
        await running.say("The", ids=[20])
        await running.finish("abort", status="cancelled")

    assert "lost" in await trial.verdict(await trial.hear(order(way), play=stops))


async def test_a_cancelled_job_must_be_the_beginning_of_an_undisturbed_one(trial: Trial) -> None:
    def stops(*texts: str) -> Callable[[Running], Any]:
        async def play(running: Running) -> None:
            await running.start()
            for number, text in enumerate(texts):
                await running.say(text, ids=[20 + number])
            await running.finish("abort", status="cancelled")

        return play

    asked = order("follow", cancel_at=100)
    assert await trial.verdict(await trial.hear(asked, play=stops("The", " cable"))) == set()
    assert await trial.verdict(await trial.hear(asked, play=stops("The", " rope"))) == {"different"}


async def test_a_job_that_redis_forgot(trial: Trial) -> None:
    witness = await trial.hear(order("follow"))
    await trial.gateway.store._redis.delete(keys.job(JobId.parse(str(witness.job_id))))
    assert "lost" in await trial.verdict(witness)


async def test_a_hole_in_the_log(trial: Trial) -> None:
    witness = await trial.hear(order("fetch"))
    await trial.gateway.store._redis.xdel(keys.events(JobId.parse(str(witness.job_id))), "3-0")
    assert await trial.verdict(witness) == {"gap"}


async def test_a_frame_of_an_owner_that_had_lost_the_job(trial: Trial) -> None:
    async def fenced(running: Running) -> None:
        client: Any = trial.gateway.store._redis
        log, frame = keys.events(JobId.parse(running.id)), encode(Frame(v=1, seq=1, epoch=5, kind="started"))
        await client.xadd(log, {"f": frame}, id="1-0")
        await client.hset(keys.job(JobId.parse(running.id)), "seq", 1)
        running.seq = 1
        await tokens(running)
        await running.finish(None)

    assert await trial.verdict(await trial.hear(order("fetch"), play=fenced)) == {"fenced"}


async def test_a_frame_on_the_channel_alone(trial: Trial) -> None:
    witness = await trial.hear(order("fetch"))
    trial.ear.jobs[str(witness.job_id)].news.clear()
    log = keys.events(JobId.parse(str(witness.job_id)))
    await trial.gateway.store._redis.publish(log, encode(Frame(v=1, seq=9, epoch=0, kind="tokens")))
    await trial.ear.jobs[str(witness.job_id)].news.wait()
    assert await trial.verdict(witness) == {"fenced"}


async def test_a_result_that_is_not_what_was_published(trial: Trial) -> None:
    async def lies(running: Running) -> None:
        await running.start()
        await tokens(running)
        frame = running.frame("done", status="completed")
        result = Result(id=running.id, status="completed", choices=undisturbed(("The", " end")))
        await running.publish([frame], Ending("completed", encode(result)))

    assert await trial.verdict(await trial.hear(order("follow"), play=lies)) == {"different"}


async def test_what_is_left_behind(trial: Trial) -> None:
    client: Any = trial.gateway.store._redis
    witness = await trial.hear(order("fetch"))
    await trial.gateway.store.heartbeat(support.MODEL, WorkerInfo(owner=trial.gateway.worker.owner), 60_000)
    assert await leftovers(client, support.MODEL, 1) == []
    await client.persist(keys.job(JobId.parse(str(witness.job_id))))
    await client.hincrby(keys.stats(support.MODEL, 0), "running_jobs", 1)
    stream = keys.queue(support.MODEL, 0, "normal", keys.bucket_of("default"))
    await client.xadd(stream, {"id": "x"})
    await client.xreadgroup(keys.GROUP, "nobody", {stream: ">"})
    found = " ".join(await leftovers(client, support.MODEL, 1))
    for problem in ("never expires", "running_jobs is 1", "1 entries", "1 entries pending", "consumer nobody"):
        assert problem in found
    await client.expire(keys.job(JobId.parse(str(witness.job_id))), 60)
    await client.hincrby(keys.stats(support.MODEL, 0), "running_jobs", -1)
    await client.delete(stream)


def test_a_report_with_any_fault_is_not_ok() -> None:
    assert Report(Config()).ok
    assert not Report(Config(), leftovers=["a key"]).ok
    assert not Report(Config(), crashes=["a worker"]).ok


def test_the_match_rate_counts_answers_and_those_of_jobs_that_were_taken_up() -> None:
    def job(epochs: Sequence[int], texts: Sequence[str] = TEXTS) -> Evidence:
        frames = [Frame(v=1, seq=n, epoch=epoch, kind="tokens") for n, epoch in enumerate(epochs, 1)]
        result = Result(id="", status="completed", choices=undisturbed(texts))
        return Evidence("completed", frames, result, undisturbed())

    jobs = [job([1, 1]), job([1, 2]), job([1, 2], ["else"]), job([1])]
    figures = Report(Config(), matches=[pair for evidence in jobs for pair in match(evidence)]).figures
    assert (figures["match_rate"], figures["resumed"], figures["resumed_match_rate"]) == (0.75, 2, 0.5)
    assert not [*match(Evidence("cancelled", expected=undisturbed()))]


# --- adapters ---


class Stays(ChaosAdapters):
    """A name that stood for `old` until 100 s and for `new` from then on."""

    def __init__(self) -> None:
        self._stays = {"adapter-1": [_Stay("old", 0, 100_000), _Stay("new", 100_000)], "adapter-2": [_Stay("other", 0)]}


@pytest.mark.parametrize(
    ("asked", "took", "identity", "at_ms", "fine"),
    [
        ("adapter-1", "adapter-1", "old", 50_000, True),
        ("adapter-1", "adapter-1", "new", 150_000, True),
        ("adapter-1", "adapter-1", "new", 50_000, False),
        ("adapter-1", "adapter-1", "old", 150_000, False),
        ("adapter-1", "adapter-1", "other", 50_000, False),
        ("adapter-1", "adapter-2", "other", 50_000, False),
        ("adapter-1", "adapter-1", None, 50_000, False),
        ("adapter-1", None, None, 50_000, False),
        ("sim", None, None, 50_000, True),
        ("sim", "adapter-2", "other", 50_000, False),
    ],
)
def test_a_job_of_another_adapter_or_content_than_asked_for(
    asked: str, took: str | None, identity: str | None, at_ms: int, fine: bool
) -> None:
    order = Order(1, "stream", "/v1/completions", {"model": asked})
    envelope = jobs.envelope(adapter=took, adapter_identity=identity, created_ms=at_ms)
    found = list(judge_adapter(Witness(order), Evidence(envelope=envelope), Stays().could_be))
    assert (found == []) == fine
