"""How large the pieces of paged attention are on each target, and with how many warps and stages they run.

Chosen by what compiles without spills (`kernels.triton.resources`); no GPU has been asked yet which is fastest.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.triton.launch import power_of_2


@dataclass(frozen=True, slots=True)
class Tile:
    """Query rows and keys of a program's step, and how it is launched."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    @property
    def launch(self) -> dict[str, int]:
        """Keyword arguments of a launch."""
        return {"ROWS": self.rows, "KEYS": self.keys, "num_warps": self.num_warps, "num_stages": self.num_stages}


def _is_datacentre(target: str) -> bool:
    """Hopper, and Blackwell with as much shared memory: products of 64 rows by four warps at once."""
    return target in ("sm_90", "sm_100", "sm_103")


def decode_tile(target: str, dim: int, itemsize: int, per_kv_head: int, float8: bool = False) -> Tile:
    """For heads of `dim`, padded, whose products take numbers of `itemsize` bytes.

    A block table's entry, then keys and values behind it: with 5 stages two steps' keys and values are on their way.
    """
    rows = max(16, power_of_2(per_kv_head))
    row_bytes = dim * itemsize
    if target.startswith("gfx"):  # 64 KiB of shared memory
        return Tile(rows, 64 if row_bytes <= 128 else 32 if row_bytes <= 256 else 16, 4, 1)
    if itemsize == 4:
        return Tile(rows, 32 if row_bytes <= 256 else 16, 4, 3)
    # A key in 8 bits takes registers to be widened in.
    keys = 64 if row_bytes <= 256 and not float8 else 32
    return Tile(rows, keys, 4, 5 if _is_datacentre(target) else 3)


def prefill_tile(target: str, dim: int, itemsize: int) -> Tile:
    """For heads of `dim`, padded, whose products take numbers of `itemsize` bytes."""
    if target == "interpreter":
        return Tile(32, 32, 4, 1)
    row_bytes = dim * itemsize
    if itemsize == 4:  # without tensor cores: for tests, not for speed
        return Tile(16, 32 if dim <= 64 else 16, 4, 1)
    if target.startswith("gfx"):
        return Tile(64, 32 if row_bytes <= 256 else 16, 4, 1)
    if _is_datacentre(target):
        return Tile(128, 64, 8, 3 if row_bytes <= 128 else 2) if row_bytes <= 256 else Tile(64, 32, 8, 2)
    if row_bytes <= 128:
        return Tile(128, 64, 8, 3)
    return Tile(64, 32, 4, 2) if row_bytes <= 256 else Tile(32, 32, 4, 2)
