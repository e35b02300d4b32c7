"""Adapters in memory: read by a thread of its own beside the steps, each once, the least recently used forgotten."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shared.errors import AdapterError, EngineError, RopewayError

if TYPE_CHECKING:
    from engine.adapters.weights import Adapter

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Want:
    """An adapter that `requests` live requests use. Its folder is kept, also when it is unregistered meanwhile."""

    folder: Path
    requests: int = 0


class AdapterLibrary:
    """At most `capacity` adapters, those being read among them. All calls come from the engine's thread.

    An adapter is kept as long as somebody wants it. What is wanted while there is no room is read when there is, in
    the order of the first request.

    Args:
        read: makes an adapter of its folder; runs beside the engine's thread.
        capacity: `max_cpu_loras`.
        executor: where `read` runs; None: a thread of its own.
    """

    def __init__(self, read: Callable[[Path], Adapter], capacity: int, executor: Executor | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"max_cpu_loras must be at least 1, not {capacity}")
        self._read, self._capacity = read, capacity
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._folders: dict[str, Path] = {}
        self._wanted: dict[str, _Want] = {}
        self._memory: OrderedDict[str, Adapter] = OrderedDict()
        self._reading: dict[str, Future[Adapter]] = {}
        self.reads = self.hits = 0

    def register(self, identity: str, folder: Path) -> None:
        """Say where an adapter is; nothing is read yet."""
        self._folders[identity] = folder

    def unregister(self, identity: str) -> None:
        """Take no new requests of an adapter; those that there are go on."""
        self._folders.pop(identity, None)

    def knows(self, identity: str) -> bool:
        """Whether requests of it are taken."""
        return identity in self._folders

    def want(self, identity: str) -> None:
        """One more request of an adapter: have it read if it is not in memory."""
        self._wanted.setdefault(identity, _Want(self._folders[identity])).requests += 1
        self.hits += identity in self._memory
        self._start()

    def let_go(self, identity: str) -> None:
        """One request less. Of an adapter that could not be read there are none left."""
        want = self._wanted.get(identity)
        if want is not None:
            want.requests -= 1
            if not want.requests:
                del self._wanted[identity]
                self._start()

    def __contains__(self, identity: str) -> bool:
        """Whether it is in memory."""
        return identity in self._memory

    def get(self, identity: str) -> Adapter:
        """An adapter that is in memory."""
        self._memory.move_to_end(identity)
        return self._memory[identity]

    @property
    def pending(self) -> bool:
        """Whether something is being read."""
        return bool(self._reading)

    def poll(self, timeout: float = 0.0) -> dict[str, RopewayError]:
        """Take in what was read; wait up to `timeout` seconds for some of it.

        Returns:
            Adapters that could not be read, and why; they are read again when they are wanted again.
        """
        failures: dict[str, RopewayError] = {}
        if not self._reading:
            return failures
        for future in wait(self._reading.values(), timeout, FIRST_COMPLETED).done:
            identity = next(name for name, reading in self._reading.items() if reading is future)
            del self._reading[identity]
            error = future.exception()
            if error is None:
                self._memory[identity] = future.result()
            else:
                failures[identity] = _typed(identity, error)
        for identity in failures:
            self._wanted.pop(identity, None)
        self._start()
        return failures

    def close(self) -> None:
        """End the thread; what is being read is waited for."""
        self._executor.shutdown(cancel_futures=True)

    def _start(self) -> None:
        for identity, want in self._wanted.items():
            if identity in self._memory or identity in self._reading:
                continue
            if not self._make_room():
                return
            self.reads += 1
            self._reading[identity] = self._executor.submit(self._checked, identity, want.folder)

    def _checked(self, identity: str, folder: Path) -> Adapter:
        adapter = self._read(folder)
        if adapter.identity != identity:
            raise AdapterError("the adapter's files were changed after it was registered")
        return adapter

    def _make_room(self) -> bool:
        if len(self._memory) + len(self._reading) < self._capacity:
            return True
        unwanted = next((identity for identity in self._memory if identity not in self._wanted), None)
        if unwanted is None:
            return False
        del self._memory[unwanted]
        return True


def _typed(identity: str, error: BaseException) -> RopewayError:
    if isinstance(error, RopewayError):
        logger.warning("adapter %s cannot be served: %s", identity, error.message)
        return error
    logger.error("adapter %s could not be read", identity, exc_info=error)
    return EngineError("the adapter could not be read")
