"""The checks can fail: each kernel with one mistake in its source, which its check has to notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kernels.triton import paged_attention
from tests.kernels.triton import attention_checks, checks, sampling_checks
from tests.kernels.triton.support import mutated

FLOAT = torch.float32


def in_float32(check: Callable[[ModuleType, torch.dtype], None]) -> Callable[[ModuleType], None]:
    return lambda module: check(module, FLOAT)


def attention(*cases: str) -> Callable[[ModuleType], None]:
    def run(module: ModuleType) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for kernel in ("decode_kernel", "merge_kernel", "prefill_kernel"):
                patch.setattr(paged_attention, kernel, getattr(module, kernel))
            for case in cases:
                attention_checks.check_case(paged_attention, attention_checks.CASES[case], FLOAT)

    return run


def draws(vocab: int, kind: str) -> Callable[[ModuleType], None]:
    return lambda module: sampling_checks.check_draw(module, vocab, kind)


@dataclass(frozen=True)
class Mutation:
    """In `kernels.triton.<module>` a piece of source becomes another, and `check` has to fail."""

    module: str
    old: str
    new: str
    check: Callable[[ModuleType], None]


MUTATIONS = {
    "embed: last column left out": Mutation(
        "embed", "mask=column < width)", "mask=column < width - 1)", in_float32(checks.check_embed)
    ),
    "write_kv: off by one slot": Mutation(
        "write_kv", "cache + slot * (2", "cache + (slot ^ 1) * (2", in_float32(checks.check_write_kv)
    ),
    "write_kv: padded tokens written": Mutation(
        "write_kv", "(slot >= 0) & (slot < total_slots)", "(slot >= -1) & (slot < total_slots)",
        # Slot -1 of the second block on is the last of the first: nothing is written outside.
        lambda module: checks.check_write_kv(_shifted(module), FLOAT),
    ),
    "write_kv float8: keys' scale for values": Mutation(
        "write_kv", "tl.load(scales + half)", "tl.load(scales)", in_float32(checks.check_write_kv_float8)
    ),
    "write_kv float8: rounded down": Mutation(
        "write_kv", "bits + 0x7FFFF + ((bits >> 20) & 1)", "bits", in_float32(checks.check_write_kv_float8)
    ),
    "rms_norm: mean over padding": Mutation(
        "rms_norm", "tl.sum(y * y, 0) / width", "tl.sum(y * y, 0) / BLOCK", in_float32(checks.check_rms_norm)
    ),
    "rms_norm: residual not stored": Mutation(
        "rms_norm", "tl.store(place, summed, mask=inside)", "pass", in_float32(checks.check_rms_norm)
    ),
    "rotary: sign of the second half": Mutation(
        "rotary", "b * cos_b[None, :] + a", "b * cos_b[None, :] - a", in_float32(checks.check_rotary)
    ),
    "silu_and_mul: off by one column": Mutation(
        "silu_and_mul", "tl.load(row + width,", "tl.load(row + width - 1,", in_float32(checks.check_silu_and_mul)
    ),
    "gelu_and_mul: wrong constant": Mutation(
        "gelu_and_mul", "0.044715", "0.0447", in_float32(checks.check_gelu_and_mul)
    ),
    "lora shrink: last inputs of a part left out": Mutation(
        "lora", "min(begin + PART_INPUTS, inputs)", "min(begin + PART_INPUTS - STEP, inputs)",
        in_float32(checks.check_lora),
    ),
    "lora shrink: rows of another tile": Mutation(
        "lora", "row = tl.load(rows + first + each, mask=each < size, other=0)\n    rank",
        "row = tl.load(rows + each, mask=each < size, other=0)\n    rank", in_float32(checks.check_lora),
    ),
    "lora expand: wrong place of the third part": Mutation(
        "lora", "width_0, width_0 + width_1))", "width_0, width_1))", in_float32(checks.check_lora)
    ),
    "penalties: repetition the wrong way": Mutation(
        "penalties", "tl.where(value > 0.0,", "tl.where(value < 0.0,", checks.check_penalties
    ),
    "uniforms: a round less": Mutation("philox", "static_range(10)", "static_range(9)", checks.check_uniforms),
    "draw: a block less": Mutation(
        "sampling", "(peak >= limit) &", "(peak > limit) &", draws(64, "flat")
    ),
    "draw: top-k off by one": Mutation(
        "sampling", "(enough_1 >= k)", "(enough_1 > k)", draws(1000, "peaked")
    ),
    "draw: top-p of all, not of what top-k leaves": Mutation(
        "sampling", "kept += _weights(x, threshold, top)", "kept += _weights(x, x, top)",
        draws(1000, "peaked"),
    ),
    "draw: pieces before left out": Mutation(
        "sampling", "tl.cumsum(weight, 0) + before", "tl.cumsum(weight, 0)", draws(5000, "flat")
    ),
    "decode: last key left out": Mutation(
        "attention_kernels", "high = tl.zeros((ROWS,), tl.int32) + length",
        "high = tl.zeros((ROWS,), tl.int32) + length - 1", attention("decodes at boundaries"),
    ),
    "attention: off by one block": Mutation(
        "attention_kernels", "mask=position < end, other=0)", "mask=position < end - BLOCK_SIZE, other=0)",
        attention("decodes at boundaries"),
    ),
    "attention: sums do not fade": Mutation(
        "attention_kernels", "total = total * fade +", "total = total +", attention("decodes within one cut")
    ),
    "attention: soft cap of the wrong scale": Mutation(
        "attention_kernels", "tl.minimum(score * cap_scale, 126.0)", "tl.minimum(score * scale, 126.0)",
        attention("decodes, soft cap"),
    ),
    "decode: window one too long": Mutation(
        "attention_kernels", "begin = tl.maximum(length - window, 0)", "begin = tl.maximum(length - window - 1, 0)",
        attention("decodes, window"),
    ),
    "merge: parts without weights": Mutation(
        "attention_kernels", "part * weight[:, None]", "part", attention("decodes at boundaries")
    ),
    "prefill: causal mask dropped": Mutation(
        "attention_kernels", "high = tl.where(valid, length - count + own + 1, 0)",
        "high = tl.where(valid, length, 0)", attention("one chunk"),
    ),
    "prefill: mask begins a key late": Mutation(
        "attention_kernels", "whole = least // KEYS * KEYS", "whole = (least + 1) // KEYS * KEYS",
        attention("chunks behind prefixes"),
    ),
    "prefill: window one too long": Mutation(
        "attention_kernels", "low = tl.maximum(high - window, 0)", "low = tl.maximum(high - window - 1, 0)",
        attention("chunks, window"),
    ),
    "prefill: heads of the first KV head for all": Mutation(
        "attention_kernels", "head = kv_head * PER_KV_HEAD + row % PER_KV_HEAD", "head = row % PER_KV_HEAD",
        attention("chunks behind prefixes"),
    ),
}  # fmt: skip


def _shifted(module: ModuleType) -> ModuleType:
    """The module with a cache that begins a block later: slot -1 is memory that the test owns."""
    shifted = ModuleType("shifted")

    def write_kv(kv: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        roomy = torch.cat((cache[:1], cache))
        before = roomy[0].clone()
        module.write_kv(kv, roomy[1:], slots.clamp(min=-1))
        assert torch.equal(roomy[0].nan_to_num(7.0), before.nan_to_num(7.0))
        cache.copy_(roomy[1:])

    shifted.write_kv = write_kv  # type: ignore[attr-defined]
    return shifted


#: What takes seconds each.
SLOW = ("draw: top-k off by one", "draw: top-p of all, not of what top-k leaves", "draw: pieces before left out")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.kernels] if name in SLOW else []) for name in MUTATIONS]
)
def test_a_mistake_is_noticed(name: str, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    torch.manual_seed(1)
    module = mutated(mutation.module, mutation.old, mutation.new, tmp_path)
    with pytest.raises(AssertionError):
        mutation.check(module)
