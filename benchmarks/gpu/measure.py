"""What the sections share: cases and how they are checked and timed, on a GPU or, tiny, in Triton's interpreter."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

#: More than any GPU's second-level cache holds: written between two timed runs, so that they read from memory.
_FLUSH_BYTES = 256 * 1024 * 1024
_RUNS, _RUN_SECONDS = 25, 0.4


@dataclass(frozen=True)
class Place:
    """Where and how large: `tiny` only shows that everything runs."""

    device: torch.device
    tiny: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and weights."""
        return torch.bfloat16

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Normal numbers, made on the device."""
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)


@dataclass(frozen=True)
class Ceilings:
    """What the card was measured to do: bytes per second copied (read and written), multiplications and additions."""

    bytes_s: float
    flops_s: float


@dataclass
class Case:
    """One kernel at one size.

    Attributes:
        name: of kernel and size.
        run: launches it once.
        check: compares one launch with float64; raises AssertionError.
        bytes: that a launch must move, each once.
        flops: multiplications and additions that it must do.
    """

    name: str
    run: Callable[[], Any]
    check: Callable[[], None]
    bytes: float = 0.0
    flops: float = 0.0


@dataclass
class Row:
    """A line of the table. `share` is the least time that bytes or operations would take, by the time taken."""

    section: str
    name: str
    problem: str | None = None
    figures: dict[str, float] = field(default_factory=dict)


def close(actual: torch.Tensor, expected: torch.Tensor, relative: float, absolute: float) -> None:
    """Every number within `absolute * rms(expected) + relative * |expected|` of a float64 result.

    Raises:
        AssertionError: with the number that is furthest off.
    """
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    scale = float(expected.square().mean().sqrt())
    excess = (actual.double() - expected).abs() - (absolute * scale + relative * expected.abs())
    excess = torch.where(excess.isnan(), torch.inf, excess)
    if bool((excess > 0).any()):
        place = int(excess.argmax())
        found, wanted = actual.reshape(-1)[place], expected.reshape(-1)[place]
        raise AssertionError(f"{int((excess > 0).sum())} numbers are off, one is {found:.6g} for {wanted:.6g}")


def seconds(place: Place, run: Callable[[], Any]) -> float:
    """The median time of a run: between events on the device, after what flushes its cache."""
    run()
    if place.device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=place.device)
    torch.cuda.synchronize()
    found: list[float] = []
    began = time.perf_counter()
    while len(found) < _RUNS and (len(found) < 3 or time.perf_counter() - began < _RUN_SECONDS):
        flush.zero_()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1000)
    return statistics.median(found)


def measured(section: str, place: Place, ceilings: Ceilings, cases: Iterable[Callable[[], Case]]) -> Iterator[Row]:
    """A row for each case, which is made, checked, timed and dropped."""
    for make in cases:
        row = Row(section, getattr(make, "name", "?"))
        try:
            case = make()
            row.name = case.name
            case.check()
            taken = seconds(place, case.run)
            row.figures = {"us": taken * 1e6}
            if case.bytes:
                row.figures["gb_s"] = case.bytes / taken / 1e9
            if case.flops:
                row.figures["tflop_s"] = case.flops / taken / 1e12
            row.figures["share"] = max(case.bytes / ceilings.bytes_s, case.flops / ceilings.flops_s) / taken
        except Exception as error:  # noqa: BLE001 - it is told in the table, and the others go on
            row.problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        yield row


def ceilings_of(place: Place) -> Ceilings:
    """What the card does: the rate of a large copy, and of a large product in bfloat16."""
    count = place.size(1 << 30, 1 << 16)
    source = torch.empty(count, dtype=torch.uint8, device=place.device).zero_()
    target = torch.empty_like(source)
    copying = seconds(place, lambda: target.copy_(source))
    width = place.size(8192, 64)
    a, b = place.randn(width, width), place.randn(width, width)
    multiplying = seconds(place, lambda: torch.mm(a, b))
    return Ceilings(2 * count / copying, 2 * width**3 / multiplying)
