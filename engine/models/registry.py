"""Which class serves which architecture of a checkpoint's config."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import torch

from engine.models.config import ModelConfig
from kernels.attention import AttentionBatch
from kernels.blocked import BlockedLogits
from kernels.lora import LoraPass
from kernels.ops import Ops

#: See `CausalLM.own_layers`.
OWN_STEP = 61

_MODULES = ("engine.models.llama",)
_classes: dict[str, type[CausalLM]] = {}


class CausalLM(ABC):
    """A decoder whose weights are ready to run; base class of all models.

    Attributes:
        config: of the checkpoint.
        dtype: of weights and KV cache.
        device: where both are.
        prepared: tensors, packed ones among them, that the constructor takes as well as a checkpoint's: then without
            packing anything. Empty where nothing is packed. Whoever has kept them empties it.
        screens: whether `greedy` may be called.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    prepared: dict[str, torch.Tensor]
    screens: bool = False

    @abstractmethod
    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, torch.Tensor],
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        max_positions: int,
    ) -> None: ...

    @abstractmethod
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
        batch: AttentionBatch,
        lora: LoraPass | None = None,
    ) -> torch.Tensor:
        """Final hidden states of a mixed batch, whose keys and values are written on the way.

        Args:
            tokens: [tokens] int64.
            positions: [tokens] int64.
            cache: [layers, blocks, block_size, 2, kv_heads, head_dim].
            batch: of the same tokens.
            lora: adapters of the tokens; None where none has one. Places are those of `engine.adapters.device`.

        Returns:
            [tokens, hidden], normalised.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor, lora: LoraPass | None = None) -> BlockedLogits:
        """[rows, hidden] -> [rows, vocab]; `lora` is of these rows."""

    def screen_head(self) -> None:
        """Prepare for `greedy` where that is faster than `logits`; takes a byte for each weight of the matrix."""
        self.screens = False

    def greedy(self, hidden: torch.Tensor) -> list[int]:
        """[rows, hidden] -> of each row the arg-max of the logits without adapters; -1 where only `logits` tell."""
        raise NotImplementedError

    @abstractmethod
    def own_layers(self) -> dict[str, torch.Tensor]:
        """Embedding and output matrix by Hugging Face name: [vocab, hidden] each, or a sample of their rows.

        A sample has every `OWN_STEP`th row.
        """


Model = TypeVar("Model", bound=type[CausalLM])


def register_model(*architectures: str) -> Callable[[Model], Model]:
    """Enter the decorated class for the names in a config's `architectures`."""

    def enter(cls: Model) -> Model:
        for name in architectures:
            _classes[name] = cls
        return cls

    return enter


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an architecture.

    Raises:
        ValueError: none serves it.
    """
    for module in _MODULES:
        importlib.import_module(module)
    if architecture not in _classes:
        raise ValueError(f"architecture {architecture!r} is not served; known: {', '.join(sorted(_classes))}")
    return _classes[architecture]
