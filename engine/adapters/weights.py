"""Adapter weights: read from safetensors, checked against config and model, scaled once, named by their content."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.adapters.targets import Target
from kernels.lora import Prepared
from shared.errors import AdapterError
from shared.lora import layout
from shared.lora.files import WEIGHTS_FILE, content_identity, weights_file
from shared.lora.peft_config import PeftConfig, read_config


@dataclass(slots=True)
class AdapterPart:
    """One module's adapter: `x @ a.T @ b.T` is added to its output. An embedding adds `a[:, token] @ b.T`.

    Attributes:
        a: [rank, inputs].
        b: [outputs, rank], multiplied by the scale.
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclass(slots=True)
class Adapter:
    """An adapter in memory.

    Attributes:
        identity: of its content; two adapters with the same one compute the same.
        rank: the largest of its parts.
        parts: by the module's Hugging Face name.
        prepared: for the device, in the place of the parts.
    """

    identity: str
    rank: int
    parts: dict[str, AdapterPart]
    prepared: Prepared | None = None

    @property
    def bytes(self) -> int:
        """Memory of its weights."""
        prepared = 0 if self.prepared is None else self.prepared.bytes
        return prepared + sum(t.numel() * t.element_size() for part in self.parts.values() for t in (part.a, part.b))


def load_adapter(
    folder: Path,
    targets: Mapping[str, Target],
    dtype: torch.dtype,
    *,
    max_rank: int,
    base: Mapping[str, torch.Tensor] | None = None,
    base_step: int = 1,
) -> Adapter:
    """Read an adapter for a model.

    Args:
        targets: the model's modules.
        dtype: of the model.
        max_rank: largest rank that is served.
        base: the model's own embedding and head by module, to compare with copies that the adapter brings.
        base_step: which rows `base` has of them, every so many.

    Raises:
        AdapterError: it cannot be served on this model, and why.
    """
    config = read_config(folder)
    # Hashing reads the file without the interpreter's lock; what follows holds it, and must not wait for a disk.
    identity = content_identity(folder)
    tensors = _read(weights_file(folder))
    found = layout.layout_of(tensors)
    layout.check_modules(config, found.modules, targets)
    for module, name in found.copies.items():
        _check_copy(module, tensors[name], targets[module], (base or {}).get(module), base_step)
    parts = {
        module: _part(config, module, tensors[a], tensors[b], targets[module], dtype)
        for module, (a, b) in sorted(found.pairs.items())
    }
    rank = max(part.a.shape[0] for part in parts.values())
    layout.check_rank(rank, max_rank)
    return Adapter(identity, rank, parts)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file handle, not a mapping
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{WEIGHTS_FILE}: {error}") from None


def _check_copy(module: str, copy: torch.Tensor, target: Target, own: torch.Tensor | None, step: int) -> None:
    """A layer that the adapter brings must be the model's own: another one would be ignored."""
    rows = target.inputs if target.site == "embedding" else target.outputs
    layout.check_copy(module, copy.shape, None if own is None else (rows, own.shape[1]))
    if own is not None and not torch.allclose(copy[::step].float(), own.float(), rtol=2e-2, atol=2e-3):
        raise AdapterError(f"{WEIGHTS_FILE}: {module}: it differs from the model's own (modules_to_save?)")


def _part(
    config: PeftConfig, module: str, a: torch.Tensor, b: torch.Tensor, target: Target, dtype: torch.dtype
) -> AdapterPart:
    layout.check_pair(config, module, a.shape, b.shape, target.inputs, target.outputs)
    for half, tensor in (("A", a), ("B", b)):
        if not tensor.is_floating_point() or not _finite(tensor):
            raise layout.not_finite(half, module)
    converted = a.to(dtype)
    if a.dtype != dtype and not _finite(converted):
        raise layout.not_finite("A", module)
    scaled = (b.float() * config.scale(module)).to(dtype)
    if not _finite(scaled):
        raise layout.not_finite_scaled(module)
    return AdapterPart(converted.contiguous(), scaled.contiguous())


def _finite(tensor: torch.Tensor) -> bool:
    """Whether all values are. The sum of what is not finite is not either, and is found in a tenth of the time."""
    return math.isfinite(float(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())
