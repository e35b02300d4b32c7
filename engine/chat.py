"""Rendering a model's own chat template for offline use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequestError

_PROBE = "ropeway-probe"
#: What a template may raise for messages that it was not written for.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
                    RecursionError)  # fmt: skip


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text of a conversation.

    Args:
        template: Jinja source, as in the checkpoint.
        messages: each with `role` and `content`, a string or a list of text parts.
        special_tokens: text by role, such as `bos_token`; the template sees them.
        add_generation_prompt: end with the opening of the assistant's turn.

    Raises:
        InvalidRequestError: the template refuses the messages, or a part of a message is not text.
    """
    plain = [{**message, "content": _text(message.get("content"))} for message in messages]
    try:
        if _wants_parts(template, tuple(sorted(special_tokens.items()))):
            plain = [_in_parts(message) for message in plain]
        return _compiled(template).render(**special_tokens, messages=plain, add_generation_prompt=add_generation_prompt)
    except _TEMPLATE_ERRORS as error:
        raise InvalidRequestError(f"messages: the chat template refuses them: {error}", param="messages") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
    return environment.from_string(template)


@lru_cache(maxsize=16)
def _wants_parts(template: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Whether content must be a list of parts: then a plain string does not come out whole."""

    def shows(message: dict[str, Any]) -> bool:
        try:
            text = _compiled(template).render(**dict(special_tokens), messages=[message], add_generation_prompt=True)
        except _TEMPLATE_ERRORS:  # it may refuse a string, or such a conversation as a whole
            return False
        return _PROBE in text

    message = {"role": "user", "content": _PROBE}
    return not shows(message) and shows(_in_parts(message))


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return "\n".join(part["text"] for part in content)
    raise InvalidRequestError("messages: content must be a string or a list of text parts", param="messages")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
