"""W3C trace context as it travels in headers and envelopes: `traceparent`, and `tracestate` where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

Trace = Mapping[str, str]

NO_TRACE: Final[Trace] = MappingProxyType({})
#: Characters of a header that are carried on.
_MAX_CHARS: Final = 512
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})(?:-|\Z)")


def carried(get: Callable[[str], str | None]) -> dict[str, str]:
    """The trace context of a request, by what `get` answers for a header; empty where there is none."""
    parent = get("traceparent")
    if not parent or len(parent) > _MAX_CHARS:
        return {}
    state = get("tracestate")
    if not state or len(state) > _MAX_CHARS:
        return {"traceparent": parent}
    return {"traceparent": parent, "tracestate": state}


def trace_id(trace: Trace) -> str | None:
    """The 32 hex digits of the trace, or None where there is none."""
    found = _TRACEPARENT.match(trace.get("traceparent", ""))
    return None if found is None else found[1]


def is_sampled(trace: Trace) -> bool:
    """Whether whoever began the trace has it recorded."""
    found = _TRACEPARENT.match(trace.get("traceparent", ""))
    return found is not None and bool(int(found[2], 16) & 1)
