"""SamplingParams: vLLM's names and defaults, bounds checked here and nowhere else."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from shared.errors import InvalidRequestError

#: Temperatures below this are greedy, as are those that would overflow the logits' scale.
SAMPLING_EPS = 1e-5

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**16
MAX_TOKEN_ID = 2**31 - 1
SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1

_FLAGS = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=False):
    """How one request is sampled. Names and defaults are vLLM's.

    `top_logprobs` is another name of `logprobs`. `truncate_prompt_tokens` of -1 keeps what fits. A request with
    `prompt_logprobs` never reads the prefix cache, whatever `skip_reading_prefix_cache` says.

    Raises:
        InvalidRequestError: a value out of bounds; `param` names it. (Decoded from the wire, msgspec turns it into
            its ValidationError.)
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    skip_reading_prefix_cache: bool | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self._check_kinds()
        self._merge_logprobs()
        self._check_counts()
        self._check_distribution()
        self._check_lists()

    @property
    def greedy(self) -> bool:
        """True where the arg-max is taken: no draw, no seed."""
        return self.temperature < SAMPLING_EPS

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, never None."""
        return list(self.stop) if self.stop else []

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside of `[0, vocab_size)`.

        Raises:
            InvalidRequestError: naming the field and the id.
        """
        fields: tuple[tuple[str, list[int]], ...] = (
            ("stop_token_ids", self.stop_token_ids or []),
            ("logit_bias", list(self.logit_bias or {})),
            ("allowed_token_ids", self.allowed_token_ids or []),
        )
        for name, ids in fields:
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequestError(
                        f"{name}: token id {token} is not in the vocabulary of {vocab_size} ids", param=name
                    )
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                raise InvalidRequestError(
                    f"{name}: {count} is more than the vocabulary of {vocab_size} ids", param=name
                )

    def _check_kinds(self) -> None:
        """Types that the checks of values rely on: from Python, unlike from the wire, anything can come."""
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, list | tuple | set | frozenset):
                raise InvalidRequestError(f"{name}: must be a list", param=name)
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise InvalidRequestError("logit_bias: must map token ids to biases", param="logit_bias")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name}: must be true or false", param=name)

    def _merge_logprobs(self) -> None:
        if self.top_logprobs is None:
            return
        _integer("top_logprobs", self.top_logprobs, 0, MAX_LOGPROBS)
        if self.logprobs not in (None, self.top_logprobs):
            raise InvalidRequestError("top_logprobs: is another name of logprobs, which differs", param="top_logprobs")
        self.logprobs, self.top_logprobs = self.top_logprobs, None

    def _check_counts(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _integer("top_k", self.top_k, -1, MAX_TOKEN_ID)
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKEN_ID)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens: {self.min_tokens} is more than max_tokens, {self.max_tokens}", param="min_tokens"
                )
        if self.seed is not None:
            _integer("seed", self.seed, SEED_MIN, SEED_MAX)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_TOKEN_ID)
            if self.truncate_prompt_tokens == 0:
                raise InvalidRequestError(
                    "truncate_prompt_tokens: must be -1 or at least 1", param="truncate_prompt_tokens"
                )
        if self.n > 1 and self.greedy:
            raise InvalidRequestError(
                "n: must be 1 when temperature is 0, since every choice would be the same", param="n"
            )

    def _check_distribution(self) -> None:
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _number("temperature", self.temperature, 0.0, 1e4)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)

    def _check_lists(self) -> None:
        stops = self.stop_strings
        _length("stop", stops, MAX_STOP_STRINGS)
        for text in stops:
            _text("stop", text)
        if stops and not self.detokenize:
            raise InvalidRequestError("stop: stop strings need detokenize", param="stop")
        for name, ids, most in (
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS),
        ):
            if ids is not None:
                _length(name, ids, most)
                for token in ids:
                    _integer(name, token, 0, MAX_TOKEN_ID)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids: must not be empty", param="allowed_token_ids")
        if self.bad_words is not None:
            _length("bad_words", self.bad_words, MAX_BAD_WORDS)
            for word in self.bad_words:
                _text("bad_words", word)
        if self.logit_bias is not None:
            _length("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
            for token, bias in self.logit_bias.items():
                _integer("logit_bias", token, 0, MAX_TOKEN_ID)
                _number("logit_bias", bias, -100.0, 100.0)


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name}: must be an integer", param=name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name}: must be from {low} to {high}", param=name)


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequestError(f"{name}: must be a finite number", param=name)
    if value > high or value < low or (open_low and value <= low):
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name}: must be in {bracket}{low:g}, {high:g}]", param=name)


def _length(name: str, value: Any, most: int) -> None:
    if len(value) > most:
        raise InvalidRequestError(f"{name}: has {len(value)} entries, at most {most} are allowed", param=name)


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{name}: each entry must be a non-empty string", param=name)
    if len(value) > MAX_STOP_LENGTH:
        raise InvalidRequestError(f"{name}: an entry is longer than {MAX_STOP_LENGTH} characters", param=name)
