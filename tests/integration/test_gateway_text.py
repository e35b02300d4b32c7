"""Text over HTTP, token by token: characters, stop strings, endings and log probabilities, streamed and whole.

The worker's model says its prompt again, so each test decides which tokens come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.parrot_worker import CONTEXT
from tests.support.stack import Stack
from tests.support.tiny_tokenizer import EOS, EOS_TEXT, STRADDLE, TOOL, VOCAB_SIZE, piece, spell

MODEL = "parrot"
EMOJI = "😀"
STRADDLE_ID = piece(STRADDLE)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with Stack(clean=True, sim_step_ms=4) as stack:
        stack.start_gateway()
        stack.start_worker("tests.support.parrot_worker")
        stack.wait_ready()
        with httpx.Client(base_url=stack.url, timeout=60) as client:
            yield client


@dataclass
class Choice:
    """What was streamed of one choice."""

    pieces: list[str] = field(default_factory=list)
    logprobs: list[tuple[str, Any]] = field(default_factory=list)  # text of the chunk, and its entries
    finish: str | None = None
    stop: Any = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def whole(http: httpx.Client, prompt: list[int], **more: Any) -> dict[str, Any]:
    """The answer in one piece."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 64, **more}
    answer: dict[str, Any] = http.post("/v1/completions", json=body).raise_for_status().json()
    return answer


def streamed(http: httpx.Client, prompt: list[int], **more: Any) -> Choice:
    """The answer as a stream, whose form is checked: one finish chunk, one [DONE], nothing behind either."""
    choice, done = Choice(), False
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 64, "stream": True, **more}
    with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            assert not done
            if line == "data: [DONE]":
                done = True
                continue
            assert choice.finish is None
            (part,) = json.loads(line[6:])["choices"]
            choice.pieces.append(part["text"])
            if part["logprobs"] is not None:
                choice.logprobs.append((part["text"], part["logprobs"]))
            choice.finish, choice.stop = part["finish_reason"], part.get("stop_reason")
    assert done and choice.finish is not None
    return choice


def both(http: httpx.Client, prompt: list[int], **more: Any) -> Choice:
    """The stream, which says what the whole answer says."""
    answer, stream = whole(http, prompt, **more), streamed(http, prompt, **more)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (stream.text, stream.finish, stream.stop)
    return stream


def test_an_emoji_of_four_tokens_comes_whole_beside_another_request(http: httpx.Client) -> None:
    prompts = [spell(f"a{EMOJI}b{EMOJI}"), spell(f"{EMOJI}€é")]
    with ThreadPoolExecutor(2) as pool:
        streams = list(pool.map(lambda prompt: streamed(http, prompt), prompts * 2))
    for prompt, stream in zip(prompts * 2, streams, strict=True):
        assert stream.text == whole(http, prompt)["choices"][0]["text"]
        assert all("\ufffd" not in piece for piece in stream.pieces)
    assert [stream.text for stream in streams[:2]] == [f"a{EMOJI}b{EMOJI}", f"{EMOJI}€é"]


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_character_that_stays_incomplete_is_flushed_once(http: httpx.Client, kept: int) -> None:
    prompt = spell("a" + EMOJI)[: 1 + kept]
    for more in ({}, {"max_tokens": len(prompt)}):
        stream = both(http, prompt, **more)
        assert stream.text == "a\ufffd"
        assert [piece for piece in stream.pieces if "\ufffd" in piece] == ["\ufffd"]


def test_nothing_of_a_stop_string_over_several_tokens_is_sent(http: httpx.Client) -> None:
    prompt = [*spell("ab"), piece("DEF"), *spell("G"), piece("HI"), *spell("Jcd")]
    stream = both(http, prompt, stop=["DEFGHIJ"])
    assert (stream.text, stream.finish, stream.stop) == ("ab", "stop", "DEFGHIJ")
    failed = both(http, prompt, stop=["DEFGHIX", "never"])
    assert (failed.text, failed.finish) == ("abDEFGHIJcd", "stop")
    cut_off = both(http, prompt, stop=["DEFGHIJ"], max_tokens=4)
    assert (cut_off.text, cut_off.finish) == ("abDEFG", "length")


