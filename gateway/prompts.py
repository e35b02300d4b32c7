"""From messages or prompts to token ids: chat template and tokenizer of a pool. Blocking; runs in threads."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import from_json
from tokenizers import Tokenizer

from gateway.schemas import Message
from shared.errors import ContextLengthExceededError, InvalidRequestError, UnsupportedParameterError
from shared.protocol import Card, TokenizerBundle

#: A template that writes more than this, or loops longer, is stopped.
MAX_RENDERED_CHARS = 64 * 1024 * 1024
MAX_RENDER_SECONDS = 5.0
MAX_RANGE_STEPS = 1_000_000
#: A clone of user text is cheap, `'a' * 10 ** 9` in a template is not.
MAX_REPEATED_CHARS = 1024 * 1024
TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking"})
#: Parts of a message's content that are text, and the field that holds it.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_PROBE = "ropeway-probe"
#: Put behind a message to be continued. Its last character is a space: a template that trims messages drops it.
_CONTINUE = "ROPEWAY_CONTINUES_HERE "
#: What a template may raise for messages that it was not written for.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
                    RecursionError)  # fmt: skip


class _Budget(threading.local):
    """What is left to the rendering that runs in this thread."""

    deadline = 0.0
    steps = 0

    def start(self) -> None:
        self.deadline, self.steps = time.monotonic() + MAX_RENDER_SECONDS, MAX_RANGE_STEPS

    def spend(self, steps: int = 1) -> None:
        self.steps -= steps
        if self.steps < 0 or time.monotonic() > self.deadline:
            raise jinja2.TemplateRuntimeError("the chat template runs too long")


_budget = _Budget()


class _Environment(ImmutableSandboxedEnvironment):
    """The environment in which transformers renders chat templates, with bounds on time and size."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "range": _bounded_range}

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int | float) and isinstance(value, str | list | tuple) and operator == "*":
                if len(value) * times > MAX_REPEATED_CHARS:
                    raise jinja2.TemplateRuntimeError("the chat template repeats too much")
            elif operator == "**" and isinstance(times, int | float) and abs(times) > 64:
                raise jinja2.TemplateRuntimeError("the chat template computes too large a power")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part in training; for a prompt it is only its content."""

    tags = {"generation"}  # noqa: RUF012  (declared so by the base class)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Take the block's body in its place."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
             sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _bounded_range(*args: int) -> range:
    """A range that is paid for when it is made, so that nested loops are bounded as a whole."""
    values = range(*args)
    _budget.spend(len(values))
    return values


class ChatTemplate:
    """A model's chat template.

    Raises:
        jinja2.TemplateError: `source` is not a template.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = _Environment().from_string(source)
        self._special = dict(special_tokens)
        self._wants_parts = self._probe()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The conversation as one prompt.

        Text that looks like a special token is one to the tokenizer, as in vLLM and transformers.

        Raises:
            InvalidRequestError: the template refuses these messages, or a part of them is no text.
        """
        conversation = [_plain(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            if not conversation[-1]["content"]:
                raise InvalidRequestError("continue_final_message: the last message has no text", param="messages")
            conversation[-1]["content"] += _CONTINUE
        try:
            text = self._run(conversation, add_generation_prompt and not continue_final_message, kwargs or {})
        except _TEMPLATE_ERRORS as error:
            # The template's own words name roles and their order. Python's would show values, so only their kind.
            reason = error.message if isinstance(error, jinja2.TemplateError) else type(error).__name__
            raise InvalidRequestError(f"messages: the model's chat template refuses them: {reason}",
                                      param="messages") from error  # fmt: skip
        return _cut(text) if continue_final_message else text

    def _run(self, conversation: list[dict[str, Any]], add_generation_prompt: bool, kwargs: dict[str, Any]) -> str:
        if self._wants_parts:
            conversation = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in conversation]
        variables = self._special | kwargs
        variables |= {"messages": conversation, "tools": None, "documents": None}
        variables["add_generation_prompt"] = add_generation_prompt
        _budget.start()
        pieces, size = [], 0
        for piece in self._template.generate(**variables):
            _budget.spend()
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise jinja2.TemplateRuntimeError("the chat template writes too much")
            pieces.append(piece)
        return "".join(pieces)

    def _probe(self) -> bool:
        """Whether the template takes content as a list of parts: then a plain string does not come out whole."""
        self._wants_parts = False
        message = {"role": "user", "content": _PROBE}
        try:
            if _PROBE in self._run([message], True, {}):
                return False
        except _TEMPLATE_ERRORS:
            pass  # it may refuse a string, or such a conversation as a whole: the second try decides
        self._wants_parts = True
        try:
            return _PROBE in self._run([message], True, {})
        except _TEMPLATE_ERRORS:
            return False


def _cut(text: str) -> str:
    """The rendered prompt up to the mark behind the last message's text.

    Raises:
        InvalidRequestError: the template dropped the mark, so it does not show that text whole.
    """
    at = text.rfind(_CONTINUE.strip())
    if at < 0:
        raise InvalidRequestError("continue_final_message: the chat template changes the last message",
                                  param="messages")  # fmt: skip
    kept = text[at : at + len(_CONTINUE)] == _CONTINUE
    return text[:at] if kept else text[:at].rstrip()


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates know it: text content, arguments of calls as values."""
    where = f"messages[{index}]"
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, f"{where}.content"),
    }
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return plain


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """Text of a message; several text parts are joined by a line break, as vLLM does."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type")
        name = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if name is None:
            raise UnsupportedParameterError(
                f"{where}[{index}].type: only parts of the type 'text' are supported", param=f"{where}[{index}].type"
            )
        if not isinstance(part.get(name), str):
            raise InvalidRequestError(f"{where}[{index}].{name}: must be a string", param=f"{where}[{index}].{name}")
        texts.append(part[name])
    return "\n".join(texts)


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}.function: must be an object with a name", param=f"{where}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            # Not `json.loads`: that takes half a surrogate pair, which no tokenizer takes.
            arguments = from_json(arguments, allow_inf_nan=False) if arguments else {}
        except ValueError:
            raise InvalidRequestError(f"{where}.function.arguments: must be JSON",
                                      param=f"{where}.function.arguments") from None  # fmt: skip
    return call | {"function": function | {"arguments": arguments}}


class PromptEncoder:
    """Template and tokenizer of one pool.

    Raises:
        ValueError: the bundle's tokenizer or template cannot be read.
    """

    def __init__(self, card: Card, bundle: TokenizerBundle) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(bundle.tokenizer_json)
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"the tokenizer of pool {card.pool} cannot be read: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._template: ChatTemplate | None = None
        if bundle.chat_template is not None:
            try:
                self._template = ChatTemplate(bundle.chat_template, bundle.special_tokens)
            except jinja2.TemplateError as error:
                raise ValueError(f"the chat template of pool {card.pool} cannot be read: {error}") from error
        self._vocab_size = card.vocab_size
        self._context = card.max_model_len
        #: No token stands for more characters than this.
        self._longest = max((len(t) for t in self._tokenizer.get_vocab()), default=1)
        added = self._tokenizer.get_added_tokens_decoder()
        #: Ids that answers do not show by default.
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: dict[str, Any] | None,
        add_special_tokens: bool,
    ) -> list[int]:
        """Token ids of a conversation. No BOS is put in front: the template writes its own.

        Raises:
            InvalidRequestError: the model has no template, or it refuses the messages.
            ContextLengthExceededError: so much text that it need not be tokenized.
        """
        if self._template is None:
            raise InvalidRequestError("messages: this model has no chat template; use /v1/completions",
                                      param="messages")  # fmt: skip
        _check_kwargs(kwargs)
        self._check_length(sum(_content_size(m) for m in messages), "messages")
        text = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )
        return self._encode(text, add_special_tokens, "messages")

    def completion(self, prompt: str | list[Any], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each prompt of a completion request.

        Raises:
            InvalidRequestError: empty, mixed, or ids outside of the vocabulary.
            ContextLengthExceededError: so much text that it need not be tokenized.
        """
        return [
            self._encode(p, add_special_tokens, "prompt") if isinstance(p, str) else self._not_empty(p)
            for p in split_prompts(prompt)
        ]

    def text(self, prompt: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, none where it is empty.

        Raises:
            InvalidRequestError: it is no text that can be tokenized.
            ContextLengthExceededError: so much text that it need not be tokenized.
        """
        self._check_length(len(prompt), "prompt")
        return list(self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens).ids)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Tokens as the vocabulary writes them."""
        return [self._tokenizer.id_to_token(i) or "" for i in token_ids]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt that came as ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        self._check_length(len(text), param)
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if not ids:
            raise InvalidRequestError(f"{param}: must not be empty", param=param)
        return ids

    def _not_empty(self, ids: list[Any]) -> list[int]:
        if not ids:
            raise InvalidRequestError("prompt: must not be empty", param="prompt")
        return self.checked(ids, "prompt")

    def checked(self, ids: list[Any], param: str) -> list[int]:
        """Ids that are the vocabulary's.

        Raises:
            InvalidRequestError: one is not.
        """
        if not all(type(i) is int for i in ids):
            raise InvalidRequestError(f"{param}: token ids must be integers, all of one kind", param=param)
        if ids and (min(ids) < 0 or max(ids) >= self._vocab_size):
            raise InvalidRequestError(
                f"{param}: token ids must be from 0 to {self._vocab_size - 1}, the model's vocabulary", param=param
            )
        return ids

    def _check_length(self, chars: int, param: str) -> None:
        """Refuse text that cannot fit, before time is spent on tokenizing it."""
        least = chars // self._longest
        if least > self._context:
            raise ContextLengthExceededError(
                f"{param}: {chars} characters are at least {least} tokens, the context has {self._context}", param=param
            )


def split_prompts(prompt: str | list[Any]) -> list[str | list[Any]]:
    """The prompts of a completion request, each text or a list of ids (whose entries are not checked here).

    Raises:
        InvalidRequestError: empty, or of mixed kinds.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError("prompt: must not be empty", param="prompt")
    if all(isinstance(p, str) for p in prompt):
        return list(prompt)
    if all(isinstance(p, list) for p in prompt):
        return list(prompt)
    if any(isinstance(p, str | list) for p in prompt):
        raise InvalidRequestError("prompt: must be text, token ids, or a list of one of them", param="prompt")
    return [prompt]


def _check_kwargs(kwargs: dict[str, Any] | None) -> None:
    for name, value in (kwargs or {}).items():
        if name not in TEMPLATE_KWARGS:
            raise UnsupportedParameterError(
                f"chat_template_kwargs: only {', '.join(sorted(TEMPLATE_KWARGS))} are supported",
                param="chat_template_kwargs",
            )
        if not isinstance(value, bool):
            raise InvalidRequestError("chat_template_kwargs: values must be true or false",
                                      param="chat_template_kwargs")  # fmt: skip


def _content_size(message: Message) -> int:
    if isinstance(message.content, list):
        return sum(len(t) for p in message.content if isinstance(t := p.get("text"), str))
    return len(message.content or "")
