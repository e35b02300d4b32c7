"""Adapter weights: read from safetensors, checked against config and model, scaled once, named by their content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.adapters.targets import Target
from shared.errors import AdapterError
from shared.lora.files import WEIGHTS_FILE, content_identity, weights_file
from shared.lora.peft_config import CONFIG_FILE, PeftConfig, matches, read_config

_PREFIX = "base_model.model."
#: A module's tensors. PEFT saves the layer itself beside the adapters of embedding and head.
_ENDS = {
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_embedding_A": "A",
    ".lora_embedding_B": "B",
    ".base_layer.weight": "base",
}
#: Most names in a message.
_NAMED = 5


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
    """

    identity: str
    rank: int
    parts: dict[str, AdapterPart]

    @property
    def bytes(self) -> int:
        """Memory of its weights."""
        return sum(t.numel() * t.element_size() for part in self.parts.values() for t in (part.a, part.b))


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
    pairs, copies = _pairs(_read(weights_file(folder)))
    _check_modules(config, sorted(pairs.keys() | copies), targets)
    for module, tensor in copies.items():
        _check_copy(module, tensor, targets[module], (base or {}).get(module), base_step)
    parts = {module: _part(config, module, *pairs[module], targets[module], dtype) for module in sorted(pairs)}
    rank = max(part.a.shape[0] for part in parts.values())
    if rank > max_rank:
        raise AdapterError(f"r: the adapter's rank is {rank}, at most {max_rank} is served (max_lora_rank)")
    return Adapter(identity, rank, parts)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file handle, not a mapping
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{WEIGHTS_FILE}: {error}") from None


def _pairs(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, tuple[torch.Tensor, torch.Tensor]], dict[str, torch.Tensor]]:
    """A and B by module, and copies of layers."""
    found: dict[str, dict[str, torch.Tensor]] = {"A": {}, "B": {}, "base": {}}
    strange = []
    for name, tensor in tensors.items():
        module, kind = _kind(name.removeprefix(_PREFIX))
        if kind is None or not name.startswith(_PREFIX):
            strange.append(name)
        else:
            found[kind][module] = tensor
    if strange:
        names = _listed(sorted(strange))
        raise AdapterError(f"{WEIGHTS_FILE}: {names}: not a LoRA matrix of PEFT's (modules_to_save, DoRA, bias?)")
    if alone := sorted(found["A"].keys() ^ found["B"].keys()):
        raise AdapterError(f"{WEIGHTS_FILE}: {_listed(alone)}: one of lora_A and lora_B is missing")
    if not found["A"]:
        raise AdapterError(f"{WEIGHTS_FILE}: it holds no LoRA matrices")
    return {module: (a, found["B"][module]) for module, a in found["A"].items()}, found["base"]


def _kind(name: str) -> tuple[str, str | None]:
    """Module and kind of a tensor; no kind for one that is not known."""
    for end, kind in _ENDS.items():
        if name.endswith(end):
            return name.removesuffix(end), kind
    return name, None


def _check_modules(config: PeftConfig, modules: list[str], targets: Mapping[str, Target]) -> None:
    """All of the adapter must have its place in the model, and all that the config names must be there."""
    if unknown := [module for module in modules if module not in targets]:
        raise AdapterError(f"{WEIGHTS_FILE}: {_listed(unknown)}: the model has no such module")
    wanted = config.target_modules
    if wanted is None or isinstance(wanted, str):
        if wanted not in (None, "all-linear") and not all(matches("target_modules", wanted, m) for m in modules):
            raise AdapterError(f"{CONFIG_FILE}: target_modules does not match the modules of {WEIGHTS_FILE}")
        return
    missing = sorted(name for name in wanted if not any(_ends(name, module) for module in modules))
    extra = [module for module in modules if not any(_ends(name, module) for name in wanted)]
    if missing:
        raise AdapterError(f"{CONFIG_FILE}: target_modules: {_listed(missing)}: there are no weights for it")
    if extra:
        raise AdapterError(f"{WEIGHTS_FILE}: {_listed(extra)}: not among the config's target_modules")


def _ends(name: str, module: str) -> bool:
    return module == name or module.endswith(f".{name}")


def _check_copy(module: str, copy: torch.Tensor, target: Target, own: torch.Tensor | None, step: int) -> None:
    """A layer that the adapter brings must be the model's own: another one would be ignored."""
    if own is None:
        raise AdapterError(f"{WEIGHTS_FILE}: {module}: a copy of this layer is not expected")
    shape = [target.inputs if target.site == "embedding" else target.outputs, own.shape[1]]
    if list(copy.shape) != shape:
        raise AdapterError(f"{WEIGHTS_FILE}: {module}: resized to {list(copy.shape)}, the model's is {shape}")
    if not torch.allclose(copy[::step].float(), own.float(), rtol=2e-2, atol=2e-3):
        raise AdapterError(f"{WEIGHTS_FILE}: {module}: it differs from the model's own (modules_to_save?)")


def _part(
    config: PeftConfig, module: str, a: torch.Tensor, b: torch.Tensor, target: Target, dtype: torch.dtype
) -> AdapterPart:
    rank = config.rank(module)
    for half, tensor, wanted in (("A", a, (rank, target.inputs)), ("B", b, (target.outputs, rank))):
        if tuple(tensor.shape) != wanted:
            raise AdapterError(
                f"{WEIGHTS_FILE}: lora_{half} of {module} has shape {list(tensor.shape)}, {list(wanted)} is needed"
            )
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{WEIGHTS_FILE}: lora_{half} of {module} holds what is not a finite number")
    scaled = (b.float() * config.scale(module)).to(dtype)
    if not bool(torch.isfinite(scaled).all()):
        raise AdapterError(f"{WEIGHTS_FILE}: lora_B of {module} is not finite once it is scaled")
    return AdapterPart(a.to(dtype).contiguous(), scaled.contiguous())


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