def test_stop_strings_are_found_in_text_not_in_tokens(http: httpx.Client) -> None:
    two = [*spell("x "), piece("beta"), piece(" gamma"), *spell("y")]
    assert both(http, two, stop="beta gamma").text == "x "
    assert both(http, two, stop=["beta gamma"], include_stop_str_in_output=True).text == "x beta gamma"
    inside = [piece("the"), piece(" Paris"), *spell("y")]
    stream = both(http, inside, stop=["Pari"])
    assert (stream.text, stream.finish, stream.stop) == ("the ", "stop", "Pari")


def test_a_stop_string_of_one_space(http: httpx.Client) -> None:
    stream = both(http, [piece("the"), piece(" cat"), piece("stop")], stop=[" "])
    assert (stream.text, stream.finish, stream.stop) == ("the", "stop", " ")


@pytest.mark.parametrize("gathered", [False, True])
def test_tokens_behind_a_stop_are_in_no_way_shown(http: httpx.Client, gathered: bool) -> None:
    """Also where all of them are gathered into one frame, and not where half a character is behind the stop."""
    prompt = [*spell("abSTOPcd"), *spell(EMOJI)[:2]]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 64, "stop": ["STOP"], "stream": not gathered}
    job = http.post("/v1/jobs", json={"kind": "completion", "body": body}).raise_for_status().json()["id"]
    done = http.get(f"/v1/jobs/{job}", params={"wait": 30}).json()
    (choice,) = done["result"]["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", "STOP")
    assert done["usage"]["completion_tokens"] == 6
    assert "".join(text for _, text in job_events(http, job)) == "ab"


def job_events(http: httpx.Client, job: str) -> list[tuple[list[int], str]]:
    """Ids and text of each event of a job's only choice."""
    lines = http.get(f"/v1/jobs/{job}/events").raise_for_status().text.split("\n")
    events = [json.loads(line[5:]) for line in lines if line.startswith("data:")]
    return [(choice["token_ids"], choice["text"]) for event in events for choice in event["choices"]]


def test_ids_are_told_at_once_and_text_when_it_is_certain(http: httpx.Client) -> None:
    prompt = [*spell("a" + EMOJI), STRADDLE_ID, *spell("b")]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 64}
    job = http.post("/v1/jobs", json={"kind": "completion", "body": body}).raise_for_status().json()["id"]
    http.get(f"/v1/jobs/{job}", params={"wait": 30}).raise_for_status()
    events = job_events(http, job)
    assert [token for ids, _ in events for token in ids] == [*prompt, EOS]
    shown = ""
    for ids, text in events:
        assert "\ufffd" not in text or ids
        shown += text
    assert shown == whole(http, prompt)["choices"][0]["text"]


@pytest.mark.parametrize("ends", [EOS, TOOL])
def test_every_end_token_ends_and_is_shown_only_where_asked_for(http: httpx.Client, ends: int) -> None:
    prompt = [*spell("ab"), ends, *spell("cd")]
    stream = both(http, prompt)
    assert (stream.text, stream.finish, stream.stop) == ("ab", "stop", None)
    shown = {EOS: EOS_TEXT, TOOL: "<tool call>"}[ends]
    asked = both(http, prompt, include_stop_str_in_output=True, skip_special_tokens=False)
    assert (asked.text, asked.finish) == ("ab" + shown, "stop")
    assert both(http, prompt, ignore_eos=True, max_tokens=5).finish == "length"


