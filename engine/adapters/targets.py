"""Where a model can be adapted: its linear layers by Hugging Face name, and their places in the fused ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.models.config import ModelConfig

#: Linear layers as the models of this engine compute them.
Site = Literal["qkv", "attention_out", "gated", "down", "lm_head", "embedding"]


@dataclass(frozen=True, slots=True)
class Target:
    """A module that an adapter may name.

    Attributes:
        site: which of the engine's layers computes it.
        layer: index of the decoder layer; None outside of them.
        part: position among the parts of a fused layer, each of which has columns of its own between A and B.
        first: the first of its outputs in the fused layer.
        outputs, inputs: widths of the module.
    """

    site: Site
    layer: int | None
    part: int
    first: int
    outputs: int
    inputs: int


def targets(config: ModelConfig) -> dict[str, Target]:
    """All modules of a Llama-like model, by name. A checkpoint's fused names are the same layers as a whole."""
    heads, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    found: dict[str, Target] = {}
    for layer in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        first = 0
        for part, (name, outputs) in enumerate((("q_proj", heads), ("k_proj", kv), ("v_proj", kv))):
            found[f"{attention}.{name}"] = Target("qkv", layer, part, first, outputs, hidden)
            first += outputs
        found[f"{attention}.o_proj"] = Target("attention_out", layer, 0, 0, hidden, heads)
        found[f"{mlp}.gate_proj"] = Target("gated", layer, 0, 0, inner, hidden)
        found[f"{mlp}.up_proj"] = Target("gated", layer, 1, inner, inner, hidden)
        found[f"{mlp}.down_proj"] = Target("down", layer, 0, 0, hidden, inner)
    found["lm_head"] = Target("lm_head", None, 0, 0, config.vocab_size, hidden)
    found["model.embed_tokens"] = Target("embedding", None, 0, 0, hidden, config.vocab_size)
    return found


#: Parts of each fused layer.
PARTS: dict[Site, int] = {"qkv": 3, "attention_out": 1, "gated": 2, "down": 1, "lm_head": 1, "embedding": 1}
