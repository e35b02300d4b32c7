"""docs/protocol.md names everything that travels."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.protocol import (
    Card,
    ChoiceFrame,
    ChoiceResult,
    Envelope,
    ErrorInfo,
    Frame,
    Head,
    Result,
    Timings,
    TokenizerBundle,
    TokenLogprob,
    Usage,
    WorkerInfo,
)
from shared.sampling import SamplingParams

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text("utf-8")
WORDS = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]+)`", PAGE))))
MESSAGES = [
    Card, ChoiceFrame, ChoiceResult, Envelope, ErrorInfo, Frame, Head, Result, SamplingParams, Timings, TokenizerBundle,
    TokenLogprob, Usage, WorkerInfo,
]  # fmt: skip


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_field_is_documented(kind: Any) -> None:
    assert [f.name for f in msgspec.structs.fields(kind) if f.name not in WORDS] == []


def test_every_script_is_documented() -> None:
    names = [p.name.removesuffix(".lua") for p in files("shared").joinpath("lua").iterdir() if p.name[0] != "_"]
    assert set(names) == set(re.findall(r"^### ([a-z_]+)$", PAGE.split("## Scripts")[1], re.MULTILINE))
