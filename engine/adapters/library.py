"""Adapters in memory: fetched and read beside the steps, each once, the least recently used forgotten."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from shared.errors import AdapterError, EngineError, RopewayError

logger = logging.getLogger(__name__)

#: Adapters whose files are fetched at the same time: that is waiting, for a network or for a store that is away. They
#: are read one after the other: reading takes a CPU.
_FETCHERS = 16
#: Seconds until a pinned adapter that could not be had is tried again with no request for it.
_PIN_AGAIN_S = 30.0
#: Last failures and durations that are kept for who asks.
_FAILURES, _DURATIONS = 32, 64


class Identified(Protocol):
    """What is kept in memory."""

    @property
    def identity(self) -> str:
        """Of its content."""


class AdapterSource(Protocol):
    """Where adapters come from that nobody has registered. Called in threads beside the steps."""

    def folder(self, identity: str) -> Path:
        """The adapter's folder. May take long, and try again by itself. Raises RopewayError."""

    def discard(self, identity: str) -> None:
        """Get them anew the next time: the folder's files are not what they should be, or nobody needs them now."""

    def close(self) -> None:
        """Whoever waits in `folder` gives up."""


A = TypeVar("A", bound=Identified)


@dataclass(slots=True)
class _Want:
    """An adapter that `requests` live requests use, or that is pinned.

    Attributes:
        folder: kept, also when it is unregistered meanwhile; None while it is not known.
        again: it could not be read, and is fetched anew, once.
        since: monotonic seconds.
    """

    name: str
    folder: Path | None
    requests: int = 0
    again: bool = False
    since: float = field(default_factory=time.monotonic)


