"""`/v1/batches`: create, show, list and cancel."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response

from gateway.batch_views import batch_view, page_view
from gateway.docs import body_docs
from gateway.routes.files import After
from gateway.schemas import CreateBatchRequest
from gateway.services import body_of, caller_of, services_of
from shared.batch_record import BatchRecord

router = APIRouter(tags=["batches"])

_JSON = "application/json"


@router.post("/v1/batches", openapi_extra=body_docs(CreateBatchRequest), response_model=None)
async def create_batch(request: Request) -> Response:
    """Run the requests of an uploaded file within 24 hours."""
    body = await body_of(request, CreateBatchRequest)
    return await _shown(request, await services_of(request).batches.create(caller_of(request), body))


@router.get("/v1/batches", response_model=None)
async def list_batches(
    request: Request, after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Response:
    """The caller's batches, the newest first."""
    desk = services_of(request).batches
    records, more = await desk.registry.batches(caller_of(request).tenant, after=after, limit=limit)
    views = [batch_view(record, await desk.progress(record)) for record in records]
    return Response(msgspec.json.encode(page_view(views, more)), media_type=_JSON)


@router.get("/v1/batches/{batch_id}", response_model=None)
async def get_batch(request: Request, batch_id: str) -> Response:
    """One batch."""
    desk = services_of(request).batches
    return await _shown(request, await desk.registry.batch(batch_id, caller_of(request).tenant))


@router.post("/v1/batches/{batch_id}/cancel", response_model=None)
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """End a batch; what is done stays in its output file."""
    return await _shown(request, await services_of(request).batches.cancel(batch_id, caller_of(request).tenant))


async def _shown(request: Request, record: BatchRecord) -> Response:
    progress = await services_of(request).batches.progress(record)
    return Response(msgspec.json.encode(batch_view(record, progress)), media_type=_JSON)
