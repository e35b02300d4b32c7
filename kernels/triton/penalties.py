"""Presence, frequency and repetition penalties."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops import register
from kernels.triton.launch import cdiv, check_tensor

_BLOCK = 256


@triton.jit(do_not_specialize=["entries"])
def penalties_kernel(logits, index, counts, presence, frequency, repetition, entries, size, BLOCK: tl.constexpr):
    """One program edits some entries; one that is not among the logits is left out."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < entries
    place = tl.load(index + entry, mask=inside, other=0)
    inside = inside & (place >= 0) & (place < size)
    value = tl.load(logits + place, mask=inside, other=0.0)
    times = tl.load(repetition + entry, mask=inside, other=1.0)
    value = tl.where(value > 0.0, tl.div_rn(value, times), value * times)
    count = tl.load(counts + entry, mask=inside, other=0.0)
    value -= tl.load(frequency + entry, mask=inside, other=0.0) * count
    value -= tl.where(count > 0.0, tl.load(presence + entry, mask=inside, other=0.0), 0.0)
    tl.store(logits + place, value, mask=inside)


@register("apply_penalties", "triton")
def apply_penalties(
    logits: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Contract of the reference; an index behind the logits is left out.

    Raises:
        KernelInputError: the arguments are not served.
    """
    name, entries = "apply_penalties", len(index)
    check_tensor(name, "logits", logits, dtypes=(torch.float32,), shape=(None, None), contiguous=True)
    device = logits.device
    check_tensor(name, "index", index, dtypes=(torch.int64,), shape=(None,), device=device, contiguous=True)
    for label, tensor in (
        ("counts", counts),
        ("presence", presence),
        ("frequency", frequency),
        ("repetition", repetition),
    ):
        check_tensor(name, label, tensor, dtypes=(torch.float32,), shape=(entries,), device=device, contiguous=True)
    if entries:
        penalties_kernel[(cdiv(entries, _BLOCK),)](
            logits,
            index,
            counts,
            presence,
            frequency,
            repetition,
            entries,
            logits.numel(),
            BLOCK=_BLOCK,
            num_warps=4,
        )
