"""Log probabilities in the shapes of clients, and where tokens begin in a text."""

from __future__ import annotations

import math

import msgspec
import pytest

from engine.sim_model import END, SimVocabulary
from gateway.logprobs import (
    TextOffsets,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from shared.protocol import TokenLogprob, TopLogprob

VOCABULARY = SimVocabulary()
TEXT = "the cable €😀 of\n\n  café "


def entry(token: bytes, token_id: int = 1, top: list[TopLogprob] | None = None, rank: int = 1) -> TokenLogprob:
    return TokenLogprob(id=token_id, logprob=-1.0, rank=rank, token=token, top=top or [])


def tokenized(text: str) -> list[TokenLogprob]:
    ids = VOCABULARY.tokenizer.encode(text).ids
    return [entry(VOCABULARY.token_bytes(token), token) for token in ids]


def assert_right(text: str, tokens: list[str], places: list[int]) -> None:
    """Every token is found at its place; of one that is not whole, the character that it belongs to is."""
    for token, place in zip(tokens, places, strict=True):
        assert text[place:].startswith(token) or ("\ufffd" in token and text[place] in "€😀é")
    assert places == sorted(places)


def test_tokens_are_found_at_their_offsets() -> None:
    entries = tokenized(TEXT)
    offsets = TextOffsets()
    found = completion_logprobs(entries, 0, offsets)
    assert_right(TEXT, found.tokens, found.text_offset)
    assert any("\ufffd" in token for token in found.tokens)
    assert offsets.end() == len(TEXT)
    piecewise = TextOffsets()
    again = [completion_logprobs([e], 0, piecewise).text_offset[0] for e in entries]
    assert again == found.text_offset


def test_bytes_that_are_no_text_have_the_places_of_what_is_shown_for_them() -> None:
    broken = [entry(b"a"), entry(b"\xe2"), entry(b"\x82"), entry(b"b"), entry(b"\xff"), entry(b"c"), entry(b"\xe2")]
    text = b"".join(e.token for e in broken).decode("utf-8", "replace")
    offsets = TextOffsets()
    places = [offsets.place(e) for e in broken]
    assert places == [0, 1, 1, 2, 3, 4, 5] and offsets.end() == len(text) == 6


def test_tokens_that_the_text_does_not_show_take_no_place() -> None:
    entries = [*tokenized("the cable"), entry(END.encode(), VOCABULARY.end_id), *tokenized(" of")]
    shown = completion_logprobs(entries, 0, TextOffsets()).text_offset
    hidden = completion_logprobs(entries, 0, TextOffsets(0, frozenset({VOCABULARY.end_id}))).text_offset
    assert hidden == [0, 3, 9, 9] and shown == [0, 3, 9, 9 + len(END)]


@pytest.mark.parametrize("text", [TEXT, "€ half a character is first", "x", " the"])
def test_an_echo_begins_with_a_token_of_which_nothing_is_known(text: str) -> None:
    entries = tokenized(text)
    first = VOCABULARY.tokenizer.decode([entries[0].id], skip_special_tokens=False)
    found = echoed_logprobs(text, first, entries[1:], 0)
    assert len(found.tokens) == len(entries)
    assert (found.tokens[0], found.token_logprobs[0], found.top_logprobs[0]) == (first, None, None)
    assert found.token_logprobs[1:] == [-1.0] * (len(entries) - 1)
    assert_right(text, found.tokens, found.text_offset)
    both = found + completion_logprobs(tokenized(" cable of"), 0, TextOffsets(len(text)))
    assert_right(text + " cable of", both.tokens, both.text_offset)


def test_an_echo_whose_prompt_begins_with_what_its_text_does_not_show() -> None:
    """A BOS, the space that some tokenizers put in front, a prompt of which only the end was kept."""
    bos = echoed_logprobs("the cable", "<s>", tokenized("the cable"), 0)
    assert bos.tokens == ["<s>", "the", " cable"] and bos.text_offset == [0, 0, 3]
    space = echoed_logprobs("The cable", "<s>", [entry(b" The"), entry(b" cable")], 0)
    assert space.text_offset == [0, 0, 3]
    cut = echoed_logprobs("the cable of café", " of", tokenized(" café"), 0)
    assert cut.tokens[:2] == [" of", " café"] and cut.text_offset[:2] == [9, 12]


def test_a_prompts_candidates_are_by_id_with_its_own_token_among_them() -> None:
    top = [TopLogprob(id=i, logprob=-float(i), rank=i, token=b"%d" % i) for i in (1, 2, 3)]
    entries = [
        entry(b"7", 7, top, rank=40),
        entry(b"2", 2, top, rank=2),
        TokenLogprob(id=9, logprob=-math.inf, rank=99, token=b"\xe2", top=[]),
    ]
    encoded = msgspec.json.decode(msgspec.json.encode(prompt_logprobs(entries, 2)))
    assert list(encoded[0]) == ["7", "1", "2"] and list(encoded[1]) == ["2", "1"]
    assert encoded[0]["7"] == {"logprob": -1.0, "rank": 40, "decoded_token": "7"}
    assert encoded[1]["1"] == {"logprob": -1.0, "rank": 1, "decoded_token": "1"}
    assert encoded[2] == {"9": {"logprob": -9999.0, "rank": 99, "decoded_token": "\ufffd"}}
    assert [list(each) for each in prompt_logprobs(entries, 0)] == [[7], [2], [9]]


def test_of_candidates_that_read_the_same_the_likeliest_is_shown() -> None:
    top = [
        TopLogprob(id=1, logprob=-0.1, rank=1, token=b"\xe2"),
        TopLogprob(id=2, logprob=-0.5, rank=2, token=b"\xe3"),
    ]
    found = completion_logprobs([TokenLogprob(id=2, logprob=-0.5, rank=2, token=b"\xe3", top=top)], 2, TextOffsets())
    assert found.top_logprobs == [{"\ufffd": -0.1}] and found.token_logprobs == [-0.5]
