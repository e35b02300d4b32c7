"""Norms, rotary, activations, embeddings and writes to the cache: all of them limited by memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.measure import Case, Place, close
from kernels.ops import Ops

#: A unit in the last place of bfloat16, and what of it may be due to several roundings.
ULP = 2.0**-7


def cases(place: Place, ops: Ops) -> Iterator[Callable[[], Case]]:
    """All of the section; a case takes memory when it is made."""
    for tokens in (place.size(64, 2), place.size(8192, 3)):
        for make in (_embed, _rms_norm, _rotary, _silu, _gelu, _write_kv):
            yield partial(make, place, ops, tokens)
    yield partial(_write_kv_float8, place, ops, place.size(8192, 3))


def _embed(place: Place, ops: Ops, tokens: int) -> Case:
    width, entries = place.size(4096, 96), place.size(128256, 50)
    table = place.randn(entries, width)
    ids = torch.randint(entries, (tokens,), device=place.device)

    def check() -> None:
        assert torch.equal(ops.embed(table, ids), table[ids]), "other rows"

    return Case(f"embed {tokens} x {width}", lambda: ops.embed(table, ids), check, bytes=4 * tokens * width)


def _rms_norm(place: Place, ops: Ops, tokens: int) -> Case:
    width = place.size(4096, 96)
    x, weight, residual = place.randn(tokens, width), 1 + place.randn(width) / 4, place.randn(tokens, width)

    def check() -> None:
        total = residual.clone()
        out = ops.rms_norm(x, weight, 1e-5, total)
        close(total, residual.double() + x.double(), ULP, 1e-6)
        y = total.double()
        close(out, y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), ULP, 1e-6)

    return Case(
        f"rms_norm {tokens} x {width}",
        lambda: ops.rms_norm(x, weight, 1e-5, residual),
        check,
        bytes=8 * tokens * width,
    )


def _rotary(place: Place, ops: Ops, tokens: int) -> Case:
    heads, dim = place.size(40, 3), place.size(128, 16)
    fused = place.randn(tokens, heads + 8, dim)
    x = fused[:, :heads]
    angle = torch.rand(tokens, 1, dim // 2, device=place.device) * 100
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(place.dtype)
    sin = torch.cat((-angle.sin(), angle.sin()), -1).to(place.dtype)

    def check() -> None:
        turned = x.clone()
        ops.rotary(turned, cos, sin)
        a, b = x.double().chunk(2, -1)
        close(turned, x.double() * cos.double() + torch.cat((b, a), -1) * sin.double(), ULP, 1e-5)

    moved = 4 * tokens * (heads + 1) * dim
    return Case(f"rotary {tokens} x {heads} x {dim}", lambda: ops.rotary(x, cos, sin), check, bytes=moved)


def _gated(
    place: Place,
    tokens: int,
    name: str,
    op: Callable[[torch.Tensor], torch.Tensor],
    gate: Callable[[torch.Tensor], torch.Tensor],
) -> Case:
    width = place.size(14336, 100)
    x = place.randn(tokens, 2 * width)

    def check() -> None:
        out = op(x)
        rows = slice(0, min(tokens, 512))
        wide = x[rows].double()
        close(out[rows], gate(wide[:, :width]) * wide[:, width:], ULP, 1e-5)

    return Case(f"{name} {tokens} x {width}", lambda: op(x), check, bytes=6 * tokens * width)


def _silu(place: Place, ops: Ops, tokens: int) -> Case:
    return _gated(place, tokens, "silu_and_mul", ops.silu_and_mul, torch.nn.functional.silu)


def _gelu(place: Place, ops: Ops, tokens: int) -> Case:
    gate = partial(torch.nn.functional.gelu, approximate="tanh")
    return _gated(place, tokens, "gelu_and_mul", ops.gelu_and_mul, gate)


def _write_kv(place: Place, ops: Ops, tokens: int) -> Case:
    kv_heads, dim, blocks = place.size(8, 2), place.size(128, 16), place.size(4096, 4)
    kv = place.randn(tokens, 2 * kv_heads * dim)
    cache = torch.zeros((blocks, 16, 2, kv_heads, dim), dtype=place.dtype, device=place.device)
    slots = torch.randperm(blocks * 16, device=place.device)[:tokens]

    def check() -> None:
        ops.write_kv(kv, cache, slots)
        flat = cache.view(blocks * 16, -1)
        assert torch.equal(flat[slots], kv), "other numbers"
        assert not bool(flat.index_fill(0, slots, 0.0).any()), "other slots were written"

    return Case(
        f"write_kv {tokens} tokens", lambda: ops.write_kv(kv, cache, slots), check, bytes=8 * tokens * kv_heads * dim
    )


def _write_kv_float8(place: Place, ops: Ops, tokens: int) -> Case:
    kv_heads, dim, blocks = place.size(8, 2), place.size(128, 16), place.size(4096, 4)
    kv = place.randn(tokens, 2 * kv_heads * dim) * 50
    scales = torch.tensor([0.1, 2.0], device=place.device)
    cache = torch.zeros((blocks, 16, 2, kv_heads, dim), device=place.device).to(torch.float8_e4m3fn)
    slots = torch.randperm(blocks * 16, device=place.device)[:tokens]

    def check() -> None:
        ops.write_kv(kv, cache, slots, scales)
        wide = (kv.double().view(tokens, 2, -1) / scales.double().view(2, 1)).clamp(-448, 448).view(tokens, -1)
        close(cache.float().view(blocks * 16, -1)[slots], wide, 2.0**-4, 1e-4)

    return Case(
        f"write_kv float8 {tokens} tokens",
        lambda: ops.write_kv(kv, cache, slots, scales),
        check,
        bytes=6 * tokens * kv_heads * dim,
    )
