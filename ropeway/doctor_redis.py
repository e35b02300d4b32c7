"""`ropeway doctor --redis`: whether a Redis suits, what the pools in it agree on, and what is to be mended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import redis
from redis.exceptions import NoPermissionError

from shared.adapters import Adapters
from shared.calls import AsyncClient, primaries
from shared.cluster import Cluster, node_name
from shared.connect import connect
from shared.errors import InvalidRequestError, ProtocolError, RopewayError
from shared.protocol import Card, WorkerInfo
from shared.redis_errors import TROUBLE
from shared.redis_url import mask
from shared.settings import AdapterSettings
from shared.task_metrics import TaskQueueCollector
from shared.task_queue import tasks_url
from shared.upkeep import Upkeep
from shared.webhooks import Webhooks, summed

#: The oldest version that the tests run with.
_OLDEST: Final = (7, 0)
#: Seconds by which Redis's clock may differ from this machine's: deadlines and queue times are read from both.
_MOST_APART_S: Final = 1.0
#: Share of `maxmemory` from which on writes may soon be refused.
_NEARLY_FULL: Final = 0.9
#: Seconds after which a webhook should have been tried, and after which somebody should look why that was in vain.
_TRIED_S, _LATE_S = 60.0, 3600.0
#: Seconds that the first of the background tasks may wait; those of the alert RopewayTasksWait.
_TASKS_WAIT_S: Final = 900.0
#: Milliseconds without a heartbeat after which a worker counts as gone.
_WORKER_TTL_MS: Final = 15_000
Info = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    Attributes:
        mend: what to do about it; None where it is well.
    """

    name: str
    value: str
    mend: str | None = None


def redis_findings(url: str) -> list[Finding]:
    """All there is to say of a Redis and its pools. Reads only.

    Raises:
        InvalidRequestError: the URL is none.
    """
    return asyncio.run(_findings(url))


async def _findings(url: str) -> list[Finding]:
    client = connect(url)
    found = [Finding("redis", mask(url))]
    try:
        for name, node in await _nodes(client):
            found += await _node(name, node)
    except TROUBLE as error:
        mend = "start it, or name another one with --redis or ROPEWAY_REDIS_URL; of a cluster, every node has to answer"
        return [*found, Finding("server", str(error) or type(error).__name__, mend)]
    else:
        return found + await _pools(Upkeep(client)) + await _tasks(client, url) + await _webhooks(client)
    finally:
        await client.aclose()


async def _nodes(client: AsyncClient) -> list[tuple[str, redis.asyncio.Redis]]:
    """Primaries by the name that their lines get."""
    if not isinstance(client, Cluster):
        return [("", client)]
    await primaries(client)
    return [(f" {node_name(node)}", client.at(node)) for node in client.slots.primaries]


async def _node(name: str, node: redis.asyncio.Redis) -> list[Finding]:
    try:
        info: Info = await node.info("all")
    except NoPermissionError:
        return [
            Finding(f"server{name}", "this user may not ask it (INFO): version, memory and persistence are not known"),
            await _clock(name, node),
        ]
    return [
        _server(name, info),
        _mode(name, info, in_cluster=bool(name)),
        _memory(name, info),
        _persistence(name, info),
        await _clock(name, node),
    ]


def _server(name: str, info: Info) -> Finding:
    version = str(info.get("redis_version", "0"))
    own = f"Valkey {info['valkey_version']} (as Redis {version})" if "valkey_version" in info else f"Redis {version}"
    mend = None if _parts(version) >= _OLDEST else f"upgrade: {_OLDEST[0]}.{_OLDEST[1]} is the oldest that is tested"
    return Finding(f"server{name}", own, mend)


