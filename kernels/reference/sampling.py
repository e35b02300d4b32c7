"""Sampling: penalties, the filters' common threshold, counter-based random numbers, and the draw.

A token depends on its own row alone, bit for bit. Thresholds compare values, so that the order of ties does not matter;
the draw walks the kept tokens in order of their ids; and whatever is summed up is summed in an order that neither other
rows nor the number of rows change: within a block first, then block by block.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from kernels.blocked import BlockedLogits
from kernels.ops import register

_PHILOX_M = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_W = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_PHILOX_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def philox4x32(counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

    Args:
        counter: [rows, 4].
        key: [rows, 2].

    Returns:
        [rows, 4] random words.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(_PHILOX_ROUNDS):
        p0, p1 = _PHILOX_M[0] * c0, _PHILOX_M[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = k0 + _PHILOX_W[0], k1 + _PHILOX_W[1]
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def uniforms(seeds: list[int], choices: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, choice index, output position), 53 bits wide."""
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    counter = np.zeros((len(seeds), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = positions, choices
    key = np.stack((seed & _LOW, seed >> _SHIFT), axis=1).astype(np.uint32)
    words = philox4x32(counter, key).astype(np.uint64)
    bits = (words[:, 0] << _SHIFT | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


@register("uniforms", "reference")
def uniforms_on(seeds: list[int], choices: list[int], positions: list[int], device: torch.device) -> torch.Tensor:
    """[rows] float64: `uniforms` on a device."""
    return torch.from_numpy(uniforms(seeds, choices, positions)).to(device)


@register("apply_penalties", "reference")
def apply_penalties(
    logits: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Penalise tokens that have occurred, in place; vLLM's meaning.

    Repetition divides positive logits and multiplies negative ones for tokens of prompt and output; presence and
    frequency then subtract for tokens of the output.

    Args:
        logits: [rows, width] float32, contiguous.
        index: [entries] int64, distinct: `row * width + token` for each token that occurred in a row.
        counts: [entries] float32, occurrences in the output; 0 for a token of the prompt alone.
        presence, frequency, repetition: [entries] float32, the row's penalties.
    """
    flat = logits.view(-1)
    values = flat.index_select(0, index)
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * counts - presence * (counts > 0)
    flat.index_copy_(0, index, values)


@register("draw", "reference")
def draw(
    x: BlockedLogits,
    temperature: torch.Tensor,
    top_k: list[int],
    top_p: list[float],
    min_p: list[float],
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse-transform sampling over the tokens that the filters keep, in order of their ids.

    The filters are min-p, then top-k, then top-p over what those leave. Tokens that tie with the last one kept are kept
    too. Where nothing below the maximum is kept, the arg-max of the logits is taken, as without a draw.

    Args:
        x: may hold -inf; each row's maximum is finite, also when divided by the temperature.
        temperature: [rows] float32, above 0; the logits are divided by it first.
        top_k: 0 is off, as is the vocabulary's size or more.
        top_p: in (0, 1]; 1 is off.
        min_p: in [0, 1]; 0 is off.
        uniform: [rows] float64 in [0, 1).

    Returns:
        [rows] int64 token ids, and [rows] float32: the least quotient that is kept, -inf where no filter is on.
    """
    values = x.values / temperature.unsqueeze(1)
    best = values.amax(-1)
    threshold = _thresholds(values, x.vocab, top_k, top_p, min_p)
    weight = (values - best.unsqueeze(1)).exp_()
    weight.masked_fill_(values < threshold.unsqueeze(1), 0.0)
    token, _ = search(weight.double(), uniform, None)
    return torch.where(threshold >= best, x.values.max(-1).indices, token), threshold


def _thresholds(
    values: torch.Tensor, vocab: int, top_k: list[int], top_p: list[float], min_p: list[float]
) -> torch.Tensor:
    """[rows]: the least of [rows, width] logits, divided by temperature, that the filters keep; -inf: all."""
    off, device = float("-inf"), values.device
    ordered = values.sort(dim=-1, descending=True).values
    best = ordered[:, 0]
    least = [math.log(p) if p > 0.0 else off for p in min_p]
    threshold = best + torch.tensor(least, dtype=torch.float32, device=device)
    with_k = [0 < k < vocab for k in top_k]
    last = torch.tensor([k - 1 if on else 0 for k, on in zip(top_k, with_k, strict=True)], device=device)
    kth = ordered.gather(1, last.unsqueeze(1)).squeeze(1)
    threshold = torch.maximum(threshold, kth.masked_fill(~torch.tensor(with_k, device=device), off))
    p = torch.tensor(top_p, dtype=torch.float64, device=device)
    return torch.where(p < 1.0, _nucleus(ordered, best, threshold, p), threshold)


def _nucleus(ordered: torch.Tensor, best: torch.Tensor, threshold: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """The least logit of the smallest set, among those at or above the threshold, that has the share `p` of their mass.

    `ordered` is [rows, n], descending; the others are [rows].
    """
    kept = ordered.masked_fill(ordered < threshold.unsqueeze(1), float("-inf"))
    mass = (kept - best.unsqueeze(1)).exp().double().cumsum(-1)
    last = (mass >= p.unsqueeze(1) * mass[:, -1:]).byte().argmax(-1, keepdim=True)
    return kept.gather(1, last).squeeze(1)


def search(
    weight: torch.Tensor, uniform: torch.Tensor, point: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running sum of [rows, n] float64 passes the point (None: `uniform` of the total), and what is left of
    the point there."""
    cumulative = weight.cumsum(-1)
    total = cumulative[:, -1]
    wanted = uniform * total if point is None else point
    # Rounding may reach the total: stay below it, so that the search ends where there is weight.
    wanted = torch.minimum(wanted, torch.nextafter(total, torch.zeros_like(total))).clamp_(min=0.0).unsqueeze(1)
    index = torch.searchsorted(cumulative, wanted, right=True)
    passed = (cumulative - weight).gather(1, index)
    return index.squeeze(1), (wanted - passed).squeeze(1)
