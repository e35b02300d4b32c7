"""Linear layers on tiles: the device's usual ones, with as many rows at a time as were shown to give equal bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

from kernels.cpu.linear import packable
from kernels.invariant.silu_and_mul import silu_and_mul
from kernels.invariant.tiles import Tensors, Tiled, proven_sizes
from kernels.ops import ops_for, register
from kernels.reference.linear import Linear

#: Makes a layer of a weight and a bias.
Make = Callable[[torch.Tensor, torch.Tensor | None], Linear]

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)
BASES = (8, 4, 2, 1)

#: Most multiply-adds of one call in a trial: what bounds the time that trials take, and with it the largest tiles.
_TRIAL_MACS = 1 << 31


@register("linear", "invariant")
def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Contract of the reference.

    Raises:
        ValueError: the device's linear layer of this shape does not give the same bits twice.
    """
    return _tiled(ops_for(weight.device.type).linear, weight, bias)


@register("gated_linear", "invariant")
def gated_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Contract of the reference.

    Raises:
        ValueError: as for `linear`.
    """
    fused = ops_for(weight.device.type).gated_linear
    if weight.device.type == "cpu" and not packable(weight):
        # There it is torch's own SiLU, which knows the end of a vector from its middle.
        return _tiled(_gated_in_two, weight, bias)
    best = max((fused, _gated_in_two), key=lambda make: _sizes(make, *_key(weight, bias))[-1])
    return _tiled(best, weight, bias)


def _gated_in_two(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    project = ops_for(weight.device.type).linear(weight, bias)

    def apply(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        return silu_and_mul(project(x, delta))

    return apply


def _tiled(make: Make, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    tiled = Tiled(_as_run(make(weight, bias)), _sizes(make, *_key(weight, bias)))

    def apply(x: torch.Tensor, delta: torch.Tensor | None = None) -> torch.Tensor:
        if delta is not None:
            raise NotImplementedError("adapters have no invariant kernels")
        return tiled(x)[0]

    return apply


def _as_run(apply: Linear) -> Callable[[torch.Tensor], Tensors]:
    return lambda x: (apply(x),)


def _key(
    weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[tuple[int, int], bool, torch.dtype, torch.device, int]:
    """What a library may choose a kernel by, besides the number of rows."""
    rows, columns = weight.shape
    return (rows, columns), bias is not None, weight.dtype, weight.device, torch.get_num_threads()


@lru_cache(maxsize=256)
@torch.inference_mode()
def _sizes(
    make: Make, shape: tuple[int, int], with_bias: bool, dtype: torch.dtype, device: torch.device, threads: int
) -> tuple[int, ...]:
    """Tile sizes for all weights of a shape, by random ones: a real one may be too plain to tell orders apart."""
    sizes = tuple(size for size in SIZES if size <= 16 or size * shape[0] * shape[1] <= _TRIAL_MACS)
    trials = [
        (_as_run(make(weight, bias)), (rows,))
        for weight, bias, rows in _random_layers(shape, with_bias, dtype, device, sizes[-1])
    ]
    try:
        return proven_sizes(trials, sizes, BASES)
    except ValueError as error:
        raise ValueError(f"deterministic: linear layer {list(shape)} in {dtype}: {error}") from error


def _random_layers(
    shape: tuple[int, int], with_bias: bool, dtype: torch.dtype, device: torch.device, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    """Weight, bias and input, once or twice."""
    generator = torch.Generator(device).manual_seed(0)

    def uniform(*size: int) -> torch.Tensor:
        return torch.empty(size, device=device).uniform_(-1, 1, generator=generator)

    width = shape[1]
    weight, x = uniform(*shape).mul_(math.sqrt(3 / width)), uniform(rows, width).mul_(2)
    yield weight.to(dtype), uniform(shape[0]).to(dtype) if with_bias else None, x.to(dtype)
    if dtype == torch.float32:
        return
    # A narrow result hides nearly every difference in a wide sum. Here the terms cancel in pairs, so that what is left
    # is the rounding errors of the sum and nothing else.
    half = width // 2
    order = torch.randperm(width, device=device, generator=generator)
    one, other = order[:half], order[half : 2 * half]
    weight[:, other], x[:, other] = -weight[:, one], x[:, one]
    weight[:, order[2 * half :]] = 0  # the one without a partner, if the width is odd
    yield weight.to(dtype), torch.zeros(shape[0], dtype=dtype, device=device) if with_bias else None, x.to(dtype)
