"""Offline chat templates: what content becomes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine.chat import render_chat
from shared.errors import InvalidRequestError

STRINGS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
PARTS = (
    "{{ bos_token + '' }}{% for m in messages %}[{{ m.role }}:"
    "{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}"
)


def render(content: Any, template: str = STRINGS, role: str = "user") -> str:
    return render_chat(template, [{"role": role, "content": content}], {"bos_token": ""})


@pytest.mark.parametrize("template", [STRINGS, PARTS])
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("a", "a"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_content_is_text_for_either_kind_of_template(template: str, role: str, content: Any, shown: str) -> None:
    assert render(content, template, role) == f"[{role}:{shown}]"


@pytest.mark.parametrize(
    "content",
    [
        7,
        {"type": "text", "text": "a"},
        ["a"],
        [{"text": "a"}],
        [{"type": "text"}],
        [{"type": "text", "text": None}],
        [{"type": "text", "text": {"a": 1}}],
        [{"type": "image_url", "image_url": {"url": "x"}}],
    ],
)
def test_no_other_content_gets_into_a_prompt(content: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(content)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{{ messages[5].content.x }}", "{{ 1 / 0 }}", "{{ ''.__class__.mro() }}", "{%"],
)
def test_what_a_template_cannot_do_is_the_requests_error(template: str) -> None:
    with pytest.raises(InvalidRequestError):
        render("a", template)


def test_loop_controls_and_json_are_there() -> None:
    template = "{% for m in messages %}{{ m | tojson(ensure_ascii=False, indent=None) }}{% break %}{% endfor %}"
    assert render("é", template) == '{"role": "user", "content": "é"}'
