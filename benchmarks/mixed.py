"""Requests that between them use every sampling option, and what an engine answers to them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.sampling import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from engine.engine import Engine
    from engine.request import EngineRequest, LogprobEntry, RequestUsage, ResumedChoice, StepOutput

#: Options of the requests in turn. Each request has a seed and a length besides.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 5},
    {"temperature": 0, "logprobs": 3, "repetition_penalty": 1.2},
    {"temperature": 1.2, "top_k": 40, "n": 2},
    {"temperature": 0, "prompt_logprobs": 2},
    {"temperature": 0.8, "min_p": 0.05, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"temperature": 0.9, "stop": [" the", "\n\n"], "include_stop_str_in_output": True, "min_tokens": 6},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "n": 2, "logprobs": 1},
    {"temperature": 0, "stop": [" of the", " and"], "min_tokens": 8},
    {"temperature": 1.0, "min_tokens": 10, "logit_bias": {2: 4.0, 28: -2.0}},
    {"temperature": 0.6, "bad_words": ["the", " and", "License"], "logprobs": 0},
    {"temperature": 1.0, "stop_token_ids": list(range(250, 300)), "min_tokens": 5, "ignore_eos": True},
    {"temperature": 1.0, "prompt_logprobs": 0, "logprobs": 2, "n": 2, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 5, "repetition_penalty": 1.1, "skip_special_tokens": False},
    {"temperature": 0, "allowed_token_ids": list(range(300, 3000)), "logprobs": 5},
    {"temperature": 1.0, "detokenize": False, "frequency_penalty": -0.5},
    {"temperature": 1.0, "truncate_prompt_tokens": 40, "prompt_logprobs": 1, "min_p": 0.1},
)
#: Lengths of the prompts in turn, and of what every second one begins with.
LENGTHS = (5, 17, 31, 48, 64, 80, 100, 129, 150, 200, 250, 300)
SYSTEM_PROMPT = 48


@dataclass(frozen=True)
class Case:
    """One request, whatever engine it is put to."""

    name: str
    prompt: list[int]
    params: SamplingParams

    def request(self, suffix: str = "", **fields: Any) -> EngineRequest:
        """For an engine; `fields` are those of `EngineRequest`."""
        from engine.request import EngineRequest

        return EngineRequest(self.name + suffix, self.prompt, self.params, **fields)


def mixed_cases(tokenizer: Tokenizer, count: int = 40, shortest: int = 16, longest: int = 32) -> list[Case]:
    """The first `count` requests: prompts of 5 to 300 tokens, cut from the project's license, every second one behind a
    common beginning; answers of `shortest` to `longest` tokens where nothing else ends them."""
    ids = tokenizer.encode((Path(__file__).parents[1] / "LICENSE").read_text("utf-8")).ids
    rng = random.Random(1)
    cases = []
    for index in range(count):
        begin = ids[:SYSTEM_PROMPT] if index % 2 else []
        length = max(2, LENGTHS[index % len(LENGTHS)] - len(begin))
        start = rng.randrange(len(ids) - length)
        options = {"max_tokens": rng.randint(shortest, longest), "seed": 1000 + index} | OPTIONS[index % len(OPTIONS)]
        cases.append(Case(str(index), begin + ids[start : start + length], SamplingParams(**options)))
    return cases


@dataclass
class Answered:
    """One choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class Answer:
    """All that was said of one request."""

    choices: dict[int, Answered] = field(default_factory=dict)
    prompt_logprobs: list[LogprobEntry] = field(default_factory=list)
    usage: RequestUsage | None = None
    preemptions: int = 0

    def take(self, output: StepOutput) -> None:
        """Add what a step did.

        Raises:
            RopewayError: the request failed.
        """
        if output.error is not None:
            raise output.error
        self.prompt_logprobs += output.prompt_logprobs
        for delta in output.choices:
            choice = self.choices.setdefault(delta.index, Answered())
            choice.token_ids += delta.token_ids
            choice.text += delta.text
            choice.logprobs += delta.logprobs or []
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        self.usage, self.preemptions = output.usage, output.preemptions

    def published(self) -> list[ResumedChoice]:
        """What a log holds of it."""
        from engine.request import ResumedChoice

        return [
            ResumedChoice(index, list(choice.token_ids), choice.text, choice.finish_reason)  # type: ignore[arg-type]
            for index, choice in self.choices.items()
        ]

    @property
    def tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())


def drain(engine: Engine, answers: dict[str, Answer]) -> None:
    """Step until nothing is left; every output goes to the answer of its request's id."""
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id].take(output)
