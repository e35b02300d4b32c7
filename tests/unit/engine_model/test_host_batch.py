"""A pass in plain numbers is the pass that tensors describe."""

from __future__ import annotations

import random

import pytest
import torch

from engine.batch import CacheLayout, build_batch
from engine.host_batch import host_batch
from engine.plan import Span
from engine.sequence import Sequence
from shared.sampling import SamplingParams

BLOCK = 4
LAYOUT = CacheLayout(BLOCK, 1000, 1, torch.float32, torch.device("cpu"), grouped=False)


def span(rng: random.Random, start: int, count: int, adapter_slot: int, *, sample: bool) -> Span:
    length = start + count
    tokens = [rng.randrange(100) for _ in range(length)]
    table = rng.sample(range(1000), -(-length // BLOCK) + rng.randrange(2))
    sequence = Sequence("r", 0, SamplingParams(), 0, tokens, length, length + 1, block_table=table)
    sequence.adapter_slot = adapter_slot
    return Span(sequence, start, count, sample)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_numbers_are_those_of_the_tensors(seed: int, adapters: bool) -> None:
    rng = random.Random(seed)
    counts = [1] * rng.randrange(1, 5) + [rng.randrange(1, 11) for _ in range(seed % 3)]
    spans = [
        span(rng, rng.randrange(40), count, rng.randrange(-1, 2) if adapters else -1, sample=bool(rng.randrange(4)))
        for count in counts
    ]
    found, expected = host_batch(spans, BLOCK), build_batch(spans, LAYOUT)
    (group,) = expected.attention.groups
    tables = group.blocks.view(group.batch, -1).tolist()
    used = [-(-length // BLOCK) for length in found.lengths]
    assert found.order == expected.order
    assert found.tokens == expected.tokens.tolist()
    assert found.positions == expected.positions.tolist()
    assert found.slots == expected.attention.slot_mapping.tolist()
    assert found.counts == group.counts.tolist()
    assert found.lengths == group.lengths.tolist()
    for start, size, table in zip(found.starts, used, tables, strict=True):
        assert found.blocks[start : start + size] == table[:size]
    assert len(found.blocks) == sum(used)
    assert (found.sample_rows is None) == (expected.sample_rows is None)
    if found.sample_rows is not None and expected.sample_rows is not None:
        assert found.sample_rows.tolist() == expected.sample_rows.tolist()


def test_decodes_that_all_sample_are_sampled_as_they_stand() -> None:
    rng = random.Random(1)
    decodes = [span(rng, start, 1, -1, sample=True) for start in (3, 4, 17)]
    assert host_batch(decodes, BLOCK).sample_rows is None
    rows = host_batch([*decodes, span(rng, 2, 3, -1, sample=True)], BLOCK).sample_rows
    assert rows is not None
    assert rows.tolist() == [0, 1, 2, 5]
