"""A multipart body whose files are written as they come. Nothing of them is kept in memory."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, suppress
from typing import IO, Any, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from shared.errors import InvalidRequestError, PayloadTooLargeError, StoreUnavailableError

#: Bytes of a form's field that is no file.
_MAX_FIELD_BYTES: Final = 8 * 1024
_MAX_HEADER_BYTES: Final = 8 * 1024
_MAX_PARTS: Final = 16
#: Bytes of a boundary, as RFC 2046 has it.
_MAX_BOUNDARY: Final = 70
#: Bytes that are gathered before they are written.
_PIECE: Final = 1024 * 1024
_FIELD: Final = re.compile(r"[a-z_\[\]]{1,64}")


class MultipartForm(ABC):
    """Takes a body in pieces. `fields` are its parts that are no files, `sizes` the bytes of its files.

    Args:
        boundary: of the body's Content-Type.
    """

    def __init__(self, boundary: bytes) -> None:
        self.fields: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
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

    @abstractmethod
    def is_file(self, name: str, has_filename: bool) -> bool:
        """Whether a part is a file."""

    @abstractmethod
    def begin_file(self, name: str, filename: str) -> tuple[str, IO[bytes]]:
        """What a file is called in errors, and where it goes. Raises InvalidRequestError, StoreUnavailableError."""

    @abstractmethod
    def writing(self) -> AbstractContextManager[None]:
        """A context in which failures of the store become StoreUnavailableErrors."""

    @abstractmethod
    def max_bytes(self, file: str) -> int:
        """The most bytes of a file."""

    @abstractmethod
    def check_files(self) -> None:
        """The body is over. Raises InvalidRequestError where a file is missing."""

    @abstractmethod
    def drop_files(self) -> None:
        """Delete what was written."""

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
            InvalidRequestError: it was cut off, or a file is missing.
        """
        if not self._ended:
            raise InvalidRequestError("the body is cut off")
        self.check_files()

    def abandon(self) -> None:
        """Close and delete what was written."""
        with suppress(StoreUnavailableError):  # what cannot be written is deleted all the same
            self._close()
        self.drop_files()

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
        if self.is_file(name, b"filename" in options):
            self._file, self._stream = self.begin_file(name, filename)
            return
        if _FIELD.fullmatch(name) is None:
            raise InvalidRequestError("the form has a field without a name, or with a strange one")
        self._field = name
        self._text.clear()

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._seen += end - start
        if self._stream is not None:
            most = self.max_bytes(self._file)
            if self._seen > most:
                raise PayloadTooLargeError(f"{self._file}: larger than the {most} bytes that are allowed")
            with self.writing():
                self._stream.write(data[start:end])
        elif self._seen > _MAX_FIELD_BYTES:
            raise PayloadTooLargeError(f"{self._field}: larger than {_MAX_FIELD_BYTES} bytes")
        else:
            self._text += data[start:end]

    def _part_end(self) -> None:
        if self._stream is not None:
            self._close()
            self.sizes[self._file] = self._seen
        else:
            self.fields[self._field] = self._text.decode("utf-8", "replace")

    def _close(self) -> None:
        """Close the file; what was gathered of it may not fit any more."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with self.writing():
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


async def receive(form: MultipartForm, stream: AsyncIterator[bytes]) -> None:
    """Take a whole body; what was written of one that is refused or cut off is deleted.

    Raises:
        InvalidRequestError, PayloadTooLargeError, StoreUnavailableError: see `MultipartForm.feed` and `finish`.
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