class AdapterLibrary(Generic[A]):
    """At most `capacity` adapters, those being read among them. All calls come from the engine's thread.

    An adapter is kept as long as somebody wants it, or it is pinned. What is wanted while there is no room is read when
    there is, in the order of the first request; its files are fetched before.

    Args:
        read: makes an adapter of its folder; runs beside the engine's thread.
        capacity: `max_cpu_loras`.
        executor: where folders are read and fetched; None: threads of its own.
        source: has the adapters that are not registered; None: requests of those are not taken.

    Attributes:
        reads, hits: adapters that were read, or began to be; requests that found theirs in memory.
        loads, load_failures: adapters that came into memory, and that could not be had.
        load_seconds: of the last loads, the newest last: from the first request until it was in memory.
    """

    def __init__(
        self,
        read: Callable[[Path], A],
        capacity: int,
        executor: Executor | None = None,
        source: AdapterSource | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"max_cpu_loras must be at least 1, not {capacity}")
        self._read, self._capacity, self._source = read, capacity, source
        self._reader = executor or ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._fetcher = executor or ThreadPoolExecutor(_FETCHERS, thread_name_prefix="adapter-files")
        self._folders: dict[str, Path] = {}
        self._wanted: dict[str, _Want] = {}
        self._pinned: dict[str, str] = {}
        self._unpinnable = 0
        self._retired: frozenset[str] = frozenset()
        self._memory: OrderedDict[str, A] = OrderedDict()
        self._fetching: dict[str, Future[Path]] = {}
        self._reading: dict[str, Future[A]] = {}
        self._failed: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self.reads = self.hits = self.loads = self.load_failures = 0
        self.load_seconds: deque[float] = deque(maxlen=_DURATIONS)

    def register(self, identity: str, folder: Path) -> None:
        """Say where an adapter is; nothing is read yet."""
        self._folders[identity] = folder

    def unregister(self, identity: str) -> None:
        """Take no new requests of an adapter; those that there are go on."""
        self._folders.pop(identity, None)

    def knows(self, identity: str) -> bool:
        """Whether requests of it are taken; whether a source has it shows when it is fetched."""
        return identity in self._folders or self._source is not None

    def want(self, identity: str, name: str = "") -> None:
        """One more request of an adapter: have it read if it is not in memory. `name` is for the log."""
        self._want(identity, name).requests += 1
        self.hits += identity in self._memory
        self._start()

    def let_go(self, identity: str) -> None:
        """One request less. Of an adapter that could not be had there are none left."""
        want = self._wanted.get(identity)
        if want is not None:
            want.requests -= 1
            self._drop_unwanted(identity, want)
            self._start()

    def pin(self, pinned: Mapping[str, str]) -> None:
        """Read these ahead and keep them: names by identity, in place of those that were pinned before.

        Room for one other stays. What could not be had is tried again after a while.
        """
        before, self._pinned = self._pinned, dict(islice(pinned.items(), self._capacity - 1))
        self._say_unpinnable(len(pinned) - len(self._pinned))
        now = time.monotonic()
        for identity, name in self._pinned.items():
            _, failed_at = self._failed.get(identity, ("", float("-inf")))
            if self.knows(identity) and now - failed_at > _PIN_AGAIN_S:
                self._want(identity, name)
        for identity in before.keys() - self._pinned.keys():
            if (want := self._wanted.get(identity)) is not None:
                self._drop_unwanted(identity, want)
        self._start()

    def retire(self, identities: Collection[str]) -> None:
        """These leave memory with their last request, in place of those that were to leave before."""
        self._retired = frozenset(identities)
        for identity in self._retired - self._wanted.keys():
            self._forget(identity)

    def retired(self, identity: str) -> bool:
        """Whether an adapter is to leave, and nobody wants it any more."""
        return identity in self._retired and identity not in self._wanted

    def label(self, identity: str) -> str:
        """How an adapter is named in logs."""
        want = self._wanted.get(identity)
        return f"{want.name} ({identity})" if want is not None and want.name else identity

    def __contains__(self, identity: str) -> bool:
        """Whether it is in memory."""
        return identity in self._memory

    def get(self, identity: str) -> A:
        """An adapter that is in memory."""
        self._memory.move_to_end(identity)
        return self._memory[identity]

    @property
    def pending(self) -> bool:
        """Whether something is being fetched or read."""
        return bool(self._fetching or self._reading)

    @property
    def awaited(self) -> bool:
        """Whether something is being fetched or read that is still wanted."""
        return any(identity in self._wanted for identity in (*self._fetching, *self._reading))

    @property
    def in_memory(self) -> list[str]:
        """Adapters in memory, the least recently used first."""
        return list(self._memory)

    @property
    def loading(self) -> list[str]:
        """Adapters that are wanted and not in memory."""
        return [identity for identity in self._wanted if identity not in self._memory]

    @property
    def failed(self) -> dict[str, str]:
        """The last ones that could not be had, and why."""
        return {identity: message for identity, (message, _) in self._failed.items()}

    @property
    def failed_at(self) -> dict[str, float]:
        """When each of these failed, in monotonic seconds."""
        return {identity: since for identity, (_, since) in self._failed.items()}

    def poll(self, timeout: float = 0.0) -> dict[str, RopewayError]:
        """Take in what was fetched and read; wait up to `timeout` seconds for some of it.

        Returns:
            Adapters that could not be had, and why; they are tried again when they are wanted again.
        """
        failures: dict[str, RopewayError] = {}
        if not self.pending:
            return failures
        under_way: list[Future[Any]] = [*self._fetching.values(), *self._reading.values()]
        wait(under_way, timeout, FIRST_COMPLETED)
        for identity in [identity for identity, future in self._fetching.items() if future.done()]:
            fetched = self._fetching.pop(identity)
            if (error := fetched.exception()) is not None:
                failures[identity] = self._fail(identity, error)
            elif (want := self._wanted.get(identity)) is not None:
                want.folder = fetched.result()
        for identity in [identity for identity, future in self._reading.items() if future.done()]:
            was_read = self._reading.pop(identity)
            if (error := was_read.exception()) is None:
                self._take_in(identity, was_read.result())
            elif not self._fetch_anew(identity):
                failures[identity] = self._fail(identity, error)
            else:
                logger.warning("adapter %s could not be read and is fetched anew: %s", self.label(identity), error)
        self._start()
        return failures

    def check(self, requests: Mapping[str, int]) -> None:
        """Compare with the live requests of each adapter.

        Raises:
            AssertionError: they differ, or there is more in memory than may be.
        """
        counted = {identity: want.requests for identity, want in self._wanted.items() if want.requests}
        if counted != {identity: count for identity, count in requests.items() if count}:
            raise AssertionError(f"the library counts requests {counted}, there are {dict(requests)}")
        if len(self._memory) + len(self._reading) > self._capacity:
            raise AssertionError(f"{len(self._memory)} adapters in memory, {len(self._reading)} being read")
        if idle := [i for i, want in self._wanted.items() if not want.requests and i not in self._pinned]:
            raise AssertionError(f"adapters are wanted by nobody: {idle}")

    def close(self) -> None:
        """End the threads; nothing is waited for."""
        if self._source is not None:
            self._source.close()
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False, cancel_futures=True)

    # --- wanting ---

    def _want(self, identity: str, name: str) -> _Want:
        want = self._wanted.get(identity)
        if want is None:
            want = self._wanted[identity] = _Want(name, self._folders.get(identity))
        return want

    def _drop_unwanted(self, identity: str, want: _Want) -> None:
        if want.requests or identity in self._pinned:
            return
        del self._wanted[identity]
        if identity in self._retired:
            self._forget(identity)

    def _forget(self, identity: str) -> None:
        """No name stands for it, and nobody wants it."""
        if self._memory.pop(identity, None) is not None and self._source is not None:
            logger.debug("adapter %s leaves memory", identity)
            self._fetcher.submit(self._source.discard, identity)
        self._failed.pop(identity, None)

    def _say_unpinnable(self, count: int) -> None:
        if count != self._unpinnable and count > 0:
            logger.warning(
                "%d of the pinned adapters are not kept in memory: there is room for %d of them (max_cpu_loras %d)",
                count, self._capacity - 1, self._capacity,
            )  # fmt: skip
        self._unpinnable = max(0, count)

    # --- reading ---

    def _start(self) -> None:
        room = True
        # Those that requests wait for go first.
        for identity, want in sorted(self._wanted.items(), key=lambda item: item[1].requests == 0):
            if identity in self._memory or identity in self._reading or identity in self._fetching:
                continue
            if want.folder is None:
                assert self._source is not None
                self._fetching[identity] = self._fetcher.submit(self._source.folder, identity)
            elif room and (room := self._make_room()):
                self.reads += 1
                self._reading[identity] = self._reader.submit(self._checked, identity, want.folder)

    def _checked(self, identity: str, folder: Path) -> A:
        try:
            adapter = self._read(folder)
            if adapter.identity != identity:
                raise AdapterError("the adapter's files were changed after it was registered")
        except Exception:
            if self._source is not None and identity not in self._folders:
                self._source.discard(identity)
            raise
        return adapter

    def _fetch_anew(self, identity: str) -> bool:
        """The files may have gone, or been damaged, between fetching and reading."""
        want = self._wanted.get(identity)
        if want is None or want.again or self._source is None or identity in self._folders:
            return False
        want.folder, want.again = None, True
        return True

    def _take_in(self, identity: str, adapter: A) -> None:
        self._memory[identity] = adapter
        self._failed.pop(identity, None)
        self.loads += 1
        want = self._wanted.get(identity)
        if want is not None:
            seconds = time.monotonic() - want.since
            self.load_seconds.append(seconds)
            logger.debug("adapter %s is in memory after %.3f s", self.label(identity), seconds)
        elif identity in self._retired:
            self._forget(identity)

    def _fail(self, identity: str, error: BaseException) -> RopewayError:
        typed = _typed(self.label(identity), error)
        self._wanted.pop(identity, None)
        self._failed[identity] = typed.message, time.monotonic()
        self._failed.move_to_end(identity)
        if len(self._failed) > _FAILURES:
            self._failed.popitem(last=False)
        self.load_failures += 1
        return typed

    def _make_room(self) -> bool:
        if len(self._memory) + len(self._reading) < self._capacity:
            return True
        unwanted = next((identity for identity in self._memory if identity not in self._wanted), None)
        if unwanted is None:
            return False
        del self._memory[unwanted]
        return True


def _typed(label: str, error: BaseException) -> RopewayError:
    if isinstance(error, RopewayError):
        logger.warning("adapter %s cannot be served: %s", label, error.message)
        return error
    logger.error("adapter %s could not be read", label, exc_info=error)
    return EngineError("the adapter could not be read")
