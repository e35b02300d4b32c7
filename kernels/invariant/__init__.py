"""Operations whose result for a row depends on that row alone, bit for bit; same contracts as the references.

A matrix product sums in an order that its shape decides, so here it runs on tiles of few sizes, shown at load to give
equal bits: see `kernels.invariant.tiles`. Everything else is made of element-wise operations that round correctly, and
of sums over one row in an order that its length decides.
"""

from kernels.invariant import linear, paged_attention, rms_norm, rotary, silu_and_mul, unembed

__all__ = ["linear", "paged_attention", "rms_norm", "rotary", "silu_and_mul", "unembed"]
