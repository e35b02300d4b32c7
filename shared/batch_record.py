"""What is kept of files and batches, in JSON."""

from __future__ import annotations

from typing import Final, Literal, TypeVar

import msgspec

from shared.errors import ForeignDataError

Purpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
#: Of a batch that has ended.
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
#: Paths that lines may ask for.
ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
#: Seconds of the only completion window that there is.
WINDOW_S: Final = 24 * 3600

R = TypeVar("R", bound=msgspec.Struct)


class FileRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A file. Times are Unix milliseconds; `filename` is the client's, and never a path here."""

    id: str
    tenant: str
    filename: str
    purpose: Purpose
    bytes: int
    created_ms: int
    expires_ms: int


class Fault(msgspec.Struct, kw_only=True, frozen=True):
    """Why a batch failed. `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A batch. Times are Unix milliseconds, 0 where not yet.

    Attributes:
        tenant: whose it is; `authenticated`: whether that came from a key; `key`: its public id.
        outcome: how it will end, once that is known.
        total, completed, failed: lines; the latter two as they were at the end.
        slices: how often a task was queued for it.
        trace: W3C trace context of whoever made it.
    """

    id: str
    tenant: str
    authenticated: bool
    endpoint: str
    input_file: str
    created_ms: int
    expires_ms: int
    metadata: dict[str, str] | None = None
    status: BatchStatus = "validating"
    outcome: Literal["completed", "expired", "cancelled"] | None = None
    faults: list[Fault] = []
    output_file: str | None = None
    error_file: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    slices: int = 0
    trace: dict[str, str] = {}
    key: str = ""
    started_ms: int = 0
    finalizing_ms: int = 0
    cancelling_ms: int = 0
    ended_ms: int = 0

    @property
    def ended(self) -> bool:
        """Nothing changes it any more."""
        return self.status in ENDED


class Progress(msgspec.Struct, kw_only=True, frozen=True):
    """How far a batch is.

    Attributes:
        next_line: of the input, from 0: those before it are in the parts.
        completed, failed: lines in the parts.
        seen_completed, seen_failed: as last shown, those included that are in no part yet.
        deaths: how often whoever was at it died, since it last came further.
    """

    next_line: int = 0
    completed: int = 0
    failed: int = 0
    seen_completed: int = 0
    seen_failed: int = 0
    deaths: int = 0


def encode(record: msgspec.Struct) -> bytes:
    """A record as it is kept."""
    return msgspec.json.encode(record)


def decode(data: bytes, kind: type[R]) -> R:
    """Read a record. Raises ForeignDataError where it is none."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ForeignDataError(f"a {kind.__name__} is not one that was written here: {error}") from None
