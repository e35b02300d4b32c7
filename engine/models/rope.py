"""Tables of rotary embeddings, with the context scalings of Hugging Face configs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from engine.models.config import ModelConfig

#: Inverse frequencies [head_dim / 2] float32, and the factor of cos and sin.
Scaling = Callable[[torch.Tensor, ModelConfig], tuple[torch.Tensor, float]]

_scalings: dict[str, Scaling] = {}


def _scaling(*kinds: str) -> Callable[[Scaling], Scaling]:
    def enter(function: Scaling) -> Scaling:
        for kind in kinds:
            _scalings[kind] = function
        return function

    return enter


def rope_tables(
    config: ModelConfig, positions: int, factors: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines as `kernels.reference.rotary` takes them, for positions from 0.

    Args:
        config: of the model.
        positions: how many.
        factors: [head_dim / 2], divisors of the frequencies, which GGUF files carry in place of a scaling.

    Returns:
        Two tensors [positions, head_dim], float32.

    Raises:
        ValueError: an unknown kind of scaling, or one of its fields is missing.
    """
    if config.rope.kind not in _scalings:
        raise ValueError(f"rope type {config.rope.kind!r} is not served; known: {', '.join(sorted(_scalings))}")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    try:
        inverse, scale = _scalings[config.rope.kind](1.0 / (config.rope.theta**exponents), config)
    except KeyError as missing:
        raise ValueError(f"rope type {config.rope.kind!r}: {missing.args[0]} is missing") from missing
    if factors is not None:
        inverse = inverse / factors.float()
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


# Dynamic scaling changes nothing up to the trained context, and longer ones are refused: see `build`.
@_scaling("default", "dynamic")
def _default(inverse: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, float]:
    return inverse, 1.0


@_scaling("linear")
def _linear(inverse: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, float]:
    return inverse / config.rope.options["factor"], 1.0


@_scaling("llama3")
def _llama3(inverse: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, float]:
    options = config.rope.options
    factor, low, high = options["factor"], options["low_freq_factor"], options["high_freq_factor"]
    context = options["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = torch.where(wavelength > context / low, inverse / factor, between)
    return torch.where(wavelength < context / high, inverse, scaled), 1.0


@_scaling("yarn")
def _yarn(inverse: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, float]:
    options, dim, base = config.rope.options, config.head_dim, config.rope.theta
    context = options["original_max_position_embeddings"]
    factor = options.get("factor") or config.max_position_embeddings / context

    def correction(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = correction(options.get("beta_fast") or 32), correction(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inverse / factor * ramp + inverse * (1 - ramp), _yarn_factor(options, factor)


def _yarn_factor(options: dict[str, Any], factor: float) -> float:
    if options.get("attention_factor") is not None:
        return float(options["attention_factor"])

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if options.get("mscale") and options.get("mscale_all_dim"):
        return magnitude(options["mscale"]) / magnitude(options["mscale_all_dim"])
    return magnitude(1.0)
