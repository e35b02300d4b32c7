"""A batch's input: lines of a JSONL file as they come, and what may be wrong with the file as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Final

import msgspec

from shared.batch_record import Fault

#: Most lines of a batch.
MAX_LINES: Final = 50_000
#: Faults that are told of one file.
MAX_FAULTS: Final = 100
#: Characters of a custom id.
MAX_CUSTOM_ID: Final = 512


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank. `number` counts from 0, blank ones included."""

    number: int
    data: bytes


class LineTooLongError(ValueError):
    """A line has more bytes than a request's body may have."""


class _Entry(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def read_lines(stream: IO[bytes], max_bytes: int) -> Iterator[Line]:
    """The lines of a file; memory is bounded by the longest.

    Args:
        max_bytes: of a line.

    Raises:
        LineTooLongError: one has more; `args` is its number.
    """
    number = 0
    while data := stream.readline(max_bytes + 1):
        if len(data) > max_bytes and not data.endswith(b"\n"):
            raise LineTooLongError(number)
        if stripped := data.strip(b" \t\r\n"):
            yield Line(number, stripped)
        number += 1


def entry_of(line: Line) -> tuple[str, bytes]:
    """Custom id and body of a line that `check_file` has passed."""
    entry = msgspec.json.decode(line.data, type=_Entry)
    return entry.custom_id, bytes(entry.body)


def check_file(stream: IO[bytes], endpoint: str, max_line_bytes: int) -> tuple[int, list[Fault]]:
    """How many lines a batch has, and what is wrong with its file; what bodies ask for is looked at when they run."""
    total, faults, seen = 0, list[Fault](), dict[bytes, int]()
    try:
        for line in read_lines(stream, max_line_bytes):
            total += 1
            if total > MAX_LINES:
                return total, [Fault(code="too_many_requests", message=f"the file has more than {MAX_LINES} requests")]
            fault = _check(line, endpoint, seen)
            if fault is not None:
                faults.append(fault)
            if len(faults) >= MAX_FAULTS:
                return total, faults
    except LineTooLongError as error:
        message = f"the line has more than {max_line_bytes} bytes"
        faults.append(Fault(code="line_too_long", message=message, line=int(error.args[0]) + 1))
    if not total and not faults:
        faults.append(Fault(code="empty_file", message="the file has no requests"))
    return total, faults


def _check(line: Line, endpoint: str, seen: dict[bytes, int]) -> Fault | None:
    number = line.number + 1

    def fault(code: str, message: str, param: str | None = None) -> Fault:
        return Fault(code=code, message=message, param=param, line=number)

    try:
        entry: Any = msgspec.json.decode(line.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return fault("invalid_json_line", "the line is not valid JSON")
    if not isinstance(entry, dict):
        return fault("invalid_json_line", "the line is not a JSON object")
    custom_id = entry.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id: must be a text of 1 to {MAX_CUSTOM_ID} characters"
        return fault("missing_required_parameter" if custom_id is None else "invalid_custom_id", message, "custom_id")
    digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    first = seen.setdefault(digest, number)
    if first != number:
        return fault("duplicate_custom_id", f"custom_id: line {first} has the same", "custom_id")
    if entry.get("method") != "POST":
        return fault("invalid_method", "method: must be POST", "method")
    if entry.get("url") != endpoint:
        return fault("mismatched_url", f"url: must be the batch's endpoint, {endpoint}", "url")
    if not isinstance(entry.get("body"), dict):
        return fault("invalid_body", "body: must be a JSON object", "body")
    if entry["body"].get("stream"):
        return fault("streaming_unsupported", "body.stream: a batch does not stream", "body.stream")
    return None
