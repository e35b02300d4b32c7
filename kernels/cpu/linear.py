"""Linear layers over weights that oneDNN has reordered once for its own kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from kernels.cpu.large_pages import move_into_large_pages
from kernels.cpu.threads import FEW_ROWS, SMALL, unless_awake
from kernels.ops import register
from kernels.reference.linear import Linear
from kernels.reference.linear import gated_linear as reference_gated_linear
from kernels.reference.linear import linear as reference_linear

_product = torch.ops.mkldnn._linear_pointwise.default
#: Rows in place of two in bfloat16, and of one where the weight has many bytes, since oneDNN reads it faster so: 57 MB
#: in 2.7 ms, against 3.3 for 1 row and 3.9 for 2 (one thread of a Zen 4). For one row of a smaller weight the copy
#: costs what it brings: 3.5 MB took two threads 200 us with 1 row and with 4.
_WIDE, _WIDE_FROM = 4, 16 * 1024 * 1024


def packable(weight: torch.Tensor) -> bool:
    """Whether oneDNN computes in the weight's dtype on this CPU; bfloat16 needs AVX-512 or AVX-NE-CONVERT."""
    if not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


@register("linear", "cpu")
def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Contract of the reference. The weight given may be freed afterwards."""
    if not packable(weight):
        return reference_linear(weight, bias)
    packed, size = _packed(weight), weight.numel() * weight.element_size()
    widened = () if weight.dtype != torch.bfloat16 else (1, 2) if size > _WIDE_FROM else (2,)

    def apply(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        rows = len(x)
        if rows in widened:
            x = x.repeat(_WIDE // rows, 1)
        if rows <= FEW_ROWS and size <= SMALL:
            y = unless_awake(_product, x, packed, bias, "none", [], "")
        else:
            y = _product(x, packed, bias, "none", [], "")
        if len(x) != rows:
            y = y.narrow(0, 0, rows)
        return y if delta is None else y.add_(delta)

    return apply


@register("gated_linear", "cpu")
def gated_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Contract of the reference; gate and up are one product, since each costs a call that finds cold caches."""
    if not packable(weight):
        return reference_gated_linear(weight, bias)
    project = linear(weight, bias)

    def apply(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        gate, up = project(x, delta).chunk(2, -1)
        return F.silu(gate).mul_(up)

    return apply


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """As oneDNN orders it, in large pages where there are such: one stream does little but read weights."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    move_into_large_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed
