"""What travels through Redis: envelope, frames, result, card. msgpack maps, decoded strictly, version first.

Unknown fields are ignored; an unknown major version, a wrong type, too many bytes or too deep a nesting is refused.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

import msgspec

from shared.errors import ProtocolError, RopewayError, VersionError
from shared.sampling import SamplingParams

#: Major version of the wire. A process refuses bytes of another.
WIRE_VERSION: Final = 1

MAX_ENVELOPE_BYTES: Final = 32 * 1024 * 1024
MAX_FRAME_BYTES: Final = 4 * 1024 * 1024
MAX_RESULT_BYTES: Final = 64 * 1024 * 1024
MAX_TOKENIZER_BYTES: Final = 64 * 1024 * 1024

JobClass = Literal["high", "normal", "batch"]
FrameKind = Literal["started", "tokens", "done", "error"]
#: A job is in one of these. The last four are final.
JobStatus = Literal["delayed", "queued", "running", "completed", "failed", "cancelled", "expired"]
FINAL_STATUSES: Final = frozenset({"completed", "failed", "cancelled", "expired"})
#: As in the OpenAI API; `abort` marks a choice that was cancelled.
FinishReason = Literal["stop", "length", "abort", "error"]


class ErrorInfo(msgspec.Struct, kw_only=True, frozen=True):
    """An error as it travels: the OpenAI error body, and the HTTP status that belongs to it."""

    message: str
    type: str = "server_error"
    code: str | None = None
    param: str | None = None
    status: int = 500

    @classmethod
    def of(cls, error: RopewayError) -> ErrorInfo:
        """The error as it is sent to a client."""
        return cls(
            message=error.message, type=error.type, code=error.error_code, param=error.param, status=error.status
        )


class Envelope(msgspec.Struct, kw_only=True):
    """A job as its submitter wrote it; never changed afterwards.

    Attributes:
        v: wire version.
        id: job id, `<pool>.<lane>.<unique>`.
        tenant: who is charged; from the key, never from the body.
        model: the name that the client asked for.
        adapter: adapter name, or None for the base model.
        adapter_identity: hash of the adapter's content, resolved when the job was submitted: the job is computed with
            that content whatever becomes of the name. None for the base model.
        prompt_token_ids: the prompt, tokenized by the gateway. Its text does not travel.
        sampling: `seed` is always set, by the client or by the gateway.
        kind: which API shape the result is shown in.
        job_class: `high`, `normal`, `batch`.
        cache_salt: separates prefix caches of tenants.
        flush_ms: how long a worker may gather tokens before it publishes a frame; 0 for every step.
        callback_url: where the outbox sends the result, or None.
        request_id: the client's X-Request-Id, echoed only.
        metadata: the client's own, echoed only.
        trace: W3C trace context.
        created_ms: submitter's clock, Unix milliseconds.
        key: id of the API key, under which its usage counts; empty without one.
        weight: of its tenant, beside others in the queue.
    """

    v: int = WIRE_VERSION
    id: str
    tenant: str = "default"
    model: str
    adapter: str | None = None
    adapter_identity: str | None = None
    prompt_token_ids: list[int]
    sampling: SamplingParams
    kind: Literal["chat", "completion"] = "completion"
    job_class: JobClass = "normal"
    cache_salt: str | None = None
    flush_ms: int = 0
    callback_url: str | None = None
    request_id: str | None = None
    metadata: dict[str, str] = {}
    trace: dict[str, str] = {}
    created_ms: int = 0
    key: str = ""
    weight: float = 1.0

    @property
    def sequences(self) -> int:
        """Sequences that the job occupies in a batch."""
        return self.sampling.n

    @property
    def cost_tokens(self) -> int:
        """Tokens of KV cache that the job may need: prompt and output of every choice."""
        return (len(self.prompt_token_ids) + (self.sampling.max_tokens or 0)) * self.sampling.n


class TopLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """One candidate of a position. `token` are the bytes of the token."""

    id: int
    logprob: float
    rank: int
    token: bytes = b""


class TokenLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """Log probability (natural) of a sampled token, its rank from 1, and the top candidates of its position."""

    id: int
    logprob: float
    rank: int
    token: bytes = b""
    top: list[TopLogprob] = []


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens, counted by the engine. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Timings(msgspec.Struct, kw_only=True, frozen=True):
    """Milliseconds of a job's life on its last worker, and what it used."""

    queue_ms: float = 0.0
    first_token_ms: float = 0.0
    run_ms: float = 0.0
    blocks: int = 0
    preemptions: int = 0


