"""Builds engines over a fake runner and gathers what they say, checking the rules of their outputs on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.config import SchedulerConfig
from engine.engine import Engine
from engine.request import ChoiceDelta, EngineRequest, LogprobEntry, ResumedChoice, StepOutput
from shared.sampling import SamplingParams
from tests.support.fake_runner import FakeRunner, model_info
from tests.support.tiny_tokenizer import byte_level

TOKENIZER = byte_level()


def make_engine(runner: FakeRunner | None = None, **settings: Any) -> Engine:
    """An engine over `runner`; `settings` are those of `SchedulerConfig`."""
    settings.setdefault("max_model_len", 512)
    runner = runner or FakeRunner()
    info = model_info(max_model_len=settings["max_model_len"], vocab_size=runner.vocab_size)
    return Engine(runner, info, TOKENIZER, SchedulerConfig(**settings))


def request(name: str = "r", prompt: list[int] | None = None, **fields: Any) -> EngineRequest:
    """A request; fields of `SamplingParams` and of `EngineRequest` alike."""
    own = {key: fields.pop(key) for key in ("priority", "adapter", "cache_salt", "resume") if key in fields}
    fields.setdefault("seed", 7)
    return EngineRequest(name, prompt or [1, 2, 3], SamplingParams(**fields), **own)


@dataclass
class Choice:
    """All deltas of one choice, joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def take(self, delta: ChoiceDelta) -> None:
        """Add one delta: no gap, no repeat, nothing after the end."""
        assert self.finish_reason is None, "a delta after the choice had ended"
        assert delta.offset == len(self.token_ids), "a gap or a repeat"
        assert delta.token_ids or delta.text or delta.finish_reason, "a delta without news"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.texts.append(delta.text)
        if delta.logprobs is not None:
            assert len(delta.logprobs) == len(delta.token_ids)
            self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class Transcript:
    """Everything that an engine said of one request."""

    choices: dict[int, Choice] = field(default_factory=dict)
    started: bool = False
    last: StepOutput | None = None

    def take(self, output: StepOutput) -> None:
        """Add one step's output: `started` at most once, nothing behind the last."""
        assert self.last is None, "an output after the last"
        assert not (output.started and self.started), "started twice"
        assert output.started or output.finished or output.choices, "an output without news"
        self.started |= output.started
        indices = [delta.index for delta in output.choices]
        assert len(indices) == len(set(indices)), "two deltas of one choice in one step"
        for delta in output.choices:
            self.choices.setdefault(delta.index, Choice()).take(delta)
        if output.finished:
            assert all(choice.finish_reason is not None for choice in self.choices.values()), "a choice is left open"
            self.last = output

    def resumed(self, published: list[ResumedChoice]) -> Transcript:
        """Begin where another engine had stopped."""
        for choice in published:
            self.choices[choice.index] = Choice(list(choice.token_ids), choice.text, [], [], choice.finish_reason, None)
        return self


def drain(engine: Engine, transcripts: dict[str, Transcript] | None = None, limit: int = 5000) -> dict[str, Transcript]:
    """Step until nothing is left; every invariant is checked after every step."""
    transcripts = {} if transcripts is None else transcripts
    steps = 0
    while engine.has_work():
        steps += 1
        assert steps <= limit, "the engine does not get to an end"
        for output in engine.step():
            transcripts.setdefault(output.request_id, Transcript()).take(output)
        engine.check()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    return transcripts


def run(engine: Engine, *requests: EngineRequest) -> dict[str, Transcript]:
    """Add all, then drain."""
    for item in requests:
        engine.add(item)
    return drain(engine)


def run_one(engine: Engine, item: EngineRequest) -> Transcript:
    """The transcript of a single request."""
    return run(engine, item)[item.id]
