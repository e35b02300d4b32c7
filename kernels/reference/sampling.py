"""Sampling: penalties, the filters' common threshold, counter-based random numbers, and the draw.

A token depends on its own row alone: thresholds compare values, so that neither the order of ties nor the rest of the
batch matters, and the draw walks the kept tokens in order of their ids.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from kernels.ops import register

_PHILOX_M = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_W = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_PHILOX_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

#: Candidates that are sorted for top-p before a row falls back to sorting the whole vocabulary.
TOP_P_CANDIDATES = 256

#: Tokens that a draw sums up before it looks at single ones.
DRAW_RUN = 256


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


@register("apply_penalties", "reference")
def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    counts: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Penalise tokens that have occurred, in place; vLLM's meaning.

    Repetition divides positive logits and multiplies negative ones for tokens of prompt and output; presence and
    frequency then subtract for tokens of the output.

    Args:
        logits: [rows, vocab] float32.
        rows, tokens: [entries] int64, distinct pairs: which token occurred in which row.
        counts: [entries] float32, occurrences in the output; 0 for a token of the prompt alone.
        presence, frequency, repetition: [entries] float32, the row's penalties.
    """
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - frequency * counts - presence * (counts > 0)
    logits[rows, tokens] = values


@register("keep_threshold", "reference")
def keep_threshold(
    logits: torch.Tensor, best: torch.Tensor, top_k: list[int], top_p: list[float], min_p: list[float]
) -> torch.Tensor:
    """The least logit that each row's filters keep: min-p, then top-k, then top-p over what those leave.

    Tokens that tie with the last one kept are kept too.

    Args:
        logits: [rows, vocab] float32, temperature applied; may hold -inf.
        best: [rows] float32, each row's maximum, finite.
        top_k: at least 1; the vocabulary's size or more is off.
        top_p: in (0, 1]; 1 is off.
        min_p: in [0, 1]; 0 is off.

    Returns:
        [rows] float32; -inf where nothing is filtered, never above `best`.
    """
    vocab = logits.shape[1]
    device = logits.device
    # log(0) is -inf, which is "off".
    threshold = best + torch.tensor(min_p, dtype=torch.float32, device=device).log()
    wanted = max((k for k in top_k if k < vocab), default=0)
    with_p = [row for row, p in enumerate(top_p) if p < 1.0]
    if not wanted and not with_p:
        return threshold
    largest = logits.topk(min(vocab, max(wanted, TOP_P_CANDIDATES if with_p else 0)), dim=-1).values
    if wanted:
        k = torch.tensor([min(k, largest.shape[1]) for k in top_k], device=device)
        kth = largest.gather(1, (k - 1).unsqueeze(1)).squeeze(1)
        off = torch.tensor([kk >= vocab for kk in top_k], device=device)
        threshold = torch.maximum(threshold, kth.masked_fill(off, float("-inf")))
    if with_p:
        index = torch.tensor(with_p, device=device)
        rows = logits if len(with_p) == len(top_p) else logits.index_select(0, index)
        p = torch.tensor([top_p[row] for row in with_p], dtype=torch.float32, device=device)
        kept = _top_p(
            rows, largest.index_select(0, index), best.index_select(0, index), threshold.index_select(0, index), p
        )
        threshold = threshold.index_copy(0, index, kept)
    return threshold


def _top_p(
    logits: torch.Tensor, largest: torch.Tensor, best: torch.Tensor, threshold: torch.Tensor, p: torch.Tensor
) -> torch.Tensor:
    """Thresholds of the smallest sets whose probability reaches `p`; never below the thresholds given.

    `largest` are some of each row's largest logits, descending.
    """
    kept = logits.masked_fill(logits < threshold.unsqueeze(1), float("-inf"))
    total = (kept - best.unsqueeze(1)).exp().sum(-1)
    result = threshold.clone()
    open_rows = torch.arange(len(logits), device=logits.device)
    while True:
        part = largest.masked_fill(largest < threshold[open_rows].unsqueeze(1), float("-inf"))
        mass = (part - best[open_rows].unsqueeze(1)).exp().cumsum(-1) / total[open_rows].unsqueeze(1)
        reached = mass >= p[open_rows].unsqueeze(1)
        found = reached.any(-1)
        if largest.shape[1] == logits.shape[1]:
            # Rounding may leave the whole sum just short of p: then nothing more is cut.
            last = torch.where(found, reached.float().argmax(-1), largest.shape[1] - 1)
            found = torch.ones_like(found)
        else:
            last = reached.float().argmax(-1)
        value = part.gather(1, last.unsqueeze(1)).squeeze(1)
        done = open_rows[found]
        result[done] = torch.maximum(threshold[done], value[found])
        open_rows = open_rows[~found]
        if not len(open_rows):
            return result
        largest = logits.index_select(0, open_rows).sort(-1, descending=True).values


@register("draw", "reference")
def draw(logits: torch.Tensor, best: torch.Tensor, threshold: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-transform sampling over the tokens at or above the threshold, in order of their ids.

    Args:
        logits: [rows, vocab] float32.
        best: [rows] float32, each row's maximum, finite.
        threshold: [rows] float32, at most `best`.
        uniform: [rows] float64 in [0, 1).

    Returns:
        [rows] int64 token ids.
    """
    weight = (logits - best.unsqueeze(1)).exp_()
    if bool((threshold > float("-inf")).any()):
        weight.masked_fill_(logits < threshold.unsqueeze(1), 0.0)
    # Two levels: first the run of tokens, then the token in it. A running sum over the vocabulary would cost as much as
    # all the rest.
    runs = F.pad(weight, (0, -weight.shape[1] % DRAW_RUN)).view(weight.shape[0], -1, DRAW_RUN)
    run, before = _search(runs.sum(-1).double(), uniform, None)
    inside = runs.gather(1, run.view(-1, 1, 1).expand(-1, 1, DRAW_RUN)).squeeze(1).double()
    token, _ = _search(inside, uniform, before)
    return run * DRAW_RUN + token


def _search(
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