class ChoiceFrame(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one frame adds to one choice.

    Attributes:
        index: which choice, from 0.
        offset: tokens of this choice that came before this frame.
        ids: new token ids, published at once even where their text is still held back.
        text: new text that is certain.
        logprobs: one entry per id of `ids`, or None where not asked for.
        finish: set in the choice's last frame.
        stop: the stop string or stop token id that ended it.
    """

    index: int = 0
    offset: int = 0
    ids: list[int] = []
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None
    stop: str | int | None = None


class Frame(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One event of a job. `seq` starts at 1 and has no holes; `done` and `error` are last.

    Attributes:
        prompt_logprobs: of the prompt, from its second token on; each frame goes on behind those before it.
        status: final status, in the last frame only.
        usage: in the last frame.
        error: in an `error` frame.
    """

    v: int
    seq: int
    epoch: int
    kind: FrameKind
    choices: list[ChoiceFrame] = []
    prompt_logprobs: list[TokenLogprob] = []
    status: JobStatus | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: ErrorInfo | None = None

    @property
    def last(self) -> bool:
        """No frame follows."""
        return self.kind in ("done", "error")


class ChoiceResult(msgspec.Struct, kw_only=True):
    """One finished choice."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Result(msgspec.Struct, kw_only=True):
    """A job's outcome as it is stored with the job. `choices` holds what was published, also after an error.

    `prompt_logprobs` holds one entry per token of the prompt from its second on; None where not asked for.
    """

    v: int = WIRE_VERSION
    id: str
    status: JobStatus
    choices: list[ChoiceResult] = []
    prompt_logprobs: list[TokenLogprob] | None = None
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: ErrorInfo | None = None


class Card(msgspec.Struct, kw_only=True):
    """What everyone in a pool must agree on.

    Attributes:
        pool: the pool's name, also the model name that clients ask for.
        digest: hash of the model's config and weights; a worker with another one may not join.
        lanes: number of lanes.
        max_model_len: context in tokens.
        vocab_size: ids from 0 to this, exclusive.
        eos_token_ids: every id that ends an answer.
        kv_tokens: tokens in the KV cache of the worker that wrote the card; live workers report their own.
        dtype: of the weights in use, for people.
        sampling_defaults: of the model's generation config (temperature, top_p, top_k ...), where it has any.
        max_lora_rank: largest rank of an adapter that the pool's workers serve; 0: they serve no adapters.
    """

    v: int = WIRE_VERSION
    pool: str
    digest: str
    lanes: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    kv_tokens: int
    dtype: str = ""
    created_ms: int = 0
    sampling_defaults: dict[str, float] = {}
    max_lora_rank: int = 0


class AdapterTargets(msgspec.Struct, kw_only=True):
    """What an adapter of a pool may change, so that one can be checked where the model is not.

    Attributes:
        modules: inputs and outputs of each module, by its Hugging Face name. An embedding's inputs are the vocabulary.
        max_lora_rank: largest rank that is served.
    """

    v: int = WIRE_VERSION
    modules: dict[str, tuple[int, int]]
    max_lora_rank: int


class TokenizerBundle(msgspec.Struct, kw_only=True):
    """What a gateway needs to validate and render while no worker lives.

    Attributes:
        tokenizer_json: the file of the `tokenizers` library.
        chat_template: Jinja source, or None for a model without one.
        special_tokens: `bos_token`, `eos_token` ... as template variables.
    """

    v: int = WIRE_VERSION
    tokenizer_json: str
    chat_template: str | None = None
    special_tokens: dict[str, str] = {}


class WorkerInfo(msgspec.Struct, kw_only=True):
    """A worker's entry in the registry, renewed with each heartbeat.

    Attributes:
        adapters: identities of the adapters on the device.
        adapters_in_memory: of those in memory, on the device or not.
        adapters_loading: of those that are being read.
        adapters_failed: why others could not be read, by identity, lately.
        adapters_failed_ms: since when, Unix ms of Redis's clock.
        max_loras: slots on the device; 0: no adapters.
    """

    v: int = WIRE_VERSION
    owner: str
    state: Literal["starting", "ready", "draining"] = "ready"
    version: str = ""
    started_ms: int = 0
    kv_tokens: int = 0
    max_num_seqs: int = 0
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    adapters: list[str] = []
    adapters_in_memory: list[str] = []
    adapters_loading: list[str] = []
    adapters_failed: dict[str, str] = {}
    adapters_failed_ms: dict[str, int] = {}
    max_loras: int = 0


class Head(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What lists show of a job beside its state, so that nobody has to read its envelope: see there."""

    v: int = WIRE_VERSION
    model: str
    adapter: str | None = None
    kind: Literal["chat", "completion"] = "completion"
    request_id: str | None = None
    metadata: dict[str, str] = {}
    callback_url: str | None = None

    @classmethod
    def of(cls, envelope: Envelope) -> Head:
        """The head of a job."""
        return cls(
            model=envelope.model,
            adapter=envelope.adapter,
            kind=envelope.kind,
            request_id=envelope.request_id,
            metadata=envelope.metadata,
            callback_url=envelope.callback_url,
        )


T = TypeVar("T", Envelope, Head, Frame, Result, Card, AdapterTargets, TokenizerBundle, WorkerInfo)

_LIMITS: Final[dict[type[Any], int]] = {
    Envelope: MAX_ENVELOPE_BYTES,
    Head: 1024 * 1024,
    Frame: MAX_FRAME_BYTES,
    Result: MAX_RESULT_BYTES,
    Card: 1024 * 1024,
    AdapterTargets: 1024 * 1024,
    TokenizerBundle: MAX_TOKENIZER_BYTES,
    WorkerInfo: 1024 * 1024,
}
_DECODERS: Final[dict[type[Any], msgspec.msgpack.Decoder[Any]]] = {t: msgspec.msgpack.Decoder(t) for t in _LIMITS}


class _Version(msgspec.Struct):
    v: int


_ERROR = msgspec.msgpack.Decoder(ErrorInfo)
_VERSION = msgspec.msgpack.Decoder(_Version)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Envelope | Head | Frame | Result | Card | AdapterTargets | TokenizerBundle | WorkerInfo) -> bytes:
    """The message as a msgpack map.

    Raises:
        ProtocolError: larger than the limit of its kind.
    """
    data = _ENCODER.encode(message)
    if len(data) > _LIMITS[type(message)]:
        raise ProtocolError(f"{type(message).__name__} has {len(data)} bytes, the limit is {_LIMITS[type(message)]}")
    return data


