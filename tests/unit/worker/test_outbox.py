"""Frames: numbered once, gathered, split, repeated as they are."""

from __future__ import annotations

import pytest

from engine.request import LogprobEntry
from shared import protocol
from shared.jobs import Publish
from shared.protocol import ErrorInfo, Frame, Result, decode
from tests.unit.worker.parts import delta, held, progress
from worker import outbox
from worker.outbox import Outbox


def frames(item: Publish | None) -> list[Frame]:
    assert item is not None
    return [decode(data, Frame) for data in item.frames]


def sent(box: Outbox) -> list[Publish]:
    """All that a box sends, one pipeline after the other, each of bounded size."""
    items = []
    while (item := box.take("me")) is not None:
        assert sum(map(len, item.frames)) < outbox._SEND_BYTES + protocol.MAX_FRAME_BYTES // 4
        assert not box.empty
        box.accepted()
        assert (box.due is None) == box.empty, "what is left is due at once"
        items.append(item)
    assert box.empty and box.weight == 0
    return items


def test_nothing_gathered_is_nothing_to_send() -> None:
    box = Outbox(held())
    assert box.take("me") is None and box.due is None


def test_steps_between_two_sends_become_one_frame() -> None:
    box = Outbox(held(n=2))
    box.add(progress(box.job, delta(1, 0, 7, text="a"), started=True))
    box.add(progress(box.job, delta(0, 0, 1, text="x"), delta(1, 1, 8, text="b")))
    box.add(progress(box.job, delta(1, 2, 9, finish="length")))
    started, tokens = frames(box.take("me"))
    assert (started.seq, started.kind) == (1, "started") and (tokens.seq, tokens.kind) == (2, "tokens")
    assert [(c.index, c.offset, c.ids, c.text, c.finish) for c in tokens.choices] == [
        (0, 0, [1], "x", None),
        (1, 0, [7, 8, 9], "ab", "length"),
    ]


def test_intervals_between_a_choices_tokens_are_told() -> None:
    told: list[tuple[float, int]] = []
    box = Outbox(held(n=2), interval=lambda seconds, tokens: told.append((seconds, tokens)))
    for ended, *deltas in (
        (10.0, delta(0, 0, 1)),
        (10.25, delta(0, 1, 2), delta(1, 0, 7)),
        (10.5, delta(0, 2, text="held back")),
        (11.25, delta(0, 2, 4, 5), delta(1, 1, 8)),
    ):
        step = progress(box.job, *deltas)
        step.ended = ended  # type: ignore[misc]
        box.add(step)
    assert told == [(0.25, 1), (0.5, 2), (1.0, 1)]


def test_what_is_not_accepted_is_sent_again_unchanged_with_what_came_since() -> None:
    box = Outbox(held())
    box.add(progress(box.job, delta(0, 0, 1)))
    first = box.take("me")
    assert first is not None
    box.add(progress(box.job, delta(0, 1, 2)))
    second = box.take("me")
    assert second is not None and second.first_seq == first.first_seq == 1
    assert second.frames[0] == first.frames[0] and len(second.frames) == 2
    box.accepted()
    box.add(progress(box.job, delta(0, 2, 3)))
    third = box.take("me")
    assert third is not None and third.first_seq == 3 and box.weight > 0


def test_numbering_goes_on_behind_the_log_and_started_is_not_said_twice() -> None:
    box = Outbox(held(last_seq=12, epoch=3))
    box.add(progress(box.job, started=True))
    assert box.take("me") is None
    box.job.transcript.add([])
    box.add(progress(box.job, delta(0, 0, 5)))
    (frame,) = frames(box.take("me"))
    assert (frame.seq, frame.epoch, frame.kind) == (13, 3, "tokens")


def test_the_last_frame_carries_the_result() -> None:
    box = Outbox(held(n=2))
    box.add(progress(box.job, delta(0, 0, 1, text="a", finish="stop"), started=True))
    box.add(progress(box.job, delta(1, 0, 2, text="b", finish="length"), status="completed"))
    item = box.take("owner")
    assert item is not None and item.ending is not None and item.ending.status == "completed"
    last = frames(item)[-1]
    assert last.kind == "done" and last.status == "completed" and last.choices == []
    result = decode(item.ending.result, Result)
    assert [(c.text, c.token_ids, c.finish_reason) for c in result.choices] == [
        ("a", [1], "stop"),
        ("b", [2], "length"),
    ]
    assert result.timings == last.timings and result.timings.blocks == 2 and result.timings.preemptions == 1
    assert result.timings.first_token_ms == result.timings.run_ms == 500.0


def test_an_error_marks_open_choices() -> None:
    box = Outbox(held(n=2))
    box.add(progress(box.job, delta(0, 0, 1, finish="stop")))
    message = progress(box.job, status="failed")
    message.error = ErrorInfo(message="no", status=400)
    box.add(message)
    item = box.take("me")
    assert item is not None and item.ending is not None
    assert frames(item)[-1].kind == "error"
    assert [c.finish_reason for c in decode(item.ending.result, Result).choices] == ["stop", "error"]


