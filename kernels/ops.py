"""The operation table: each operation's implementations by backend, and the choice among them by device."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar, get_args

from kernels.backends import TRITON, Kernels, has_triton, prepare_triton

logger = logging.getLogger(__name__)

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

#: Backends by type of device, the preferred first. `reference` has every operation.
BACKENDS: dict[str, tuple[str, ...]] = {"cpu": ("cpu", "reference"), "cuda": ("triton", "reference")}

#: Preferred to all others where results are to be deterministic.
INVARIANT = "invariant"
#: Preferred to all others on a CPU where it has been loaded and is asked for.
NATIVE = "cpu.native"

_table: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each operation. Contracts are in `kernels/reference/<operation>.py`."""

    apply_penalties: Callable[..., Any]
    argmax: Callable[..., Any]
    capture: Callable[..., Any]
    copy_blocks: Callable[..., Any]
    count_above: Callable[..., Any]
    draw: Callable[..., Any]
    draw_packed: Callable[..., Any]
    draw_rows: Callable[..., Any]
    embed: Callable[..., Any]
    embed_delta: Callable[..., Any]
    find_maxima: Callable[..., Any]
    gated_linear: Callable[..., Any]
    gelu_and_mul: Callable[..., Any]
    largest: Callable[..., Any]
    linear: Callable[..., Any]
    log_sum_exp: Callable[..., Any]
    lora_delta: Callable[..., Any]
    lora_store: Callable[..., Any]
    pack: Callable[..., Any]
    paged_attention: Callable[..., Any]
    rms_norm: Callable[..., Any]
    rotary: Callable[..., Any]
    screen: Callable[..., Any]
    silu_and_mul: Callable[..., Any]
    take_rows: Callable[..., Any]
    unembed: Callable[..., Any]
    uniforms: Callable[..., Any]
    uniforms_packed: Callable[..., Any]
    write_kv: Callable[..., Any]


def register(operation: str, backend: str) -> Callable[[Kernel], Kernel]:
    """Enter the decorated function into the table.

    Raises:
        ValueError: no such operation, or a second implementation for the backend.
    """
    if operation not in {field.name for field in fields(Ops)}:
        raise ValueError(f"unknown operation {operation!r}")

    def enter(kernel: Kernel) -> Kernel:
        if (operation, backend) in _table:
            raise ValueError(f"{operation!r} has a {backend!r} implementation already")
        _table[operation, backend] = kernel
        return kernel

    return enter


def implementation(operation: str, backend: str) -> Callable[..., Any] | None:
    """What is registered, or None; Triton's kernels are there where the package is."""
    if backend == TRITON and not has_triton():
        return None
    importlib.import_module(f"kernels.{backend}")
    return _table.get((operation, backend))


def ops_for(device_type: str, *, deterministic: bool = False, native: bool = False, kernels: Kernels = "auto") -> Ops:
    """The operations for a type of device.

    Args:
        device_type: `cpu` or `cuda`. Any other gets the references, and the log a warning.
        deterministic: a row's result is to depend on that row alone, bit for bit, by `kernels.invariant`.
        native: take what `kernels.cpu.native` has; it must have been loaded.
        kernels: `triton` on any device, in Triton's interpreter on a CPU; `reference`: plain torch alone; `auto`: what
            `BACKENDS` has for the device.

    Raises:
        ValueError: no such choice of kernels.
        KernelsUnavailableError: Triton is asked for and cannot be used in this process.
    """
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels must be one of {', '.join(get_args(Kernels))}, not {kernels!r}")
    backends: tuple[str, ...] = ("reference",)
    if kernels == TRITON:
        prepare_triton(device_type)
        backends = (TRITON, "reference")
    elif kernels == "auto":
        backends = _of_device(device_type)
    if deterministic:
        backends = (INVARIANT, *backends)
    elif native:
        backends = (NATIVE, *backends)
    return Ops(**{field.name: _choose(field.name, backends) for field in fields(Ops)})


@lru_cache(maxsize=16)
def _of_device(device_type: str) -> tuple[str, ...]:
    """Backends for a device; a warning, once, where those are not its own."""
    backends = BACKENDS.get(device_type, ("reference",))
    if device_type not in BACKENDS:
        logger.warning("no kernels for device %s: it computes by the references, in plain torch", device_type)
    elif TRITON in backends and not has_triton():
        logger.warning("no Triton on this %s device: it computes by the references, in plain torch", device_type)
    return backends


def is_native(ops: Ops) -> bool:
    """Whether attention is the native one."""
    return ops.paged_attention is _table.get(("paged_attention", NATIVE))


def is_triton(ops: Ops) -> bool:
    """Whether attention is Triton's."""
    return ops.paged_attention is _table.get(("paged_attention", TRITON), False)


def serves_fixed(ops: Ops) -> bool:
    """Whether a pass may be described on the device alone: see `FixedDecode` and `FixedRows`."""
    return is_triton(ops) or ops.paged_attention is _table.get(("paged_attention", "reference"))


def wants_groups(ops: Ops) -> bool:
    """Whether attention wants groups of similar sizes with masks; else all sequences are one group without."""
    return not (is_native(ops) or is_triton(ops))


def reads_host(ops: Ops) -> bool:
    """Whether a pass that `capture` has made takes a `kernels.host_pass.HostPass` as well as tensors."""
    return ops.capture is _table.get(("capture", NATIVE))


def _choose(operation: str, backends: tuple[str, ...]) -> Callable[..., Any]:
    for backend in backends:
        kernel = implementation(operation, backend)
        if kernel is not None:
            return kernel
    raise ValueError(f"{operation!r} has no implementation among {', '.join(backends)}")
