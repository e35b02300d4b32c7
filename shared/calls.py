"""Calls on their way to the nodes that serve their keys: one pipeline per node and round, all nodes at once.

What has to be sent again after the answers, and to whom, is decided here once, for asyncio and for threads:

- a node that does not know a script gets its text, with everything of the lane that came after it: a later call may
  depend on an earlier one;
- MOVED and ASK are followed, TRYAGAIN is tried again;
- where a node is away and another one serves its keys by now, that one is asked.

Every call may be repeated, so nothing is harmed by sending one again that was run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any, Final

import redis
import redis.asyncio
from redis.exceptions import AskError, ClusterDownError, MovedError, NoScriptError, ReadOnlyError, TryAgainError

from shared.cluster import Cluster, SyncCluster, node_name
from shared.redis_errors import TROUBLE
from shared.redis_url import Address
from shared.scripts import Call
from shared.slot_map import SlotMap

AsyncClient = redis.asyncio.Redis | Cluster
SyncClient = redis.Redis | SyncCluster
Command = tuple[Any, ...]
#: Those of a pipeline, or what kept all of them from coming.
Answers = list[Any] | Exception

#: Rounds until what still is not answered is given up.
_ROUNDS: Final = 6
#: Seconds before a slot that is on its way to another node is asked again, times the round.
_TRY_AGAIN_S: Final = 0.05
#: Seconds that the nodes that have answered wait for one that has not.
_LATE_S: Final = 1.0
_SILENT: Final = redis.TimeoutError("the node is silent while others answer")
_AWAY: Final = (redis.ConnectionError, redis.TimeoutError, ClusterDownError, OSError)


async def run(client: AsyncClient, calls: Sequence[Call]) -> list[Any]:
    """One answer per call. An error is an answer too: an error reply, or that of a node that is away."""
    if not isinstance(client, Cluster):
        batch = _Batch(calls)
        while batch.open:
            batch.answered(batch.open, await _send(client, batch.commands(batch.open)))
            batch.turn()
        return batch.answers
    spread = _SpreadBatch(calls, client.slots)
    while spread.open:
        for index in spread.open:
            try:
                spread.place(index, await client.primary(calls[index].key))
            except TROUBLE as error:
                spread.answers[index] = error
        groups = spread.groups()
        sending = [_send(client.at(node), spread.commands(indexes)) for node, indexes in groups]
        for (_, indexes), answers in zip(groups, await _together(sending), strict=True):
            spread.answered(indexes, answers)
        spread.turn()
        if spread.pause:
            await asyncio.sleep(spread.pause)
    return spread.answers


def run_sync(client: SyncClient, calls: Sequence[Call]) -> list[Any]:
    """See `run`."""
    if not isinstance(client, SyncCluster):
        batch = _Batch(calls)
        while batch.open:
            batch.answered(batch.open, _send_sync(client, batch.commands(batch.open)))
            batch.turn()
        return batch.answers
    spread = _SpreadBatch(calls, client.slots)
    while spread.open:
        for index in spread.open:
            try:
                spread.place(index, client.primary(calls[index].key))
            except TROUBLE as error:
                spread.answers[index] = error
        groups = spread.groups()
        commands = [(node, spread.commands(indexes)) for node, indexes in groups]
        for (_, indexes), answers in zip(groups, _together_sync(client, commands), strict=True):
            spread.answered(indexes, answers)
        spread.turn()
        if spread.pause:
            time.sleep(spread.pause)
    return spread.answers


async def run_everywhere(client: AsyncClient, call: Call) -> list[Any]:
    """A call's answer, or error, from every node."""
    if not isinstance(client, Cluster):
        return await run(client, [call])
    try:
        await client.primary(call.key)
    except TROUBLE as error:
        return [error]
    answers = await asyncio.gather(*(_send(client.at(node), [call.command]) for node in client.slots.nodes))
    return [answer if isinstance(answer, Exception) else answer[0] for answer in answers]


async def primaries(client: AsyncClient) -> list[redis.asyncio.Redis]:
    """A client of each node that serves keys.

    Raises:
        redis.RedisError: no node of the cluster can be reached.
    """
    if not isinstance(client, Cluster):
        return [client]
    await client.primary("")
    return [client.at(node) for node in client.slots.primaries]


async def node_of(client: AsyncClient, key: str) -> str:
    """The name of the node that serves a key: `host:port` in a cluster, else nothing.

    Raises:
        redis.RedisError: no node of the cluster can be reached.
    """
    return node_name(await client.primary(key)) if isinstance(client, Cluster) else ""


