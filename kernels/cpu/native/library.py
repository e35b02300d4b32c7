"""The loaded library: its records as ctypes structures (`src/abi.h`), and the one call that runs programs."""

from __future__ import annotations

import ctypes
import logging
import threading
from ctypes import POINTER, Structure, c_char_p, c_double, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from kernels.native_build import NativeUnavailableError, built

logger = logging.getLogger(__name__)

ABI = 7

#: Numbers of dtypes in the records.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Batch(Structure):
    """What all operations of a program know; pointers are to int64."""

    _fields_ = (
        ("rows", c_int64),
        ("sequences", c_int64),
        ("counts", c_void_p),
        ("lengths", c_void_p),
        ("starts", c_void_p),
        ("blocks", c_void_p),
        ("lora_tiles", c_int64),
        ("lora_slots", c_void_p),
        ("lora_firsts", c_void_p),
        ("lora_rows", c_void_p),
        ("lora_of_row", c_void_p),
        ("lora_groups", c_int64),
        ("lora_active", c_void_p),
    )


class Gather(Structure):
    """Operation 0; `form` is one of `ROWS`, `PANELS`, `COMPACT`."""

    _fields_ = (
        ("table", c_void_p),
        ("ids", c_void_p),
        ("out", c_void_p),
        ("entries", c_int64),
        ("width", c_int64),
        ("table_dtype", c_int64),
        ("out_dtype", c_int64),
        ("form", c_int64),
    )


ROWS, PANELS, COMPACT = 0, 1, 2


