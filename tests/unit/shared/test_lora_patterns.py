"""Patterns of adapters' configs: PEFT's where they are reasonable, an error in bounded time where they are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.errors import AdapterError
from shared.lora.files import content_identity
from shared.lora.patterns import Patterns
from shared.lora.peft_config import read_config

Q = "model.layers.11.self_attn.q_proj"


def refused(pattern: str, module: str = Q) -> str:
    with pytest.raises(AdapterError) as caught:
        Patterns("config").first("rank_pattern", {pattern: 1}, module, 0)
    return caught.value.message


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("q_proj", True),
        ("_proj", False),
        ("proj", False),
        ("q.proj", True),
        ("self_attn.q_proj", True),
        (Q, True),
        (f"^{Q}", False),  # behind (.*\.)? as PEFT has it: it matches with nothing in front
        (r"layers\.1\d\..*", True),
        (r"layers\.2\d\..*", False),
        (r"(?!.*mlp).*_proj", True),
        (r"layers\.\d{1,2}\.self_attn\.(q|k|v)_proj", True),
        (r"layers\.(1?\d|2[0-7])\.(self_attn|mlp)\.([a-z]+_)+proj", True),
        (r"(?:.*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.(?:(?:up)))", True),
        ("", False),
    ],
)
def test_what_matches(pattern: str, matches: bool) -> None:
    wanted = matches or pattern.startswith("^")
    assert Patterns("config").first("rank_pattern", {"no": 1, pattern: 2}, Q, 0) == (2 if wanted else 0)


def test_the_first_pattern_wins() -> None:
    patterns = Patterns("config")
    assert patterns.first("rank_pattern", {"q_proj": 1, Q: 2}, Q, 0) == 1
    assert patterns.first("rank_pattern", {Q: 2, "q_proj": 1}, Q, 0) == 1, "an answer is kept"
    assert patterns.first("alpha_pattern", {Q: 2, "q_proj": 1}, Q, 0) == 2


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("q_(", "missing )"),
        ("(.|..|...)+[A-Z]", "takes too long"),
        ("(" * 20 + "a" + "){9}" * 20, "repeats too much"),
        ("(" * 20 + "a" + ")+" * 20, "repeats too much"),
        ("(((a){99}){99}){99}", "repeats too much"),
        ("(a{60000}){60000}", "repeats too much"),
        ("(a{500}){500}", "repeats too much"),
        ("a{" + "9" * 5000 + "}", "repeats too much"),
        ("(a{e<=9})", "braces"),
        (r"\p{L}", "braces"),
        ("(?x:" + "(" * 20 + "a" + ") {9}" * 20 + ")", "(?"),
        ("(a(?1)?)", "(?"),
        ("(?R)", "(?"),
        ("(" * 1000 + "a" + ")" * 1000, "nested too deeply"),
        ("a" * 8193, "8192 are allowed"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_refused(pattern: str, named: str) -> None:
    """Compiling some of these without a bound takes all memory that there is."""
    message = refused(pattern)
    assert message.startswith("config: rank_pattern: ") and named in message
    with pytest.raises(AdapterError, match="config: target_modules: "):
        Patterns("config").matches("target_modules", pattern, "a" * 3000)


def test_many_patterns_take_no_longer_than_one_config_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though each of them ends in time."""
    monkeypatch.setattr("shared.lora.patterns._TOTAL_S", 0.01)
    patterns, slow = Patterns("config"), {f"(.|..)*X{n}": n for n in range(1000)}
    with pytest.raises(AdapterError, match=r"alpha_pattern: the config's patterns take too long"):
        for layer in range(1000):
            patterns.first("alpha_pattern", slow, f"l{layer}.mlp.up", 0)


def test_a_config_that_names_every_module_of_a_large_model_is_fine() -> None:
    names = [
        f"model.layers.{layer}.{part}" for layer in range(80) for part in ("q", "k", "v", "o", "gate", "up", "down")
    ]
    patterns, ranks = Patterns("config"), {name: rank for rank, name in enumerate(names)}
    assert [patterns.first("rank_pattern", ranks, name, -1) for name in names] == list(range(len(names)))
    assert [patterns.first("rank_pattern", ranks, name, -1) for name in names] == list(range(len(names)))
    assert patterns.first("rank_pattern", ranks, "model.layers.80.q", -1) == -1


def test_matching_changes_nothing_of_what_an_adapter_is(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "rank_pattern": {"q_proj": 3}}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    config, identity = read_config(tmp_path), content_identity(tmp_path)
    assert (config.rank(Q), config.rank("up_proj")) == (3, 8)
    assert config == read_config(tmp_path) and content_identity(tmp_path) == identity
