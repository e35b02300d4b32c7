"""Logs: structlog on standard error, JSON where that is not a terminal. Prompts, outputs and keys stay out of them.

Every line carries what `bind` put into the context: the job's id and the trace's. Lines of the standard library's
loggers (uvicorn, redis, asyncio) take the same way.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Set
from contextlib import contextmanager
from typing import Any, Final

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor

from shared.trace_context import trace_id

#: Keys whose values no line of any level may hold, in any nesting.
CREDENTIAL_KEYS: Final = frozenset(
    {
        "api_key", "api_keys", "authorization", "bearer", "cookie", "credentials", "headers", "password", "secret",
        "token", "x-api-key",
    }
)  # fmt: skip
#: Keys whose values no line at info level or above may hold, in any nesting: what clients write and models answer.
SECRET_KEYS: Final = CREDENTIAL_KEYS | {
    "bad_words", "body", "content", "delta", "envelope", "input", "input_ids", "logprobs", "messages", "output",
    "output_ids", "prompt", "prompt_token_ids", "stop", "text", "token_ids", "top_logprobs",
}  # fmt: skip
_MAX_DEPTH: Final = 6


def configure(level: str = "info", json: bool | None = None) -> None:
    """Set up logging for this process; calling it again replaces the set-up.

    Args:
        level: least level that is logged: `debug`, `info`, `warning`, `error`.
        json: JSON lines; None: where standard error is not a terminal.
    """
    as_json = not sys.stderr.isatty() if json is None else json
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    renderer: list[Processor]
    if as_json:
        # Tracebacks without the values of local variables: those hold prompts.
        frames = ExceptionDictTransformer(show_locals=False, use_rich=False)
        renderer = [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]
    else:
        renderer = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )


@contextmanager
def bind(*, job_id: str | None = None, trace: Mapping[str, str] | None = None) -> Iterator[None]:
    """Bind a job's id, and the trace id out of its W3C trace context, to every line inside."""
    values = {"job_id": job_id, "trace_id": trace_id(trace or {})}
    with structlog.contextvars.bound_contextvars(**{k: v for k, v in values.items() if v is not None}):
        yield


#: Kinds of values that hold nothing, most of those in a line.
_PLAIN = frozenset({str, int, float, bool, type(None)})


def redact(_: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Drop what must not be read in a log: credentials always, texts unless the line is at debug level."""
    cleaned = _redacted(event, CREDENTIAL_KEYS if method == "debug" else SECRET_KEYS, 0)
    event.clear()
    event.update(cleaned)
    return event


def _redacted(value: Any, secret: Set[str], depth: int) -> Any:
    if type(value) in _PLAIN:
        return value
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, Mapping):
        return {
            k: _redacted(v, secret, depth + 1)
            for k, v in value.items()
            if not (isinstance(k, str) and k.lower() in secret)
        }
    if isinstance(value, list):
        return [_redacted(item, secret, depth + 1) for item in value]
    if isinstance(value, tuple):
        return tuple(_redacted(item, secret, depth + 1) for item in value)
    return value
