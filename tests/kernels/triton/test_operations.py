"""Every operation but attention and draws, in Triton's interpreter."""

from __future__ import annotations

import importlib

import pytest
import torch

from tests.kernels.triton import checks
from tests.kernels.triton.support import DTYPES

CHECKS = {
    "embed": checks.check_embed,
    "write_kv": checks.check_write_kv,
    "write_kv float8": checks.check_write_kv_float8,
    "rms_norm": checks.check_rms_norm,
    "rotary": checks.check_rotary,
    "silu_and_mul": checks.check_silu_and_mul,
    "gelu_and_mul": checks.check_gelu_and_mul,
    "lora": checks.check_lora,
    "lora embeddings": checks.check_embed_delta,
}
MODULES = {"write_kv float8": "write_kv", "lora embeddings": "lora"}


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_against_float64(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    CHECKS[name](importlib.import_module(f"kernels.triton.{MODULES.get(name, name)}"), dtype)


def test_penalties_are_the_reference_s() -> None:
    torch.manual_seed(2)
    checks.check_penalties(importlib.import_module("kernels.triton.penalties"))


def test_random_numbers_are_the_reference_s_bit_for_bit() -> None:
    checks.check_uniforms(importlib.import_module("kernels.triton.philox"))
