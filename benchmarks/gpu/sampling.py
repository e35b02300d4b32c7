"""Draws, penalties and random numbers over a large vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.measure import Case, Place
from kernels.blocked import BlockedLogits
from kernels.ops import Ops
from kernels.reference import sampling as reference

FILTERS = {
    "all": (0, 1.0, 0.0),
    "top-k 50": (50, 1.0, 0.0),
    "top-p 0.9": (0, 0.9, 0.0),
    "min-p 0.05": (0, 1.0, 0.05),
    "top-k 50, top-p 0.9": (50, 0.9, 0.0),
}


def cases(place: Place, ops: Ops) -> Iterator[Callable[[], Case]]:
    """All of the section."""
    for rows in (place.size(1, 1), place.size(64, 2), place.size(256, 3)):
        for name in FILTERS:
            yield partial(_draw, place, ops, rows, name)
    yield partial(_penalties, place, ops)
    yield partial(_uniforms, place, ops)


def _draw(place: Place, ops: Ops, rows: int, name: str) -> Case:
    vocab = place.size(128256, 500)
    top_k, top_p, min_p = FILTERS[name]
    logits = BlockedLogits.of(place.randn(rows, vocab, dtype=torch.float32) * 3)
    uniform = torch.from_numpy(np.random.default_rng(0).random(rows)).to(place.device)
    heat = torch.full((rows,), 0.8, device=place.device)
    arguments = (logits, heat, [top_k] * rows, [top_p] * rows, [min_p] * rows, uniform)

    def check() -> None:
        tokens, thresholds = ops.draw(*arguments)
        expected, limits = reference.draw(*arguments)
        assert torch.equal(thresholds, limits), f"{int((thresholds != limits).sum())} other thresholds"
        # Exponentials may differ in their last bits: a draw at the very edge of a token may go to its neighbour.
        wrong = int((tokens != expected).sum())
        assert wrong <= rows // 64, f"{wrong} other tokens of {rows}"

    return Case(f"draw {rows} x {vocab}, {name}", lambda: ops.draw(*arguments), check, bytes=4 * rows * vocab)


def _penalties(place: Place, ops: Ops) -> Case:
    rows, vocab, each = place.size(256, 2), place.size(128256, 100), place.size(1000, 9)
    logits = place.randn(rows, vocab, dtype=torch.float32)
    token = torch.rand(rows, vocab, device=place.device).argsort(-1)[:, :each]
    index = (token + torch.arange(rows, device=place.device).unsqueeze(1) * vocab).reshape(-1)
    counts = torch.randint(0, 4, index.shape, device=place.device).float()
    penalties = [torch.rand(index.shape, device=place.device) + 0.5 for _ in range(3)]

    def check() -> None:
        edited, expected = logits.clone(), logits.clone()
        ops.apply_penalties(edited, index, counts, *penalties)
        reference.apply_penalties(expected, index, counts, *penalties)
        assert torch.allclose(edited, expected, rtol=1e-6, atol=1e-6), "other logits"

    return Case(
        f"penalties {rows} x {each}",
        lambda: ops.apply_penalties(logits, index, counts, *penalties),
        check,
        bytes=32 * index.numel(),
    )


def _uniforms(place: Place, ops: Ops) -> Case:
    rows = place.size(256, 5)
    arguments = ([2**63 + 7 * row for row in range(rows)], [row % 3 for row in range(rows)], list(range(rows)))

    def check() -> None:
        expected = torch.from_numpy(reference.uniforms(*arguments))
        assert torch.equal(ops.uniforms(*arguments, place.device).cpu(), expected), "other bits than the CPU's"

    return Case(f"uniforms {rows}", lambda: ops.uniforms(*arguments, place.device), check)
