"""The rule for lengths, envelopes."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.admission import Caller, JobOptions, cache_salt, envelopes, fit
from gateway.catalogue import Pool
from gateway.prompts import PromptEncoder
from gateway.sampling import check_choices, sampling_params
from gateway.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from gateway.served import Served
from shared.errors import ContextLengthExceededError, InvalidRequestError
from shared.keys import JobId
from shared.protocol import Envelope, WorkerInfo, decode, encode
from tests.unit.gateway.support import bundle, card

OPTIONS = JobOptions("normal", 0, {})


@pytest.fixture(scope="module")
def tokenizer() -> PromptEncoder:
    return PromptEncoder(card(), bundle())


def chat(**more: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate(
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **more}
    )


def completion(**more: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "tiny", "prompt": "x", **more})


def fitted(request: GenerationRequest, tokens: int, pool: Pool) -> int:
    return fit(request, sampling_params(request, pool.card), [5] * tokens, pool)[1]


@pytest.mark.parametrize("kind", [chat, completion])
@pytest.mark.parametrize(
    ("prompt", "most", "fits"),
    [(511, 1, True), (511, 2, False), (512, 1, False), (513, 1, False), (1, 511, True), (1, 512, False)],
)
def test_prompt_and_max_tokens_fit_in_the_context(
    tokenizer: PromptEncoder, kind: Any, prompt: int, most: int, fits: bool
) -> None:
    pool = Pool(card(), tokenizer)
    if fits:
        assert fitted(kind(max_tokens=most), prompt, pool) == most
        return
    with pytest.raises(ContextLengthExceededError) as caught:
        fitted(kind(max_tokens=most), prompt, pool)
    assert caught.value.error_code == "context_length_exceeded"
    assert str(prompt) in caught.value.message
    assert "512" in caught.value.message


def test_the_kv_cache_is_a_limit_too(tokenizer: PromptEncoder) -> None:
    """That of the largest live worker; while none lives, that of the card."""
    small = Pool(card(kv_tokens=100), tokenizer)
    with pytest.raises(ContextLengthExceededError, match="KV cache of this model holds 100"):
        fitted(completion(max_tokens=60), 41, small)
    assert fitted(completion(max_tokens=60), 40, small) == 60
    workers = (WorkerInfo(owner="a", kv_tokens=50), WorkerInfo(owner="b", kv_tokens=200))
    assert fitted(completion(max_tokens=60), 41, Pool(card(kv_tokens=100), tokenizer, workers)) == 60
    assert Pool(card(kv_tokens=0), tokenizer).max_sequence == 512


def test_max_tokens_by_default(tokenizer: PromptEncoder) -> None:
    pool = Pool(card(), tokenizer)
    assert fitted(chat(), 100, pool) == 412
    assert fitted(completion(), 100, pool) == 16
    assert fitted(completion(), 510, pool) == 2
    assert fitted(chat(min_tokens=5), 100, pool) == 412
    assert fitted(completion(min_tokens=50), 100, pool) == 50
    with pytest.raises(ContextLengthExceededError):
        fitted(completion(min_tokens=50), 500, pool)


def test_choices_share_the_cache(tokenizer: PromptEncoder) -> None:
    """A worker takes a job as a whole, so all its choices fit together or it is refused."""
    pool = Pool(card(kv_tokens=800), tokenizer)
    assert fitted(chat(n=4), 100, pool) == 100
    assert fitted(chat(n=2), 100, pool) == 300
    assert fitted(chat(n=4, max_tokens=100), 100, pool) == 100
    for request, prompt in ((chat(n=4, max_tokens=101), 100), (chat(n=4), 200), (completion(n=128), 10)):
        with pytest.raises(ContextLengthExceededError, match="holds 800") as caught:
            fitted(request, prompt, pool)
        assert caught.value.param == "n"
    assert fitted(chat(n=4, max_tokens=300), 100, Pool(card(kv_tokens=0), tokenizer)) == 300


@pytest.mark.parametrize("keep", [10, -1])
def test_truncation_keeps_the_last_tokens(tokenizer: PromptEncoder, keep: int) -> None:
    request = completion(truncate_prompt_tokens=keep, max_tokens=12)
    prompt, _ = fit(
        request, sampling_params(request, card()), list(range(300)) + list(range(300)), Pool(card(), tokenizer)
    )
    assert prompt == (list(range(300)) * 2)[-(keep if keep > 0 else 500) :]
    with pytest.raises(InvalidRequestError):
        fit(
            completion(truncate_prompt_tokens=0),
            sampling_params(request, card()),
            [5],
            Pool(card(), tokenizer),
        )


def test_choices_of_a_request_are_bounded() -> None:
    check_choices(completion(n=4), 32, 128)
    for n, prompts in ((5, 32), (0, 1), (-1, 1), (10**9, 1)):
        with pytest.raises(InvalidRequestError) as caught:
            check_choices(completion(n=n), prompts, 128)
        assert caught.value.param == "n"


def test_envelopes_hold_the_request(tokenizer: PromptEncoder) -> None:
    pool = Pool(card(lanes=4), tokenizer)
    request = completion(n=2, prompt_cache_key="k", cache_salt="s")
    caller = Caller("key-1", True, "client-id", {"traceparent": "00-1"})
    made = envelopes(
        request,
        sampling_params(request, pool.card),
        [[5], [6, 7]],
        Served(pool),
        caller,
        JobOptions("high", 7, {"a": "b"}),
    )
    assert [e.prompt_token_ids for e in made] == [[5], [6, 7]]
    assert len({e.id for e in made}) == 2
    assert len({JobId.parse(e.id).lane for e in made}) == 1
    assert all(0 <= e.sampling.seed < 2**63 for e in made if e.sampling.seed is not None)
    assert len({e.sampling.seed for e in made}) == 2
    first = made[0]
    assert (first.tenant, first.request_id, first.job_class, first.flush_ms) == ("key-1", "client-id", "high", 7)
    assert (first.metadata, first.trace, first.kind) == ({"a": "b"}, {"traceparent": "00-1"}, "completion")
    assert first.cost_tokens == (1 + 16) * 2
    assert decode(encode(first), Envelope) == first
    given = completion(seed=5)
    assert (
        envelopes(given, sampling_params(given, card()), [[5]], Served(pool), Caller(), OPTIONS)[0].sampling.seed == 5
    )


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (completion(prompt_logprobs=20, n=20, temperature=1), "prompt_logprobs"),
        (completion(echo=True, logprobs=20, n=20, temperature=1), "echo"),
        (chat(prompt_logprobs=20, n=20, temperature=1), None),
        (completion(prompt_logprobs=1, n=20, temperature=1), None),
        (completion(logprobs=20, n=20, temperature=1), None),
    ],
)
def test_what_an_answer_says_of_its_prompts_is_bounded(
    tokenizer: PromptEncoder, request_: GenerationRequest, param: str | None
) -> None:
    pool = Pool(card(max_model_len=8192, kv_tokens=0), tokenizer)
    asked = sampling_params(request_, pool.card)
    prompts = [[5] * 2600]
    if param is None:
        assert len(envelopes(request_, asked, prompts, Served(pool), Caller(), OPTIONS)) == 1
        return
    with pytest.raises(InvalidRequestError, match=f"{param}: .* 1092000 candidates") as caught:
        envelopes(request_, asked, prompts, Served(pool), Caller(), OPTIONS)
    assert caught.value.param == param


def test_a_salt_is_of_the_tenant() -> None:
    a, b = Caller("key-a", True), Caller("key-b", True)
    assert cache_salt(Caller(), None) is None
    assert cache_salt(a, None) != cache_salt(b, None)
    assert cache_salt(a, "s") != cache_salt(b, "s")
    assert cache_salt(a, "s") != cache_salt(a, None)
    stolen = cache_salt(a, None)
    assert stolen is not None
    assert cache_salt(b, stolen) != stolen
