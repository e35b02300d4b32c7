"""Server-sent events out of bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropeway.client._sse import ServerSentEvent, SseDecoder


def decode(*chunks: bytes) -> list[ServerSentEvent]:
    decoder = SseDecoder()
    return [event for chunk in chunks for event in decoder.feed(chunk)]


def test_fields_comments_and_sticky_id() -> None:
    text = b": hello\n\nid: 7\nevent: tokens\ndata: a\ndata:b\ndata:  c\nretry: 5\n\ndata: d\n\n"
    assert decode(text) == [ServerSentEvent("tokens", "a\nb\n c", "7"), ServerSentEvent("message", "d", "7")]


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_every_line_end_of_the_standard(end: bytes) -> None:
    # The last CR waits for what follows: it may be half of a CRLF.
    assert decode(b"data: x" + end + end + b"data: y" + end + end, b":") == [
        ServerSentEvent("message", "x"),
        ServerSentEvent("message", "y"),
    ]


def test_no_line_ends_at_unicode_separators() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf"
    assert decode(f"data: {text}\n\n".encode()) == [ServerSentEvent("message", text)]


def test_a_byte_order_mark_and_an_unfinished_event() -> None:
    assert decode(b"\xef\xbb\xbfdata: x\n\ndata: never ended\n") == [ServerSentEvent("message", "x")]


@given(st.data(), st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), min_size=1, max_size=4))
def test_any_cut_gives_the_same_events(data: st.DataObject, texts: list[str]) -> None:
    end = data.draw(st.sampled_from(["\n", "\r", "\r\n"]))
    whole = "".join(f"id: {i}{end}data: {text}{end}{end}" for i, text in enumerate(texts)).encode() + b":"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert decode(*chunks) == [ServerSentEvent("message", text, str(i)) for i, text in enumerate(texts)]
