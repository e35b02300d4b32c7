"""What a batch answers: lines of its output and error files, gathered into parts and put together in the end."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import msgspec

from shared.batch_record import BatchRecord
from shared.file_store import FileStore, trouble
from tasks.batch_engine import Outcome

_EXPIRED: Final = {
    "code": "batch_expired",
    "message": "This request could not be executed before the completion window expired.",
}


@dataclass(slots=True)
class Part:
    """Consecutive lines that are done and not written yet."""

    out: bytearray
    err: bytearray
    job_ids: list[str]
    lines: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0

    @classmethod
    def empty(cls) -> Part:
        """Nothing yet."""
        return cls(bytearray(), bytearray(), [])

    @property
    def outcomes(self) -> dict[str, int]:
        """Lines by what became of them; an expired one is a failed one in what a batch shows of itself."""
        return {"completed": self.completed, "failed": self.failed - self.expired, "expired": self.expired}

    @property
    def bytes(self) -> int:
        """Of both files."""
        return len(self.out) + len(self.err)

    def add(self, batch: str, number: int, custom_id: str, outcome: Outcome) -> None:
        """A line that has ended, with an answer or an error."""
        name = _request_id(batch, number)
        response = {"status_code": outcome.status, "request_id": name, "body": msgspec.Raw(outcome.body)}
        self._write(number, {"id": name, "custom_id": custom_id, "response": response, "error": None}, outcome.done)
        self.job_ids += outcome.job_ids

    def add_expired(self, batch: str, number: int, custom_id: str) -> None:
        """A line whose batch expired before it had ended."""
        name = _request_id(batch, number)
        self._write(number, {"id": name, "custom_id": custom_id, "response": None, "error": _EXPIRED}, False)
        self.expired += 1

    def _write(self, number: int, line: dict[str, object], done: bool) -> None:
        (self.out if done else self.err).extend(msgspec.json.encode(line) + b"\n")
        self.completed += done
        self.failed += not done
        self.lines += 1


def write_part(store: FileStore, batch: str, name: str, part: Part) -> None:
    """Write a part under a name that nobody else writes. Raises StoreUnavailableError."""
    if part.out:
        store.write_part(batch, f"{name}.out", bytes(part.out))
    if part.err:
        store.write_part(batch, f"{name}.err", bytes(part.err))


def join_parts(store: FileStore, batch: BatchRecord, parts: list[str], kind: str, file_id: str) -> int:
    """Put a batch's parts together, as one file; answers its bytes. With none in them no file is made.

    Args:
        kind: `out` or `err`.

    Raises:
        StoreUnavailableError: the store is away.
    """
    written, stream = 0, None
    try:
        for name in parts:
            data = store.read_part(batch.id, f"{name}.{kind}")
            if not data:
                continue
            if stream is None:
                stream = store.create(file_id)
            with trouble():
                stream.write(data)
            written += len(data)
    finally:
        if stream is not None:
            with trouble():
                stream.close()
    return written


def _request_id(batch: str, number: int) -> str:
    return f"batch_req_{hashlib.blake2b(f'{batch}/{number}'.encode(), digest_size=12).hexdigest()}"
