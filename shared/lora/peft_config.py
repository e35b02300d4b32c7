"""`adapter_config.json` as PEFT writes it: what of it is computed here, and a refusal by name of everything else."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import AdapterError
from shared.lora.patterns import Patterns

CONFIG_FILE = "adapter_config.json"
#: Bytes of a config; PEFT's own are below 2 kB.
MAX_CONFIG_BYTES = 256 * 1024

#: They say how an adapter was made or is to be named, and change nothing of what it computes.
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",
    }
)
#: Initialisations that take something out of the base's weights, so that the adapter is right on that base alone.
_BASE_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")


class PeftConfig(msgspec.Struct, kw_only=True, dict=True):
    """The fields that decide what a LoRA adapter computes. Names and defaults are PEFT's.

    Attributes:
        r, lora_alpha: rank and numerator of the scale, where no pattern says otherwise.
        use_rslora: the scale is alpha over the square root of the rank (Kalajdzievski, 2023, arXiv:2312.03732).
        rank_pattern, alpha_pattern: by the end of a module's name, or a regular expression for it.
        target_modules: ends of names, or one regular expression for whole names.
    """

    peft_type: str
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: list[str] | str | None = None

    @functools.cached_property
    def patterns(self) -> Patterns:
        """What matches its patterns; no field of it."""
        return Patterns(CONFIG_FILE)

    def rank(self, module: str) -> int:
        """Rank of a module's adapter. Raises AdapterError for a pattern that cannot be matched, see `Patterns`."""
        return self.patterns.first("rank_pattern", self.rank_pattern, module, self.r)

    def scale(self, module: str) -> float:
        """What the product of B and A is multiplied by. Raises AdapterError as `rank`."""
        rank = self.rank(module)
        alpha = self.patterns.first("alpha_pattern", self.alpha_pattern, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_config(folder: Path) -> PeftConfig:
    """Read and check a folder's config.

    Raises:
        AdapterError: no config, not PEFT's, or it asks for what is not computed here.
    """
    path = folder / CONFIG_FILE
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise AdapterError(f"{CONFIG_FILE}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise AdapterError(f"{CONFIG_FILE}: larger than {MAX_CONFIG_BYTES} bytes")
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        _check_others(fields)
        config = msgspec.convert(fields, PeftConfig, strict=True)
    except msgspec.MsgspecError as error:
        raise AdapterError(f"{CONFIG_FILE}: {error}") from None
    except RecursionError:
        raise AdapterError(f"{CONFIG_FILE}: it is nested too deeply") from None
    _check(config)
    return config


def _check_others(fields: Mapping[str, Any]) -> None:
    """Refuse what is not known to be harmless: a field that is ignored may be the one that counts."""
    if fields.get("peft_type") != "LORA":
        raise AdapterError(f"{CONFIG_FILE}: peft_type {fields.get('peft_type')!r} is not served, only LORA")
    made = fields.get("init_lora_weights")
    if isinstance(made, str) and made.lower().startswith(_BASE_CHANGING):
        raise AdapterError(
            f"{CONFIG_FILE}: init_lora_weights {made!r} changes the base's weights; save the adapter as plain LoRA"
        )
    for name, value in fields.items():
        known = name in _HARMLESS or name in PeftConfig.__struct_fields__
        if not known and value and not (name == "bias" and value == "none"):
            raise AdapterError(f"{CONFIG_FILE}: {name} is not served")


def _check(config: PeftConfig) -> None:
    for name, rank in {"r": config.r, **config.rank_pattern}.items():
        if rank < 1:
            raise AdapterError(f"{CONFIG_FILE}: rank {rank} of {name} must be at least 1")
    for name, alpha in {"lora_alpha": config.lora_alpha, **config.alpha_pattern}.items():
        if not math.isfinite(alpha):
            raise AdapterError(f"{CONFIG_FILE}: alpha of {name} is not finite")