def test_much_at_once_is_split_into_frames_of_bounded_size() -> None:
    box = Outbox(held())
    top = [(i, -1.0, i, b"token") for i in range(20)]
    for n in range(3000):
        step = delta(0, n, n)
        step.logprobs = [LogprobEntry(n, -1.0, 1, b"token", top)]
        box.add(progress(box.job, step))
    items = sent(box)
    assert len(items) > 2 and len(items[0].frames) > 1
    assert max(len(data) for item in items for data in item.frames) < 2 * outbox._FRAME_BYTES
    assert [i for item in items for frame in frames(item) for c in frame.choices for i in c.ids] == list(range(3000))


def entry(token: int, candidates: int = 0) -> LogprobEntry:
    """As large as an entry may be: the longest numbers, and tokens of many bytes."""
    top = [(2**31 - 1 - rank, -1.0 / 3 - rank, 2**31 - 1, b"\x00" * 300) for rank in range(candidates)]
    return LogprobEntry(token, -1.0 / 3, 2**31 - 1, b"\x00" * 300, top)


def test_log_probabilities_of_the_prompt_come_in_front_of_the_answer() -> None:
    box = Outbox(held(prompt=5, prompt_logprobs=1))
    box.add(progress(box.job, prompt=[entry(2), entry(3)], started=True))
    assert box.due is not None
    box.add(progress(box.job, delta(0, 0, 9, text="a"), prompt=[entry(4), entry(5, 1)]))
    started, tokens = frames(box.take("me"))
    assert started.kind == "started" and started.prompt_logprobs == []
    assert [e.id for e in tokens.prompt_logprobs] == [2, 3, 4, 5] and tokens.choices[0].ids == [9]
    assert len(tokens.prompt_logprobs[3].top) == 1
    box.accepted()
    box.add(progress(box.job, delta(0, 1, 8, text="b", finish="length"), status="completed"))
    item = box.take("me")
    assert item is not None and item.ending is not None
    assert [frame.prompt_logprobs for frame in frames(item)] == [[], []]
    result = decode(item.ending.result, Result)
    assert result.prompt_logprobs == tokens.prompt_logprobs and result.choices[0].token_ids == [9, 8]


@pytest.mark.parametrize("asked", [None, 0])
def test_a_result_says_whether_log_probabilities_of_the_prompt_were_asked_for(asked: int | None) -> None:
    box = Outbox(held(prompt=1, prompt_logprobs=asked))
    box.add(progress(box.job, delta(0, 0, 1, finish="length"), status="completed"))
    item = box.take("me")
    assert item is not None and item.ending is not None
    assert decode(item.ending.result, Result).prompt_logprobs == (None if asked is None else [])


def test_a_prompt_of_one_step_is_split_into_frames_of_bounded_size() -> None:
    box = Outbox(held(prompt=16_385, prompt_logprobs=20))
    many = [entry(token, 20) for token in range(2, 16_386)]
    message = progress(box.job, prompt=many, started=True)
    box.add(message)
    assert box.due is not None, "what was sealed on the way waits for nothing more"
    box.add(progress(box.job, delta(0, 0, 1)))
    items = sent(box)
    assert len(items) > 10
    assert max(len(data) for item in items for data in item.frames) < protocol.MAX_FRAME_BYTES // 4
    assert message.weight > 16_384 * 21 * 40, "they count in what may wait for Redis"
    got = [frame for item in items for frame in frames(item)]
    assert [e.id for frame in got for e in frame.prompt_logprobs] == list(range(2, 16_386))
    assert [frame.choices != [] for frame in got] == [False] * (len(got) - 1) + [True]


def test_the_end_travels_with_the_last_of_many_frames_and_is_repeated_with_it() -> None:
    box = Outbox(held(prompt=3000, prompt_logprobs=20))
    box.add(progress(box.job, prompt=[entry(token, 20) for token in range(2, 3001)], started=True))
    box.add(progress(box.job, delta(0, 0, 1, finish="length"), status="completed"))
    first = box.take("me")
    assert first is not None and first.ending is None and box.ending is not None
    assert box.take("me") == first, "as long as it is not accepted"
    items = sent(box)
    assert items[0] == first and [item.ending is None for item in items] == [True] * (len(items) - 1) + [False]
    assert [item.first_seq for item in items[1:]] == [item.first_seq + len(item.frames) for item in items[:-1]]


def test_a_prompt_with_more_log_probabilities_than_a_result_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(protocol._LIMITS, Result, 10_000)
    box = Outbox(held(prompt=100, prompt_logprobs=0))
    box.add(progress(box.job, delta(0, 0, 1, finish="length"), prompt=[entry(2)] * 99, status="completed"))
    item = box.take("me")
    assert item is not None and item.ending is not None and item.ending.status == "failed"
    last, result = frames(item)[-1], decode(item.ending.result, Result)
    assert last.error is not None and "10000" in last.error.message
    assert result.error == last.error and result.prompt_logprobs == []


def test_a_result_over_the_limit_is_an_error(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(protocol._LIMITS, Result, 600)
    box = Outbox(held())
    box.add(progress(box.job, delta(0, 0, *range(500), finish="length"), status="completed"))
    item = box.take("me")
    assert item is not None and item.ending is not None and item.ending.status == "failed"
    assert frames(item)[-1].kind == "error" and frames(item)[-1].status == "failed"
