"""The packaged model in the forms that peers read, all with the values that Ropeway computes with: bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2"}
#: Metadata that `GGUFWriter` writes by itself.
_WRITERS_OWN = ("general.architecture",)


def export_folder(model: str, folder: Path) -> Path:
    """Write safetensors, config and tokenizer as Hugging Face's libraries read them; answers the folder."""
    import torch
    from safetensors.torch import save_file

    from engine.loading.resolve import load

    checkpoint = load(model)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in checkpoint.tensors.items()
        if name != "rope_freqs.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    bundle = checkpoint.bundle
    bundle.tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", **bundle.special_tokens}
    if bundle.chat_template is not None:
        tokenizer["chat_template"] = bundle.chat_template
    architecture = checkpoint.config["architectures"][0]
    config = checkpoint.config | {
        "model_type": _MODEL_TYPES[architecture],
        "torch_dtype": "bfloat16",
        "eos_token_id": bundle.eos_token_ids[0],
        "bos_token_id": bundle.tokenizer.token_to_id(bundle.special_tokens["bos_token"]),
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", tokenizer)
    return folder


def export_gguf(model: str, path: Path, kind: str = "BF16") -> Path:
    """Write a GGUF file whose matrices are of `kind` (BF16 or F16) and whose vectors are float32; answers the path.

    Raises:
        ValueError: the model is not packaged as a GGUF file.
    """
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    from engine.loading.resolve import resolve

    source = resolve(model).path
    if source.suffix != ".gguf":
        raise ValueError(f"model {model!r} is no GGUF file")
    reader = GGUFReader(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    _copy_metadata(reader, writer)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    matrices = GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, matrices), raw_dtype=matrices)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _copy_metadata(reader: Any, writer: Any) -> None:
    from gguf import GGUFValueType

    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in (*_WRITERS_OWN, "general.file_type"):
            continue
        items = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=items)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
