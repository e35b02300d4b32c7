"""RMS norm, rotary embedding, gated activation and linear layers against double precision."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.ops import Ops, implementation, ops_for

#: Allowed difference, as a share of the largest value.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
DTYPES = sorted(TOLERANCE, key=str)
BACKENDS = ["reference", "cpu", "invariant", "cpu.native"]


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    limit = TOLERANCE[actual.dtype] * float(expected.abs().max().clamp(min=1.0))
    return float((actual.double() - expected).abs().max()) <= limit


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (3, 576), (70, 65)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(backend: str, dtype: torch.dtype, tokens: int, hidden: int, with_residual: bool) -> None:
    kernel = implementation("rms_norm", backend)
    assert kernel is not None
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(hidden).to(dtype)
    residual = torch.randn(tokens, hidden).to(dtype) if with_residual else None
    before = x.clone()
    total = x if residual is None else (x + residual)
    actual = kernel(x, weight, 1e-5, residual)
    rows = []
    for row in total.double().tolist():
        scale = 1.0 / math.sqrt(sum(value * value for value in row) / hidden + 1e-5)
        rows.append([value * scale for value in row])
    assert close(actual, torch.tensor(rows, dtype=torch.float64) * weight.double())
    assert actual.dtype == dtype
    assert torch.equal(x, before)
    if residual is not None:
        assert torch.equal(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 2), (5, 3, 8), (33, 4, 64)])
def test_rotary_turns_each_pair_by_its_angle(
    cpu_ops: Ops, dtype: torch.dtype, tokens: int, heads: int, dim: int
) -> None:
    wide = torch.randn(tokens, heads + 2, dim).to(dtype)
    x = wide.narrow(1, 1, heads)  # rows are strided, as in the fused projection
    angles = torch.rand(tokens, dim // 2, dtype=torch.float64) * 6
    expected = x.double().clone()
    for token in range(tokens):
        for i in range(dim // 2):
            a, b = x[token, :, i].double(), x[token, :, i + dim // 2].double()
            c, s = math.cos(angles[token, i]), math.sin(angles[token, i])
            expected[token, :, i], expected[token, :, i + dim // 2] = a * c - b * s, b * c + a * s
    cos = torch.cat((angles.cos(), angles.cos()), -1).unsqueeze(1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).unsqueeze(1).to(dtype)
    untouched = wide[:, 0].clone()
    cpu_ops.rotary(x, cos, sin)
    assert close(x, expected)
    assert torch.equal(wide[:, 0], untouched)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = torch.randn(9, 34).to(dtype)
    gate, up = x.double().chunk(2, -1)
    assert close(ops_for("cpu").silu_and_mul(x), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 31, 130])
def test_linear_and_gated_linear(backend: str, dtype: torch.dtype, with_bias: bool, tokens: int) -> None:
    linear, gated = implementation("linear", backend), implementation("gated_linear", backend)
    assert linear is not None
    assert gated is not None
    x = torch.randn(tokens, 48).to(dtype)
    weight = (torch.randn(64, 48) / 7).to(dtype)
    bias = torch.randn(64).to(dtype) if with_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert close(linear(weight, bias)(x), expected)
    gate, up = expected.chunk(2, -1)
    assert close(gated(weight, bias)(x), gate / (1 + (-gate).exp()) * up)


def test_linear_takes_float16_by_the_reference() -> None:
    ops: Ops = ops_for("cpu")
    weight, x = torch.randn(8, 4).half(), torch.randn(2, 4).half()
    assert torch.allclose(ops.linear(weight)(x).float(), x.float() @ weight.float().T, atol=1e-2)
    assert ops.gated_linear(weight)(x).shape == (2, 4)
