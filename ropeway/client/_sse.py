"""Server-sent events out of bytes, after the WHATWG's rules.

On bytes, because lines end at CR, LF and CRLF only: splitting decoded text would also break at U+2028 and its like,
which JSON may hold as they are.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class ServerSentEvent:
    """One event. `id` is the last id seen so far, which an event without one keeps."""

    event: str = "message"
    data: str = ""
    id: str = ""


class SseDecoder:
    """Takes bytes as they come, gives the events that they complete."""

    def __init__(self) -> None:
        self._pending = b""
        self._first_line = True
        self._event = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """The events whose end is in this chunk; an unfinished line is kept for the next."""
        self._pending += chunk
        # A CR at the end may be the first half of a CRLF: it waits for what follows.
        held = b"\r" if self._pending.endswith(b"\r") else b""
        body = self._pending[: len(self._pending) - len(held)]
        *lines, rest = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._pending = rest + held
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, raw: bytes) -> ServerSentEvent | None:
        line = raw.decode("utf-8", errors="replace")
        if self._first_line:
            self._first_line = False
            line = line.removeprefix("\ufeff")
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> ServerSentEvent | None:
        """A blank line: an event if there is data, else nothing (a comment or a lone id)."""
        event, data = self._event or "message", self._data
        self._event, self._data = "", []
        return ServerSentEvent(event, "\n".join(data), self._id) if data else None
