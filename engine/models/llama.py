"""The Llama family: Llama, Mistral and Qwen2, with grouped-query attention and fused projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

from engine.adapters.targets import Site
from engine.models.config import ModelConfig
from engine.models.registry import OWN_STEP, CausalLM, register_model
from engine.models.rope import rope_tables
from kernels.attention import AttentionBatch
from kernels.blocked import BlockedLogits
from kernels.lora import LoraPass
from kernels.ops import Ops
from kernels.packed import Packed, Weight
from kernels.reference.linear import Linear
from kernels.reference.screen import Screen


@dataclass(slots=True)
class _Layer:
    """One decoder layer. `qkv` gives [tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys, values."""

    input_norm: torch.Tensor
    qkv: Linear
    attention_out: Linear
    mlp_norm: torch.Tensor
    gated: Linear
    down: Linear


#: Kind of a packed tensor, in the place of `weight` in its name.
_PACKED = "packed"


@register_model("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
class LlamaModel(CausalLM):
    """Decoder of the Llama family over a paged KV cache."""

    _screen: Screen | None = None

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
            tensors: by Hugging Face name, on any device in any floating dtype, or `prepared` ones of such a model; left
                empty of all that was used.
            ops: kernels for the device.
            device: where the model runs.
            dtype: of weights and KV cache.
            max_positions: length of the longest sequence.

        Raises:
            ValueError: a tensor is missing or has a wrong shape.
        """
        self.config, self.dtype, self.device, self._ops = config, dtype, device, ops
        weights = _Weights(tensors, ops, device, dtype)
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._heads, self._rotated, self._scale = heads, heads + kv_heads, dim**-0.5
        cos, sin = rope_tables(config, max_positions, weights.take_any("rope_freqs.weight"))
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)
        shape = (config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings or not weights.has("lm_head")
        # Rows of the embedding are read from the panels of a head that is the same matrix.
        self._embedding = weights.packed("model.embed_tokens", *shape) if tied else weights.table(*shape)
        self._layers = [self._load_layer(weights, index) for index in range(config.num_hidden_layers)]
        self._norm = weights.take_vector("model.norm", config.hidden_size)
        head = self._embedding if tied else weights.packed("lm_head", *shape)
        self._head, self._samples = ops.unembed(head), (self._sample(self._embedding), self._sample(head))
        self.prepared = weights.prepared

    def _load_layer(self, weights: _Weights, index: int) -> _Layer:
        config, ops, name = self.config, self._ops, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        parts = {
            f"{name}.self_attn.{part}_proj": size for part, size in (("q", width), ("k", kv_width), ("v", kv_width))
        }
        gates = {f"{name}.mlp.{part}_proj": inner for part in ("gate", "up")}
        out, down = f"{name}.self_attn.o_proj", f"{name}.mlp.down_proj"
        return _Layer(
            input_norm=weights.take_vector(f"{name}.input_layernorm", hidden),
            qkv=ops.linear(*weights.fused(f"{name}.self_attn.qkv_proj", parts, hidden)),
            attention_out=ops.linear(*weights.fused(out, {out: hidden}, width)),
            mlp_norm=weights.take_vector(f"{name}.post_attention_layernorm", hidden),
            gated=ops.gated_linear(*weights.fused(f"{name}.mlp.gate_up_proj", gates, hidden, gated=True)),
            down=ops.linear(*weights.fused(down, {down: hidden}, inner)),
        )

    def _sample(self, matrix: Weight) -> torch.Tensor:
        """Every `OWN_STEP`th row."""
        rows = torch.arange(0, self.config.vocab_size, OWN_STEP, device=self.device)
        return cast(torch.Tensor, self._ops.embed(matrix, rows).to(self.dtype))

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
        update: torch.Tensor | None = None
        if lora is not None and (adapters := lora.layers.get(("embedding", None))) is not None:
            update = ops.embed_delta(tokens, adapters, lora.batch).to(residual.dtype)
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

    def _delta(self, x: torch.Tensor, lora: LoraPass | None, site: Site, index: int | None) -> Any:
        """What adapters add to the layer's output; None where none has changed it so far."""
        adapters = None if lora is None else lora.layers.get((site, index))
        return None if lora is None or adapters is None else self._ops.lora_delta(x, adapters, lora.batch)

    def logits(self, hidden: torch.Tensor, lora: LoraPass | None = None) -> BlockedLogits:
        return self._head(hidden, self._delta(hidden, lora, "lm_head", None))

    def screen_head(self) -> None:
        self._screen = self._ops.screen(self._head)
        self.screens = self._screen is not None

    def greedy(self, hidden: torch.Tensor) -> list[int]:
        assert self._screen is not None
        return self._screen(hidden)

    def own_layers(self) -> dict[str, torch.Tensor]:
        return dict(zip(("model.embed_tokens", "lm_head"), self._samples, strict=True))


class _Weights:
    """Takes checked tensors out of a checkpoint, on the model's device and in its dtype, and packs them.

    What was packed before is taken as it is.

    Attributes:
        prepared: what was taken, under the names that it can be taken by again.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], ops: Ops, device: torch.device, dtype: torch.dtype) -> None:
        self._tensors, self._ops, self._device, self._dtype = tensors, ops, device, dtype
        self._prepared: dict[str, torch.Tensor] = {}
        self._packs = False

    @property
    def prepared(self) -> dict[str, torch.Tensor]:
        return self._prepared if self._packs else {}

    def has(self, name: str) -> bool:
        return any(f"{name}.{kind}" in self._tensors for kind in ("weight", _PACKED))

    def take_any(self, name: str) -> torch.Tensor | None:
        """A tensor as it is, if it is there."""
        tensor = self._tensors.pop(name, None)
        return None if tensor is None else self._prepared.setdefault(name, tensor)

    def table(self, rows: int, columns: int) -> torch.Tensor:
        """The embedding as rows."""
        return self._keep("model.embed_tokens.weight", (rows, columns))

    def take_vector(self, name: str, size: int) -> torch.Tensor:
        return self._keep(f"{name}.weight", (size,))

    def packed(self, name: str, rows: int, columns: int) -> Weight:
        """One matrix without a bias."""
        return self._pack(name, {name: rows}, columns, gated=False)

    def fused(
        self, name: str, sizes: dict[str, int], columns: int, *, gated: bool = False
    ) -> tuple[Weight, torch.Tensor | None]:
        """Weights of several projections of one input as one, and their biases where they have any."""
        weight = self._pack(name, sizes, columns, gated=gated)
        if f"{name}.bias" not in self._tensors:
            if not any(f"{part}.bias" in self._tensors for part in sizes):
                return weight, None
            self._tensors[f"{name}.bias"] = torch.cat([self._pop(f"{part}.bias", (n,)) for part, n in sizes.items()])
        return weight, self._keep(f"{name}.bias", (sum(sizes.values()),))

    def _pack(self, name: str, sizes: dict[str, int], columns: int, *, gated: bool) -> Weight:
        data = self._tensors.pop(f"{name}.{_PACKED}", None)
        if data is not None:
            weight: Weight = Packed(data, sum(sizes.values()), columns, self._dtype)
        else:
            rows = torch.cat([self._pop(f"{part}.weight", (size, columns)) for part, size in sizes.items()])
            weight = self._ops.pack(rows, gated)
        if isinstance(weight, Packed):
            self._packs = True
            self._prepared[f"{name}.{_PACKED}"] = weight.data
        return weight

    def _keep(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        # A copy: an alias of one small tensor would keep a whole file mapped.
        return self._prepared.setdefault(name, self._pop(name, shape).clone())

    def _pop(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ValueError(f"checkpoint: tensor {name} is missing")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"checkpoint: tensor {name} has shape {tuple(tensor.shape)}, the config says {shape}")
        return tensor.to(self._device, self._dtype)
