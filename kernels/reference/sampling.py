"""Sampling: penalties, the filters' common threshold, counter-based random numbers, and the draw.

A token depends on its own row alone, bit for bit. Thresholds compare values, so that the order of ties does not matter;
the draw walks the kept tokens in order of their ids; and whatever is summed up is summed in an order that neither other
rows nor the number of rows change: within a block first, then block by block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.blocked import BlockedLogits
from kernels.ops import register

_PHILOX_M = (0xD2511F53, 0xCD9E8D57)
_PHILOX_W = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_LOW = 0xFFFFFFFF
#: Rows whose random numbers take less time one by one than as arrays.
_FEW_ROWS = 8


def philox4x32(counter: npt.NDArray[np.uint32], key: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

    Args:
        counter: [rows, 4].
        key: [rows, 2].

    Returns:
        [rows, 4] random words.
    """
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    words = _philox(c0, c1, c2, c3, key[:, 0].astype(np.uint64), key[:, 1].astype(np.uint64))
    return np.stack(words, axis=1).astype(np.uint32)


def _philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> tuple[Any, Any, Any, Any]:
    """Words of 32 bits, each an int or [rows] uint64."""
    for _ in range(_PHILOX_ROUNDS):
        p0, p1 = c0 * _PHILOX_M[0], c2 * _PHILOX_M[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _LOW, (p0 >> 32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _PHILOX_W[0]) & _LOW, (k1 + _PHILOX_W[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: list[int], choices: list[int], positions: list[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, choice index, output position), 53 bits wide."""
    if len(seeds) <= _FEW_ROWS:
        return np.array([_uniform(*row) for row in zip(seeds, choices, positions, strict=True)], dtype=np.float64)
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    position, choice = np.array(positions, dtype=np.uint64), np.array(choices, dtype=np.uint64)
    zeros = np.zeros_like(seed)
    high, low, _, _ = _philox(position, choice, zeros, zeros, seed & _LOW, seed >> 32)
    bits: npt.NDArray[np.uint64] = (high << 32 | low) >> 11
    return bits.astype(np.float64) * 2.0**-53


def _uniform(seed: int, choice: int, position: int) -> float:
    high, low, _, _ = _philox(position, choice, 0, 0, seed & _LOW, seed >> 32 & _LOW)
    bits: int = (high << 32 | low) >> 11
    return bits * 2.0**-53


@register("uniforms", "reference")
def uniforms_on(seeds: list[int], choices: list[int], positions: list[int], device: torch.device) -> torch.Tensor:
    """[rows] float64: `uniforms` on a device."""
    return torch.from_numpy(uniforms(seeds, choices, positions)).to(device)


def pack_counters(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int64]:
    """What `uniforms_packed` takes, on the host."""
    numbers = np.empty((3, len(seeds)), dtype=np.uint64)
    numbers[0] = [seed & 0xFFFFFFFFFFFFFFFF for seed in seeds]
    numbers[1], numbers[2] = choices, positions
    return numbers.view(np.int64)


@register("uniforms_packed", "reference")
def uniforms_packed(numbers: torch.Tensor) -> torch.Tensor:
    """`uniforms` of what is on the device already.

    Args:
        numbers: [3, rows] int64: seeds (of 64 bits), choice indices, output positions.

    Returns:
        [rows] float64.
    """
    seed, choice, position = numbers.unbind(0)
    low = 0xFFFFFFFF
    c0, c1 = position & low, choice & low
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in range(_PHILOX_ROUNDS):
        # Products of 64 bits wrap around in int64; their bits are those of unsigned ones.
        p0, p1 = c0 * _PHILOX_M[0], c2 * _PHILOX_M[1]
        c0, c1, c2, c3 = ((p1 >> 32) & low) ^ c1 ^ k0, p1 & low, ((p0 >> 32) & low) ^ c3 ^ k1, p0 & low
        k0, k1 = (k0 + _PHILOX_W[0]) & low, (k1 + _PHILOX_W[1]) & low
    bits = (((c0 << 32) | c1) >> 11) & ((1 << 53) - 1)
    return bits.double() * 2.0**-53


@register("take_rows", "reference")
def take_rows(x: BlockedLogits, rows: list[int], out: BlockedLogits) -> None:
    """The values of some rows, at least one, copied to `out`, which has as many; without their maxima."""
    torch.index_select(x.values, 0, torch.tensor(rows, device=x.values.device), out=out.values)


@register("find_maxima", "reference")
def find_maxima(x: BlockedLogits) -> None:
    """Fill in the maxima of blocks and rows, whose values have changed."""
    torch.amax(x.blocks, -1, out=x.peaks)
    torch.amax(x.peaks, -1, out=x.best)


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
    filters = torch.from_numpy(pack_filters(top_k, top_p, min_p, x.vocab)).to(x.values.device)
    return draw_packed(x, temperature, filters, uniform)


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """Rows of logits that are drawn, in plain numbers, one of each per row.

    Attributes:
        rows: which they are, ascending.
        temperature, top_k, top_p, min_p: as `draw` takes them.
        seeds, choices, positions: what the random numbers are functions of, see `uniforms`.
    """

    rows: list[int]
    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    seeds: list[int]
    choices: list[int]
    positions: list[int]


DrawRows = Callable[[BlockedLogits, DrawnRows], list[int]]


def draw_rows_with(uniforms: Callable[..., torch.Tensor], draw: Callable[..., Any]) -> DrawRows:
    """`draw_rows` made of a backend's `uniforms` and `draw`."""

    def draw_rows(x: BlockedLogits, drawn: DrawnRows) -> list[int]:
        """The tokens of some rows: `draw` with `uniforms`.

        Args:
            x: as `draw` takes it, but that other rows may hold anything.
            drawn: at least one row.
        """
        device = x.values.device
        uniform = uniforms(drawn.seeds, drawn.choices, drawn.positions, device)
        temperature = torch.tensor(drawn.temperature, dtype=torch.float32).to(device)
        tokens, _ = draw(x.select(drawn.rows), temperature, drawn.top_k, drawn.top_p, drawn.min_p, uniform)
        found: list[int] = tokens.tolist()
        return found

    return draw_rows


register("draw_rows", "reference")(draw_rows_with(uniforms_on, draw))


def pack_filters(
    top_k: Sequence[int], top_p: Sequence[float], min_p: Sequence[float], vocab: int
) -> npt.NDArray[np.float64]:
    """What `draw_packed` takes, on the host, of what `draw` takes."""
    filters = np.empty((3, len(top_k)), dtype=np.float64)
    filters[0] = np.array([math.log(p) if p > 0.0 else -math.inf for p in min_p], dtype=np.float32)
    filters[1] = [k if 0 < k < vocab else 0 for k in top_k]
    filters[2] = top_p
    return filters


@register("draw_packed", "reference")
def draw_packed(
    x: BlockedLogits, temperature: torch.Tensor, filters: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`draw` of what is on the device already: the host does not wait.

    A row whose maximum is not finite has any number in the place of its token.

    Args:
        x, temperature, uniform: as `draw` takes them.
        filters: [3, rows] float64: logarithm of min-p (-inf: off), k of top-k (0: off), p of top-p (1: off).

    Returns:
        As `draw`.
    """
    values = x.values / temperature.unsqueeze(1)
    best = values.amax(-1)
    threshold = _thresholds(values, filters)
    weight = (values - best.unsqueeze(1)).exp_()
    weight.masked_fill_(values < threshold.unsqueeze(1), 0.0)
    token, _ = search(weight.double(), uniform, None)
    return torch.where(threshold >= best, x.values.max(-1).indices, token), threshold


def _thresholds(values: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """[rows]: the least of [rows, width] logits, divided by temperature, that the filters keep; -inf: all."""
    ordered = values.sort(dim=-1, descending=True).values
    best = ordered[:, 0]
    threshold = best + filters[0].float()
    k = filters[1].long()
    kth = ordered.gather(1, (k - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
    threshold = torch.maximum(threshold, kth.masked_fill(k == 0, float("-inf")))
    p = filters[2]
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
    # Among numbers that are not finite the search may run off the end.
    index = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=weight.shape[1] - 1)
    passed = (cumulative - weight).gather(1, index)
    return index.squeeze(1), (wanted - passed).squeeze(1)
