"""The part of a Hugging Face config that a decoder needs, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, and how long contexts scale it. `options` are the config's own fields."""

    theta: float = 10000.0
    kind: str = "default"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-like decoder. Field names are Hugging Face's."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    sliding_window: int | None
    rope: RopeConfig

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModelConfig:
        """Read a `config.json`, of transformers 4 or 5.

        Raises:
            ValueError: a field is missing, or asks for what is not served.
        """
        architectures = config.get("architectures") or []
        if len(architectures) != 1:
            raise ValueError("config: exactly one architecture is needed")
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ValueError(f"config: hidden_act {activation!r} is not served, only silu")
        try:
            heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                architecture=str(architectures[0]),
                vocab_size=int(config["vocab_size"]),
                hidden_size=hidden,
                intermediate_size=int(config["intermediate_size"]),
                num_hidden_layers=int(config["num_hidden_layers"]),
                num_attention_heads=heads,
                num_key_value_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                max_position_embeddings=int(config["max_position_embeddings"]),
                rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                sliding_window=_sliding_window(config),
                rope=_rope(config),
            )
        except KeyError as missing:
            raise ValueError(f"config: {missing.args[0]} is missing") from missing


def _sliding_window(config: dict[str, Any]) -> int | None:
    # Qwen2 names a window and switches it off.
    if not config.get("use_sliding_window", True):
        return None
    window = config.get("sliding_window")
    return None if window is None else int(window)


def _rope(config: dict[str, Any]) -> RopeConfig:
    options = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(options.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = str(options.get("rope_type") or options.get("type") or "default")
    for name in ("original_max_position_embeddings", "partial_rotary_factor"):
        if config.get(name) is not None:
            options.setdefault(name, config[name])
    if float(options.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config: partial_rotary_factor other than 1 is not served")
    return RopeConfig(theta=theta, kind=kind, options=options)
