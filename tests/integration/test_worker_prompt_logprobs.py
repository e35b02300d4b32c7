"""Log probabilities of prompts through real workers: in pieces, over take-overs, in bulk."""

from __future__ import annotations

import signal

import pytest

from shared.protocol import MAX_FRAME_BYTES, Envelope, Frame, Result, decode, encode
from tests.support.worker_harness import Follower, Harness, expected, expected_prompt, harness, job


def entries(frames: list[Frame]) -> int:
    """Log probabilities of the prompt so far."""
    return sum(len(frame.prompt_logprobs) for frame in frames)


async def check(h: Harness, follower: Follower, envelope: Envelope) -> list[Frame]:
    """The job ends as it would undisturbed: no entry is missing or comes twice, and all come before the answer."""
    frames = await follower.end()
    told = [entry for frame in frames for entry in frame.prompt_logprobs]
    assert told == expected_prompt(envelope)
    answered = next(at for at, frame in enumerate(frames) if any(choice.ids for choice in frame.choices))
    assert entries(frames[answered + 1 :]) == 0
    result = await h.result(envelope.id)
    assert result.status == "completed"
    assert result.prompt_logprobs == told
    assert result.choices == expected(envelope)
    return frames


async def test_they_come_chunk_by_chunk_or_gathered(redis_url: str) -> None:
    async with harness(redis_url) as h:
        await h.worker(sim_step_ms=2, max_num_batched_tokens=32)
        plain, gathered = job(1, prompt=200, prompt_logprobs=2, n=2), job(2, prompt=200, prompt_logprobs=0)
        gathered.flush_ms = 60_000
        without, short = job(3, prompt=200), job(4, prompt=1, prompt_logprobs=1)
        followers = [await h.submit(envelope) for envelope in (plain, gathered, without, short)]
        await check(h, followers[0], plain)
        whole = await check(h, followers[1], gathered)
        assert [frame.kind for frame in whole] == ["started", "tokens", "done"]
        for follower in followers[2:]:
            await follower.end()
        assert (await h.result(without.id)).prompt_logprobs is None
        assert (await h.result(short.id)).prompt_logprobs == []
        await h.assert_clean()


@pytest.mark.parametrize("when", ["in the prompt", "behind the prompt"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_a_job_that_is_taken_up_goes_on_behind_those_published(
    valkey_url: str, how: signal.Signals, when: str
) -> None:
    async with harness(valkey_url) as h:
        first = await h.worker(max_num_batched_tokens=16, grace_s=0)
        envelope = job(prompt=2000 if when == "in the prompt" else 100, prompt_logprobs=1)
        follower = await h.submit(envelope)
        if when == "in the prompt":
            seen = entries(await follower.until(lambda frames: entries(frames) >= 50))
            assert seen < 1999
        else:
            await follower.tokens(3)
        first.signal(how)
        await first.wait()
        await h.worker()
        frames = await check(h, follower, envelope)
        assert sorted({frame.epoch for frame in frames}) == [1, 2]
        assert {frame.epoch for frame in frames if frame.prompt_logprobs} == (
            {1} if when == "behind the prompt" else {1, 2}
        )
        await h.assert_clean()


async def test_a_job_that_ends_while_nobody_has_it(valkey_url: str) -> None:
    """A script ends it: log probabilities stay in the log, as those of the answer do."""
    async with harness(valkey_url) as h:
        worker = await h.worker(max_num_batched_tokens=16, grace_s=0)
        envelope = job(prompt=2000, prompt_logprobs=1)
        follower = await h.submit(envelope)
        await follower.until(lambda frames: entries(frames) >= 50)
        worker.signal(signal.SIGTERM)
        await worker.wait()
        assert await h.store.cancel(envelope.id) == "cancelled"
        frames = await follower.end()
        assert (frames[-1].kind, frames[-1].status) == ("done", "cancelled")
        assert entries(frames) >= 50
        stored = (await h.store.get(envelope.id)).result
        assert stored is not None
        result = decode(stored, Result)
        assert result.prompt_logprobs is None
        assert [choice.finish_reason for choice in result.choices] == ["abort"]
        await h.assert_clean()


async def test_a_long_prompt_in_one_step_with_all_candidates(valkey_url: str) -> None:
    async with harness(valkey_url) as h:
        await h.worker(sim_step_ms=0, max_num_batched_tokens=16_384, max_model_len=16_500, max_num_seqs=16)
        envelope, beside = job(1, prompt=16_000, prompt_logprobs=20, max_tokens=5), job(2)
        followers = [await h.submit(envelope), await h.submit(beside)]
        frames = await check(h, followers[0], envelope)
        assert len([frame for frame in frames if frame.prompt_logprobs]) > 10
        assert max(len(encode(frame)) for frame in frames) < MAX_FRAME_BYTES // 4
        await followers[1].end()
        assert (await h.result(beside.id)).choices == expected(beside)
