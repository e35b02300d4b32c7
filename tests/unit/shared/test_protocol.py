"""The wire: what is encoded decodes to the same, and what is not ours is refused."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared import protocol
from shared.errors import JobExpiredError, ProtocolError, VersionError
from shared.protocol import (
    AdapterTargets,
    Card,
    ChoiceFrame,
    ChoiceResult,
    Envelope,
    ErrorInfo,
    Frame,
    Result,
    Timings,
    TokenizerBundle,
    TokenLogprob,
    TopLogprob,
    Usage,
    WorkerInfo,
    decode,
    decode_error,
    encode,
)
from shared.sampling import SamplingParams

TEXT = st.text(max_size=20)
OPTIONAL_TEXT = st.none() | TEXT
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=8)
MAPPING = st.dictionaries(TEXT, TEXT, max_size=3)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
COUNT = st.integers(0, 2**53)
FINISH = st.none() | st.sampled_from(["stop", "length", "abort", "error"])
STATUS = st.sampled_from(["queued", "running", "completed", "failed", "cancelled", "expired"])

SAMPLING = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    temperature=st.floats(0.1, 100),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 1000),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stop=st.none() | st.lists(st.text(min_size=1, max_size=8), max_size=4),
    stop_token_ids=st.none() | TOKENS,
    bad_words=st.none() | st.lists(st.text(min_size=1, max_size=8), max_size=4),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    max_tokens=st.none() | st.integers(100, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    detokenize=st.just(True),
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    truncate_prompt_tokens=st.none() | st.just(-1) | st.integers(1, 100),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4),
    skip_reading_prefix_cache=st.booleans(),
    top_logprobs=st.none(),
)
ENVELOPE = st.builds(
    Envelope,
    id=TEXT, tenant=TEXT, model=TEXT, adapter=OPTIONAL_TEXT, adapter_identity=OPTIONAL_TEXT,
    prompt_token_ids=TOKENS, sampling=SAMPLING,
    kind=st.sampled_from(["chat", "completion"]), job_class=st.sampled_from(["high", "normal", "batch"]),
    cache_salt=OPTIONAL_TEXT, flush_ms=COUNT, callback_url=OPTIONAL_TEXT, request_id=OPTIONAL_TEXT, metadata=MAPPING,
    trace=MAPPING, created_ms=COUNT, key=TEXT, weight=FINITE,
)  # fmt: skip
ERROR = st.builds(
    ErrorInfo, message=TEXT, type=TEXT, code=OPTIONAL_TEXT, param=OPTIONAL_TEXT, status=st.integers(400, 599)
)
USAGE = st.builds(Usage, prompt_tokens=COUNT, completion_tokens=COUNT, cached_tokens=COUNT)
TIMINGS = st.builds(Timings, queue_ms=FINITE, first_token_ms=FINITE, run_ms=FINITE, blocks=COUNT, preemptions=COUNT)
TOP = st.builds(TopLogprob, id=COUNT, logprob=FINITE, rank=COUNT, token=st.binary(max_size=6))
ENTRIES = st.lists(
    st.builds(
        TokenLogprob, id=COUNT, logprob=FINITE, rank=COUNT, token=st.binary(max_size=6), top=st.lists(TOP, max_size=2)
    ),
    max_size=3,
)
LOGPROBS = st.none() | ENTRIES
STOP = st.none() | TEXT | st.integers(0, 2**31 - 1)
FRAME = st.builds(
    Frame,
    v=st.just(1),
    seq=st.integers(1, 2**53), epoch=COUNT, kind=st.sampled_from(["started", "tokens", "done", "error"]),
    choices=st.lists(
        st.builds(ChoiceFrame, index=COUNT, offset=COUNT, ids=TOKENS, text=TEXT, logprobs=LOGPROBS, finish=FINISH,
                  stop=STOP),
        max_size=3,
    ),
    prompt_logprobs=ENTRIES, status=st.none() | STATUS, usage=st.none() | USAGE, timings=st.none() | TIMINGS,
    error=st.none() | ERROR,
)  # fmt: skip
RESULT = st.builds(
    Result,
    id=TEXT, status=STATUS,
    choices=st.lists(
        st.builds(ChoiceResult, index=COUNT, text=TEXT, token_ids=TOKENS, logprobs=LOGPROBS, finish_reason=FINISH,
                  stop_reason=STOP),
        max_size=3,
    ),
    prompt_logprobs=LOGPROBS, usage=USAGE, timings=TIMINGS, error=st.none() | ERROR,
)  # fmt: skip
CARD = st.builds(
    Card, pool=TEXT, digest=TEXT, lanes=COUNT, max_model_len=COUNT, vocab_size=COUNT, eos_token_ids=TOKENS,
    kv_tokens=COUNT, dtype=TEXT, created_ms=COUNT, sampling_defaults=st.dictionaries(TEXT, FINITE, max_size=3),
    max_lora_rank=COUNT,
)  # fmt: skip
TARGETS = st.builds(
    AdapterTargets, modules=st.dictionaries(TEXT, st.tuples(COUNT, COUNT), max_size=3), max_lora_rank=COUNT
)
BUNDLE = st.builds(
    TokenizerBundle, tokenizer_json=TEXT, chat_template=OPTIONAL_TEXT, special_tokens=MAPPING
)  # fmt: skip
WORKER = st.builds(
    WorkerInfo, owner=TEXT, state=st.sampled_from(["starting", "ready", "draining"]), version=TEXT, started_ms=COUNT,
    kv_tokens=COUNT, max_num_seqs=COUNT, running=COUNT, waiting=COUNT, free_blocks=COUNT, total_blocks=COUNT,
    adapters=st.lists(TEXT, max_size=3), adapters_in_memory=st.lists(TEXT, max_size=3),
    adapters_loading=st.lists(TEXT, max_size=3), adapters_failed=MAPPING, max_loras=COUNT,
    adapters_failed_ms=st.dictionaries(TEXT, COUNT, max_size=3),
)  # fmt: skip

SMALL_ENVELOPE = Envelope(id="i", model="m", prompt_token_ids=[1], sampling=SamplingParams())


@settings(max_examples=150, deadline=None)
@given(st.one_of(ENVELOPE, FRAME, RESULT, CARD, TARGETS, BUNDLE, WORKER))
def test_decode_of_encode_is_the_same(message: Any) -> None:
    again = decode(encode(message), type(message))
    assert again == message
    assert msgspec.structs.asdict(again) == msgspec.structs.asdict(message)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [(ENVELOPE, Envelope), (SAMPLING, SamplingParams), (FRAME, Frame), (RESULT, Result), (CARD, Card),
     (TARGETS, AdapterTargets), (BUNDLE, TokenizerBundle), (ERROR, ErrorInfo), (WORKER, WorkerInfo)],
)  # fmt: skip
def test_the_round_trip_covers_every_field(strategy: Any, kind: Any) -> None:
    """A field that is added to a message has to be added here too."""
    named = set(strategy.wrapped_strategy.kwargs) if hasattr(strategy, "wrapped_strategy") else set(strategy.kwargs)
    assert {f.name for f in msgspec.structs.fields(kind)} - {"v"} == named - {"v"}


@pytest.mark.parametrize(
    "message",
    [
        SMALL_ENVELOPE,
        Frame(v=1, seq=1, epoch=1, kind="started"),
        Result(id="i", status="completed"),
        Card(pool="p", digest="d", lanes=1, max_model_len=1, vocab_size=1, eos_token_ids=[], kv_tokens=1),
        AdapterTargets(modules={"m": (1, 2)}, max_lora_rank=1),
        TokenizerBundle(tokenizer_json=""),
        WorkerInfo(owner="o"),
    ],
)
def test_defaults_survive(message: Any) -> None:
    assert decode(encode(message), type(message)) == message


def test_the_prompts_text_has_no_field() -> None:
    assert not {"prompt", "text", "messages"} & {f.name for f in msgspec.structs.fields(Envelope)}


def test_unknown_fields_are_ignored() -> None:
    plain = msgspec.msgpack.decode(encode(SMALL_ENVELOPE))
    plain["new_field"] = {"deep": [1, {"er": None}]}
    plain["sampling"]["new_knob"] = 1
    assert decode(msgspec.msgpack.encode(plain), Envelope) == SMALL_ENVELOPE


@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_major_version_is_refused(version: int) -> None:
    plain = msgspec.msgpack.decode(encode(SMALL_ENVELOPE)) | {"v": version}
    with pytest.raises(VersionError, match=str(version)):
        decode(msgspec.msgpack.encode(plain), Envelope)
    with pytest.raises(VersionError):
        decode(msgspec.msgpack.encode({"v": version, "shape": "of the future"}), Envelope)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"{}",
        b"\x93\x01\x02\x03",
        b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os",  # a pickle
        msgspec.msgpack.encode(None),
        msgspec.msgpack.encode({"v": 1}),
        msgspec.msgpack.encode({"v": "1"}),
        msgspec.msgpack.encode({b"v": 1}),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"x")),
        encode(SMALL_ENVELOPE)[:-1],
        encode(SMALL_ENVELOPE) + b"\x01",
    ],
)
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data, Envelope)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", b"bytes"),
        ("id", None),
        ("prompt_token_ids", [1.5]),
        ("prompt_token_ids", "text"),
        ("prompt_token_ids", [True]),
        ("prompt_token_ids", msgspec.msgpack.Ext(5, b"\x00")),
        ("job_class", "urgent"),
        ("kind", "embedding"),
        ("metadata", {"a": 1}),
        ("metadata", [1]),
        ("sampling", {"temperature": -1.0}),
        ("sampling", {"temperature": math.nan}),
        ("sampling", {"n": 10**6}),
        ("sampling", {"stop": [""]}),
    ],
)
def test_wrong_types_and_bounds_are_refused(field: str, value: Any) -> None:
    plain = msgspec.msgpack.decode(encode(SMALL_ENVELOPE)) | {field: value}
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode(plain), Envelope)


def test_an_error_holds_nothing_of_the_data() -> None:
    plain = msgspec.msgpack.decode(encode(SMALL_ENVELOPE)) | {"kind": "the secret prompt"}
    with pytest.raises(ProtocolError) as caught:
        decode(msgspec.msgpack.encode(plain), Envelope)
    assert "secret" not in caught.value.message and "$.kind" in caught.value.message


@pytest.mark.parametrize("depth", [10, 500, 100_000])
def test_deep_nesting_is_refused_or_skipped(depth: int) -> None:
    """Where a type is wanted it is of the wrong type; in an unknown field it may be skipped, never crash."""
    deep = b"\x91" * depth + b"\xc0"
    body = encode(SMALL_ENVELOPE)
    count = body[0] & 0x0F if body[0] < 0xDE else int.from_bytes(body[1:3], "big")
    start = 1 if body[0] < 0xDE else 3
    header = b"\xde" + (count + 1).to_bytes(2, "big")
    unknown = header + body[start:] + b"\xa3new" + deep
    if depth < 500:
        assert decode(unknown, Envelope) == SMALL_ENVELOPE
    elif depth > 10_000:
        with pytest.raises(ProtocolError):
            decode(unknown, Envelope)
    with pytest.raises(ProtocolError):
        decode(deep, Envelope)


def test_sizes_are_limited_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(protocol._LIMITS, Envelope, 400)
    long = Envelope(id="i", model="m", prompt_token_ids=[70_000] * 200, sampling=SamplingParams())
    with pytest.raises(ProtocolError, match="the limit is 400"):
        encode(long)
    with pytest.raises(ProtocolError, match="the limit is 400"):
        decode(b"\x00" * 401, Envelope)
    monkeypatch.undo()
    assert decode(encode(long), Envelope) == long


@pytest.mark.parametrize("data", ["text", None, 5, ["x"]])
def test_only_bytes_are_decoded(data: Any) -> None:
    with pytest.raises(ProtocolError, match="bytes are needed"):
        decode(data, Frame)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_kind_of_bytes_is_decoded(kind: Any) -> None:
    assert decode(kind(encode(SMALL_ENVELOPE)), Envelope) == SMALL_ENVELOPE


def test_costs() -> None:
    job = Envelope(id="i", model="m", prompt_token_ids=[1] * 5, sampling=SamplingParams(n=3, max_tokens=7))
    assert (job.sequences, job.cost_tokens) == (3, 36)


def test_only_done_and_error_are_last() -> None:
    kinds = {kind: Frame(v=1, seq=1, epoch=1, kind=kind).last for kind in ("started", "tokens", "done", "error")}  # type: ignore[arg-type]
    assert kinds == {"started": False, "tokens": False, "done": True, "error": True}


def test_an_error_travels_as_the_openai_body() -> None:
    info = ErrorInfo.of(JobExpiredError("too late", param="p"))
    assert (info.message, info.type, info.code, info.param, info.status) == (
        "too late", "timeout_error", "deadline_exceeded", "p", 504,
    )  # fmt: skip
    assert decode_error(msgspec.msgpack.encode(info)) == info
    with pytest.raises(ProtocolError):
        decode_error(b"\x81")