def decode(data: bytes, kind: type[T]) -> T:
    """Decode one message, strictly.

    Raises:
        VersionError: another major version.
        ProtocolError: malformed, of wrong types, too large or too deep. The message holds none of the data.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ProtocolError(f"{kind.__name__}: bytes are needed, not {type(data).__name__}")
    if len(data) > _LIMITS[kind]:
        raise ProtocolError(f"{kind.__name__} has {len(data)} bytes, the limit is {_LIMITS[kind]}")
    try:
        message: T = _DECODERS[kind].decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError) as error:
        _check_version(data, kind)
        raise ProtocolError(f"{kind.__name__} does not decode{_place(error)}") from error
    if message.v != WIRE_VERSION:
        raise VersionError(f"{kind.__name__} has wire version {message.v}, this process speaks {WIRE_VERSION}")
    return message


def decode_error(data: bytes) -> ErrorInfo:
    """The error of a dead letter.

    Raises:
        ProtocolError: malformed.
    """
    try:
        return _ERROR.decode(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ProtocolError(f"ErrorInfo does not decode{_place(error)}") from error


def _place(error: Exception) -> str:
    """Where in the message the error is. msgspec's text can hold the value at fault, its path cannot."""
    _, at, path = str(error).partition(" - at ")
    return at + path


def _check_version(data: bytes, kind: type[Any]) -> None:
    """A newer message may fail to decode for its shape: then say that it is newer."""
    try:
        version = _VERSION.decode(data).v
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError):
        return
    if version != WIRE_VERSION:
        raise VersionError(f"{kind.__name__} has wire version {version}, this process speaks {WIRE_VERSION}")