class _Batch:
    """Calls for one server.

    Attributes:
        open: indexes of calls that are to be sent now.
        answers: by index.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self.answers: list[Any] = [None] * len(calls)
        self.open = list(range(len(calls)))
        self._rounds = 0
        #: By script and lane, the call that brings the text along: EVAL leaves the script with the node for the others.
        self._texts: dict[tuple[str, str], int] = {}

    def commands(self, indexes: Iterable[int]) -> list[Command]:
        """What is sent for these calls, in one pipeline."""
        return [command for index in indexes for command in self._parts(index)]

    def answered(self, indexes: Iterable[int], answers: Answers) -> None:
        """Take the answers to `commands(indexes)`, or what kept all of them from coming."""
        position = 0
        for index in indexes:
            if isinstance(answers, Exception):
                self.answers[index] = answers
                continue
            parts = len(self._parts(index))
            self._take(index, answers[position : position + parts])
            position += parts

    def turn(self) -> None:
        """The round is over: `open` is what has to be sent again."""
        self._rounds += 1
        self._texts.clear()
        again: list[int] = []
        lanes: set[str] = set()
        for index in self.open:
            lane = self._calls[index].lane
            if self._repeat(index, self.answers[index]) or lane in lanes:
                lanes.add(lane)
                again.append(index)
        self.open = again if self._rounds < _ROUNDS else []

    def _parts(self, index: int) -> list[Command]:
        call = self._calls[index]
        command = call.command
        if call.script is not None and self._texts.get((call.script.sha, call.lane)) == index:
            command = ("EVAL", call.script.text, *command[2:])
        return [command] if call.behind is None else [command, call.behind]

    def _take(self, index: int, answers: list[Any]) -> None:
        error = next((answer for answer in answers if isinstance(answer, Exception)), None)
        self.answers[index] = error or (answers[0] if self._calls[index].behind is None else tuple(answers))

    def _repeat(self, index: int, answer: Any) -> bool:
        """Whether a call must be sent again."""
        script = self._calls[index].script
        if script is None or not isinstance(answer, NoScriptError):
            return False
        self._texts.setdefault((script.sha, self._calls[index].lane), index)
        return True


class _SpreadBatch(_Batch):
    """Calls for the nodes of a cluster.

    Attributes:
        pause: seconds to wait before the next round.
    """

    def __init__(self, calls: Sequence[Call], slots: SlotMap) -> None:
        super().__init__(calls)
        self._slots = slots
        self.pause = 0.0
        self._nodes: dict[int, Address] = {}
        self._asked: dict[int, Address] = {}
        self._away: dict[int, Address] = {}

    def place(self, index: int, primary: Address) -> None:
        """The node that serves a call's key. Where it is the one that was away just now, it is left at that."""
        if self._away.get(index) != primary:
            self._nodes[index] = self._asked.get(index, primary)

    def groups(self) -> list[tuple[Address, list[int]]]:
        """Nodes, and the calls for each in order."""
        groups: dict[Address, list[int]] = {}
        self.open = [index for index in self.open if index in self._nodes]
        for index in self.open:
            groups.setdefault(self._nodes[index], []).append(index)
        return list(groups.items())

    def turn(self) -> None:
        """See `_Batch.turn`."""
        self.pause = 0.0
        self._asked.clear()
        self._away.clear()
        super().turn()
        self._nodes.clear()

    def _parts(self, index: int) -> list[Command]:
        parts = super()._parts(index)
        return [("ASKING",), *parts] if index in self._asked else parts

    def _take(self, index: int, answers: list[Any]) -> None:
        super()._take(index, answers[1:] if index in self._asked else answers)

    def _repeat(self, index: int, answer: Any) -> bool:
        node = self._nodes[index]
        if isinstance(answer, MovedError):
            self._slots.moved(answer.slot_id, (answer.host or node[0], answer.port))
            return True
        if isinstance(answer, AskError):
            self._asked[index] = (answer.host or node[0], answer.port)
            return True
        if isinstance(answer, TryAgainError):
            self.pause = _TRY_AGAIN_S * self._rounds
            return True
        if isinstance(answer, _AWAY):
            self._slots.failed(node)
            self._away[index] = node
            return True
        return super()._repeat(index, answer)


async def _together(sending: Sequence[Coroutine[Any, Any, Answers]]) -> list[Answers]:
    """The answers of several nodes. One that is silent is not waited for much longer than the others."""
    if len(sending) < 2:
        return [await one for one in sending]
    tasks = [asyncio.create_task(one) for one in sending]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(tasks, timeout=_LATE_S)
    finally:
        late = [task for task in tasks if task.cancel()]
        await asyncio.gather(*late, return_exceptions=True)
    return [_SILENT if task in late else task.result() for task in tasks]


def _together_sync(client: SyncCluster, commands: Sequence[tuple[Address, list[Command]]]) -> list[Answers]:
    """See `_together`. What is late goes on in its thread; until it has ended nothing else is sent to that node."""
    if len(commands) < 2:
        return [_send_sync(client.at(node), parts) for node, parts in commands]
    sent = [
        None if node in client.late else client.threads.submit(_send_sync, client.at(node), parts)
        for node, parts in commands
    ]
    futures = [future for future in sent if future is not None]
    wait(futures, return_when=FIRST_COMPLETED)
    wait(futures, timeout=_LATE_S)
    answers: list[Answers] = []
    for (node, _), future in zip(commands, sent, strict=True):
        if future is not None and future.done():
            answers.append(future.result())
            continue
        if future is not None:
            client.keep_late(node, future)
        answers.append(_SILENT)
    return answers


async def _send(client: Any, commands: list[Command]) -> Answers:
    """One pipeline's answers, or the error that kept it from being sent or answered."""
    try:
        if len(commands) == 1:
            try:
                return [await client.execute_command(*commands[0])]
            except redis.ResponseError as error:
                answers: list[Any] = [error]
        else:
            pipe = client.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            answers = await pipe.execute(raise_on_error=False)
        if any(isinstance(answer, ReadOnlyError) for answer in answers):
            # Connections to a demoted primary are of no use: behind the same name there may be another server by now.
            await client.connection_pool.disconnect(inuse_connections=False)
    except TROUBLE as error:
        return error
    return answers


def _send_sync(client: Any, commands: list[Command]) -> Answers:
    """See `_send`."""
    try:
        pipe = client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        answers: list[Any] = pipe.execute(raise_on_error=False)
        if any(isinstance(answer, ReadOnlyError) for answer in answers):
            client.connection_pool.disconnect(inuse_connections=False)
    except TROUBLE as error:
        return error
    return answers
