"""Counter-based random numbers on the device: the same bits as the reference's, for the same seed and position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.ops import register
from kernels.reference.sampling import pack_counters
from kernels.transfer import to_device
from kernels.triton.launch import cdiv, check_tensor

_BLOCK = 128


@triton.jit
def philox_uniform(seed, choice, position):
    """Philox4x32-10 (Salmon et al., 2011) of (position, choice, 0, 0) under the key `seed`: float64 in [0, 1)."""
    c0, c1 = position.to(tl.uint32), choice.to(tl.uint32)
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    k0 = seed.to(tl.uint64).to(tl.uint32)
    k1 = (seed.to(tl.uint64) >> 32).to(tl.uint32)
    m0 = tl.zeros_like(c0) + 0xD2511F53
    m1 = tl.zeros_like(c0) + 0xCD9E8D57
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(m0, c0), m0 * c0
        high1, low1 = tl.umulhi(m1, c2), m1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.zeros_like(c0) + 0x9E3779B9
        k1 += tl.zeros_like(c0) + 0xBB67AE85
    bits = ((c0.to(tl.uint64) << 32) | c1.to(tl.uint64)) >> 11
    return bits.to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit(do_not_specialize=["rows"])
def uniforms_kernel(numbers, out, rows, BLOCK: tl.constexpr):
    """`numbers` is [3, rows] int64: seeds, choices, positions."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    seed = tl.load(numbers + row, mask=inside, other=0)
    choice = tl.load(numbers + rows + row, mask=inside, other=0)
    position = tl.load(numbers + 2 * rows + row, mask=inside, other=0)
    tl.store(out + row, philox_uniform(seed, choice, position), mask=inside)


@register("uniforms", "triton")
def uniforms(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Contract of the reference."""
    return uniforms_packed(to_device(pack_counters(seeds, choices, positions), device))


@register("uniforms_packed", "triton")
def uniforms_packed(numbers: torch.Tensor) -> torch.Tensor:
    """Contract of the reference.

    Raises:
        KernelInputError: the arguments are not served.
    """
    check_tensor("uniforms_packed", "numbers", numbers, dtypes=(torch.int64,), shape=(3, None), contiguous=True)
    rows = numbers.shape[1]
    out = torch.empty(rows, dtype=torch.float64, device=numbers.device)
    if rows:
        uniforms_kernel[(cdiv(rows, _BLOCK),)](numbers, out, rows, BLOCK=_BLOCK, num_warps=4)
    return out
