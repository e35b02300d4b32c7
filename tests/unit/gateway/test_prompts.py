"""Chat templates and tokenization."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.prompts import ChatTemplate, PromptEncoder, split_prompts
from gateway.schemas import Message
from shared.errors import ContextLengthExceededError, InvalidRequestError, UnsupportedParameterError
from tests.unit.gateway.support import SPECIAL, TEMPLATE, bundle, card


def message(content: Any = "hi", role: str = "user", **more: Any) -> Message:
    return Message.model_validate({"role": role, "content": content, **more})


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


ECHO = "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] }}]{% endfor %}"


def encoder(source: str | None = TEMPLATE, *, bos: bool = False, **changes: object) -> PromptEncoder:
    return PromptEncoder(card(**changes), bundle(source, bos=bos))


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("a", "a"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_content_is_text(content: Any, shown: str, role: str) -> None:
    assert template(ECHO).render([message(content, role)]) == f"[{role}:{shown}]"


def test_a_template_that_takes_parts_gets_parts() -> None:
    parts = "{% for m in messages %}{% for p in m['content'] %}<{{ p['text'] }}>{% endfor %}{% endfor %}"
    assert template(parts).render([message("hello"), message([{"type": "text", "text": "a"}])]) == "<hello><a>"


@pytest.mark.parametrize(
    ("part", "where"),
    [
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}, "type"),
        ({"type": "input_audio", "input_audio": {}}, "type"),
        ({"type": "file", "file": {"file_id": "x"}}, "type"),
        ({"type": ["text"], "text": "x"}, "type"),
        ({"text": "x"}, "type"),
        ({"type": "text"}, "text"),
        ({"type": "text", "text": 7}, "text"),
        ({"type": "text", "text": None}, "text"),
    ],
)
def test_other_parts_are_refused_by_place(part: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(ECHO).render([message("ok"), message([{"type": "text", "text": "a"}, part])])
    assert caught.value.param == f"messages[1].content[1].{where}"
    assert "169.254" not in caught.value.message


def test_a_null_assistant_with_calls_is_taken() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    source = "{% for m in messages %}{{ m['content'] }}|{% for c in m.get('tool_calls', []) %}{{ c.function.name }}" \
        "{{ c.function.arguments.x }}{% endfor %}{% endfor %}"  # fmt: skip
    assert template(source).render([message(None, "assistant", tool_calls=calls)]) == "|f1"
    for bad in ('{"x"', "[" * 100_000, '{"x": "\\ud800"}', '{"x": NaN}', '{"x": 1' + "0" * 5000 + "}"):
        calls[0]["function"] = {"name": "f", "arguments": bad}
        with pytest.raises(InvalidRequestError) as caught:
            template(source).render([message(None, "assistant", tool_calls=calls)])
        assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_developer_is_system() -> None:
    assert template(ECHO).render([message("x", "developer")]) == "[system:x]"


def test_templates_render_as_transformers_does() -> None:
    source = (
        "{%- for m in messages %}\n    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "    {{- bos_token + (m | tojson) }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ eos_token }}{% endif %}{% generation %}g{% endgeneration %}"
        "{{ strftime_now('%Y') | length }}{{ [1,2] | tojson(indent=1) }}"
    )
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "b"}, {"role": "user", "content": "c"}]
    expected = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )[0][0]
    assert template(source).render([Message.model_validate(m) for m in messages]) == expected
    assert "<é>" in expected


@pytest.mark.parametrize("final", ["The answer is", "The answer is ", " x", "end"])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_continue_final_message_as_transformers(final: str, trim: str) -> None:
    source = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content']" + trim + " }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": final}]
    expected = render_jinja_template([messages], chat_template=source, continue_final_message=True)[0][0]
    got = template(source).render([Message.model_validate(m) for m in messages], continue_final_message=True)
    assert got == expected


def test_continue_needs_a_last_text() -> None:
    with pytest.raises(InvalidRequestError):
        template(ECHO).render([message("")], continue_final_message=True)
    with pytest.raises(InvalidRequestError):
        template("{{ messages[0]['role'] }}").render([message("x")], continue_final_message=True)


def test_what_a_template_refuses_is_a_400() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        template("{{ raise_exception('roles must alternate') }}").render([message("secret")])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ range(10 ** 12) }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 9 ** 9999999 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[5].content }}{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages | join(7) + 1 }}",
    ],
)
def test_hostile_templates_end_as_an_error(source: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render([message("ropeway-secret")])
    assert "ropeway-secret" not in caught.value.message


def test_chat_prompts_have_no_second_bos() -> None:
    tiny = encoder("{{ '<|endoftext|>' }}{{ messages[0]['content'] }}", bos=True)
    options: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False, "kwargs": None}
    assert tiny.chat([message("a")], add_special_tokens=False, **options).count(0) == 1
    assert tiny.chat([message("a")], add_special_tokens=True, **options).count(0) == 2
    assert tiny.completion("a", add_special_tokens=True)[0][0] == 0
    assert tiny.completion("a", add_special_tokens=False)[0].count(0) == 0


def test_special_text_in_messages_is_special_as_in_transformers() -> None:
    ids = encoder().chat(
        [message("<|im_end|>")],
        add_generation_prompt=False,
        continue_final_message=False,
        kwargs=None,
        add_special_tokens=False,
    )
    assert ids.count(SPECIAL.index("<|im_end|>")) == 3


@pytest.mark.parametrize("prompt", [[], [[]], [[5], []], [5, "a"], ["a", [5]], [[5], 5], [[5, 7], [1e19]], [1e19],
                                    [-1], [400], [[5], [400]], [True], [None], [{"a": 1}], [[5, "a"]], [1.0],
                                    [10**30], [[[5]]]])  # fmt: skip
def test_bad_prompts(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encoder().completion(prompt, add_special_tokens=True)
    assert caught.value.param == "prompt"


def test_empty_text_is_a_bos_or_refused() -> None:
    assert encoder(bos=True).completion("", add_special_tokens=True) == [[0]]
    for prompt in ("", [""], ["a", ""]):
        with pytest.raises(InvalidRequestError):
            encoder().completion(prompt, add_special_tokens=True)


def test_prompts_of_each_shape() -> None:
    tiny = encoder()
    ids = tiny.completion("never stops", add_special_tokens=True)[0]
    assert tiny.completion(["never stops", "never stops"], add_special_tokens=True) == [ids, ids]
    assert tiny.completion(ids, add_special_tokens=True) == [ids]
    assert tiny.completion([ids, [5]], add_special_tokens=True) == [ids, [5]]
    assert tiny.decode(ids) == "never stops"
    assert split_prompts("a") == ["a"]


def test_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    with pytest.raises(ContextLengthExceededError) as caught:
        encoder().completion("x" * 1_000_000, add_special_tokens=True)
    assert "1000000" in caught.value.message
    assert "512" in caught.value.message


def test_a_model_without_template_has_no_chat() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encoder(None).chat(
            [message()], add_generation_prompt=True, continue_final_message=False, kwargs=None, add_special_tokens=False
        )
    assert caught.value.param == "messages"


@pytest.mark.parametrize("kwargs", [{"messages": []}, {"tokenize": True}, {"enable_thinking": "yes"}])
def test_template_kwargs_are_allow_listed(kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encoder().chat(
            [message()],
            add_generation_prompt=True,
            continue_final_message=False,
            kwargs=kwargs,
            add_special_tokens=False,
        )
    assert caught.value.param == "chat_template_kwargs"
    if "enable_thinking" not in kwargs:
        assert isinstance(caught.value, UnsupportedParameterError)


def test_a_bundle_that_cannot_be_read_is_an_error() -> None:
    broken = bundle()
    broken.tokenizer_json = "{}"
    with pytest.raises(ValueError, match="tokenizer of pool tiny"):
        PromptEncoder(card(), broken)
    with pytest.raises(ValueError, match="template of pool tiny"):
        PromptEncoder(card(), bundle("{% for"))
