"""Any JSON as a body: it is prepared, or refused as the client's fault with nothing of it in the message."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.admission import Caller, JobOptions, envelopes
from gateway.catalogue import Pool
from gateway.preparation import _encode
from gateway.prompts import PromptEncoder, split_prompts
from gateway.sampling import check_choices, sampling_params
from gateway.schemas import _REFUSED, ChatCompletionRequest, CompletionRequest, GenerationRequest, JobRequest, parse
from gateway.served import Served
from shared.errors import RopewayError
from shared.protocol import Envelope, decode, encode
from tests.unit.gateway.support import MODEL, bundle, card

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}"
    "{% endif %}<|im_end|>\n{% endfor %}"
)
POOL = Pool(card(), PromptEncoder(card(), bundle(TEMPLATE)))
SECRET = "ropewaysecret"
FIELDS = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *_REFUSED} - {"model"})

numbers = st.one_of(
    st.integers(-3, 500), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**20, 10**400, 1e19, -0.0, 1e-300, 5e-324]),
)  # fmt: skip
scalars = st.one_of(st.none(), st.booleans(), numbers, st.just(SECRET), st.text(max_size=6))
keys = st.one_of(
    st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id", "7", "-1",
                     "400", "include_usage", SECRET]), st.text(max_size=4),
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=8,
)
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "refusal", "image_url", SECRET])}, optional={
    "text": values, "refusal": values,
})  # fmt: skip
calls = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries(
        {"name": scalars}, optional={"arguments": st.one_of(values, values.map(json.dumps), st.text(max_size=9))},
    )},
)  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", SECRET])},
        optional={"content": st.one_of(values, st.lists(parts, max_size=3)), "tool_calls": st.lists(calls, max_size=2),
                  "name": scalars},
    ),
    max_size=4,
)  # fmt: skip


def prepare(model: type[GenerationRequest], body: bytes | dict[str, Any]) -> list[Envelope]:
    """All that stands between a body and the queue."""
    request = parse(model, body)
    prompts = split_prompts(request.prompt) if isinstance(request, CompletionRequest) else [""]
    check_choices(request, len(prompts), 128)
    params = sampling_params(request, POOL.card)
    tokens, _ = _encode(request, POOL.encoder)
    return envelopes(
        request, params, tokens, Served(POOL), Caller(), JobOptions(request.job_class, 0, request.metadata or {})
    )


def check(model: type[GenerationRequest], body: dict[str, Any]) -> None:
    for form in (json.dumps(body).encode(), body):
        try:
            made = prepare(model, form)
        except RopewayError as error:
            assert 400 <= error.status < 500, error
            assert SECRET not in error.message
            assert SECRET not in str(error.param)
            continue
        for envelope in made:
            assert decode(encode(envelope), Envelope) == envelope
            assert envelope.sampling.max_tokens is not None
            assert len(envelope.prompt_token_ids) + envelope.sampling.max_tokens <= POOL.max_sequence
            assert all(0 <= token < POOL.card.vocab_size for token in envelope.prompt_token_ids)


@settings(max_examples=300, deadline=None)
@given(more=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3))
@example(more={"n": 2, "temperature": 1, "max_tokens": 10**400})
def test_any_field_with_any_value(more: dict[str, Any]) -> None:
    check(ChatCompletionRequest, {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more})
    check(CompletionRequest, {"model": MODEL, "prompt": "hi", **more})


@settings(max_examples=300, deadline=None)
@given(messages=messages)
def test_any_conversation(messages: list[Any]) -> None:
    check(ChatCompletionRequest, {"model": MODEL, "messages": messages})


@settings(max_examples=200, deadline=None)
@given(prompt=st.one_of(values, st.lists(st.one_of(st.integers(-1, 401), st.lists(st.integers(-1, 401), max_size=3)))))
def test_any_prompt(prompt: Any) -> None:
    check(CompletionRequest, {"model": MODEL, "prompt": prompt})


@settings(max_examples=200, deadline=None)
@given(order=st.dictionaries(st.sampled_from([*JobRequest.model_fields, "class", "adapter"]), values, max_size=5))
def test_any_order_of_a_job(order: dict[str, Any]) -> None:
    try:
        parse(JobRequest, json.dumps(order).encode())
    except RopewayError as error:
        assert 400 <= error.status < 500, error
        assert SECRET not in error.message + str(error.param)