def _mode(name: str, info: Info, *, in_cluster: bool) -> Finding:
    mode, role = str(info.get("redis_mode", "standalone")), str(info.get("role", "master"))
    value = f"{mode}, {role}, {info.get('connected_slaves', 0)} replicas"
    mend = None
    if mode == "cluster" and not in_cluster:
        mend = "it is a node of a cluster: use redis+cluster://, else only a part of the keys can be reached"
    elif role != "master":
        mend = "it is a replica and takes no writes: name its primary, or use redis+sentinel://"
    return Finding(f"mode{name}", value, mend)


def _memory(name: str, info: Info) -> Finding:
    policy, most, used = str(info.get("maxmemory_policy")), int(info.get("maxmemory", 0)), int(info["used_memory"])
    value = f"{used / 2**20:.0f} MiB" + (f" of {most / 2**20:.0f}" if most else "") + f", maxmemory-policy {policy}"
    mend = None
    if policy != "noeviction":
        mend = "set maxmemory-policy noeviction: an evicted key is a lost job"
    elif most and used > _NEARLY_FULL * most:
        mend = "raise maxmemory, or lower retention_s and the queues' limits: when it is full jobs are refused"
    return Finding(f"memory{name}", value, mend)


def _persistence(name: str, info: Info) -> Finding:
    if not int(info.get("aof_enabled", 0)):
        return Finding(f"persistence{name}", "no AOF", "set appendonly yes: a restart would lose the queue")
    status = str(info.get("aof_last_write_status", "ok"))
    mend = None if status == "ok" else "the last write of the AOF failed: look at its disk, and at the log of Redis"
    return Finding(f"persistence{name}", f"AOF, last write {status}", mend)


async def _clock(name: str, node: redis.asyncio.Redis) -> Finding:
    before = time.time()
    seconds, microseconds = await node.time()
    half_way = (before + time.time()) / 2
    apart = seconds + microseconds / 1e6 - half_way
    mend = None if abs(apart) <= _MOST_APART_S else "set both clocks by NTP: deadlines and queue times are wrong"
    return Finding(f"clock{name}", f"{apart:+.3f} s from this machine's", mend)


async def _pools(upkeep: Upkeep) -> list[Finding]:
    try:
        return await _all_pools(upkeep)
    except RopewayError as error:
        return [Finding("pools", error.message, "mend what is said above; else look at the user's rights")]


async def _all_pools(upkeep: Upkeep) -> list[Finding]:
    names = await upkeep.pools()
    found = [] if names else [Finding("pools", "none: no worker has served anything yet")]
    for name in names:
        try:
            card = await upkeep.get_card(name)
        except ProtocolError as error:
            mend = "let the pool's jobs end, stop its old workers, and start them all in this version"
            found.append(Finding(f"pool {name}", f"its card does not read: {error.message}", mend))
            continue
        found += [Finding(f"pool {name}", "no card")] if card is None else await _pool(upkeep, card)
    return found


async def _pool(upkeep: Upkeep, card: Card) -> list[Finding]:
    workers = await upkeep.live_workers(card.pool, _WORKER_TTL_MS)
    load, paused = await upkeep.pool_load(card.pool, card.lanes), await upkeep.paused(card.pool)
    letters = sum([len(await upkeep.dead_letters(card.pool, lane)) for lane in range(card.lanes)])
    beats = await upkeep.heartbeats(card.pool)
    ready = [worker for worker in workers if worker.state == "ready"]
    mend = None
    if load.running_jobs and not workers:
        mend = "start a worker: it takes up the jobs of those that died"
    elif load.queued_jobs and not ready:
        mend = "start a worker: jobs wait and nobody takes them"
    elif load.queued_jobs and paused:
        mend = f"ropeway pool unpause {card.pool}, if it is not meant to be paused: jobs wait"
    value = (
        f"{card.digest[:12]}, {card.lanes} lanes, {card.max_model_len} tokens; "
        f"{len(ready)} ready of {len(workers)} workers, {load.queued_jobs} jobs wait, {load.running_jobs} run, "
        f"{letters} dead letters{', paused' if paused else ''}"
    )
    found = [Finding(f"pool {card.pool}", value, mend)]
    found += [finding for worker in workers if (finding := _worker(card, worker, workers)) is not None]
    alive = {worker.owner for worker in workers}
    stale = {owner: f"last heard of {silent:.0f} s ago" for owner, silent in beats.items() if owner not in alive}
    for owner, jobs in (await upkeep.holders(card.pool, card.lanes)).items():
        if owner not in alive:
            stale[owner] = f"{stale.get(owner, 'not heard of')}, and still has {jobs} jobs"
    found += [
        Finding(
            f"worker {owner}",
            f"of {card.pool}, {why}",
            "it died, hangs or cannot reach Redis: restart it; others take its jobs up when their lease is over",
        )
        for owner, why in sorted(stale.items())
    ]
    return found


