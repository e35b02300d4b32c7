"""Compiles every kernel ahead of time, without a GPU, and says what each takes: registers, shared memory, spills.

`python -m kernels.triton.resources` prints a table and fails on what is over a target's bound. The parameters are those
that a launch on the target would have.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: Shared memory of one program in bytes, and whether the target multiplies float8.
TARGETS = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
#: Bytes that a thread may spill of its registers: none where it counts.
MOST_SPILLS = 0
#: Of single variants, by name.
SPILLS: dict[str, int] = {}


@dataclass(frozen=True)
class Variant:
    """One compilation.

    Attributes:
        name: of the operation and what is special.
        kernel: module and function in `kernels.triton`.
        types: of the arguments by name, as Triton writes them; all others are constants.
        constants: by name.
        odd: integers that are no multiples of 16.
        options: `num_warps` and `num_stages`.
        quick: among those that every run of the tests compiles.
    """

    name: str
    kernel: tuple[str, str]
    types: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    odd: tuple[str, ...] = ()
    options: dict[str, int] = field(default_factory=dict)
    quick: bool = False


@dataclass(frozen=True)
class Resources:
    """What one compilation takes; bytes for memory and spills."""

    target: str
    name: str
    registers: int
    shared: int
    spills: int

    @property
    def problem(self) -> str | None:
        """What is over a bound, or None."""
        if self.shared > TARGETS[self.target]:
            return f"{self.shared} bytes of shared memory, {self.target} has {TARGETS[self.target]}"
        most = SPILLS.get(self.name, MOST_SPILLS)
        return f"{self.spills} bytes spilled, the bound is {most}" if self.spills > most else None


def variants(target: str) -> Iterator[Variant]:
    """All of them for a target; Triton is imported."""
    yield from _elementwise(target)
    yield from _sampling()
    yield from _lora()
    yield from _attention(target)


def _elementwise(target: str) -> Iterator[Variant]:
    from kernels.triton.launch import has_float8

    warps = {"num_warps": 4}
    for dtype in ("bf16", "fp16", "fp32"):
        p, quick = f"*{dtype}", dtype == "bf16"
        yield Variant(
            f"embed {dtype}", ("embed", "embed_kernel"),
            {"table": p, "ids": "*i64", "out": p, "entries": "i32", "width": "i32", "table_stride": "i32"},
            {"BLOCK": 1024}, ("entries",), warps, quick,
        )  # fmt: skip
        yield Variant(
            f"write_kv {dtype}", ("write_kv", "write_kv_kernel"),
            {"kv": p, "cache": p, "slots": "*i64", "scales": p, "width": "i32", "total_slots": "i32",
             "kv_stride": "i32"},
            {"BLOCK": 1024, "FLOAT8_CACHE": False}, (), warps, quick,
        )  # fmt: skip
        for width in (4096, 16384):
            from kernels.triton.rms_norm import warps_for

            yield Variant(
                f"rms_norm {dtype} {width}", ("rms_norm", "rms_norm_kernel"),
                {"x": p, "weight": p, "residual": p, "out": p, "width": "i32", "x_stride": "i32",
                 "residual_stride": "i32", "eps": "fp32"},
                {"BLOCK": width, "WITH_RESIDUAL": True}, (), {"num_warps": warps_for(width)}, quick,
            )  # fmt: skip
        for dim in (64, 256):
            yield Variant(
                f"rotary {dtype} {dim}", ("rotary", "rotary_kernel"),
                {"x": p, "cos": p, "sin": p, "heads": "i32", "token_stride": "i32", "head_stride": "i32",
                 "cos_stride": "i32", "sin_stride": "i32"},
                {"HALF": dim // 2, "HALF_PADDED": dim // 2, "HEADS": 8}, ("heads",), warps, quick and dim == 64,
            )  # fmt: skip
        for name, more in (("silu", {}), ("gelu", {"TANH": True}), ("gelu", {"TANH": False})):
            form = "" if not more else " tanh" if more["TANH"] else " erf"
            yield Variant(
                f"{name}_and_mul{form} {dtype}", (f"{name}_and_mul", f"{name}_and_mul_kernel"),
                {"x": p, "out": p, "width": "i32", "x_stride": "i32"}, {"BLOCK": 1024, **more}, (), warps, quick,
            )  # fmt: skip
    if has_float8(target):
        yield Variant(
            "write_kv float8", ("write_kv", "write_kv_kernel"),
            {"kv": "*bf16", "cache": "*fp8e4nv", "slots": "*i64", "scales": "*fp32", "width": "i32",
             "total_slots": "i32", "kv_stride": "i32"},
            {"BLOCK": 1024, "FLOAT8_CACHE": True}, (), warps, True,
        )  # fmt: skip


def _sampling() -> Iterator[Variant]:
    yield Variant(
        "penalties", ("penalties", "penalties_kernel"),
        {"logits": "*fp32", "index": "*i64", "counts": "*fp32", "presence": "*fp32", "frequency": "*fp32",
         "repetition": "*fp32", "entries": "i32", "size": "i32"},
        {"BLOCK": 256}, ("entries",), {"num_warps": 4}, True,
    )  # fmt: skip
    yield Variant(
        "uniforms", ("philox", "uniforms_kernel"), {"numbers": "*i64", "out": "*fp64", "rows": "i32"},
        {"BLOCK": 128}, ("rows",), {"num_warps": 4}, True,
    )  # fmt: skip
    row = {"best": "*fp32", "temperature": "*fp32", "filters": "*fp64", "lists": "*i32", "counts": "*i32",
           "totals": "*fp64", "rows": "i32", "vocab": "i32", "blocks": "i32", "values": "*fp32"}  # fmt: skip
    yield Variant(
        "candidates", ("sampling", "candidates_kernel"), {**row, "peaks": "*fp32"},
        {"BLOCKS": 2048, "BLOCK": 64, "TOGETHER": 2048}, ("rows", "vocab", "blocks"), {"num_warps": 8}, True,
    )  # fmt: skip
    yield Variant(
        "draw", ("sampling", "draw_kernel"),
        {**row, "uniform": "*fp64", "tokens": "*i64", "thresholds": "*fp32"},
        {"BLOCK": 64, "TOGETHER": 2048}, ("rows", "vocab", "blocks"), {"num_warps": 8}, True,
    )  # fmt: skip


def _lora() -> Iterator[Variant]:
    import triton.language as tl

    from kernels.triton.lora import OUTPUTS, PART_INPUTS, ROWS, shrink_step

    for rank in (16, 64, 256):
        yield Variant(
            f"lora shrink rank {rank}", ("lora", "shrink_kernel"),
            {"x": "*bf16", "a": "*bf16", "low": "*fp32", "rows": "*i64", "plan": "*i32", "tiles": "i32",
             "count": "i32", "cuts": "i32", "inputs": "i32", "max_rank": "i32", "x_stride": "i32",
             "slot_stride": "i32", "part_stride": "i32"},
            {"ROWS": ROWS, "RANK": rank, "PART_INPUTS": PART_INPUTS, "STEP": shrink_step(rank, 2),
             "DOT": tl.bfloat16},
            ("tiles", "count", "cuts"), {"num_warps": 4, "num_stages": 2}, rank == 16,
        )  # fmt: skip
        yield Variant(
            f"lora expand rank {rank}", ("lora", "expand_kernel"),
            {"low": "*fp32", "b": "*bf16", "delta": "*fp32", "rows": "*i64", "plan": "*i32", "tiles": "i32",
             "count": "i32", "cuts": "i32", "max_rank": "i32", "width_0": "i32", "width_1": "i32",
             "width_2": "i32", "slot_stride": "i32", "outputs": "i32"},
            {"PARTS": 3, "ROWS": ROWS, "RANK": rank, "OUTPUTS": OUTPUTS, "DOT": tl.bfloat16},
            ("tiles", "count", "cuts"), {"num_warps": 4, "num_stages": 1}, rank == 16,
        )  # fmt: skip


def _attention(target: str) -> Iterator[Variant]:
    for dim, per_kv_head in ((64, 3), (128, 4), (80, 1), (256, 8)):
        yield from _attend(target, f"heads of {dim}", dim, per_kv_head, quick=dim == 128)
    yield from _attend(target, "window, soft cap", 128, 4, WINDOW=True, SOFT_CAP=True)
    yield from _attend(target, "window of 256", 256, 2, WINDOW=True, SOFT_CAP=True)
    yield from _attend(target, "float16", 128, 4, "fp16")
    yield from _attend(target, "float32", 128, 4, "fp32")
    from kernels.triton.launch import has_float8

    yield from _attend(target, "blocks of 32", 128, 8, BLOCK_SIZE=32)
    if has_float8(target):
        yield from _attend(target, "float8", 128, 4, cache="fp8e4nv", SCALED=True)


def _attend(
    target: str,
    name: str,
    dim: int,
    per_kv_head: int,
    dtype: str = "bf16",
    cache: str | None = None,
    quick: bool = False,
    **constants: Any,
) -> Iterator[Variant]:
    import triton.language as tl

    from kernels.triton.attention_plan import MOST_SPLITS
    from kernels.triton.attention_tiles import decode_tile, prefill_tile
    from kernels.triton.launch import power_of_2

    padded, itemsize, p = power_of_2(dim), 4 if dtype == "fp32" else 2, f"*{dtype}"
    types = {"query": p, "cache": f"*{cache or dtype}", "blocks": "*i64", "plan": "*i32", "out": p,
             "scales": "*fp32" if cache else p, "query_stride": "i32", "query_head_stride": "i32",
             "block_stride": "i32", "token_stride": "i32", "value_offset": "i32", "head_stride": "i32",
             "out_stride": "i32", "scale": "fp32", "cap_scale": "fp32", "window": "i32"}  # fmt: skip
    common = {"PER_KV_HEAD": per_kv_head, "DIM": dim, "DIM_PADDED": padded, "BLOCK_SIZE": 16,
              "DOT": {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}[dtype],
              "WINDOW": False, "SOFT_CAP": False, "SCALED": False, **constants}  # fmt: skip

    def variant(kind: str, more: dict[str, str], tile: Any, **extra: Any) -> Variant:
        launch = tile.launch
        sizes = {"ROWS": launch.pop("ROWS"), "KEYS": launch.pop("KEYS")}
        odd = ("window", *more)
        return Variant(
            f"{kind.split('_')[0]} {name}{' at once' if extra.get('SPLIT') is False else ''}",
            ("attention_kernels", kind), {**types, **more}, {**common, **sizes, **extra}, odd, launch, quick,
        )  # fmt: skip

    decode = decode_tile(target, padded, itemsize, per_kv_head, cache is not None)
    parts = {"part_mixed": "*fp32", "part_stats": "*fp32", "sequences": "i32", "splits": "i32"}
    yield variant("decode_kernel", parts, decode, SPLIT=True)
    if quick:
        yield variant("decode_kernel", parts, decode, SPLIT=False)
    yield variant("prefill_kernel", {"tiles": "i32"}, prefill_tile(target, padded, itemsize))
    if name.startswith("heads"):
        yield Variant(
            f"merge {name}", ("attention_kernels", "merge_kernel"),
            {"part_mixed": "*fp32", "part_stats": "*fp32", "plan": "*i32", "out": p, "sequences": "i32",
             "splits": "i32", "out_stride": "i32", "window": "i32"},
            {"DIM": dim, "DIM_PADDED": padded, "WINDOW": False, "MOST_SPLITS": MOST_SPLITS, "TOGETHER": 8},
            ("sequences", "splits", "window"), {"num_warps": 2}, quick,
        )  # fmt: skip


def compile_variant(target: str, variant: Variant) -> Resources:
    """Compile for a target; raises what Triton raises."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = variant.kernel
    kernel = getattr(importlib.import_module(f"kernels.triton.{module}"), name)
    names = kernel.arg_names
    signature = {each: variant.types.get(each, "constexpr") for each in names}
    aligned = [
        index
        for index, each in enumerate(names)
        if each in variant.types and variant.types[each] != "fp32" and each not in variant.odd
    ]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={each: variant.constants[each] for each in names if each not in variant.types},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    compiled = triton.compile(source, target=_gpu_target(target, GPUTarget), options=dict(variant.options))
    registers, spills = _of_amd(compiled) if target.startswith("gfx") else _of_nvidia(compiled)
    return Resources(target, variant.name, registers, int(compiled.metadata.shared), spills)


