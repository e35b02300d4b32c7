"""Weights move into large pages, and stay what they are."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.cpu import large_pages
from kernels.cpu.large_pages import move_into_large_pages
from kernels.cpu.linear import linear, packable

_LARGE = 2 * 1024 * 1024


def test_memory_moves_with_what_is_beside_it_and_nothing_changes() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 4 * _LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    memory[:] = np.arange(len(memory)) % 251
    first = -memory.ctypes.data % _LARGE
    address = memory.ctypes.data + first + _LARGE // 2
    if not move_into_large_pages(address, _LARGE):
        pytest.skip("no large pages on demand here")
    assert _large_bytes(address) >= 2 * _LARGE
    assert np.array_equal(memory, np.arange(len(memory)) % 251)


def test_a_layer_asks_for_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(512, 512)
    if not packable(weight):
        pytest.skip("no oneDNN here")
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(large_pages, "_madvise", lambda: lambda *call: calls.append(call) or 0)
    linear(weight)
    ((first, size, advice),) = calls
    assert advice == 25
    assert size >= weight.nbytes
    assert first % _LARGE == size % _LARGE == 0


@pytest.mark.parametrize("size", [0, 100_000])
def test_small_memory_is_left_alone(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_madvise", lambda: pytest.fail)
    assert not move_into_large_pages(4096, size)


def test_a_system_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_madvise", lambda: lambda *call: -1)
    assert not move_into_large_pages(_LARGE, _LARGE)


def test_other_systems_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages.sys, "platform", "darwin")
    large_pages._madvise.cache_clear()
    try:
        assert not move_into_large_pages(_LARGE, _LARGE)
    finally:
        large_pages._madvise.cache_clear()


def _large_bytes(address: int) -> int:
    """In large pages, of the mapping that holds an address."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(bound, 16) for bound in mapping.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            return 1024 * int(re.search(r"AnonHugePages:\s*(\d+) kB", mapping)[1])
    raise AssertionError("not mapped")
