"""GGUF files: metadata as a Hugging Face config, tensors dequantised under Hugging Face names."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType
from gguf.quants import dequantize

#: Architectures of GGUF files and the one of Hugging Face that computes the same.
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
#: Those whose query and key rows llama.cpp reorders for its interleaved rotary embedding.
_INTERLEAVED = frozenset({"llama"})

#: Values of a tensor that are dequantised together.
_AT_ONCE = 256 * 1024

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Reader(GGUFReader):
    """The package's reader with a quick way through long arrays.

    Its own makes several NumPy views for each of the hundred thousand strings of a vocabulary, which takes seconds.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if kind == GGUFValueType.STRING and self.byte_order == "I":
            parts, end = _strings(memoryview(self.data), start, count)
            return end - orig_offs, parts, list(range(count)), [GGUFValueType.ARRAY, kind]
        if kind in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[kind], count)
            return 12 + values.nbytes, [values], [0], [GGUFValueType.ARRAY, kind]
        return super()._get_field_parts(orig_offs, raw_type)


def _strings(data: memoryview, start: int, count: int) -> tuple[list[memoryview], int]:
    """The strings of an array, and the offset behind it."""
    found: list[memoryview] = []
    for _ in range(count):
        length = int.from_bytes(data[start : start + 8], "little")
        start += 8 + length
        found.append(data[start - length : start])
    return found, start


class GGUFFile:
    """One GGUF file, its metadata read and its tensors mapped.

    Raises:
        ValueError: not a GGUF file, or of an architecture that is not served.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _Reader(path)
        self.architecture = str(self.value("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            known = ", ".join(sorted(_ARCHITECTURES))
            raise ValueError(f"{path.name}: GGUF architecture {self.architecture!r} is not served; known: {known}")

    def value(self, key: str, default: Any = None) -> Any:
        """A metadata value; arrays as lists."""
        field = self._reader.fields.get(key)
        if field is None:
            return default
        return field.contents()

    def config(self) -> dict[str, Any]:
        """The metadata as a `config.json` of transformers.

        Raises:
            ValueError: a needed value is missing, or a rope scaling is not served.
        """
        names = {tensor.name for tensor in self._reader.tensors}
        heads = self._needed("attention.head_count")
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "vocab_size": len(self._reader.fields["tokenizer.ggml.tokens"].data),
            "hidden_size": self._needed("embedding_length"),
            "intermediate_size": self._needed("feed_forward_length"),
            "num_hidden_layers": self._needed("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._value("attention.head_count_kv", heads),
            "max_position_embeddings": self._needed("context_length"),
            "rms_norm_eps": self._needed("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._value("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in names,
            "hidden_act": "silu",
        }
        if self._value("attention.key_length") is not None:
            config["head_dim"] = self._value("attention.key_length")
        scaling = self._value("rope.scaling.type", "none")
        if scaling != "none":
            if scaling not in ("linear", "yarn"):
                raise ValueError(f"{self.path.name}: rope scaling {scaling!r} of GGUF files is not served")
            original = self._value("rope.scaling.original_context_length", config["max_position_embeddings"])
            config["rope_scaling"] = {
                "rope_type": scaling,
                "factor": self._needed("rope.scaling.factor"),
                "original_max_position_embeddings": original,
            }
        return config

    def tensors(self, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """All tensors, rows in Hugging Face's order.

        Args:
            dtype: of the result; None: float32, and float16 for those of 16 bits.

        Raises:
            ValueError: a tensor has a name that the architecture does not know.
        """
        heads = self._needed("attention.head_count")
        permuted: dict[str, int] = {}
        if self.architecture in _INTERLEAVED:
            permuted = {"attn_q": heads, "attn_k": self._value("attention.head_count_kv", heads)}

        def load(tensor: Any) -> tuple[str, torch.Tensor]:
            name, part = _hf_name(tensor.name)
            values = _dequantised(tensor, dtype)
            return name, _halves_layout(values, permuted[part]) if part in permuted else values

        # NumPy lets go of the lock inside, so threads help.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return dict(pool.map(load, self._reader.tensors))

    def _value(self, key: str, default: Any = None) -> Any:
        return self.value(f"{self.architecture}.{key}", default)

    def _needed(self, key: str) -> Any:
        value = self._value(key)
        if value is None:
            raise ValueError(f"{self.path.name}: {self.architecture}.{key} is missing")
        return value


def _hf_name(name: str) -> tuple[str, str]:
    """Hugging Face's name of a tensor, and llama.cpp's name of its part of a layer."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name], ""
    pieces = name.split(".")
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in _LAYER_NAMES:
        return f"model.layers.{pieces[1]}.{_LAYER_NAMES[pieces[2]]}.{pieces[3]}", pieces[2]
    raise ValueError(f"GGUF tensor {name!r} is not known")


def _dequantised(tensor: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor's values, some rows at a time: what is between quantised and converted stays in the cache."""
    data = tensor.data
    first = torch.from_numpy(np.array(dequantize(data[:1], tensor.tensor_type)))
    out = torch.empty((len(data), *first.shape[1:]), dtype=dtype or first.dtype)
    step = max(1, _AT_ONCE // max(1, first.numel()))
    for begin in range(0, len(data), step):
        values = dequantize(data[begin : begin + step], tensor.tensor_type)
        out[begin : begin + step] = torch.from_numpy(values if values.flags.writeable else values.copy())
    return out


def _halves_layout(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of rows, where a head's pairs (i, i + dim/2) are neighbours."""
    rows = values.shape[0]
    split = values.view(heads, rows // heads // 2, 2, *values.shape[1:])
    return split.transpose(1, 2).reshape(values.shape)
