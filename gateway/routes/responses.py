"""`/v1/responses`: the Responses API for text. A response is a job; what was asked is kept with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response

from gateway import errors, response_format, response_requests, wire_format
from gateway.admission import JobOptions
from gateway.docs import body_docs
from gateway.entrance import Repeat
from gateway.errors import reference_of
from gateway.generation import GenerationResponse, Style
from gateway.preparation import Prepared
from gateway.response_answer import ResponseAnswer
from gateway.response_events import ResponseEventsResponse
from gateway.response_format import ResponseShape, State
from gateway.response_requests import Asked, ResponsesRequest, Turn
from gateway.schemas import ChatCompletionRequest
from gateway.services import Services, body_of, caller_of, repeat_of, services_of
from gateway.submission import Terms
from shared.errors import InvalidRequestError, JobNotFoundError
from shared.jobs import JobView, Lifetime
from shared.protocol import FINAL_STATUSES, Result, decode

router = APIRouter(tags=["responses"])

_JSON = "application/json"
#: Characters of a request that are looked through in the event loop.
_INLINE_CHARS = 64 * 1024
#: Seconds that a job is kept whose response is not to be stored, in case it cannot be deleted at once.
_UNSTORED_S = 60.0
Id = Annotated[str, Path(description="the response's id")]


class ResponseNotFoundError(JobNotFoundError):
    """No response has this id, it has expired, or it was not to be stored."""

    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class _Stored:
    """A response as the queue has it."""

    shape: ResponseShape
    view: JobView
    result: Result | None

    @property
    def text(self) -> str:
        return self.result.choices[0].text if self.result is not None and self.result.choices else ""

    def body(self) -> bytes:
        """The object, as JSON."""
        result, view = self.result, self.view
        state = State(
            view.status,
            self.text,
            result.choices[0].finish_reason if result is not None and result.choices else None,
            None if result is None else result.usage,
            None if result is None or result.error is None else errors.public(
                errors.error_of(result.error, view.id), view.id
            ),
            view.finished_ms // 1000 or None,
        )  # fmt: skip
        return wire_format.encode(response_format.response(self.shape, state))


@router.post("/v1/responses", openapi_extra=body_docs(ResponsesRequest), response_model=None)
async def create_response(request: Request) -> Response:
    """Answer text, as a stream of events if `stream` is true; with `background` at once, while it is being made."""
    services, body = services_of(request), await body_of(request, ResponsesRequest)
    response_requests.check(body)
    repeat = repeat_of(request, body)
    before = await _conversation(request, body.previous_response_id)

    def chat() -> tuple[Asked, ChatCompletionRequest]:
        asked = response_requests.asked_of(body, before)
        return asked, response_requests.chat_of(body, asked)

    large = sum(len(turn.content) for turn in before) + int(request.headers.get("content-length") or 0) > _INLINE_CHARS
    asked, inner = await services.in_thread(chat) if large else chat()
    if body.background and not body.stream:
        return await _queue(request, asked, inner, repeat)
    style = Style(
        answer=lambda prepared: ResponseAnswer(_shape(prepared, asked)),
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
    return Response(wire_format.encode(body), media_type=_JSON, headers={"x-ropeway-job-id": stored.view.id})


async def _queue(request: Request, asked: Asked, inner: ChatCompletionRequest, repeat: Repeat | None) -> Response:
    """Queue a response's job, and answer at once."""
    services, caller = services_of(request), caller_of(request)
    options = JobOptions(inner.job_class, 0, asked.metadata)
    with response_requests.renamed():
        prepared = await services.preparer.prepare(inner, caller, options)
    entered = await services.entrance.enter(caller.tenant, prepared, repeat)
    prepared = entered.prepared
    await services.submitter.submit(prepared.envelopes, _terms(services, asked), keep=repeat is not None)
    shape = _shape(prepared, asked)
    headers = {"x-ropeway-job-id": shape.job_id, **entered.headers}
    if entered.replayed:
        stored = await _stored(request, response_format.PREFIX + shape.job_id)
        return Response(stored.body(), media_type=_JSON, headers=headers)
    body = wire_format.encode(response_format.response(shape, State("queued")))
    return Response(body, media_type=_JSON, headers=headers)


def _terms(services: Services, asked: Asked) -> Terms:
    if asked.store:
        return Terms(attachment=response_requests.encode(asked))
    settings = services.settings
    return Terms(Lifetime(settings.deadline_s, settings.max_run_s, min(_UNSTORED_S, settings.retention_s)))


def _shape(prepared: Prepared, asked: Asked) -> ResponseShape:
    envelope = prepared.envelopes[0]
    return ResponseShape(envelope.id, envelope.model, prepared.shape.created, asked, envelope.sampling)


def _answer(stored: _Stored) -> Response:
    return Response(stored.body(), media_type=_JSON, headers={"x-ropeway-job-id": stored.view.id})


async def _stored(request: Request, response_id: str) -> _Stored:
    """A response, if it is the caller's and was stored.

    Raises:
        ResponseNotFoundError: it is not, or there is none.
    """
    caller, missing = caller_of(request), ResponseNotFoundError("no response has this id", param="response_id")
    try:
        view = await services_of(request).store.get(response_format.job_of(response_id))
    except JobNotFoundError:
        raise missing from None
    if view.attachment is None or (caller.authenticated and view.envelope.tenant != caller.tenant):
        raise missing
    asked = response_requests.decode(view.attachment)
    envelope = view.envelope
    shape = ResponseShape(view.id, envelope.model, envelope.created_ms // 1000, asked, envelope.sampling)
    ended = view.result is not None and view.status in FINAL_STATUSES
    return _Stored(shape, view, decode(view.result, Result) if ended and view.result is not None else None)


async def _conversation(request: Request, previous: str | None) -> list[Turn]:
    """What was said up to and with a previous response.

    Raises:
        InvalidRequestError: there is no such response, or it has not ended well.
    """
    if previous is None:
        return []
    name = "previous_response_id"
    try:
        stored = await _stored(request, previous)
    except ResponseNotFoundError:
        raise InvalidRequestError(
            f"{name}: no response has this id, or it has expired", param=name, code="previous_response_not_found"
        ) from None
    if stored.view.status != "completed":
        raise InvalidRequestError(f"{name}: that response is {stored.view.status}", param=name)
    return [*stored.shape.asked.conversation, Turn("assistant", stored.text)]
