"""The gated activation by operations that do not know where in a vector an element lies."""

from __future__ import annotations

import torch

from kernels.invariant.exponential import prove_exponential
from kernels.ops import register


@register("silu_and_mul", "invariant")
def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Contract of the reference, rounded once. torch's own SiLU takes another exponential at a vector's end."""
    prove_exponential(x.device)
    gate, up = x.float().chunk(2, -1)
    return gate.div(gate.neg().exp_().add_(1.0)).mul_(up).to(x.dtype)