def test_no_token_and_no_text(http: httpx.Client) -> None:
    for prompt in ([EOS, *spell("ab")], [TOOL]):
        stream = both(http, prompt)
        assert (stream.text, stream.finish) == ("", "stop")
    silent = both(http, [EOS, EOS], ignore_eos=True, max_tokens=2)
    assert (silent.text, silent.finish) == ("", "length")


@pytest.mark.parametrize(
    ("prompt", "most", "finish"),
    [("abcd", 1, "length"), ("abcd", 4, "length"), ("abcd", 5, "stop"), ("abcd", 6, "stop"), ("abc", 4, "stop")],
)
def test_an_end_on_the_last_allowed_token_is_a_stop(http: httpx.Client, prompt: str, most: int, finish: str) -> None:
    stream = both(http, spell(prompt), max_tokens=most)
    assert (stream.text, stream.finish) == (prompt[:most], finish)
    assert both(http, spell("abSTOP"), max_tokens=6, stop=["STOP"]).finish == "stop"


def test_the_context_is_a_limit_too(http: httpx.Client) -> None:
    answer = whole(http, [piece("the")] * (CONTEXT - 1), max_tokens=1)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("prompt", ["a😀€é b", "the cat", "é\ufffd😀"])
def test_many_tokens_in_one_frame_read_as_one_by_one(http: httpx.Client, prompt: str) -> None:
    """Gathered for the whole of the answer, or token by token: the text comes from all ids, not from the last few."""
    ids = [*spell(prompt), STRADDLE_ID, *spell("\u00ac!")]
    stream = streamed(http, ids)
    body = {"model": MODEL, "prompt": ids, "max_tokens": 64, "stream": False}
    job = http.post("/v1/jobs", json={"kind": "completion", "body": body}).raise_for_status().json()["id"]
    done = http.get(f"/v1/jobs/{job}", params={"wait": 30}).json()
    assert stream.text == done["result"]["choices"][0]["text"] == whole(http, ids)["choices"][0]["text"]
    assert stream.text.startswith(prompt)


def test_a_token_that_ends_one_character_and_begins_the_next(http: httpx.Client) -> None:
    ids = [*spell("é")[:1], STRADDLE_ID, *spell("€")[2:]]
    stream = both(http, ids)
    assert stream.text == "é€" and "\ufffd" not in "".join(stream.pieces)
    (choice,) = whole(http, ids, logprobs=0)["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2]


def test_bytes_of_a_chats_tokens_joined_are_its_text(http: httpx.Client) -> None:
    text = f"a{EMOJI}é€b"
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "logprobs": True, "top_logprobs": 2}
    choice = http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
    assert choice["message"]["content"] == text
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == text
    assert bytes(content[-1]["bytes"]).decode() == EOS_TEXT


@pytest.mark.parametrize(
    ("prompt", "more", "text", "tokens"),
    [
        (spell(f"ab{EMOJI}c"), {}, f"ab{EMOJI}c", 8),
        (spell("abSTOPcd"), {"stop": ["STOP"]}, "ab", 6),
        (spell("abSTxcd"), {"stop": ["STOP"]}, "abSTxcd", 8),
        (spell("abST"), {"stop": ["STOP"], "max_tokens": 4}, "abST", 4),
        ([*spell("a"), *spell(EMOJI)[:2]], {"max_tokens": 3}, "a\ufffd", 3),
    ],
)
def test_there_are_as_many_entries_as_tokens_whatever_is_held_back(
    http: httpx.Client, prompt: list[int], more: dict[str, Any], text: str, tokens: int
) -> None:
    answer = whole(http, prompt, logprobs=1, **more)
    assert answer["usage"]["completion_tokens"] == tokens
    one = answer["choices"][0]["logprobs"]
    assert {len(values) for values in one.values()} == {tokens}
    stream = streamed(http, prompt, logprobs=1, **more)
    assert stream.text == text == answer["choices"][0]["text"]
    joined = {name: [value for _, part in stream.logprobs for value in part[name]] for name in one}
    assert joined == one


