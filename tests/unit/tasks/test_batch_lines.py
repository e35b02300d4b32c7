"""The input of a batch: what makes a whole file unfit, and with which line numbers."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tasks.batch_lines import MAX_FAULTS, MAX_LINES, check_file, entry_of, read_lines

ENDPOINT = "/v1/chat/completions"
MOST = 4096


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    entry = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"model": "m"}, **changes}
    return json.dumps({k: v for k, v in entry.items() if v is not ...}).encode() + b"\n"


def check(data: bytes, most: int = MOST) -> tuple[int, list[tuple[str, int | None]]]:
    total, faults = check_file(io.BytesIO(data), ENDPOINT, most)
    return total, [(fault.code, fault.line) for fault in faults]


def test_good_lines() -> None:
    assert check(line("a") + b"\n  \n" + line("b").strip()) == (2, [])


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"{nonsense\n", "invalid_json_line"),
        (b"[1]\n", "invalid_json_line"),
        (b'"\xff"\n', "invalid_json_line"),
        (b"[" * 3000 + b"\n", "invalid_json_line"),
        (line(...), "missing_required_parameter"),
        (line(""), "invalid_custom_id"),
        (line(7), "invalid_custom_id"),
        (line("x" * 513), "invalid_custom_id"),
        (line("first"), "duplicate_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="/v1/completions"), "mismatched_url"),
        (line(url=["x"]), "mismatched_url"),
        (line(body="x"), "invalid_body"),
        (line(body=...), "invalid_body"),
        (line(body={"stream": True}), "streaming_unsupported"),
    ],
)
def test_a_fault_is_told_with_its_line(bad: bytes, code: str) -> None:
    assert check(line("first") + b"\n" + bad + line("last")) == (3, [(code, 3)])


@pytest.mark.parametrize("data", [b"", b"\n \r\n"])
def test_an_empty_file(data: bytes) -> None:
    assert check(data) == (0, [("empty_file", None)])


def test_a_line_that_is_too_long() -> None:
    assert check(line("a") + line("b", body={"x": "y" * MOST}) + line("c")) == (1, [("line_too_long", 2)])
    fits = line("a")
    assert check(fits, most=len(fits))[1] == []


def test_the_number_of_lines_is_bounded() -> None:
    fitting = b"".join(line(str(i)) for i in range(MAX_LINES))
    assert check(fitting) == (MAX_LINES, [])
    assert check(fitting + line("more"))[1] == [("too_many_requests", None)]


def test_the_number_of_faults_is_bounded() -> None:
    assert len(check(b"x\n" * (MAX_FAULTS + 50))[1]) == MAX_FAULTS


def test_lines_are_read_with_numbers_and_bodies() -> None:
    [first, second] = read_lines(io.BytesIO(line("a") + b"\n" + line("b", body={"n": 1.0})), MOST)
    assert (first.number, second.number) == (0, 2)
    assert entry_of(second) == ("b", b'{"n": 1.0}')
