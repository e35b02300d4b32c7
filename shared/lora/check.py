"""Whether an adapter can be served, found out without its model and without torch, reading its weights once in pieces.

What passes here an engine serves, with one exception: whether copies of embedding and head are the model's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from safetensors import SafetensorError, safe_open

from shared.errors import AdapterError
from shared.lora import layout
from shared.lora.files import WEIGHTS_FILE, weights_file
from shared.lora.peft_config import PeftConfig, read_config

#: Bytes of weights that are looked at together.
_PIECE: Final = 4 * 1024 * 1024
#: Floating point types as safetensors names them, by what numpy reads; bfloat16 as the bits that it has.
_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"),
}  # fmt: skip
#: Largest number of a model's dtype.
_LARGEST: Final = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
_LARGEST_FLOAT32: Final = 3.4028234663852886e38
#: Modules whose layer PEFT saves beside their adapter.
_COPIED: Final = ("embed_tokens", "lm_head")


@dataclass(frozen=True, slots=True)
class Checked:
    """An adapter that can be served. `bytes` are those of its weights' file."""

    rank: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where a tensor is in its file: `start` from the beginning of the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def check_adapter(
    folder: Path, modules: Mapping[str, tuple[int, int]], *, max_rank: int, max_bytes: int, dtype: str = ""
) -> Checked:
    """Look at all of an adapter.

    Args:
        modules: inputs and outputs of the model's modules, by name; an embedding's inputs are the vocabulary.
        max_rank: largest rank that is served.
        max_bytes: largest file of weights.
        dtype: of the model, as torch names it.

    Raises:
        AdapterError: it cannot be served, and why. The messages are those of the engine.
    """
    config = read_config(folder)
    path = weights_file(folder)
    size = path.stat().st_size
    if size > max_bytes:
        raise AdapterError(f"{WEIGHTS_FILE}: it has {size} bytes, at most {max_bytes} are allowed (max_adapter_bytes)")
    tensors = _tensors(path)
    found = layout.layout_of(tensors)
    layout.check_modules(config, found.modules, modules)
    for module, name in found.copies.items():
        layout.check_copy(module, tensors[name].shape, _own_shape(module, *modules[module]))
    ranks = {
        module: layout.check_pair(config, module, tensors[a].shape, tensors[b].shape, *modules[module])
        for module, (a, b) in sorted(found.pairs.items())
    }
    rank = max(ranks.values())
    layout.check_rank(rank, max_rank)
    largest = _LARGEST.get(dtype, _LARGEST_FLOAT32)
    with path.open("rb") as stream:
        for module, (a, b) in sorted(found.pairs.items()):
            _check_numbers(stream, config, module, tensors[a], tensors[b], largest)
    return Checked(rank, size)


def check_ranks(folder: Path, most: int) -> None:
    """Look at the largest rank of an adapter, which its config and the names of its tensors tell without its weights.

    Raises:
        AdapterError: it is above the largest that is served, or the config or the weights' header cannot be served.
    """
    config = read_config(folder)
    pairs = layout.layout_of(_tensors(weights_file(folder))).pairs
    rank = max(config.rank(module) for module in pairs)
    layout.check_rank(rank, most, "r" if rank == config.r else "rank_pattern")


def _tensors(path: Path) -> dict[str, _Tensor]:
    """What the header says, once the library has found it in order: offsets, sizes and the file's length agree."""
    try:
        with safe_open(path, framework="np"), path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise AdapterError(f"{WEIGHTS_FILE}: {error}") from None
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        found[name] = _Tensor(entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start)
    return found


def _own_shape(module: str, inputs: int, outputs: int) -> tuple[int, int] | None:
    """Shape of the model's own layer where an adapter may bring a copy of it."""
    name = module.rpartition(".")[2]
    if name not in _COPIED:
        return None
    return (inputs, outputs) if name == "embed_tokens" else (outputs, inputs)


def _check_numbers(stream: BinaryIO, config: PeftConfig, module: str, a: _Tensor, b: _Tensor, largest: float) -> None:
    for half, tensor in (("A", a), ("B", b)):
        if tensor.dtype not in _TYPES:
            raise layout.not_finite(half, module)
        greatest = 0.0
        for piece in _pieces(stream, tensor):
            largest_here = _greatest(piece)
            if not math.isfinite(largest_here):
                raise layout.not_finite(half, module)
            greatest = max(greatest, largest_here)
        if half == "A" and greatest > largest:
            raise layout.not_finite(half, module)
        if half == "B" and greatest * abs(config.scale(module)) > largest:
            raise layout.not_finite_scaled(module)


def _greatest(numbers: np.ndarray[Any, Any]) -> float:
    """Largest magnitude of a piece; infinity or NaN where there is one."""
    if numbers.dtype == _TYPES["BF16"]:
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    return float(np.abs(numbers).max(initial=0.0))


def _pieces(stream: BinaryIO, tensor: _Tensor) -> Iterator[np.ndarray[Any, Any]]:
    kind = _TYPES[tensor.dtype]
    stream.seek(tensor.start)
    left = tensor.size
    while left:
        data = stream.read(min(left, _PIECE))
        if not data:
            raise AdapterError(f"{WEIGHTS_FILE}: it was cut off while it was read")
        left -= len(data)
        yield np.frombuffer(data, kind)