def test_offsets_pass_over_tokens_that_are_not_shown(http: httpx.Client) -> None:
    prompt = [*spell("ab"), EOS, *spell("c"), TOOL, *spell("d")]
    ask = {"ignore_eos": True, "max_tokens": len(prompt), "logprobs": 0}
    for more, text, offsets in (
        ({}, "abc<tool call>d", [0, 1, 2, 2, 3, 14]),
        ({"skip_special_tokens": False}, f"ab{EOS_TEXT}c<tool call>d", [0, 1, 2, 9, 10, 21]),
    ):
        body = {"model": MODEL, "prompt": prompt, **ask, **more}
        response = http.post("/v1/completions", json=body).raise_for_status()
        (choice,) = response.json()["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)
        stream = streamed(http, prompt, **ask, **more)
        assert [at for _, part in stream.logprobs for at in part["text_offset"]] == offsets
        job = response.headers["x-ropeway-job-id"]
        assert http.get(f"/v1/jobs/{job}").json()["result"]["choices"] == [choice]


def test_a_long_answer_ends_once_when_it_is_cancelled(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": [piece("the")] * 250, "max_tokens": 250, "stream": True}
    finishes, dones = [], 0
    with http.stream("POST", "/v1/completions", json=body) as response:
        job = response.headers["x-ropeway-job-id"]
        for at, line in enumerate(line for line in response.iter_lines() if line.startswith("data: ")):
            if at == 3:
                http.post(f"/v1/jobs/{job}/cancel").raise_for_status()
            if line == "data: [DONE]":
                dones += 1
            elif (reason := json.loads(line[6:])["choices"][0]["finish_reason"]) is not None:
                finishes.append(reason)
    assert (finishes, dones) == (["abort"], 1)


def test_a_second_equal_prompt_is_read_from_the_cache(http: httpx.Client) -> None:
    """Usage says so on each path: chat, completions, streams, jobs."""
    prompt = spell("a prompt of five whole blocks, seen before: yes")

    def cached(**more: Any) -> int:
        usage = whole(http, prompt, max_tokens=1, **more)["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    most = (len(prompt) - 1) // 4 * 4
    assert (cached(), cached()) == (0, most)
    assert cached(skip_reading_prefix_cache=True) == 0
    assert cached(prompt_logprobs=0) == 0
    assert cached(cache_salt="another") == 0
    assert (cached(), cached(cache_salt="another")) == (most, most)
    assert whole(http, [prompt, prompt], max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * most

    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    text = http.post("/v1/completions", json=body | stream).raise_for_status().text
    usage = json.loads(text.split("data: ")[-2])["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": most}
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a chat that was seen before"}], "max_tokens": 2}
    answers = [http.post("/v1/chat/completions", json=chat).raise_for_status().json() for _ in range(2)]
    assert [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers] == [0, 24]
    text = http.post("/v1/chat/completions", json=chat | stream).raise_for_status().text
    assert json.loads(text.split("data: ")[-2])["usage"]["prompt_tokens_details"] == {"cached_tokens": 24}
    job = http.post("/v1/jobs", json={"kind": "completion", "body": body}).raise_for_status().json()["id"]
    done = http.get(f"/v1/jobs/{job}", params={"wait": 30}).json()
    assert done["usage"]["prompt_tokens_details"] == done["result"]["usage"]["prompt_tokens_details"]
    assert done["usage"]["prompt_tokens_details"] == {"cached_tokens": most}
    events = http.get(f"/v1/jobs/{job}/events").text
    assert f'"prompt_tokens_details":{{"cached_tokens":{most}}}' in events


def test_ids_of_the_whole_vocabulary_are_text(http: httpx.Client) -> None:
    ids = [token for token in range(VOCAB_SIZE) if token not in (EOS, TOOL)]
    stream = both(http, ids, max_tokens=200)
    assert stream.finish == "length" and stream.text