def _gpu_target(target: str, gpu_target: Any) -> Any:
    if target.startswith("gfx"):
        return gpu_target("hip", target, 64)
    return gpu_target("cuda", int(target.removeprefix("sm_")), 32)


def _of_nvidia(compiled: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory, which is what it spills."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        listed = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", listed.stdout)
    assert found is not None, listed.stdout
    return int(found[1]), int(found[2])


def _of_amd(compiled: Any) -> tuple[int, int]:
    text = compiled.asm["amdgcn"]
    numbers = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", text))
    return int(numbers["vgpr_count"]), int(numbers["private_segment_fixed_size"])


def table(found: Sequence[Resources], failed: dict[str, str]) -> str:
    """A line for each variant, a column for each target: registers, KiB of shared memory, bytes spilled."""
    targets = list(dict.fromkeys(each.target for each in found))
    cells = {(each.name, each.target): each for each in found}
    lines = [f"{'kernel':<36}" + "".join(f"{target:>20}" for target in targets)]
    for name in dict.fromkeys(each.name for each in found):
        line = f"{name:<36}"
        for target in targets:
            cell = cells.get((name, target))
            text = "-" if cell is None else f"{cell.registers} / {cell.shared / 1024:.1f} / {cell.spills}"
            line += f"{text:>20}"
        lines.append(line)
    lines.append("registers of a thread / KiB of shared memory / bytes spilled by a thread")
    lines += [f"{name}: {problem}" for name, problem in failed.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; answers the exit code."""
    parser = argparse.ArgumentParser(description="Compile Triton's kernels ahead of time and list what they take.")
    parser.add_argument(
        "--target", action="append", choices=list(TARGETS), help="once or more; all where none is named"
    )
    parser.add_argument("--quick", action="store_true", help="only the most important variants")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing")
    found: list[Resources] = []
    failed: dict[str, str] = {}
    for target in options.target or TARGETS:
        for variant in variants(target):
            if options.quick and not variant.quick:
                continue
            try:
                found.append(compile_variant(target, variant))
            except Exception as error:  # noqa: BLE001 - a compiler may fail in any way, and the others go on
                failed[f"{target}, {variant.name}"] = f"{type(error).__name__}: {error}"
    failed |= {f"{each.target}, {each.name}": each.problem for each in found if each.problem is not None}
    print(table(found, failed))  # noqa: T201 - its output
    if options.json is not None:
        options.json.write_text(
            json.dumps({"found": [asdict(each) for each in found], "failed": failed}, indent=2), "utf-8"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
