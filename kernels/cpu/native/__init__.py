"""Native operations for CPUs: C++ built on first use, called through ctypes; same contracts as the references.

Registered for `cpu.native`, which the table takes only where it is asked to, after `load` has succeeded.
"""

from kernels.cpu.native import attention, capture, draw, lora, lora_store, operations, screen
from kernels.cpu.native.library import load, paths, set_affinity, set_threads
from kernels.cpu.native.operations import layout, unserved
from kernels.cpu.native.screen import screens
from kernels.native_build import NativeUnavailableError

__all__ = [
    "NativeUnavailableError",
    "attention",
    "capture",
    "draw",
    "layout",
    "load",
    "lora",
    "lora_store",
    "operations",
    "paths",
    "screen",
    "screens",
    "set_affinity",
    "set_threads",
    "unserved",
]
