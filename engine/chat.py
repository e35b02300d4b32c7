"""Rendering a model's own chat template for offline use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequestError


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
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals.update(raise_exception=_raise, strftime_now=lambda form: datetime.now().strftime(form))
    plain = [{**message, "content": _text(message.get("content"))} for message in messages]
    try:
        return environment.from_string(template).render(
            **special_tokens, messages=plain, add_generation_prompt=add_generation_prompt
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise InvalidRequestError(f"messages: the chat template refuses them: {error}", param="messages") from error


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "\n".join(str(part.get("text", "")) for part in content)
    raise InvalidRequestError("messages: content must be a string or a list of text parts", param="messages")