class Norm(Structure):
    """Operation 1."""

    _fields_ = (
        ("x", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("x_dtype", c_int64),
        ("residual_dtype", c_int64),
        ("out_dtype", c_int64),
        ("eps", c_double),
    )


class Linear(Structure):
    """Operation 2; `epilogue` is one of `PLAIN`, `GATED`, `LOGITS`."""

    _fields_ = (
        ("x", c_void_p),
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("lora", c_void_p),
        ("out", c_void_p),
        ("peaks", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("peaks_stride", c_int64),
        ("in_width", c_int64),
        ("out_width", c_int64),
        ("dtype", c_int64),
        ("epilogue", c_int64),
        ("compact", c_int64),
    )


PLAIN, GATED, LOGITS = 0, 1, 2


class Rotary(Structure):
    """Operation 3."""

    _fields_ = (
        ("x", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("stride", c_int64),
        ("heads", c_int64),
        ("dim", c_int64),
        ("dtype", c_int64),
        ("table_dtype", c_int64),
    )


class WriteKv(Structure):
    """Operation 4; `stride` in bytes."""

    _fields_ = (
        ("kv", c_void_p),
        ("cache", c_void_p),
        ("slots", c_void_p),
        ("stride", c_int64),
        ("block_size", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("dtype", c_int64),
    )


class Attention(Structure):
    """Operation 5."""

    _fields_ = (
        ("query", c_void_p),
        ("cache", c_void_p),
        ("out", c_void_p),
        ("query_stride", c_int64),
        ("out_stride", c_int64),
        ("block_size", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("dtype", c_int64),
        ("scale", c_double),
    )


class LoraSite(Structure):
    """A layer that adapters change."""

    _fields_ = (("in_width", c_int64), ("parts", c_int64), ("widths", c_void_p), ("gated", c_int64))


class Lora(Structure):
    """Operation 6."""

    _fields_ = (
        ("site", LoraSite),
        ("x", c_void_p),
        ("slots", c_void_p),
        ("low", c_void_p),
        ("x_stride", c_int64),
        ("low_stride", c_int64),
        ("dtype", c_int64),
    )


class EmbedDelta(Structure):
    """Operation 7."""

    _fields_ = (
        ("ids", c_void_p),
        ("slots", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("dtype", c_int64),
    )


class Maxima(Structure):
    """Operation 8."""

    _fields_ = (("values", c_void_p), ("peaks", c_void_p), ("best", c_void_p), ("blocks", c_int64))


class Logits(Structure):
    """What `Draw` and `Scores` read."""

    _fields_ = (("values", c_void_p), ("peaks", c_void_p), ("blocks", c_int64), ("vocab", c_int64))


class Draw(Structure):
    """Operation 9."""

    _fields_ = (
        ("x", Logits),
        ("rows", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("uniform", c_void_p),
        ("seeds", c_void_p),
        ("choices", c_void_p),
        ("positions", c_void_p),
        ("tokens", c_void_p),
        ("thresholds", c_void_p),
    )


class Scores(Structure):
    """Operation 10."""

    _fields_ = (
        ("x", Logits),
        ("tokens", c_void_p),
        ("limits", c_void_p),
        ("above", c_void_p),
        ("norms", c_void_p),
        ("largest", c_void_p),
        ("ids", c_void_p),
        ("count", c_int64),
    )


class Screen(Structure):
    """`SCREEN_STAGES`, the stages of one operation: their record is the same."""

    _fields_ = (
        ("x", c_void_p),
        ("packed", c_void_p),
        ("coarse", c_void_p),
        ("bounds", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("in_width", c_int64),
        ("vocab", c_int64),
        ("dtype", c_int64),
        ("compact", c_int64),
    )


class Instruction(Structure):
    """One step of a program."""

    _fields_ = (("op", c_int64), ("record", c_void_p))


Record = Gather | Norm | Linear | Rotary | WriteKv | Attention | Lora | EmbedDelta | Maxima | Draw | Scores

#: Number of the operation that each kind of record is for.
OPERATIONS: dict[type[Structure], int] = {
    kind: number
    for number, kind in enumerate(
        (Gather, Norm, Linear, Rotary, WriteKv, Attention, Lora, EmbedDelta, Maxima, Draw, Scores)
    )
}
SCREEN_STAGES = range(len(OPERATIONS), len(OPERATIONS) + 3)

_lock = threading.Lock()
_loaded: ctypes.CDLL | None = None
_reason: str | None = None


def load(cache_dir: Path) -> None:
    """Load the library, once per process; it is built if need be. What went wrong the first time stays so.

    Raises:
        NativeUnavailableError: it cannot be used here.
    """
    global _loaded, _reason
    with _lock:
        if _loaded is not None:
            return
        if _reason is None:
            try:
                _loaded = open_library(*built(cache_dir))
                return
            except NativeUnavailableError as error:
                _reason = str(error)
        raise NativeUnavailableError(_reason)


def open_library(path: Path, key: str) -> ctypes.CDLL:
    """Open a file and check that it is the library that the key stands for.

    Raises:
        NativeUnavailableError: it is not, or it cannot be opened.
    """
    try:
        opened = ctypes.CDLL(str(path))
        _declare(opened)
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{path}: {error}") from error
    found = (opened.ropeway_abi(), opened.ropeway_key().decode("ascii", "replace"))
    if found != (ABI, key):
        raise NativeUnavailableError(f"{path} is another library: {found[1]}")
    return opened


def _declare(opened: ctypes.CDLL) -> None:
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ropeway_abi": (c_int64, []),
        "ropeway_key": (c_char_p, []),
        "ropeway_paths": (c_char_p, []),
        "ropeway_set_threads": (None, [c_int64, c_int64]),
        "ropeway_set_affinity": (None, [c_void_p, c_int64]),
        "ropeway_packed_bytes": (c_int64, [c_int64, c_int64, c_int64, c_int64]),
        "ropeway_compact_bytes": (c_int64, [c_int64, c_int64, c_int64, c_int64]),
        "ropeway_compact": (c_int64, [c_void_p, c_int64, c_int64, c_int64, c_void_p]),
        "ropeway_compact_fits": (c_int64, [c_void_p, c_int64, c_int64, c_int64]),
        "ropeway_panel_columns": (c_int64, []),
        "ropeway_pack": (None, [c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p]),
        "ropeway_screen_sizes": (None, [c_int64, c_int64, POINTER(c_int64), POINTER(c_int64)]),
        "ropeway_screen_pack": (c_int64, [c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p]),
        "ropeway_lora_elements": (c_int64, [POINTER(LoraSite), c_int64, c_int64]),
        "ropeway_pack_lora": (
            None,
            [POINTER(LoraSite), c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p],
        ),
        "ropeway_run": (c_int64, [POINTER(Instruction), c_int64, POINTER(Batch)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(opened, name)
        function.restype, function.argtypes = result, arguments


def library() -> ctypes.CDLL:
    """What `load` has loaded.

    Raises:
        NativeUnavailableError: nothing.
    """
    if _loaded is None:
        raise NativeUnavailableError("the native kernels are not loaded")
    return _loaded


def paths() -> str:
    """The instructions that the loaded library was built for, such as `avx512_bf16` or `avx2`."""
    return str(library().ropeway_paths().decode("ascii"))


def set_threads(threads: int, spins: int = 2000) -> None:
    """Threads of the next programs, the caller's included; and how often a thread looks for work before it sleeps."""
    library().ropeway_set_threads(threads, spins)


def set_affinity(cpus: list[int]) -> None:
    """Pin the threads of the next programs, in turn, each to one of these CPUs (below 1024); none: do not pin them.

    The first is the caller's and not used: that thread is not the library's.
    """
    library().ropeway_set_affinity((c_int64 * len(cpus))(*cpus), len(cpus))


def run(instructions: ctypes.Array[Instruction], count: int, batch: Batch) -> None:
    """Run a program; other Python threads may run meanwhile.

    Raises:
        ValueError: an operation is not known; nothing has run.
    """
    place = library().ropeway_run(instructions, count, ctypes.byref(batch))
    if place:
        raise ValueError(f"instruction {place - 1} of a native program is not known")
