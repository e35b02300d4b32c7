"""What bodies are taken, and how refusals look."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from gateway.sampling import sampling_params
from gateway.schemas import ChatCompletionRequest, CompletionRequest, JobRequest, parse
from shared.errors import InvalidRequestError, UnsupportedParameterError
from shared.sampling import SamplingParams
from tests.unit.gateway.support import card

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**more: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": MESSAGES, **more}).encode()


def completion(**more: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hi", **more}).encode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop_token_ids": [""] * 1_000_000}, "stop_token_ids[0]"),
        ({"stop": [1] * 1_000_000}, None),
        ({"messages": [{"role": "user", "content": [1] * 1_000_000}]}, None),
        ({"logit_bias": dict.fromkeys(map(str, range(100_000)), "")}, None),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_of_many_faults_not_all_are_made_to_objects(fields: dict[str, Any], param: str | None) -> None:
    """Each would take half a kilobyte, and all of them seconds in which nothing else runs."""
    body = chat(**fields)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            parse(ChatCompletionRequest, body)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert param is None or caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"", None),
        (b"[" * 100_000, None),
        (b'{"a":' * 100_000, None),
        (b'"text"', None),
        (b"[]", None),
        (b"\xff\xfe", None),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', None),
        (b"{}", "model"),
        (b'{"model": "tiny"}', "messages"),
        (b'{"model": 7, "messages": []}', "model"),
        (chat(messages=[]), "messages"),
        (chat(messages="hi"), "messages"),
        (chat(messages=[{"content": "hi"}]), "messages[0].role"),
        (chat(messages=[{"role": "wizard", "content": "hi"}]), "messages[0].role"),
        (chat(messages=[{"role": "user", "content": 7}]), "messages[0].content"),
        (chat(messages=[*MESSAGES, {"role": "user", "content": ["hi"]}]), "messages[1].content"),
        (chat(temperature="hot"), "temperature"),
        (chat(temperature=True), "temperature"),
        (chat(n="2"), "n"),
        (chat(n=1.5), "n"),
        (chat(stop=7), "stop"),
        (chat(stop=["a", 7]), "stop"),
        (chat(logit_bias=[1]), "logit_bias"),
        (chat(logit_bias={"5": "much"}), "logit_bias"),
        (chat(stream="yes"), "stream"),
        (chat(stream_options={"include_usage": True}), "stream_options"),
        (chat(top_logprobs=3), "top_logprobs"),
        (chat(prompt_logprobs=True), "prompt_logprobs"),
        (chat(prompt_logprobs=0, stream=True), "prompt_logprobs"),
        (chat(skip_reading_prefix_cache="yes"), "skip_reading_prefix_cache"),
        (chat(metadata={"a": 1}), "metadata"),
        (chat(metadata={str(i): "x" for i in range(17)}), "metadata"),
        (chat(metadata={"a": "x" * 513}), "metadata"),
        (chat(continue_final_message=True, add_generation_prompt=True), "continue_final_message"),
        (chat(service_tier="gold"), "service_tier"),
        (chat(cache_salt=""), "cache_salt"),
        (chat(messages=MESSAGES * 5000), "messages"),
    ],
)
def test_bad_chat_bodies_name_the_field(body: bytes, param: str | None) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse(ChatCompletionRequest, body)
    assert caught.value.param == param
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("tool_choice", {"type": "function"}),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}),
        ("response_format", {"json_schema": {"schema": {"maximum": 10**20}}}),
        ("response_format", "text"),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("web_search_options", {}),
        ("chat_template", "{{ messages }}"),
        ("guided_json", {"type": "object"}),
        ("best_of", 3),
        ("adapter", "a"),
        ("lora_request", {"lora_name": "a"}),
        ("echo", True),
    ],
)
def test_what_is_not_served_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        parse(ChatCompletionRequest, chat(**{field: value}))
    assert caught.value.param == field
    assert caught.value.error_code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", None),
        ("tools", []),
        ("tool_choice", "none"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("stream_options", None),
        ("no_such_field", {"a": [1]}),
        ("user", "u"),
        ("store", False),
        ("parallel_tool_calls", True),
    ],
)
def test_what_asks_for_nothing_is_taken(field: str, value: Any) -> None:
    assert parse(ChatCompletionRequest, chat(**{field: value})).model == "tiny"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"echo": True, "top_logprobs": 0, "stream": True}, "echo"),
        ({"echo": True, "max_tokens": 0, "stream": True}, "echo"),
    ],
)
def test_completion_fields_not_served(more: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        parse(CompletionRequest, completion(**more))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body",
    [
        chat(temperature="ropeway-secret"),
        chat(messages=[{"role": "ropeway-secret", "content": "x"}]),
        chat(messages=[{"role": "user", "content": {"ropeway-secret": 1}}]),
        chat(metadata={"ropeway-secret": 1}),
        chat(logit_bias={"ropeway-secret": "x"}),
        chat(logit_bias={"ropeway-secret": 1}),
        chat(service_tier="ropeway-secret"),
        b'{"model": "tiny", "messages": ropeway-secret}',
        b"ropeway-secret",
    ],
)
def test_errors_do_not_echo_what_was_sent(body: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sampling_params(parse(ChatCompletionRequest, body), card())
    assert "secret" not in caught.value.message
    assert "secret" not in str(caught.value.param)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [400]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"presence_penalty": 3}, "presence_penalty"),
    ],
)
def test_bounds_name_the_clients_field(more: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sampling_params(parse(ChatCompletionRequest, chat(**more)), card())
    assert caught.value.param == param
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    body = chat(temperature=1).replace(b'"temperature": 1', f'"temperature": {text}'.encode())
    with pytest.raises(InvalidRequestError):
        sampling_params(parse(ChatCompletionRequest, body), card())


def test_edges_are_taken() -> None:
    for more in ({"top_p": 1}, {"top_p": 1e-9}, {"top_k": -1}, {"top_k": 0}, {"top_k": 401}, {"min_p": 0}, {"min_p": 1},
                 {"temperature": 1e-300}, {"temperature": 0}, {"stop": []}, {"stop": ["x"] * 16}):  # fmt: skip
        sampling_params(parse(ChatCompletionRequest, chat(**more)), card())


def test_the_models_defaults_hold_where_the_client_gave_none() -> None:
    pool = card(sampling_defaults={"temperature": 0.2, "top_k": 50.0, "top_p": 0.9, "max_new_tokens": 7.0})
    plain = sampling_params(parse(ChatCompletionRequest, chat()), pool)
    assert (plain.temperature, plain.top_k, plain.top_p) == (0.2, 50, 0.9)
    assert plain.max_tokens is None
    own = sampling_params(parse(ChatCompletionRequest, chat(temperature=1, top_k=0)), pool)
    assert (own.temperature, own.top_k, own.top_p) == (1, 0, 0.9)


def test_every_sampling_field_goes_over() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.8, "top_k": 3, "min_p": 0.1, "presence_penalty": 1.0, "frequency_penalty": -1.0,
        "repetition_penalty": 1.2, "n": 2, "stop": ["a", "b"], "seed": -5, "min_tokens": 1, "stop_token_ids": [4],
        "include_stop_str_in_output": True, "ignore_eos": True, "skip_special_tokens": False,
        "skip_reading_prefix_cache": True, "prompt_logprobs": 3,
        "spaces_between_special_tokens": False, "bad_words": ["x"], "allowed_token_ids": [1, 2],
        "max_tokens": 9,
    }  # fmt: skip
    params = sampling_params(parse(CompletionRequest, completion(**given, logit_bias={"7": -3.5}, logprobs=2)), card())
    assert {name: getattr(params, name) for name in given} == given
    assert params.logit_bias == {7: -3.5}
    assert params.logprobs == 2


def test_max_completion_tokens_wins() -> None:
    request = parse(ChatCompletionRequest, chat(max_tokens=5, max_completion_tokens=7))
    assert sampling_params(request, card()).max_tokens == 7


def test_chat_logprobs_are_a_switch_and_a_number() -> None:
    assert sampling_params(parse(ChatCompletionRequest, chat()), card()).logprobs is None
    assert sampling_params(parse(ChatCompletionRequest, chat(logprobs=True)), card()).logprobs == 0
    assert sampling_params(parse(ChatCompletionRequest, chat(logprobs=True, top_logprobs=4)), card()).logprobs == 4


def test_top_logprobs_is_another_name_on_completions() -> None:
    for more in ({"top_logprobs": 4}, {"logprobs": 4}, {"logprobs": 4, "top_logprobs": 4}):
        assert sampling_params(parse(CompletionRequest, completion(**more)), card()).logprobs == 4
    for more, pool in (
        ({"top_logprobs": 21}, card()),
        ({"top_logprobs": -1}, card()),
        ({"logprobs": 1, "top_logprobs": 2}, card()),
        ({"top_logprobs": 5}, card(vocab_size=4)),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            sampling_params(parse(CompletionRequest, completion(**more)), pool)
        assert caught.value.param == "top_logprobs"
        assert caught.value.message.startswith("top_logprobs")


@pytest.mark.parametrize(
    ("more", "asked"),
    [
        ({"logprobs": 2}, None),
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 2}, 2),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "top_logprobs": 2}, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 0}, 2),
        ({"echo": True, "logprobs": 0, "prompt_logprobs": 5}, 5),
        ({"echo": True, "prompt_logprobs": 5}, 5),
    ],
)
def test_an_echo_with_logprobs_asks_for_those_of_the_prompt(more: dict[str, Any], asked: int | None) -> None:
    assert sampling_params(parse(CompletionRequest, completion(**more)), card()).prompt_logprobs == asked


def test_an_echo_alone_is_a_job_of_one_token() -> None:
    assert sampling_params(parse(CompletionRequest, completion(echo=True, max_tokens=0)), card()).max_tokens == 1
    for more in ({"max_tokens": 0}, {"echo": False, "max_tokens": 0}, {"echo": True, "max_tokens": -1}):
        with pytest.raises(InvalidRequestError) as caught:
            sampling_params(parse(CompletionRequest, completion(**more)), card())
        assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("more", "job_class"),
    [
        ({}, "normal"),
        ({"service_tier": "auto"}, "normal"),
        ({"service_tier": "priority"}, "high"),
        ({"service_tier": "flex"}, "batch"),
        ({"priority": -1}, "high"),
        ({"priority": 1}, "batch"),
        ({"priority": 0}, "normal"),
    ],
)
def test_classes(more: dict[str, Any], job_class: str) -> None:
    assert parse(ChatCompletionRequest, chat(**more)).job_class == job_class


def test_every_sampling_parameter_is_served_or_refused_by_name() -> None:
    """A parameter that is added to `SamplingParams` must be given a place here, too."""
    inside = {"detokenize"}  # the API always answers with text
    for name in SamplingParams.__struct_fields__:
        if name in inside:
            continue
        served = [name in model.model_fields for model in (ChatCompletionRequest, CompletionRequest)]
        if not all(served):
            for model, body in ((ChatCompletionRequest, chat), (CompletionRequest, completion)):
                with pytest.raises(UnsupportedParameterError) as caught:
                    parse(model, body(**{name: 1}))
                assert caught.value.param == name


@pytest.mark.parametrize(("count", "param"), [(1_000, "metadata"), (1_001, None)])
def test_the_first_fault_is_named_unless_there_are_too_many_to_look_at(count: int, param: str | None) -> None:
    body = {"kind": "chat", "body": {}, "metadata": {str(number): 1 for number in range(count)}}
    with pytest.raises(InvalidRequestError) as caught:
        parse(JobRequest, json.dumps(body).encode())
    assert caught.value.param == param
    assert param is not None or caught.value.message == f"the body has {count} values of wrong types"


def test_a_jobs_body_and_class() -> None:
    order = parse(JobRequest, b'{"kind": "chat", "class": "batch", "body": {"model": "m"}, "deadline_s": 5}')
    assert (order.job_class, order.deadline_s) == ("batch", 5)
    for bad, param in (
        (b'{"kind": "chat"}', "body"),
        (b'{"kind": "audio", "body": {}}', "kind"),
        (b'{"kind": "chat", "body": {}, "class": "urgent"}', "class"),
        (b'{"kind": "chat", "body": {}, "deadline_s": 0}', "deadline_s"),
        (b'{"kind": "chat", "body": {}, "deadline_s": 1e30}', "deadline_s"),
        (b'{"kind": "chat", "body": {}, "deadline_s": NaN}', "deadline_s"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            parse(JobRequest, bad)
        assert caught.value.param == param
