"""What is known of an adapter under its name: a value, and how it changes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import msgspec

from shared.errors import ProtocolError, VersionError
from shared.keys import POOL_PATTERN
from shared.lora.files import IDENTITY_PATTERN
from shared.protocol import WIRE_VERSION

#: Bytes of one record.
MAX_RECORD_BYTES: Final = 64 * 1024


class PendingLoad(msgspec.Struct, kw_only=True, frozen=True):
    """A load under way.

    Attributes:
        version: that it will give the name.
        source: as it was asked for: a folder, `hf:owner/name[@revision]`, or `upload:<32 hex digits>`.
        pinned: whether workers are to keep it in memory.
        since_ms: when it was asked for, by Redis's clock.
        starts: how often it was begun anew because whoever was at it died.
        error: why the last try has failed, where it is tried again.
    """

    version: int
    source: str
    pinned: bool = False
    since_ms: int = 0
    starts: int = 0
    error: str | None = None


class Content(msgspec.Struct, kw_only=True, frozen=True):
    """What was loaded.

    Attributes:
        identity: hash of weights and config, 32 hex digits; where it is in the store.
        rank: largest rank of its parts.
        bytes: of its weights' file.
        revision: commit on the hub, for what came from there.
    """

    identity: str
    rank: int
    bytes: int
    revision: str | None = None


class AdapterRecord(msgspec.Struct, kw_only=True, frozen=True):
    """A name and what it stands for.

    Attributes:
        pool: the pool of its base model.
        version: of what serves now; rises with each load under this name, 0 until the first one has succeeded.
        content: what serves now, None until the first load has succeeded.
        source: where that came from.
        pinned: workers keep it in memory.
        error: why the last load failed, None once one has succeeded.
        created_ms, loaded_ms: first asked for, last loaded; Unix ms of Redis's clock, 0 for never.
        next_version: that the next load gets.
        pending: the load under way.
        stamp: drawn anew with each change, so that no two records are the same by chance.
    """

    v: int = WIRE_VERSION
    name: str
    pool: str
    version: int = 0
    content: Content | None = None
    source: str | None = None
    pinned: bool = False
    error: str | None = None
    created_ms: int = 0
    loaded_ms: int = 0
    next_version: int = 1
    pending: PendingLoad | None = None
    stamp: str = ""

    @property
    def identity(self) -> str | None:
        """Of what serves now."""
        return None if self.content is None else self.content.identity


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(AdapterRecord)


def encode_record(record: AdapterRecord) -> bytes:
    """The record as a msgpack map. Raises ProtocolError where it is too large."""
    data = _ENCODER.encode(record)
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolError(f"AdapterRecord has {len(data)} bytes, the limit is {MAX_RECORD_BYTES}")
    return data


def decode_record(data: bytes) -> AdapterRecord:
    """A record, strictly.

    Raises:
        VersionError: another major version.
        ProtocolError: malformed, of wrong types or too large.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise ProtocolError(f"AdapterRecord has {len(data)} bytes, the limit is {MAX_RECORD_BYTES}")
    try:
        record = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError("AdapterRecord does not decode") from error
    if record.v != WIRE_VERSION:
        raise VersionError(f"AdapterRecord has wire version {record.v}, this process speaks {WIRE_VERSION}")
    return record


def salvage(name: str, data: bytes) -> AdapterRecord:
    """What can be told of a record that does not read, so that it can be forgotten: pool and content, if anything.

    Without them its pool is empty, and its content none.
    """
    fields: Any = None
    with suppress(msgspec.DecodeError, RecursionError, ValueError):
        fields = msgspec.msgpack.decode(data)
    fields = fields if isinstance(fields, dict) else {}
    pool, content = fields.get("pool"), fields.get("content")
    identity = content.get("identity") if isinstance(content, dict) else None
    known = IDENTITY_PATTERN.fullmatch(identity) if isinstance(identity, str) else None
    return AdapterRecord(
        name=name,
        pool=pool if isinstance(pool, str) and POOL_PATTERN.match(pool) else "",
        content=None if known is None else Content(identity=known[0], rank=0, bytes=0),
    )
