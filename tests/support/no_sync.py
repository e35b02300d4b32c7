"""Fails where the host would wait for a device: reads a value, asks how many there are, copies unpinned memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

#: Operations whose result, or its size, is a value on the host.
OPERATIONS = {
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "_unique", "_unique2",
    "unique_dim", "unique_consecutive",
}  # fmt: skip
#: Methods and functions that torch does not dispatch as such on a CPU.
CALLS = {
    "__bool__", "__contains__", "__float__", "__index__", "__int__", "__iter__", "as_tensor", "cpu", "item", "nonzero",
    "numpy", "tensor", "tolist",
}  # fmt: skip


class HostSyncError(AssertionError):
    """The host would wait."""


class _Calls(TorchFunctionMode):
    paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if not self.paused and (name in CALLS or (name == "where" and len(args) == 1)):
            raise HostSyncError(f"{name} makes the host wait")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.paused and (name in OPERATIONS or (name == "index" and _by_mask(args))):
            raise HostSyncError(f"{name} makes the host wait")
        return func(*args, **(kwargs or {}))


def _by_mask(args: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Within it, HostSyncError; Triton's interpreter may do as it likes."""
    calls, operations = _Calls(), _Operations()
    with _interpreter_left_alone(calls, operations), calls, operations:
        yield


@contextmanager
def _interpreter_left_alone(*modes: Any) -> Iterator[None]:
    if "triton" not in sys.modules:
        yield
        return
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def paused(self: Any, *args: Any, **kwargs: Any) -> Any:
        for mode in modes:
            mode.paused = True
        try:
            return launch(self, *args, **kwargs)
        finally:
            for mode in modes:
                mode.paused = False

    GridExecutor.__call__ = paused
    try:
        yield
    finally:
        GridExecutor.__call__ = launch
