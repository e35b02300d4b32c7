"""Memory of the KV cache: zeros, each layer in one piece, and layers that reach the ends of large pages in turn."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine.kv_memory import TakenAhead, taken_ahead, zeros

PAGE = 2 * 1024 * 1024
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(3, 5, 4, 2, 2, 8), (30, 90, 16, 2, 1, 32), (3, 90, 32, 2, 3, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_layer_is_contiguous_and_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cache = zeros(shape, dtype, CPU)
    assert cache.shape == shape and cache.dtype == dtype
    assert all(layer.is_contiguous() for layer in cache.unbind(0))
    for index, layer in enumerate(cache.unbind(0)):
        assert not layer.any()
        layer.fill_(index + 1)
    assert [float(layer.min()) for layer in cache] == [float(layer.max()) for layer in cache]


@pytest.mark.parametrize("layers", [1, 2, 16, 30, 32, 80])
@pytest.mark.parametrize("blocks", [86, 513])
def test_layers_come_to_the_end_of_a_page_in_turn(layers: int, blocks: int) -> None:
    cache = zeros((layers, blocks, 32, 2, 3, 64), torch.bfloat16, CPU)
    stride = cache.stride(0) * 2
    assert stride - cache[0].numel() * 2 < PAGE
    places = sorted(index * stride % PAGE for index in range(layers))
    gaps = [after - before for before, after in pairwise(places)]
    assert not gaps or min(gaps) >= PAGE // layers - 4096


def test_a_small_one_takes_no_more_than_it_needs() -> None:
    cache = zeros((4, 8, 4, 2, 1, 8), torch.float32, CPU)
    assert cache.is_contiguous()


def resident(cache: torch.Tensor) -> int:
    """Bytes that the system has given memory for, of the mappings that the cache is in: the process's own vary."""
    first, total, inside = cache.data_ptr(), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            begin, end = (int(address, 16) for address in key.split("-"))
            inside = begin < first + cache.numel() * cache.itemsize and first < end
        elif inside and key == "Rss:":
            total += int(values[0]) * 1024
    return total


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="Linux says what is resident")
def test_memory_comes_ahead_of_need_layer_by_layer() -> None:
    layers, block = 4, 64 * 1024
    cache = zeros((layers, 256, 16, 2, 2, 512), torch.bfloat16, CPU)
    assert cache[0, 0].numel() * 2 == block
    before = resident(cache)
    ahead = TakenAhead(cache)
    first = resident(cache) - before
    assert first >= 0.9 * layers * PAGE
    ahead.advance(0)  # nothing of the second part is near enough, so it is taken ahead
    for _ in range(layers - 1):
        ahead.advance(0)
    second = resident(cache) - before
    assert second - first >= 0.5 * layers * PAGE
    ahead.advance(0)
    assert resident(cache) - before < second + PAGE
    assert not cache.any()


def test_it_ends_with_the_cache_and_catches_up_with_what_is_used() -> None:
    cache = zeros((3, 100, 16, 2, 2, 512), torch.bfloat16, CPU)
    cache.fill_(3.0)
    ahead = TakenAhead(cache)
    for block in (5, 70, 71, 72, 73, 99, 99, 99):
        ahead.advance(block)
    assert ahead.complete
    ahead.advance(99)
    assert bool((cache == 3.0).all())


def test_a_small_cache_and_a_device_need_none() -> None:
    assert taken_ahead(zeros((4, 8, 4, 2, 1, 8), torch.float32, CPU)) is None
    assert taken_ahead(torch.empty((2, 64, 16, 2, 2, 512), device="meta")) is None
