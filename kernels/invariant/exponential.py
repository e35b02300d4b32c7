"""The exponential, where an element's result may not depend on its place in a tensor.

Kernels that treat the end of a vector by other code often round differently there: torch's `exp2`, `sigmoid` and `silu`
do on CPUs, its `exp` does not. That is tried on many ends, since a tile has too few of them to show it for certain.
"""

from __future__ import annotations

from functools import lru_cache

import torch

#: Least argument: from here on a weight is as good as nothing beside the largest one, which is 1.
_LEAST = -80.0
_NOTHING = 2e-35

_LONGEST_END = 64


def weights_(x: torch.Tensor) -> torch.Tensor:
    """exp(x) in place, for x up to 0; exactly 0 from about -80 down.

    Underflow is kept away from the exponential, which takes many times as long there.
    """
    return torch.threshold_(x.clamp_(min=_LEAST).exp_(), _NOTHING, 0.0)


@lru_cache(maxsize=64)
@torch.inference_mode()
def prove_exponential(device: torch.device) -> None:
    """Try all ends of vectors.

    Raises:
        ValueError: an element's exponential depends on its place.
    """
    generator = torch.Generator(device).manual_seed(0)
    x = torch.empty(_LONGEST_END * _LONGEST_END, device=device).uniform_(_LEAST, 20.0, generator=generator)
    whole = x.exp()
    for length in range(1, _LONGEST_END):
        for first in range(0, x.shape[0] - length, _LONGEST_END - 1):
            if not torch.equal(x[first : first + length].clone().exp_(), whole[first : first + length]):
                raise ValueError(f"deterministic: exponentials on {device.type} depend on an element's place")
