"""Linear layers over weights that oneDNN has reordered once for its own kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from kernels.cpu.large_pages import move_into_large_pages
from kernels.ops import register
from kernels.reference.linear import Linear
from kernels.reference.linear import gated_linear as reference_gated_linear
from kernels.reference.linear import linear as reference_linear


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
    packed = _packed(weight)
    run = torch.ops.mkldnn._linear_pointwise.default

    def apply(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        y = run(x, packed, bias, "none", [], "")
        return y if delta is None else y.add_(delta)

    return apply


@register("gated_linear", "cpu")
def gated_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Contract of the reference: SiLU and product are done where the matrix products leave their results."""
    if not packable(weight):
        return reference_gated_linear(weight, bias)
    gate_weight, up_weight = weight.chunk(2)
    gate_bias, up_bias = (None, None) if bias is None else bias.chunk(2)
    gate, up = _packed(gate_weight), _packed(up_weight)
    run = torch.ops.mkldnn._linear_pointwise.default
    run_binary = torch.ops.mkldnn._linear_pointwise.binary

    def apply(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        if delta is not None:
            halves = delta.chunk(2, -1)
            left = run(x, gate, gate_bias, "none", [], "").add_(halves[0])
            return F.silu(left).mul_(run(x, up, up_bias, "none", [], "").add_(halves[1]))
        return run_binary(x, run(x, gate, gate_bias, "swish", [], ""), up, up_bias, "mul")

    return apply


def _packed(weight: torch.Tensor) -> torch.Tensor:
    """As oneDNN orders it, in large pages where there are such: one stream does little but read weights."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    move_into_large_pages(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))
    return packed
