"""The `openai` package for Python against the whole system: its own types say whether an answer has the right form."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from openai.types.responses import Response

from tests.openai_compat.conftest import MODEL
from tests.support.stack import Stack

TEXT = "the cable of a ropeway never stops"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": TEXT}]


def test_a_chat_with_every_field_that_is_served(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "the "},
            {"role": "user", "content": [{"type": "text", "text": "cable"}]},
            {"role": "assistant", "content": " of "},
            {"role": "user", "content": "a ropeway", "name": "somebody"},
        ],
        n=2,
        temperature=0.5,
        top_p=1,
        max_completion_tokens=64,
        stop=["\u2603"],
        seed=7,
        presence_penalty=0,
        frequency_penalty=0,
        logit_bias={"5": 0},
        logprobs=True,
        top_logprobs=2,
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        metadata={"a": "b"},
        store=True,
        service_tier="flex",
        parallel_tool_calls=False,
        response_format={"type": "text"},
        modalities=["text"],
    )
    ChatCompletion.model_validate_json(answer.model_dump_json())  # the client itself does not look whether all is there
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == MODEL
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.service_tier == "flex"
    for choice in answer.choices:
        assert choice.message.role == "assistant" and choice.message.content == "the cable of a ropeway"
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        joined = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
        assert joined.decode().startswith("the cable of a ropeway")
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_log_probabilities_are_finite_where_few_tokens_are_allowed(client: openai.OpenAI) -> None:
    for more in ({"extra_body": {"top_k": 1}}, {"logit_bias": {str(i): -100 for i in range(20)}}):
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=20, **more
        )
        assert answer.choices[0].logprobs is not None
        for entry in answer.choices[0].logprobs.content or []:
            assert len(entry.top_logprobs) == 20
            assert all(-9999 <= value.logprob <= 0 for value in (entry, *entry.top_logprobs))


def test_a_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, max_tokens=64
    )
    chunks = list(stream)
    assert stream.response.headers["x-ropeway-job-id"] in chunks[0].id
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_streaming_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=64) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == TEXT


def test_completions_of_every_prompt_form(client: openai.OpenAI) -> None:
    ids = client.post("/../tokenize", body={"model": MODEL, "prompt": TEXT}, cast_to=dict)["tokens"]
    for prompt, count in ((TEXT, 1), ([TEXT, TEXT], 2), (ids, 1), ([ids, ids, ids], 3)):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=64, n=2, seed=1, logprobs=1)
        assert answer.object == "text_completion"
        assert [choice.text for choice in answer.choices] == [TEXT] * count * 2
        assert all(c.logprobs is not None and len(c.logprobs.tokens or []) > 1 for c in answer.choices)


def test_a_completion_stream_with_echo_and_suffix(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="x y", stream=True, echo=True, max_tokens=8, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "x yx y"
    assert chunks[-1].usage is not None
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model=MODEL, prompt="x", suffix="y")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.object, model.owned_by) == ("model", "ropeway") and model.created > 0


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"maximum": 10**20}}}},
            "response_format",
        ),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {"model": "x"}}, "moderation"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": {"999999": 5}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 100_000}, "max_tokens"),
    ],
)
def test_what_is_not_served_or_wrong_is_a_bad_request(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    for stream in (False, True) if "stream_options" not in more else (False,):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream, **more)
        assert caught.value.param == param and caught.value.type == "invalid_request_error"


def test_errors_are_the_clients_own(client: openai.OpenAI, stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as refused:
            stranger.models.list()
        assert refused.value.code == "invalid_api_key"


def test_unknown_fields_are_ignored(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=64, extra_body={"a_field_of_tomorrow": {"x": 1}}
    )
    assert answer.choices[0].message.content == TEXT


def test_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input=TEXT, instructions="say: ", temperature=0, top_p=1, max_output_tokens=64, metadata={"a": "b"}
    )
    assert (answer.object, answer.status, answer.output_text) == ("response", "completed", f"say: {TEXT}")
    Response.model_validate_json(answer.model_dump_json())  # the client itself does not look whether all is there
    assert answer.usage is not None and answer.usage.output_tokens > 0
    again = client.responses.retrieve(answer.id)
    assert again.output_text == answer.output_text and again.metadata == {"a": "b"}
    items = client.responses.input_items.list(answer.id)
    assert [item.content[0].text for item in items] == [TEXT]  # type: ignore[union-attr]
    follow = client.responses.create(model=MODEL, input="!", previous_response_id=answer.id)
    assert follow.output_text == f"{TEXT}say: {TEXT}!"
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_response_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=TEXT, max_output_tokens=64) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == TEXT
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
    numbers = [e.sequence_number for e in client.responses.create(model=MODEL, input=TEXT, stream=True)]
    assert numbers == list(range(len(numbers)))


def test_a_response_in_the_background_is_taken_up(client: openai.OpenAI) -> None:
    started = client.responses.create(model=MODEL, input=TEXT, background=True, stream=True)
    seen = []
    for event in started:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    started.close()
    response_id = seen[0].response.id  # type: ignore[union-attr]
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number))
    assert [e.sequence_number for e in seen + rest] == list(range(len(seen + rest)))
    text = "".join(e.delta for e in seen + rest if e.type == "response.output_text.delta")
    assert text == TEXT == client.responses.retrieve(response_id).output_text
    assert client.responses.cancel(response_id).status == "completed"


def test_a_response_that_was_cut(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input=TEXT, max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_what_a_response_cannot_have(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.responses.create(model=MODEL, input="x", tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="text"):
        schema: Any = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
        client.responses.create(model=MODEL, input="x", text=schema)


async def test_the_async_client(stack: Stack, client: openai.OpenAI) -> None:
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as http:
        stream = await http.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, max_tokens=64)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == TEXT
