"""Calls of the scripts that concern adapters. All their keys carry one hash tag."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import msgspec

from shared import keys
from shared.adapter_record import AdapterRecord, encode_record
from shared.scripts import Call, load

#: Control message: the adapters of this pool are others.
CHANGED: Final = msgspec.msgpack.encode({"op": "adapters"})
#: Milliseconds that the deletion of a content may take.
_DELETE_MS: Final = 600_000

#: Of a content that no name has pointed to for long: it is being deleted, it is gone, or some name does point to it.
Step = Literal["delete", "deleted", "used"]


def write(name: str, data: bytes, held: AdapterRecord | None, wanted: AdapterRecord | None, most: int) -> Call:
    """Put `wanted` in the place of `held`, which was read as `data`. Where nothing is wanted, what serves drains."""
    record = wanted or held
    if record is None:
        raise ValueError("there is nothing to change")
    drains = wanted is None and held is not None and held.content is not None
    names = [keys.adapters(what) for what in ("names", "draining", "unused", "revision")]
    return _call(
        "adapter_write",
        names,
        [
            name,
            data,
            b"" if wanted is None else encode_record(wanted),
            encode_record(msgspec.structs.replace(record, pending=None)) if drains else b"",
            draining_field(record),
            _identity(held),
            _identity(wanted),
            most,
            keys.control(record.pool),
            CHANGED,
        ],
    )


def keep(identity: str) -> Call:
    """Keep a content that is about to be put into the store."""
    return _call("adapter_keep", _content_keys(identity), [identity])


def drop(identity: str, since_ms: int, step: Step) -> Call:
    """A step in the deletion of a content that no name has pointed to since a time."""
    return _call("adapter_drop", _content_keys(identity), [identity, since_ms, step, _DELETE_MS])


def draining_field(record: AdapterRecord) -> str:
    """Under which an unloaded name's record is kept while jobs pin its content."""
    return f"{record.name}@{record.version}"


def _identity(record: AdapterRecord | None) -> str:
    return "" if record is None or record.content is None else record.content.identity


def _content_keys(identity: str) -> list[str]:
    return [keys.adapters("unused"), keys.adapters(f"deleting:{identity}")]


def _call(name: str, names: Sequence[str], arguments: Sequence[Any]) -> Call:
    script = load(name)
    return Call(("EVALSHA", script.sha, len(names), *names, *arguments), names[0], script)
