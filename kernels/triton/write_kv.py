"""Keys and values of a step's tokens into their slots, in the cache's own dtype or in 8 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.ops import register
from kernels.triton.launch import FLOAT8, FLOATS, cdiv, check, check_tensor, has_float8, power_of_2, target_of

#: Largest finite number of float8_e4m3fn.
FLOAT8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def round_to_float8(x):
    """float32 within float8_e4m3fn's range, rounded to its numbers, ties to even.

    The cast behind it has nothing left to round, so that every device writes the same bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # below 2^-6 in steps of 2^-9
    return tl.where(tl.abs(x) < 0.015625, small, normal)


@triton.jit
def write_kv_kernel(
    kv, cache, slots, scales, width, total_slots, kv_stride, BLOCK: tl.constexpr, FLOAT8_CACHE: tl.constexpr
):
    """One program writes a piece of one token's keys or values; `width` is that of each of both.

    A slot that does not exist, such as -1 for a padded token, is left out.
    """
    token = tl.program_id(0).to(tl.int64)
    half = tl.program_id(2)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    inside = column < tl.where((slot >= 0) & (slot < total_slots), width, 0)
    column += half * width
    x = tl.load(kv + token * kv_stride + column, mask=inside, other=0.0)
    if FLOAT8_CACHE:
        wide = tl.div_rn(x.to(tl.float32), tl.load(scales + half))
        x = round_to_float8(tl.minimum(tl.maximum(wide, -FLOAT8_MAX), FLOAT8_MAX)).to(cache.dtype.element_ty)
    tl.store(cache + slot * (2 * width) + column, x, mask=inside)


@register("write_kv", "triton")
def write_kv(
    kv: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Contract of the reference; a slot that does not exist is left out.

    Raises:
        KernelInputError: the arguments are not served.
    """
    name = "write_kv"
    check_tensor(name, "kv", kv, dtypes=FLOATS, shape=(None, None))
    shape = (None, None, 2, None, None)
    check_tensor(name, "cache", cache, dtypes=(*FLOATS, *FLOAT8), shape=shape, device=kv.device, contiguous=True)
    blocks, block_size, _, kv_heads, dim = cache.shape
    width = kv_heads * dim
    check(name, kv.shape[1] == 2 * width, f"kv has rows of {kv.shape[1]}, the cache takes {2 * width}")
    eight_bits = cache.dtype in FLOAT8
    check(name, eight_bits or cache.dtype == kv.dtype, f"kv is {kv.dtype}, the cache {cache.dtype}")
    check(name, eight_bits == (scales is not None), "scales belong to a cache of float8, and only to that")
    check_tensor(name, "slot_mapping", slot_mapping, dtypes=(torch.int64,), shape=(len(kv),), device=kv.device)
    if scales is not None:
        check(name, has_float8(target_of(kv.device)), f"{target_of(kv.device)} has no float8_e4m3fn")
        check_tensor(name, "scales", scales, dtypes=(torch.float32,), shape=(2,), device=kv.device)
    if not len(kv):
        return
    block = min(1024, power_of_2(width))
    write_kv_kernel[(len(kv), cdiv(width, block), 2)](
        kv,
        cache,
        slot_mapping,
        kv if scales is None else scales,
        width,
        blocks * block_size,
        kv.stride(0),
        BLOCK=block,
        FLOAT8_CACHE=eight_bits,
        num_warps=4,
    )
