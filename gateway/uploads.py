"""An adapter's two files in a multipart body, written to the store as they come. Nothing of them is kept in memory."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import IO, Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from shared.adapter_store import AdapterStore, StoreUnavailableError
from shared.adapter_store.base import trouble
from shared.errors import InvalidRequestError, PayloadTooLargeError
from shared.lora.files import FILES, PICKLE_FILE
from shared.lora.peft_config import CONFIG_FILE, MAX_CONFIG_BYTES

#: Bytes of a form's field that is no file.
_MAX_FIELD_BYTES: Final = 8 * 1024
_MAX_HEADER_BYTES: Final = 8 * 1024
_MAX_PARTS: Final = 16
#: Bytes of a boundary, as RFC 2046 has it.
_MAX_BOUNDARY: Final = 70
#: Bytes that are gathered before they are written.
_PIECE: Final = 1024 * 1024
_NOT_WRITTEN: Final = "the adapter store cannot be written"
_FIELD: Final = re.compile(r"[a-z_]{1,64}")


class UploadForm:
    """Takes a body in pieces. `fields` are its parts that are no files.

    Args:
        boundary: of the body's Content-Type.
        max_bytes: largest file of weights.
    """

    def __init__(self, store: AdapterStore, boundary: bytes, max_bytes: int) -> None:
        self.upload = secrets.token_hex(16)
        self.fields: dict[str, str] = {}
        self.files: set[str] = set()
        self._store, self._max_bytes = store, max_bytes
        self._header = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._parts = 0
        self._stream: IO[bytes] | None = None
        self._file = self._field = ""
        self._seen = 0
        self._text = bytearray()
        self._ended = False
        self._parser = MultipartParser(boundary, {
            "on_part_begin": self._part_begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._part_data,
            "on_part_end": self._part_end,
            "on_end": self._end,
        })  # fmt: skip

    def feed(self, data: bytes) -> None:
        """Take the next piece; blocks while files are written.

        Raises:
            InvalidRequestError: the body is no form, or holds what does not belong there.
            PayloadTooLargeError: a file is larger than it may be.
            StoreUnavailableError: the store cannot be written.
        """
        try:
            self._parser.write(data)
        except FormParserError:
            raise InvalidRequestError("the body is no multipart form") from None

    def finish(self) -> None:
        """The body is over.

        Raises:
            InvalidRequestError: it was cut off, or one of the two files is missing.
        """
        if not self._ended:
            raise InvalidRequestError("the body is cut off")
        for name in FILES:
            if name not in self.files:
                raise InvalidRequestError(f"{name}: the form has no such file", param=name)

    def abandon(self) -> None:
        """Close and delete what was written."""
        with suppress(StoreUnavailableError):  # what cannot be written is deleted all the same
            self._close()
        if self.files:
            self._store.drop_upload(self.upload)

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise InvalidRequestError(f"the form has more than {_MAX_PARTS} parts")
        self._headers, self._header, self._value = {}, b"", b""
        self._file, self._field, self._seen = "", "", 0

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header = self._bounded(self._header + data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value = self._bounded(self._value + data[start:end])

    def _header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header = self._value = b""

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        filename = options.get(b"filename", b"").decode("utf-8", "replace")
        if b"filename" not in options and name not in FILES:
            if _FIELD.fullmatch(name) is None:
                raise InvalidRequestError("the form has a field without a name, or with a strange one")
            self._field = name
            self._text.clear()
            return
        file = filename if filename in FILES else name
        if PICKLE_FILE in (filename, name):
            raise InvalidRequestError(
                f"{PICKLE_FILE}: only safetensors are read; save the adapter as {FILES[1]}", param=PICKLE_FILE
            )
        if file not in FILES or file in self.files:
            raise InvalidRequestError(
                f"the form must have the files {FILES[0]} and {FILES[1]}, each once, and no others"
            )
        self._file = file
        self.files.add(file)
        self._stream = self._store.create_upload(self.upload, file)

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._seen += end - start
        if self._stream is not None:
            most = MAX_CONFIG_BYTES if self._file == CONFIG_FILE else self._max_bytes
            if self._seen > most:
                raise PayloadTooLargeError(f"{self._file}: larger than the {most} bytes that are allowed")
            with trouble(_NOT_WRITTEN):
                self._stream.write(data[start:end])
        elif self._seen > _MAX_FIELD_BYTES:
            raise PayloadTooLargeError(f"{self._field}: larger than {_MAX_FIELD_BYTES} bytes")
        else:
            self._text += data[start:end]

    def _part_end(self) -> None:
        if self._stream is not None:
            self._close()
        else:
            self.fields[self._field] = self._text.decode("utf-8", "replace")

    def _close(self) -> None:
        """Close the file; what was gathered of it may not fit any more."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with trouble(_NOT_WRITTEN):
                stream.close()

    def _end(self) -> None:
        self._ended = True

    def _bounded(self, header: bytes) -> bytes:
        if len(header) > _MAX_HEADER_BYTES:
            raise InvalidRequestError("the form has a header that is too long")
        return header


def boundary_of(content_type: str) -> bytes | None:
    """The boundary of a form; None for a body of another kind. Raises InvalidRequestError where it is missing."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        return None
    boundary: Any = options.get(b"boundary")
    if not boundary or len(boundary) > _MAX_BOUNDARY:
        raise InvalidRequestError(f"Content-Type: multipart/form-data needs a boundary of 1 to {_MAX_BOUNDARY} bytes")
    return bytes(boundary)


async def receive(form: UploadForm, stream: AsyncIterator[bytes]) -> None:
    """Take a whole body; what was written of one that is refused or cut off is deleted.

    Raises:
        InvalidRequestError, PayloadTooLargeError, StoreUnavailableError: see `UploadForm.feed` and `finish`.
    """
    gathered = bytearray()
    try:
        async for piece in stream:
            gathered += piece
            if len(gathered) >= _PIECE:
                await asyncio.to_thread(form.feed, bytes(gathered))
                gathered.clear()
        await asyncio.to_thread(form.feed, bytes(gathered))
        form.finish()
    except BaseException:
        await asyncio.shield(asyncio.to_thread(form.abandon))
        raise
