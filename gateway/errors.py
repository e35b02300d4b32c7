"""Errors as HTTP answers: the OpenAI body, and what of an error may leave this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import structlog
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import (
    InvalidRequestError,
    JobError,
    JobExpiredError,
    OverloadedError,
    ProtocolError,
    RopewayError,
    ServiceUnavailableError,
)
from shared.protocol import ErrorInfo

log = structlog.get_logger(__name__)

#: Entries of a location that are shown: names of fields and indexes, never a client's own keys.
_MAX_LOCATION = 6
#: Faults of a body of which the first is looked for: they are all made to objects, and of millions that takes the whole
#: process seconds and gigabytes.
_MAX_FAULTS = 1_000


class UnsupportedMediaTypeError(InvalidRequestError):
    """A body in an encoding that is not taken, such as gzip."""

    status = 415
    code = "unsupported_content_encoding"


class MethodNotAllowedError(InvalidRequestError):
    """The path exists, not for this method."""

    status = 405
    code = "method_not_allowed"


class JobLostError(JobError):
    """The queue no longer knows a job that this process follows: Redis lost its data."""

    code = "job_lost"


def _classes(root: type[RopewayError]) -> Iterator[type[RopewayError]]:
    yield root
    for child in root.__subclasses__():
        yield from _classes(child)


_BY_CODE = {c.code: c for c in _classes(RopewayError) if c.code is not None}
#: Server errors whose message is written for clients.
_SPEAKING = (JobExpiredError, ServiceUnavailableError, OverloadedError, JobLostError)


def error_of(info: ErrorInfo, job_id: str) -> RopewayError:
    """The error of a job as its client may see it: of an internal one only the kind and the job's id."""
    kind = _BY_CODE.get(info.code or "", InvalidRequestError if 400 <= info.status < 500 else JobError)
    if kind.status >= 500 and not issubclass(kind, _SPEAKING):
        log.warning("job.failed", job_id=job_id, code=info.code, error=info.message)
        return kind(f"The job failed inside the server. Its id is {job_id}", code=info.code)
    return kind(info.message, param=info.param, code=info.code)


def public(error: RopewayError, reference: str) -> ErrorInfo:
    """What a client is told. `reference` is the id under which the log has the details."""
    if isinstance(error, ProtocolError):
        return ErrorInfo(message=f"Internal error; its id is {reference}", type=error.type, code=error.error_code)
    return ErrorInfo.of(error)


def internal(reference: str) -> ErrorInfo:
    """What a client is told of an exception that nobody foresaw."""
    return ErrorInfo(message=f"Internal error; its id is {reference}", type="server_error", code="internal_error")


def body(info: ErrorInfo) -> bytes:
    """The OpenAI error body as JSON."""
    return msgspec.json.encode(
        {"error": {"message": info.message, "type": info.type, "param": info.param, "code": info.code}}
    )


def answer(info: ErrorInfo, retry_after: float | None = None) -> Response:
    """The whole HTTP answer."""
    headers = {} if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}
    if info.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Response(body(info), status_code=info.status, media_type="application/json", headers=headers)


def answer_of(error: RopewayError, reference: str) -> Response:
    """The whole HTTP answer to an error of the tree."""
    info = public(error, reference)
    retry_after = error.retry_after
    if retry_after is None and error.status in (429, 503):
        retry_after = 1.0
    response = answer(info, retry_after)
    if isinstance(error, OverloadedError):
        response.headers.update(error.headers)
    return response


def invalid(error: ValidationError, known: frozenset[str]) -> InvalidRequestError:
    """The first fault of a body as an error that names the field and never holds the client's values.

    `known` are the names of fields; of a location nothing else is shown, since keys are the client's own text.
    """
    if error.error_count() > _MAX_FAULTS:
        return InvalidRequestError(f"the body has {error.error_count()} values of wrong types")
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = location(first["loc"], known)
    return InvalidRequestError(f"{param}: {_message(first)}" if param else _message(first), param=param)


def location(path: Sequence[int | str], known: frozenset[str]) -> str | None:
    """A location as `messages[0].content`; None for the body as a whole."""
    text = ""
    for part in path[:_MAX_LOCATION]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part in known:
            text += f".{part}" if text else part
        else:
            break
    return text or None


def _message(detail: ErrorDetails) -> str:
    if detail["type"] == "json_invalid":
        return f"the body is not valid JSON ({detail['msg'].removeprefix('Invalid JSON: ')})"
    if detail["type"] == "missing":
        return "this field is required"
    if detail["type"] == "model_type":
        return "must be a JSON object"
    return detail["msg"][:1].lower() + detail["msg"][1:]


def install(app: FastAPI) -> None:
    """Give every error of the tree, of the framework and of nobody the OpenAI body."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, RopewayError)
        reference = reference_of(request)
        if isinstance(error, ProtocolError):
            log.error("request.protocol_error", internal_id=reference, exc_info=error)
        return answer_of(error, reference)

    async def frameworks(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        known = {404: ("invalid_request_error", "not_found"), 405: ("invalid_request_error", "method_not_allowed")}
        kind, code = known.get(error.status_code, ("invalid_request_error", None))
        message = {404: "There is nothing under this path", 405: "This path does not take this method"}
        info = ErrorInfo(
            message=message.get(error.status_code, "The request cannot be served"),
            type=kind,
            code=code,
            status=error.status_code,
        )
        response = answer(info)
        response.headers.update(error.headers or {})
        return response

    async def queries(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        name = str(first["loc"][-1]) if first["loc"] and first["loc"][0] in ("query", "path") else None
        return answer_of(InvalidRequestError(f"{name}: {_message(first)}", param=name), reference_of(request))

    app.add_exception_handler(RopewayError, ours)
    app.add_exception_handler(HTTPException, frameworks)
    app.add_exception_handler(RequestValidationError, queries)


def reference_of(request: Request) -> str:
    """The id of this request in the log."""
    return str(request.scope.get("state", {}).get("internal_id", "unknown"))
