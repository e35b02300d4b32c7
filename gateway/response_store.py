"""Responses as the queue has them: each is a job, with what was asked kept beside it."""

from __future__ import annotations

from dataclasses import dataclass

from gateway import errors, response_format, response_requests, wire_format
from gateway.admission import Caller
from gateway.preparation import Prepared
from gateway.response_format import ResponseShape, State
from gateway.response_requests import Asked, Turn
from shared.errors import InvalidRequestError, JobNotFoundError
from shared.jobs import JobView
from shared.jobstore import JobStore
from shared.protocol import FINAL_STATUSES, Result, decode


class ResponseNotFoundError(JobNotFoundError):
    """No response has this id, it has expired, or it was not to be stored."""

    code = "response_not_found"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it is now."""

    shape: ResponseShape
    view: JobView
    result: Result | None

    @property
    def text(self) -> str:
        """Of its answer, as far as it has ended."""
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


def shape_of(prepared: Prepared, asked: Asked) -> ResponseShape:
    """The response that a prepared request will be."""
    envelope = prepared.envelopes[0]
    return ResponseShape(envelope.id, envelope.model, prepared.shape.created, asked, envelope.sampling)


async def find(store: JobStore, caller: Caller, response_id: str) -> StoredResponse:
    """A response, if it is the caller's and was stored.

    Raises:
        ResponseNotFoundError: it is not, or there is none.
    """
    missing = ResponseNotFoundError("no response has this id", param="response_id")
    try:
        view = await store.get(response_format.job_of(response_id))
    except JobNotFoundError:
        raise missing from None
    if view.attachment is None or (caller.authenticated and view.envelope.tenant != caller.tenant):
        raise missing
    asked = response_requests.decode(view.attachment)
    envelope = view.envelope
    shape = ResponseShape(view.id, envelope.model, envelope.created_ms // 1000, asked, envelope.sampling)
    ended = view.result is not None and view.status in FINAL_STATUSES
    return StoredResponse(shape, view, decode(view.result, Result) if ended and view.result is not None else None)


async def conversation(store: JobStore, caller: Caller, previous: str | None) -> list[Turn]:
    """What was said up to and with a previous response.

    Raises:
        InvalidRequestError: there is no such response, or it has not ended well.
    """
    if previous is None:
        return []
    name = "previous_response_id"
    try:
        stored = await find(store, caller, previous)
    except ResponseNotFoundError:
        raise InvalidRequestError(
            f"{name}: no response has this id, or it has expired", param=name, code="previous_response_not_found"
        ) from None
    if stored.view.status != "completed":
        raise InvalidRequestError(f"{name}: that response is {stored.view.status}", param=name)
    return [*stored.shape.asked.conversation, Turn("assistant", stored.text)]
