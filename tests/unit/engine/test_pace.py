"""Prompt tokens beside decodes by what they cost: more beside many streams, fewer the more keys they attend to."""

from __future__ import annotations

import pytest

from engine.models.config import ModelConfig, RopeConfig
from engine.pace import PrefillPace
from tests.support.engine_harness import make_engine, request
from tests.support.fake_runner import FakeRunner

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    sliding_window=None,
    rope=RopeConfig(),
)


def test_a_known_model() -> None:
    pace = PrefillPace.of(SMOLLM2)
    assert pace.keys_per_row == pytest.approx(1280)
    assert [pace.tokens(decodes, 0) for decodes in (1, 8, 16, 32)] == [11, 20, 30, 51]
    assert [pace.tokens(decodes, 1280) for decodes in (1, 8, 16, 32)] == [8, 10, 15, 25]
    assert pace.tokens(1, 100_000) == 8


def test_more_beside_more_streams_and_fewer_further_on() -> None:
    pace = PrefillPace(500.0)
    by_decodes = [pace.tokens(decodes, 400) for decodes in range(1, 65)]
    assert by_decodes == sorted(by_decodes)
    by_position = [pace.tokens(16, computed) for computed in range(0, 4000, 100)]
    assert by_position == sorted(by_position, reverse=True)
    assert len(set(by_position)) > 10


def test_the_scheduler_keeps_it_only_while_others_decode() -> None:
    pace = PrefillPace(20.0)
    fake = FakeRunner(128, 4)
    engine = make_engine(fake, max_num_batched_tokens=64, max_num_seqs=4, prefill_pace=pace)
    engine.add(request("stream", [1, 2, 3], max_tokens=5, ignore_eos=True))
    engine.step()
    engine.add(request("long", [(13 * i) % 90 for i in range(150)], max_tokens=1, ignore_eos=True))
    while engine.has_work():
        engine.step()
    chunks = [count for plan in fake.plans for who, _, _, count in plan if who == "long"]
    expected, computed = [], 0
    for _ in range(4):
        expected.append(pace.tokens(1, computed))
        computed += expected[-1]
    assert chunks == [*expected, 64, 150 - computed - 64]
    assert len(set(expected)) > 1


def test_it_decides_in_place_of_the_threshold() -> None:
    fake = FakeRunner(128, 4)
    engine = make_engine(
        fake, max_num_batched_tokens=64, max_num_seqs=4, prefill_pace=PrefillPace(1e9), long_prefill_token_threshold=3
    )
    engine.add(request("stream", [1, 2, 3], max_tokens=5, ignore_eos=True))
    engine.step()
    engine.add(request("long", list(range(90)), max_tokens=1, ignore_eos=True))
    engine.step()
    assert {who: count for who, _, _, count in fake.plans[-1]} == {"stream": 1, "long": 11}
