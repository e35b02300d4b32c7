"""Jobs through a real worker: answers, errors, cancels, deadlines."""

from __future__ import annotations

import asyncio
import json
import signal

import httpx
import pytest

from shared.jobs import Lifetime
from tests.support.faulty_worker import TRIGGER
from tests.support.worker_harness import POOL, expected, harness, job
from worker.pulse import EXIT_BROKEN, EXIT_STALLED


@pytest.mark.topologies
async def test_a_job_is_answered_exactly(redis_url: str) -> None:
    async with harness(redis_url) as h:
        await h.worker()
        envelope = job()
        frames = await (await h.submit(envelope)).end()
        result = await h.result(envelope.id)
        assert result.status == "completed" and result.choices == expected(envelope)
        assert frames[0].kind == "started" and frames[-1].kind == "done"
        timings = result.timings
        assert timings.run_ms >= timings.first_token_ms > 0 and timings.queue_ms > 0 and timings.blocks > 0
        await h.assert_clean()


async def test_choices_of_different_lengths_with_logprobs_and_stops(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        await h.worker(sim_step_ms=0)
        jobs = [
            job(1, n=3, stop=["the", "e "], logprobs=2, max_tokens=60),
            job(2, n=2, ignore_eos=False, max_tokens=600, min_tokens=5),
            job(3, flush_ms=50, max_tokens=100, logprobs=0),
            job(4, max_tokens=1),
        ]
        for follower in [await h.submit(envelope) for envelope in jobs]:
            await follower.end()
        for envelope in jobs:
            result = await h.result(envelope.id)
            assert result.status == "completed" and result.choices == expected(envelope)
        assert len({len(c.token_ids) for c in expected(jobs[0])}) > 1, "the choices should differ in length"


async def test_probes_and_metrics_of_a_process(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.health_port}") as http:
            for path, state in (("/health", "ready"), ("/ready", "ready")):
                response = await http.get(path)
                assert response.status_code == 200 and state in response.text
            envelope = job(max_tokens=30)
            await (await h.submit(envelope)).end()
            text = (await http.get("/metrics")).text
        assert f'ropeway_jobs_total{{model_name="{POOL}",status="completed"}} 1.0' in text
        assert f'ropeway_jobs_pulled_total{{model_name="{POOL}"}} 1.0' in text
        (info,) = await h.store.live_workers(POOL, 60_000)
        assert info.owner == worker.owner and info.state == "ready" and info.total_blocks > 0


async def test_health_says_so_when_the_engine_hangs(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(fault="hang", step_timeout_s=4, lease_s=60)
        bad = job(1)
        bad.prompt_token_ids[0] = TRIGGER
        await (await h.submit(bad)).tokens(1)
        statuses = set()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{worker.health_port}", timeout=5) as http:
            while worker.alive:
                try:
                    statuses.add((await http.get("/health")).status_code)
                except httpx.TransportError:
                    break
        assert await worker.wait() == EXIT_STALLED and statuses == {200, 503}


async def test_gathered_tokens_come_in_few_frames(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        await h.worker(sim_step_ms=2)
        envelope = job(max_tokens=100, flush_ms=60_000)
        frames = await (await h.submit(envelope)).end()
        assert [frame.kind for frame in frames] == ["started", "tokens", "done"]
        assert (await h.result(envelope.id)).choices == expected(envelope)


async def test_two_hundred_jobs_over_two_workers_end_exactly_once(redis_url: str) -> None:
    async with harness(redis_url) as h:
        first, second = await asyncio.gather(
            h.worker(sim_step_ms=2, max_num_seqs=16), h.worker(sim_step_ms=2, max_num_seqs=16)
        )
        jobs = [job(n, lane=n % 4, max_tokens=5 + n % 30, flush_ms=(n % 3) * 10) for n in range(200)]
        followers = await asyncio.gather(*(h.submit(envelope) for envelope in jobs))
        await asyncio.gather(*(follower.end() for follower in followers))
        for envelope in jobs:
            result = await h.result(envelope.id)
            assert result.status == "completed" and result.choices == expected(envelope)
        taken = [[ln["job_id"] for ln in w.lines if ln["event"] == "pulled"] for w in (first, second)]
        assert all(taken), "one worker did everything"
        assert sorted(taken[0] + taken[1]) == sorted(envelope.id for envelope in jobs)
        await h.assert_clean()


async def test_cancel_while_queued_and_while_running(redis_url: str) -> None:
    async with harness(redis_url) as h:
        queued, running = job(1), job(2, n=2, max_tokens=3000)
        follower = await h.submit(queued)
        assert await h.store.cancel(queued.id) == "cancelled"
        await follower.end()
        assert (await h.result(queued.id)).choices[0].token_ids == []

        worker = await h.worker()
        follower = await h.submit(running)
        await follower.tokens(10)
        assert await h.store.cancel(running.id) == "running"
        frames = await follower.end()
        assert frames[-1].kind == "done" and frames[-1].status == "cancelled"
        result = await h.result(running.id)
        whole = expected(running)
        for choice in result.choices:
            assert choice.finish_reason == "abort"
            assert choice.token_ids == whole[choice.index].token_ids[: len(choice.token_ids)]
            assert choice.text == whole[choice.index].text[: len(choice.text)]
        assert await h.store.cancel(running.id) == "cancelled", "a second cancel changes nothing"
        assert not [line for line in worker.lines if line["event"] in ("fenced", "lease lost")]
        await h.assert_clean()


async def test_cancel_with_one_choice_already_ended(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        await h.worker()
        # Seed and stop are such that one choice ends with its first token and the other after hundreds.
        envelope = job(22, n=2, stop=[" motor"], max_tokens=3000)
        lengths = [len(choice.token_ids) for choice in expected(envelope)]
        early = lengths.index(min(lengths))
        follower = await h.submit(envelope)
        await follower.until(lambda frames: any(c.finish for f in frames for c in f.choices))
        await h.store.cancel(envelope.id)
        await follower.end()
        result = await h.result(envelope.id)
        assert result.status == "cancelled"
        assert result.choices[early] == expected(envelope)[early]
        assert result.choices[1 - early].finish_reason == "abort"


async def test_a_request_that_the_engine_refuses_fails_alone(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        await h.worker()
        good, bad = job(1), job(2)
        bad.prompt_token_ids = [10**6]
        followers = [await h.submit(envelope) for envelope in (good, bad)]
        frames = [await follower.end() for follower in followers]
        assert frames[1][-1].kind == "error" and frames[1][-1].error is not None
        assert frames[1][-1].error.status == 400 and frames[1][-1].error.param == "prompt"
        assert (await h.result(bad.id)).status == "failed"
        assert (await h.result(good.id)).choices == expected(good)
        await h.assert_clean()


@pytest.mark.parametrize("fault", ["add", "error"])
async def test_a_fault_of_one_request_is_that_requests_error(valkey_url: str, fault: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(fault=fault)
        good, bad = job(1), job(2)
        bad.prompt_token_ids[0] = TRIGGER
        followers = [await h.submit(envelope) for envelope in (good, bad)]
        frames = [await follower.end() for follower in followers]
        assert frames[1][-1].kind == "error" and frames[1][-1].status == "failed"
        result = await h.result(bad.id)
        assert result.choices[0].finish_reason == "error" and result.error is not None
        assert result.error.code == "engine_error"
        assert (await h.result(good.id)).choices == expected(good)
        worker.signal(signal.SIGTERM)
        assert await worker.wait() == 0


async def test_a_step_that_raises_fails_what_runs_and_the_next_job_is_served(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(fault="raise")
        bad = job(1)
        bad.prompt_token_ids[0] = TRIGGER
        frames = await (await h.submit(bad)).end()
        assert frames[-1].error is not None and frames[-1].error.code == "engine_error"
        good = job(2)
        await (await h.submit(good)).end()
        assert (await h.result(good.id)).choices == expected(good)
        assert worker.alive


async def test_an_engine_that_raises_again_ends_the_process_and_the_job_moves(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        worker = await h.worker(fault="raise always")
        bad, good = job(1), job(2)
        bad.prompt_token_ids[0] = TRIGGER
        await (await h.submit(bad)).end()
        follower = await h.submit(good)
        assert await worker.wait() == EXIT_BROKEN
        await h.worker()
        await follower.end()
        assert (await h.result(good.id)).choices == expected(good)


async def test_a_job_past_its_deadline_ends_as_expired(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        await h.worker()
        envelope = job(max_tokens=4000)
        follower = await h.follow(envelope.id)
        await h.store.submit(envelope, lifetime=Lifetime(deadline_s=1.0))
        frames = await follower.end()
        assert frames[-1].kind == "error" and frames[-1].status == "expired"
        result = await h.result(envelope.id)
        assert result.error is not None and result.error.status == 504
        assert 0 < len(result.choices[0].token_ids) < 4000
        await h.assert_clean()


@pytest.mark.parametrize("fault", [None, "add", "error", "raise"])
async def test_no_line_of_the_log_holds_what_was_asked_or_answered(valkey_url: str, fault: str | None) -> None:
    """Not even at debug level, at which these workers log."""
    async with harness(valkey_url) as h:
        worker = await h.worker(fault=fault)
        whole, cut, failed = job(1, stop=["sesame stop"], bad_words=["sesame word"]), job(2, max_tokens=3000), job(3)
        for envelope in (whole, cut, failed):
            envelope.metadata, envelope.cache_salt = {"note": "sesame note"}, "sesame salt"
        await (await h.submit(whole)).end()
        follower = await h.submit(cut)
        await follower.tokens(10)
        await h.store.cancel(cut.id)
        await follower.end()
        failed.prompt_token_ids[0] = TRIGGER
        await (await h.submit(failed)).end()
        worker.signal(signal.SIGTERM)
        await worker.wait()
        written = json.dumps(worker.lines)
        assert "pulled" in written and "sesame" not in written
        for envelope in (whole, cut):
            words = expected(envelope)[0].text.split()
            assert all(" ".join(words[at : at + 4]) not in written for at in range(min(len(words), 100) - 4))
            assert str(expected(envelope)[0].token_ids[:3])[1:-1] not in written
