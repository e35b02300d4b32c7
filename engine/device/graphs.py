"""Work that a device records once and then repeats in one launch; and what stands in where nothing can be recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

#: Works on tensors that stay where they are.
Call = Callable[[], None]


class GraphBackend(Protocol):
    """Records calls."""

    def capture(self, call: Call) -> Call:
        """What does on the device all that the call did there, from the same memory to the same memory.

        The call may be made several times here. It must not make the host wait for the device.
        """


class CudaGraphs:
    """CUDA graphs, which share one pool of memory: only one of them runs at a time, and keeps nothing in it."""

    #: Calls before a capture: kernels are compiled, libraries take their workspaces.
    WARM_UP = 2

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def capture(self, call: Call) -> Call:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(self.WARM_UP):
                call()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may pin memory meanwhile, for adapters that they read.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            call()
        replay: Call = graph.replay
        return replay


class RecordedCalls:
    """For a CPU: a call is replayed by making it again."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, call: Call) -> Call:
        self.captures += 1
        return call
