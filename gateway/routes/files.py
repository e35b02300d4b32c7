"""`/v1/files`: upload, list, show, read and delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import IO, Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from gateway.batch_views import file_view, page_view
from gateway.file_form import FileForm
from gateway.multipart import boundary_of, receive
from gateway.services import caller_of, services_of
from shared.batches import new_file_id
from shared.errors import InvalidRequestError, NotFoundError
from shared.file_store import trouble

router = APIRouter(tags=["batches"])

_JSON: Final = "application/json"
_PIECE: Final = 256 * 1024
_FORM: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}
After = Annotated[str | None, Query(max_length=64, description="the last id of the page before")]


@router.post("/v1/files", openapi_extra=_FORM, response_model=None)
async def create_file(request: Request) -> Response:
    """Upload a file: a form with `purpose` (`batch`) and `file`."""
    services = services_of(request)
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        raise InvalidRequestError("Content-Type: must be multipart/form-data")
    file_id = new_file_id()
    store = await asyncio.to_thread(services.batches.store)
    form = FileForm(store, file_id, boundary, services.settings.max_file_bytes)
    await receive(form, request.stream())
    try:
        record = await services.batches.add_file(caller_of(request).tenant, file_id, form)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(form.abandon))
        raise
    return Response(msgspec.json.encode(file_view(record)), media_type=_JSON)


@router.get("/v1/files", response_model=None)
async def list_files(
    request: Request,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """The caller's files."""
    records, more = await services_of(request).batches.registry.files(
        caller_of(request).tenant, after=after, limit=limit, ascending=order == "asc", purpose=purpose
    )
    return Response(msgspec.json.encode(page_view([file_view(r) for r in records], more)), media_type=_JSON)


@router.get("/v1/files/{file_id}", response_model=None)
async def get_file(request: Request, file_id: str) -> Response:
    """One file."""
    record = await services_of(request).batches.registry.file(file_id, caller_of(request).tenant)
    return Response(msgspec.json.encode(file_view(record)), media_type=_JSON)


@router.delete("/v1/files/{file_id}", response_model=None)
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file; 409 while a batch reads it."""
    await services_of(request).batches.delete_file(file_id, caller_of(request).tenant)
    body = {"id": file_id, "object": "file", "deleted": True}
    return Response(msgspec.json.encode(body), media_type=_JSON)


@router.get("/v1/files/{file_id}/content", response_model=None)
async def get_content(request: Request, file_id: str) -> Response:
    """A file's content."""
    desk = services_of(request).batches
    record = await desk.registry.file(file_id, caller_of(request).tenant)
    store = await asyncio.to_thread(desk.store)
    try:
        stream = await asyncio.to_thread(store.open, record.id)
    except FileNotFoundError:
        raise NotFoundError("The content of this file is gone", param="id") from None
    headers = {"content-length": str(record.bytes)}
    return StreamingResponse(_pieces(stream), media_type="application/octet-stream", headers=headers)


async def _pieces(stream: IO[bytes]) -> AsyncIterator[bytes]:
    def read() -> bytes:
        with trouble():
            return stream.read(_PIECE)

    try:
        while piece := await asyncio.to_thread(read):
            yield piece
    finally:
        await asyncio.to_thread(stream.close)
