"""The error tree. Every error that a client can see is one of these.

RopewayError
├── InvalidRequestError            400  the request is wrong; `param` names the field
│   ├── ContextLengthExceededError 400  prompt longer than the context or than the whole KV cache
│   ├── UnsupportedParameterError  400  a field that is known and not served
│   └── AdapterError               400  an adapter that cannot be served
├── AuthenticationError            401
├── PermissionDeniedError          403
├── NotFoundError                  404
│   ├── ModelNotFoundError
│   └── JobNotFoundError
├── ConflictError                  409
│   └── JobRunningError                 what was asked for cannot be done while the job runs
├── JobGoneError                   410  the job's events have expired
├── PayloadTooLargeError           413
├── OverloadedError                429  a limit of the queue or of a tenant; `retry_after` in seconds
├── ServiceUnavailableError        503  Redis is away, loading, full or read-only; `retry_after` in seconds
│   └── StoreUnavailableError      503  the store of adapters is away, or an adapter is not in it
├── JobError                       500  a job ended with an error
│   ├── JobExpiredError            504  its deadline passed
│   └── EngineError                500  this request made the engine fail; the batch went on
└── ProtocolError                  500  bytes on the wire that this version cannot read
    ├── VersionError
    └── ForeignDataError                what Redis holds under a key is not what this system writes there
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class RopewayError(Exception):
    """Root of the tree.

    Attributes:
        message: for people; never holds prompt or output text.
        param: the request's field at fault, or None.
        retry_after: seconds after which a retry makes sense, or None.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.error_code = code if code is not None else self.code
        self.retry_after = retry_after


class InvalidRequestError(RopewayError, ValueError):
    """The request is malformed or out of bounds."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt (and what it asks for) can never fit."""

    code = "context_length_exceeded"


class UnsupportedParameterError(InvalidRequestError):
    """A known parameter that this server does not serve."""

    code = "unsupported_parameter"


class AdapterError(InvalidRequestError):
    """An adapter that cannot be served; the message names the field, tensor or module at fault."""

    code = "invalid_adapter"


class AuthenticationError(RopewayError):
    """No key, or a wrong one."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class PermissionDeniedError(RopewayError):
    """The key is right, its scope is not."""

    status = 403
    type = "permission_error"


class NotFoundError(RopewayError):
    """Nothing under that name."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    """No pool and no adapter has this name."""

    code = "model_not_found"


class JobNotFoundError(NotFoundError):
    """No job has this id, or it has expired."""

    code = "job_not_found"


class ConflictError(RopewayError):
    """The same idempotency key with another body."""

    status = 409
    type = "conflict_error"


class JobRunningError(ConflictError):
    """What was asked for cannot be done while the job runs."""

    code = "job_running"


class JobGoneError(RopewayError):
    """The job is known, what was asked of it has expired."""

    status = 410
    type = "gone_error"
    code = "events_expired"


class PayloadTooLargeError(RopewayError):
    """Body over the byte limit."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class OverloadedError(RopewayError):
    """A queue or rate limit is reached.

    Attributes:
        headers: of the answer, besides `Retry-After`: how much of a rate limit is left.
    """

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    headers: Mapping[str, str] = MappingProxyType({})


class ServiceUnavailableError(RopewayError):
    """What the request needs is away for now."""

    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"


class StoreUnavailableError(ServiceUnavailableError):
    """The store of adapters is away, full or forbidden, or an adapter is not (yet) in it."""

    code = "adapter_store_unavailable"


class JobError(RopewayError):
    """The job ended with an error."""

    code = "job_failed"


class JobExpiredError(JobError):
    """The job's deadline passed before it ended."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineError(JobError):
    """One request failed inside the engine: NaN logits, an id out of the vocabulary, an exception of its own."""

    code = "engine_error"


class ProtocolError(RopewayError):
    """Bytes that do not decode: malformed, too large, too deep, or of a wrong type."""

    code = "protocol_error"


class VersionError(ProtocolError):
    """An unknown major version of the wire."""

    code = "protocol_version"


class ForeignDataError(ProtocolError):
    """Redis refuses a command for good: under one of its keys is something that this system did not write there."""

    code = "foreign_data"
