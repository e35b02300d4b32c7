"""What the native CPU kernels bring over torch's, and what a busy neighbour process takes from them."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks.engine_parts import greedy, seconds_of
from benchmarks.engines import Engines

if TYPE_CHECKING:
    from engine.engine import Engine

#: The one prompt that is decoded alone.
_ALONE = slice(4, 5)


def over_torch(
    engines: Engines, torchs: Engines, prompts: list[list[int]], rounds: int, tokens: int
) -> dict[str, float]:
    """Rates over those of the same engine on torch's kernels, alternating: a batch, and one stream."""
    native, plain = _warm(engines, prompts), _warm(torchs, prompts)

    def once(some: list[list[int]]) -> float:
        return seconds_of(plain, some, greedy(tokens)) / seconds_of(native, some, greedy(tokens))

    return {
        "kernels_ratio": statistics.median(once(prompts) for _ in range(rounds)),
        "kernels_single_ratio": statistics.median(once(prompts[_ALONE]) for _ in range(rounds)),
    }


def beside_a_neighbour(engines: Engines, prompts: list[list[int]], rounds: int, tokens: int) -> dict[str, float]:
    """Rates beside one process that computes without end, over those without it, alternating."""
    engine = _warm(engines, prompts)

    def once(some: list[list[int]]) -> float:
        alone = seconds_of(engine, some, greedy(tokens))
        with _busy_process():
            return alone / seconds_of(engine, some, greedy(tokens))

    return {
        "neighbour_ratio": statistics.median(once(prompts) for _ in range(rounds)),
        "neighbour_single_ratio": statistics.median(once(prompts[_ALONE]) for _ in range(rounds)),
    }


def _warm(engines: Engines, prompts: list[list[int]]) -> Engine:
    engine = engines.make(enable_prefix_caching=False)
    seconds_of(engine, prompts[:2], greedy(2))
    return engine


@contextmanager
def _busy_process() -> Iterator[None]:
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()
