"""The operations of an engine that no native CPU kernels compute: by its device and the setting `kernels`."""

from __future__ import annotations

import logging

import torch

from engine.config import EngineConfig
from engine.models.config import ModelConfig
from kernels.backends import TRITON
from kernels.errors import KernelsUnavailableError
from kernels.ops import Ops, is_triton, ops_for

logger = logging.getLogger(__name__)


def device_ops(config: EngineConfig, model: ModelConfig, device: torch.device) -> Ops:
    """The operations; what the model needs of them is known to be served.

    Raises:
        ValueError: Triton's kernels are asked for, and cannot be used in this process or for this model.
    """
    try:
        ops = ops_for(device.type, deterministic=config.deterministic, kernels=config.kernels)
    except KernelsUnavailableError as error:
        raise ValueError(f"kernels {config.kernels}: {error}") from error
    if not is_triton(ops):
        return ops
    reason = _unserved(config, model)
    if reason is None:
        if device.type == "cpu":
            logger.warning("Triton's kernels run in its interpreter on a CPU: for tests, not for work")
        return ops
    if config.kernels == TRITON:
        raise ValueError(f"kernels triton: {reason}")
    logger.warning("kernels of plain torch, not of Triton: %s", reason)
    return ops_for(device.type, deterministic=config.deterministic, kernels="reference")


def _unserved(config: EngineConfig, model: ModelConfig) -> str | None:
    from kernels.triton.paged_attention import unserved

    per_kv_head = model.num_attention_heads // model.num_key_value_heads
    return unserved(model.head_dim, config.block_size, per_kv_head)
