"""Paged attention in Triton's interpreter, against softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.reference import paged_attention as reference
from kernels.triton import paged_attention as kernels
from kernels.triton.attention_plan import MOST_SPLITS, SPLIT_KEYS, plan_attention
from tests.kernels.triton.attention_checks import CASES, Case, build, check_case, expected, random_case
from tests.kernels.triton.support import assert_close


@pytest.mark.parametrize("name", CASES)
def test_float32(name: str) -> None:
    check_case(kernels, CASES[name], torch.float32)


@pytest.mark.parametrize("name", ["mixed", "decodes at boundaries", "chunks behind prefixes", "float8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow(name: str, dtype: torch.dtype) -> None:
    check_case(kernels, CASES[name], dtype)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.kernels) for n in range(4, 24))])
def test_random_batches(seed: int) -> None:
    check_case(kernels, random_case(seed), (torch.float32, torch.bfloat16, torch.float16)[seed % 3])


@pytest.mark.parametrize("name", ["mixed, window and soft cap", "chunks, window", "decodes, soft cap", "float8"])
def test_the_reference_has_the_same_options(name: str) -> None:
    case = CASES[name]
    batch = build(case, torch.float32)
    cache = batch.cache.float().nan_to_num(0.0).to(batch.cache.dtype)  # it reads what it then masks
    scale = case.dim**-0.5
    out = reference.paged_attention(
        batch.query, cache, batch.attention, scale, window=case.window, soft_cap=case.soft_cap, scales=batch.scales
    )
    assert_close(out, expected(case, batch, scale), 1e-5, 1e-5)


def test_a_decode_does_not_depend_on_its_batch() -> None:
    """Bit for bit, also where others need several cuts and it does not."""
    together = build(Case([[(20, 1), (700, 1), (255, 1)]]), torch.float32)
    out = kernels.paged_attention(together.query, together.cache, together.attention, 0.1)
    group = together.attention.groups[0]
    tables = group.blocks.view(3, -1)
    for row in range(3):
        batch = build(Case([[together.spans[row]]]), torch.float32)
        alone = batch.attention.groups[0]
        alone.blocks = tables[row]
        found = kernels.paged_attention(together.query[row : row + 1], together.cache, batch.attention, 0.1)
        assert torch.equal(found, out[row : row + 1])


def test_long_sequences_have_longer_cuts_of_their_own() -> None:
    batch = build(Case([[(20, 1), (SPLIT_KEYS, 1)]]), torch.float32)
    group = batch.attention.groups[0]
    group.lengths = np.array([SPLIT_KEYS * MOST_SPLITS, SPLIT_KEYS * MOST_SPLITS + 1])
    plan = plan_attention(batch.attention, 3, 32, 100, None)
    assert plan.decode is not None
    assert plan.decode.rows[3].tolist() == [SPLIT_KEYS, 2 * SPLIT_KEYS]
    assert plan.decode.splits == MOST_SPLITS
    assert plan_attention(batch.attention, 3, 32, 100, 300).decode.splits == 2  # type: ignore[union-attr]


def test_a_block_table_cannot_lead_out_of_the_cache() -> None:
    batch = build(Case([[(3, 1), (0, 4)]]), torch.float32)
    batch.attention.groups[0].blocks.fill_(10**9)
    kernels.paged_attention(batch.query, batch.cache, batch.attention, 0.1)
