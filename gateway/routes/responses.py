"""`/v1/responses`: the Responses API for text. A response is a job; what was asked is kept with it."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from gateway import response_format, response_requests, response_store, wire_format
from gateway.admission import JobOptions
from gateway.docs import body_docs
from gateway.entrance import Repeat
from gateway.errors import reference_of
from gateway.generation import GenerationResponse, Style
from gateway.response_answer import ResponseAnswer
from gateway.response_events import ResponseEventsResponse
from gateway.response_format import State
from gateway.response_requests import Asked, ResponsesRequest
from gateway.response_store import StoredResponse
from gateway.schemas import ChatCompletionRequest
from gateway.services import Services, body_of, caller_of, repeat_of, services_of
from gateway.submission import Terms
from shared.errors import InvalidRequestError
from shared.jobs import Lifetime

router = APIRouter(tags=["responses"])

_JSON = "application/json"
#: Characters of a request that are looked through in the event loop.
_INLINE_CHARS = 64 * 1024
#: Seconds that a job is kept whose response is not to be stored, in case it cannot be deleted at once.
_UNSTORED_S = 60.0
Id = Annotated[str, Path(description="the response's id")]


@router.post("/v1/responses", openapi_extra=body_docs(ResponsesRequest), response_model=None)
async def create_response(request: Request) -> Response:
    """Answer text, as a stream of events if `stream` is true; with `background` at once, while it is being made."""
    services, body = services_of(request), await body_of(request, ResponsesRequest)
    response_requests.check(body)
    repeat = repeat_of(request, body)
    before = await response_store.conversation(services.store, caller_of(request), body.previous_response_id)

    def chat() -> tuple[Asked, ChatCompletionRequest]:
        asked = response_requests.asked_of(body, before)
        return asked, response_requests.chat_of(body, asked)

    large = sum(len(turn.content) for turn in before) + int(request.headers.get("content-length") or 0) > _INLINE_CHARS
    asked, inner = await services.in_thread(chat) if large else chat()
    if body.background and not body.stream:
        return await _queue(request, asked, inner, repeat)
    style = Style(
        answer=lambda prepared: ResponseAnswer(response_store.shape_of(prepared, asked)),
        naming=response_requests.renamed,
        terms=_terms(services, asked),
        forget=not asked.store,
    )
    return GenerationResponse(services, inner, caller_of(request), reference_of(request), repeat, style)


@router.get("/v1/responses/{response_id}", response_model=None)
async def get_response(
    request: Request,
    response_id: Id,
    stream: Annotated[bool, Query(description="its events, from the first")] = False,
    starting_after: Annotated[
        int | None, Query(ge=0, lt=10**15, description="of a stream, the number of the last event received")
    ] = None,
) -> Response:
    """A response as it is now, or its events."""
    stored = await _stored(request, response_id)
    if not stream:
        return _answer(stored)
    after = -1 if starting_after is None else starting_after
    return ResponseEventsResponse(services_of(request), stored.shape, after, reference_of(request))


@router.get("/v1/responses/{response_id}/input_items", response_model=None)
async def list_input_items(
    request: Request,
    response_id: Id,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    after: Annotated[str | None, Query(max_length=256, description="the item that a page goes on behind")] = None,
) -> Response:
    """The messages that came with a response's request."""
    items = response_format.input_items((await _stored(request, response_id)).shape)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == after]
        if not places:
            raise InvalidRequestError("after: no item has this id", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    body = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
    return Response(wire_format.encode(body), media_type=_JSON)


@router.post("/v1/responses/{response_id}/cancel", response_model=None)
async def cancel_response(request: Request, response_id: Id) -> Response:
    """End a response that is being made. Harmless to repeat."""
    stored = await _stored(request, response_id)
    await services_of(request).store.cancel(stored.view.id)
    return _answer(await _stored(request, response_id))


@router.delete("/v1/responses/{response_id}", response_model=None)
async def delete_response(request: Request, response_id: Id) -> Response:
    """Remove a response with its job; one that is being made has to be cancelled first."""
    stored = await _stored(request, response_id)
    await services_of(request).store.delete(stored.view.id)
    body = {"id": response_id, "object": "response", "deleted": True}
    return Response(wire_format.encode(body), media_type=_JSON)


async def _queue(request: Request, asked: Asked, inner: ChatCompletionRequest, repeat: Repeat | None) -> Response:
    """Queue a response's job, and answer at once."""
    services, caller = services_of(request), caller_of(request)
    options = JobOptions(inner.job_class, 0, asked.metadata)
    with response_requests.renamed():
        prepared = await services.preparer.prepare(inner, caller, options)
    entered = await services.entrance.enter(caller.tenant, prepared, repeat)
    prepared = entered.prepared
    await services.submitter.submit(prepared.envelopes, _terms(services, asked), keep=repeat is not None)
    shape = response_store.shape_of(prepared, asked)
    request.scope["state"]["job_id"] = shape.job_id
    if entered.replayed:
        stored = await _stored(request, response_format.PREFIX + shape.job_id)
        return Response(stored.body(), media_type=_JSON, headers=entered.headers)
    body = wire_format.encode(response_format.response(shape, State("queued")))
    return Response(body, media_type=_JSON, headers=entered.headers)


def _terms(services: Services, asked: Asked) -> Terms:
    if asked.store:
        return Terms(attachment=response_requests.encode(asked))
    settings = services.settings
    return Terms(Lifetime(settings.deadline_s, settings.max_run_s, min(_UNSTORED_S, settings.retention_s)))


def _answer(stored: StoredResponse) -> Response:
    return Response(stored.body(), media_type=_JSON)


async def _stored(request: Request, response_id: str) -> StoredResponse:
    return await response_store.find(services_of(request).store, caller_of(request), response_id)
