"""The Llama family: Llama, Mistral and Qwen2, with grouped-query attention and fused projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.adapters.targets import Site
from engine.models.config import ModelConfig
from engine.models.registry import OWN_STEP, CausalLM, register_model
from engine.models.rope import rope_tables
from kernels.attention import AttentionBatch
from kernels.blocked import BlockedLogits
from kernels.lora import LoraPass
from kernels.ops import Ops
from kernels.reference.linear import Linear


@dataclass(slots=True)
class _Layer:
    """One decoder layer. `qkv` gives [tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys, values."""

    input_norm: torch.Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: torch.Tensor
    gated: Linear
    down: Linear


@register_model("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
class LlamaModel(CausalLM):
    """Decoder of the Llama family over a paged KV cache."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, torch.Tensor],
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None:
        """Prepare the weights, which are taken out of `tensors` one by one so that two copies never coexist.

        Args:
            config: shape of the model.
            tensors: by Hugging Face name, on any device in any floating dtype; left empty of all that was used.
            ops: kernels for the device.
            device: where the model runs.
            dtype: of weights and KV cache.
            max_positions: length of the longest sequence.

        Raises:
            ValueError: a tensor is missing or has a wrong shape.
        """
        self.config, self.dtype, self.device, self._ops = config, dtype, device, ops
        weights = _Weights(tensors, device, dtype)
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._heads, self._rotated, self._scale = heads, heads + kv_heads, dim**-0.5
        cos, sin = rope_tables(config, max_positions, tensors.pop("rope_freqs.weight", None))
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)
        embedding = weights.take("model.embed_tokens", config.vocab_size, config.hidden_size).clone()
        self._embedding = embedding
        self._layers = [self._load_layer(weights, index) for index in range(config.num_hidden_layers)]
        self._norm = weights.take_vector("model.norm", config.hidden_size)
        tied = config.tie_word_embeddings or not weights.has("lm_head")
        head = embedding if tied else weights.take("lm_head", *embedding.shape)
        self._head, self._head_sample = ops.unembed(head), head[::OWN_STEP].clone()

    def _load_layer(self, weights: _Weights, index: int) -> _Layer:
        config, ops, name = self.config, self._ops, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        parts = {
            f"{name}.self_attn.{part}_proj": size for part, size in (("q", width), ("k", kv_width), ("v", kv_width))
        }
        gates = {f"{name}.mlp.{part}_proj": inner for part in ("gate", "up")}
        return _Layer(
            input_norm=weights.take_vector(f"{name}.input_layernorm", hidden),
            qkv=ops.linear(*weights.take_fused(parts, hidden)),
            attention_out=ops.linear(*weights.take_fused({f"{name}.self_attn.o_proj": hidden}, width)),
            mlp_norm=weights.take_vector(f"{name}.post_attention_layernorm", hidden),
            gated=ops.gated_linear(*weights.take_fused(gates, hidden)),
            down=ops.linear(*weights.take_fused({f"{name}.mlp.down_proj": hidden}, inner)),
        )

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        lora: LoraPass | None = None,
    ) -> torch.Tensor:
        config, ops, eps = self.config, self._ops, self.config.rms_norm_eps
        count, dim, heads, rotated, scale = len(tokens), config.head_dim, self._heads, self._rotated, self._scale
        width = heads * dim
        cos = ops.embed(self._cos, positions).unsqueeze(1)
        sin = ops.embed(self._sin, positions).unsqueeze(1)
        residual = ops.embed(self._embedding, tokens)
        if lora is not None and (adapters := lora.layers.get(("embedding", None))) is not None:
            residual.add_(ops.embed_delta(tokens, adapters, lora.batch))
        update: torch.Tensor | None = None
        for index, (layer, layer_cache) in enumerate(zip(self._layers, cache.unbind(0), strict=True)):
            if update is None:
                x = ops.rms_norm(residual, layer.input_norm, eps)
            else:
                x = ops.rms_norm(update, layer.input_norm, eps, residual)
            qkv = layer.qkv(x, self._delta(x, lora, "qkv", index))
            by_head = qkv.view(count, -1, dim)
            ops.rotary(by_head.narrow(1, 0, rotated), cos, sin)
            ops.write_kv(qkv.narrow(1, width, qkv.shape[1] - width), layer_cache, batch.slot_mapping)
            attended = ops.paged_attention(by_head.narrow(1, 0, heads), layer_cache, batch, scale)
            attended = layer.attention_out(attended, self._delta(attended, lora, "attention_out", index))
            x = ops.rms_norm(attended, layer.mlp_norm, eps, residual)
            x = layer.gated(x, self._delta(x, lora, "gated", index))
            update = layer.down(x, self._delta(x, lora, "down", index))
        if update is None:
            return ops.rms_norm(residual, self._norm, eps)
        return ops.rms_norm(update, self._norm, eps, residual)

    def _delta(self, x: torch.Tensor, lora: LoraPass | None, site: Site, index: int | None) -> torch.Tensor | None:
        """What adapters add to the layer's output; None where none has changed it so far."""
        adapters = None if lora is None else lora.layers.get((site, index))
        return None if lora is None or adapters is None else self._ops.lora_delta(x, adapters, lora.batch)

    def logits(self, hidden: torch.Tensor, lora: LoraPass | None = None) -> BlockedLogits:
        return self._head(hidden, self._delta(hidden, lora, "lm_head", None))

    def own_layers(self) -> dict[str, torch.Tensor]:
        return {"model.embed_tokens": self._embedding[::OWN_STEP], "lm_head": self._head_sample}


class _Weights:
    """Takes checked tensors out of a checkpoint, on the model's device and in its dtype."""

    def __init__(self, tensors: dict[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._tensors, self._device, self._dtype = tensors, device, dtype

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self._tensors

    def take(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._pop(f"{name}.weight", (rows, columns))

    def take_vector(self, name: str, size: int) -> torch.Tensor:
        # A copy: an alias of one small tensor would keep a whole file mapped.
        return self._pop(f"{name}.weight", (size,)).clone()

    def take_fused(self, sizes: dict[str, int], columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights of several projections of one input as one, and their biases where they have any."""
        weight = torch.cat([self.take(name, rows, columns) for name, rows in sizes.items()])
        if not any(f"{name}.bias" in self._tensors for name in sizes):
            return weight, None
        return weight, torch.cat([self._pop(f"{name}.bias", (rows,)) for name, rows in sizes.items()])

    def _pop(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ValueError(f"checkpoint: tensor {name} is missing")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"checkpoint: tensor {name} has shape {tuple(tensor.shape)}, the config says {shape}")
        return tensor.to(self._device, self._dtype)
