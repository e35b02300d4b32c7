"""Checks of draws: tokens and thresholds of the reference, over filters of all kinds, ties, and rows of -inf."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from kernels.blocked import BlockedLogits
from kernels.reference import sampling as reference

OFF = float("-inf")


@dataclass(frozen=True)
class Filters:
    """Of one row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


ROWS = [
    Filters(),
    Filters(temperature=0.3),
    Filters(top_k=1),
    Filters(top_k=7, temperature=1.7),
    Filters(top_k=40),
    Filters(top_k=10**6),
    Filters(top_p=0.9),
    Filters(top_p=0.2, temperature=0.8),
    Filters(top_p=1e-6),
    Filters(top_p=1.0 - 1e-12),
    Filters(min_p=0.05),
    Filters(min_p=1.0),
    Filters(top_k=12, top_p=0.7),
    Filters(top_k=12, min_p=0.1),
    Filters(top_p=0.8, min_p=0.02, temperature=2.5),
    Filters(top_k=30, top_p=0.95, min_p=0.001, temperature=0.6),
]


def logits_of(rows: int, vocab: int, kind: str, rng: np.random.Generator) -> torch.Tensor:
    """`kind`: peaked as a model's, flat, with ties, or mostly -inf."""
    values = rng.standard_normal((rows, vocab)) * {"peaked": 4.0, "flat": 0.01, "ties": 2.0, "few": 2.0}[kind]
    if kind == "ties":
        values = np.round(values)
    if kind == "few":
        for row in values:
            row[rng.random(vocab) < 0.97] = -np.inf
        values[:, int(rng.integers(vocab))] = 0.0
    return torch.from_numpy(values.astype(np.float32))


def check_draw(module: ModuleType, vocab: int, kind: str, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    logits = logits_of(len(ROWS), vocab, kind, rng)
    x = BlockedLogits.of(logits)
    uniform = torch.from_numpy(rng.random(len(ROWS)))
    uniform[seed % len(ROWS)] = 0.0
    uniform[(seed + 1) % len(ROWS)] = 1.0 - 2.0**-53
    arguments = (
        torch.tensor([row.temperature for row in ROWS]),
        [row.top_k for row in ROWS],
        [row.top_p for row in ROWS],
        [row.min_p for row in ROWS],
        uniform,
    )
    tokens, thresholds = module.draw(x, *arguments)
    expected, limits = reference.draw(x, *arguments)
    last = (seed + 1) % len(ROWS)
    wrong = [ROWS[row] for row in (tokens != expected).nonzero().flatten().tolist() if row != last]
    assert not wrong, f"other tokens for {wrong}"
    # The largest random number there is: sums in other orders end at other tokens, all of them at the very end.
    weight = (logits[last] / ROWS[last].temperature).double()
    weight = (weight - weight.max()).exp().masked_fill(weight < limits[last], 0.0)
    token = int(tokens[last])
    assert weight[token] > 0.0, "a token that is not kept"
    assert weight[token + 1 :].sum() <= 1e-12 * weight.sum() or tokens[last] == expected[last], "not the last token"
    # Where p leaves out so little that rounding decides, sums in other orders cut elsewhere.
    firm = torch.tensor([row.top_p == 1.0 or row.top_p < 1.0 - 1e-9 for row in ROWS])
    wrong = [ROWS[row] for row in ((thresholds != limits) & firm).nonzero().flatten().tolist()]
    assert not wrong, f"other thresholds for {wrong}"


def check_rows_are_independent(module: ModuleType) -> None:
    """A row's token is the same alone and in a batch, whoever its neighbours are."""
    rng = np.random.default_rng(3)
    logits, uniform = logits_of(len(ROWS), 3000, "peaked", rng), torch.from_numpy(rng.random(len(ROWS)))
    x = BlockedLogits.of(logits)
    heat = torch.tensor([row.temperature for row in ROWS])
    k, p, least = [row.top_k for row in ROWS], [row.top_p for row in ROWS], [row.min_p for row in ROWS]
    together = module.draw(x, heat, k, p, least, uniform)
    for row in range(0, len(ROWS), 3):
        one = slice(row, row + 1)
        alone = module.draw(x.select([row]), heat[one], k[one], p[one], least[one], uniform[one])
        assert torch.equal(alone[0], together[0][one])
        assert torch.equal(alone[1], together[1][one])


def check_all(module: ModuleType) -> None:
    for seed, (vocab, kind) in enumerate(
        ((1, "peaked"), (64, "flat"), (1000, "ties"), (3001, "few"), (5000, "peaked"))
    ):
        check_draw(module, vocab, kind, seed)
    check_rows_are_independent(module)
