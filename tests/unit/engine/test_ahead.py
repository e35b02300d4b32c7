"""Passes that begin before the last one has ended, and fail."""

from __future__ import annotations

from engine.sequence import Sequence
from tests.support.engine_harness import Transcript, drain, make_engine, request
from tests.support.fake_runner import LaunchingRunner
from tests.support.tiny_tokenizer import EOS


def first_choice_ends(sequence: Sequence) -> int:
    return EOS if (sequence.request_id, sequence.index) == ("pair", 0) else 5


def test_a_copy_that_is_made_again_finds_its_source() -> None:
    """Though the choice that it was made from is over, and another request would have its block."""
    runner = LaunchingRunner(16, 4)
    runner.next_token = first_choice_ends
    engine = make_engine(runner, max_num_seqs=8, enable_prefix_caching=False)
    engine.add(request("before", [1], max_tokens=1))  # so that it is the third pass which fails late
    drain(engine)
    engine.add(request("pair", [1, 2, 3, 4, 5, 6], n=2, max_tokens=4))
    engine.step()  # the prompt
    runner.breaks = "behind"
    transcripts = {name: Transcript() for name in ("pair", "other")}
    [output] = engine.step()  # a copy for the second choice; the first one ends
    transcripts["pair"].take(output)
    assert [delta.finish_reason for delta in output.choices] == ["stop"]
    assert runner.copied and runner.launched == 3
    engine.add(request("other", [1, 2, 3], max_tokens=4))
    for output in engine.step():
        transcripts[output.request_id].take(output)
    assert (runner.late, runner.behind) == (1, 1)
    drain(engine, transcripts)
    assert transcripts["pair"].choices[1].token_ids == transcripts["other"].choices[0].token_ids == [5] * 4
