"""Builds engines over a fake runner and gathers what they say, checking the rules of their outputs on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.adapters.library import AdapterLibrary
from engine.adapters.weights import Adapter
from engine.classes import BATCH
from engine.config import SchedulerConfig
from engine.detokenizer import Detokenizer
from engine.engine import Engine
from engine.request import ChoiceDelta, EngineRequest, LogprobEntry, ResumedChoice, StepOutput
from shared.errors import AdapterError
from shared.sampling import SamplingParams
from tests.support.fake_runner import FakeRunner, LaunchingRunner, model_info
from tests.support.tiny_tokenizer import byte_level

TOKENIZER = byte_level()
_SPELL = Detokenizer(TOKENIZER).token_bytes


class InlineExecutor(Executor):
    """Reads adapters on the spot, so that a test knows when."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it now."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


class LateExecutor(Executor):
    """Reads adapters when the test says so, in any order."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Keep it."""
        future: Future[Any] = Future()
        self.waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self, index: int = 0) -> None:
        """Do one of them."""
        future, call = self.waiting.pop(index)
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)


def adapters(names: Iterable[str], capacity: int = 32, executor: Executor | None = None) -> AdapterLibrary[Adapter]:
    """A library of adapters without weights, each in a folder of its own name; one named `broken...` cannot be read."""

    def read(folder: Path) -> Adapter:
        if folder.name.startswith("broken"):
            raise AdapterError(f"{folder.name} is broken")
        return Adapter(folder.name, 1, {})

    library = AdapterLibrary(read, capacity, executor or InlineExecutor())
    for name in names:
        library.register(name, Path(name))
    return library


def make_engine(
    runner: FakeRunner | None = None, library: AdapterLibrary[Adapter] | None = None, **settings: Any
) -> Engine:
    """An engine over `runner`, with adapters a to d where no `library` is; `settings` are `SchedulerConfig`'s.

    A runner that launches passes is asked to.
    """
    settings.setdefault("max_model_len", 512)
    runner = runner or FakeRunner()
    info = model_info(max_model_len=settings["max_model_len"], vocab_size=runner.vocab_size)
    launcher = runner if isinstance(runner, LaunchingRunner) else None
    return Engine(runner, info, TOKENIZER, SchedulerConfig(**settings), library or adapters("abcd"), launcher)


def request(name: str = "r", prompt: list[int] | None = None, **fields: Any) -> EngineRequest:
    """A request; fields of `SamplingParams` and of `EngineRequest` alike."""
    own_fields = ("priority", "adapter", "cache_salt", "resume", "prompt_logprobs_done")
    own = {key: fields.pop(key) for key in own_fields if key in fields}
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
            assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
            self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class Transcript:
    """Everything that was said of one request, by one engine or by several after each other.

    With `item`, the request, it also checks what was said of the prompt, and that nothing is missing at the end.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)
    started: bool = False
    last: StepOutput | None = None
    item: EngineRequest | None = None
    _prompt: list[int] = field(default_factory=list)

    def take(self, output: StepOutput) -> None:
        """Add one step's output: `started` at most once, nothing behind the last."""
        assert self.last is None, "an output after the last"
        assert not (output.started and self.started), "started twice"
        assert output.started or output.finished or output.choices or output.prompt_logprobs, "an output without news"
        self.started |= output.started
        if self.item is not None:
            self._prompt = self.item.prompt_token_ids[-output.usage.prompt_tokens :]
        self._take_prompt(output.prompt_logprobs)
        indices = [delta.index for delta in output.choices]
        assert len(indices) == len(set(indices)), "two deltas of one choice in one step"
        for delta in output.choices:
            assert not delta.token_ids or self._prompt_is_told(), "a token before the prompt's log probabilities"
            self.choices.setdefault(delta.index, Choice()).take(delta)
        if output.finished:
            self._end(output)

    def resumed(self, published: list[ResumedChoice]) -> Transcript:
        """Begin where another engine had stopped."""
        for choice in published:
            self.choices[choice.index] = Choice(list(choice.token_ids), choice.text, [], [], choice.finish_reason, None)
        return self

    def published(self) -> list[ResumedChoice]:
        """What a log holds of the choices so far."""
        return [
            ResumedChoice(index, list(choice.token_ids), choice.text, choice.finish_reason)  # type: ignore[arg-type]
            for index, choice in self.choices.items()
        ]

    def take_up(self) -> EngineRequest:
        """The request, to be added to an engine that goes on behind what was said; this transcript then goes on too."""
        assert self.item is not None
        assert self.last is None
        self.started = False
        return replace(self.item, resume=self.published(), prompt_logprobs_done=len(self.prompt_logprobs))

    def _take_prompt(self, entries: list[LogprobEntry]) -> None:
        if not entries:
            return
        assert not any(choice.token_ids for choice in self.choices.values()), "the prompt is scored behind its answer"
        self.prompt_logprobs += entries
        if self.item is None:
            return
        params = self.item.params
        assert params.prompt_logprobs is not None, "prompt log probabilities that nobody asked for"
        told = [entry.token_id for entry in self.prompt_logprobs]
        assert told == self._prompt[1 : len(told) + 1], "a gap or a repeat in the prompt's log probabilities"
        for entry in entries:
            assert entry.token == _SPELL(entry.token_id)
            assert len(entry.top) == params.prompt_logprobs
            assert all(spelled == _SPELL(token_id) for token_id, _, _, spelled in entry.top)

    def _prompt_is_told(self) -> bool:
        if self.item is None or self.item.params.prompt_logprobs is None:
            return True
        return len(self.prompt_logprobs) == len(self._prompt) - 1

    def _end(self, output: StepOutput) -> None:
        reasons = [choice.finish_reason for choice in self.choices.values()]
        assert all(reason is not None for reason in reasons), "a choice is left open"
        if output.error is not None:
            assert "error" in reasons, "a failed request without a failed choice"
        elif "abort" not in reasons:
            assert self._prompt_is_told(), "the prompt's log probabilities are not complete"
            assert self.item is None or len(reasons) == self.item.params.n, "a choice was never heard of"
        self.last = output


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
    check_empty(engine)
    return transcripts


def check_empty(engine: Engine) -> None:
    """Nothing runs, nothing waits, nobody holds a block."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


def check_pass(runner: FakeRunner, config: SchedulerConfig) -> None:
    """The last pass is within its bounds."""
    if not runner.plans:
        return
    counts, decodes = [count for *_, count in runner.plans[-1]], runner.decodes[-1]
    assert sum(counts) <= config.max_num_batched_tokens
    assert len(counts) <= config.max_num_seqs
    threshold = config.long_prefill_token_threshold
    if threshold and decodes:
        watched = not config.batch_prefill_tokens or min(runner.priorities[-1][:decodes]) < BATCH
        assert not watched or max(counts[decodes:], default=0) <= threshold
    if config.batch_prefill_tokens:
        batch = [count for count, priority in zip(counts, runner.priorities[-1], strict=True) if priority >= BATCH]
        assert sum(batch[sum(p >= BATCH for p in runner.priorities[-1][:decodes]) :]) <= config.batch_prefill_tokens


def run(engine: Engine, *requests: EngineRequest) -> dict[str, Transcript]:
    """Add all, then drain."""
    transcripts: dict[str, Transcript] = {}
    for item in requests:
        engine.add(item)
        transcripts[item.id] = Transcript(item=item).resumed(item.resume)
    return drain(engine, transcripts)


def run_one(engine: Engine, item: EngineRequest) -> Transcript:
    """The transcript of a single request."""
    return run(engine, item)[item.id]