async def _tasks(client: AsyncClient, url: str) -> list[Finding]:
    """Whether background tasks are run; nothing where none waits, or where they have no place (a cluster)."""
    try:
        place = tasks_url(AdapterSettings(redis_url=url))
    except InvalidRequestError:
        return []
    try:
        waiting = await asyncio.to_thread(_waiting, place)
        alive = await Adapters(client).any_tasks()
    except ModuleNotFoundError as error:
        return [Finding("tasks", f"their queue is not looked at: {error.name} is not installed")]
    except RopewayError as error:
        return [Finding("tasks", error.message, "mend what is said above; else look at the user's rights")]
    if waiting is None:
        mend = None if place == url else "start it, or look at ROPEWAY_TASKS_REDIS_URL and its user's rights"
        return [Finding("tasks", f"{mask(place)} says nothing of their queue", mend)]
    count, age_s = waiting
    if not count:
        return []
    mend = None
    if age_s > _TRIED_S and not alive:
        mend = "start a tasks process (ropeway tasks): nobody runs them"
    elif age_s > _TASKS_WAIT_S:
        mend = "start more tasks processes (ropeway tasks), if their logs do not say what holds them up"
    return [Finding("tasks", f"{count} wait, the first for {age_s:.0f} s", mend)]


def _waiting(url: str) -> tuple[int, float] | None:
    queue = TaskQueueCollector(url, looks=False)
    try:
        queue.look()
        return queue.waiting().get("tasks")
    finally:
        queue.close()


async def _webhooks(client: AsyncClient) -> list[Finding]:
    """What is owed, and whether somebody sends it; nothing where nothing is."""
    try:
        webhooks = Webhooks(client)
        owed, oldest_ms = summed(await webhooks.survey(await webhooks.lanes()))
        if oldest_ms is None:
            return []
        age_s = (await webhooks.now_ms() - oldest_ms) / 1e3
        mend = None
        if age_s > _TRIED_S and not await Adapters(client).any_tasks():
            mend = "start a tasks process (ropeway tasks): nobody sends them"
        elif age_s > _LATE_S:
            mend = "ropeway webhooks list says what their receivers answer"
    except RopewayError as error:
        return [Finding("webhooks", error.message, "mend what is said above; else look at the user's rights")]
    return [Finding("webhooks", f"{owed} are not delivered yet, the oldest for {age_s:.0f} s", mend)]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _worker(card: Card, worker: WorkerInfo, workers: list[WorkerInfo]) -> Finding | None:
    """Where a worker does not fit its pool's card or the others; None where it does."""
    mend, value = None, f"of {card.pool}, {worker.state}, version {worker.version or 'unknown'}"
    if worker.state != "starting" and card.max_lora_rank > 0 and worker.max_loras == 0:
        mend = "start it with enable_lora: the pool's card says that it serves adapters"
    elif 0 < worker.kv_tokens < card.max_model_len:
        value += f", {worker.kv_tokens} tokens of KV cache"
        mend = f"give it more blocks, or the pool less max_model_len: the card promises {card.max_model_len} tokens"
    elif _parts(worker.version) < max(_parts(other.version) for other in workers):
        mend = "finish the roll-out: other workers of the pool run a newer version"
    return None if mend is None else Finding(f"worker {worker.owner}", value, mend)
