"""Several real servers on loopback as one Redis: a cluster, or a primary with a replica and sentinels."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.connection import parse_url
from redis.crc import key_slot

from shared.connect import connect
from shared.redis_url import parse
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer, binary

SERVICE = "main"
#: Milliseconds after which a silent node counts as gone: in tests of what the servers do then, and in all others, where
#: a machine that stutters must not disturb.
QUICK_MS, NEVER_MS = 1500, 600_000
_PATIENCE_S = 60.0


def kind_of_server() -> str:
    """Debian's redis-server where it is installed, else the embedded one."""
    return "redis" if binary("redis") is not None else "valkey"


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition; errors of connections count as not yet."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


class ClusterServers:
    """A cluster whose primaries share the slots evenly, each with so many replicas. Use as a context manager."""

    def __init__(
        self,
        *,
        primaries: int = 3,
        replicas: int = 0,
        timeout_ms: int = NEVER_MS,
        server: str | None = None,
        extra: Sequence[list[str]] = (),
    ) -> None:
        self._buses = [free_port() for _ in range(primaries * (1 + replicas))]
        self.servers = [
            RedisServer(
                server or kind_of_server(),
                extra=[
                    "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--cluster-port", str(bus),
                    "--cluster-node-timeout", str(QUICK_MS), "--cluster-replica-validity-factor", "0",
                    "--repl-diskless-sync-delay", "0", *more,
                ],
            )
            for bus, more in zip(self._buses, extra or [[]] * len(self._buses), strict=True)
        ]  # fmt: skip
        self._primaries, self._replicas, self._timeout_ms = primaries, replicas, timeout_ms

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.servers)

    def __enter__(self) -> ClusterServers:
        try:
            for server in self.servers:
                server.start()
            self._join()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def flush(self) -> None:
        """Forget data and scripts."""
        for server in self.servers[: self._primaries]:
            with server.client() as client:
                client.flushall()
                client.script_flush()

    def serving(self, key: str) -> RedisServer:
        """The server that has a key now."""
        return self._by_port(self._owner(self._any(), key)["primary"][1])

    def replica_of(self, key: str) -> RedisServer:
        """A replica of the server that has a key."""
        return self._by_port(self._owner(self._any(), key)["replicas"][0][1])

    def take_over(self, key: str) -> None:
        """Have the replica of a key's primary take over without asking the others."""
        lost, replica = self.serving(key), self.replica_of(key)
        with replica.client() as client:
            client.execute_command("CLUSTER", "FAILOVER", "TAKEOVER")
        self.until_failed_over(key, lost)

    def until_replicated(self) -> None:
        """Wait until every replica has what its primary has written."""
        for server in self.servers[: self._primaries]:
            _until_replicated(server, self._replicas)

    @contextmanager
    def moving(self, key: str, source: RedisServer, target: RedisServer) -> Iterator[Callable[[str], None]]:
        """A key's slot on its way to another node; keys go when what is yielded is called, the rest at the end."""
        slot = key_slot(key.encode())
        with source.client() as old, target.client() as new:
            ids = [client.execute_command("CLUSTER", "MYID").decode() for client in (old, new)]
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
            yield lambda name: old.execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
            for name in old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000):
                old.execute_command("MIGRATE", "127.0.0.1", target.port, name, 0, 5000)
            for client in (new, old):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[1])

    def move_whole(self, key: str, source: RedisServer, target: RedisServer) -> None:
        """Move a key's slot atomically, as Valkey 9 can, and wait until it has moved."""
        slot = key_slot(key.encode())
        with source.client() as old, target.client() as new:
            node = new.execute_command("CLUSTER", "MYID")
            old.execute_command("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", node)
        until(lambda: self._owner(source, key)["primary"][1] == target.port, "the slot does not move")

    @contextmanager
    def announced(self, server: RedisServer, port: int) -> Iterator[None]:
        """Have all nodes name another port for one of them to whoever asks: that of a proxy in front of it."""
        self._announce(server, port)
        try:
            yield
        finally:
            self._announce(server, 0)

    def until_whole(self) -> None:
        """Wait until all servers agree that all slots are served."""
        until(lambda: all(_info(server)["cluster_state"] == "ok" for server in self.servers), "cluster state")
        until(lambda: all(self._complete(server) for server in self.servers), "everyone knows everyone")

    def until_failed_over(self, key: str, lost: RedisServer) -> None:
        """Wait until another server than `lost` has a key, for all that are left."""
        rest = [server for server in self.servers if server is not lost]
        until(
            lambda: all(self._owner(server, key)["primary"][1] != lost.port for server in rest), "no replica took over"
        )

    def _join(self) -> None:
        first = self.servers[0]
        slots = [round(16384 * n / self._primaries) for n in range(self._primaries + 1)]
        for number, (server, bus) in enumerate(zip(self.servers, self._buses, strict=True)):
            with server.client() as client:
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                if number < self._primaries:
                    client.execute_command("CLUSTER", "ADDSLOTSRANGE", slots[number], slots[number + 1] - 1)
            with first.client() as client:
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        until(lambda: all(_info(server)["cluster_known_nodes"] == len(self.servers) for server in self.servers), "meet")
        for number, server in enumerate(self.servers[self._primaries :]):
            with self.servers[number % self._primaries].client() as client:
                primary = client.execute_command("CLUSTER", "MYID")
            with server.client() as client:
                until(lambda c=client, p=primary: bool(c.execute_command("CLUSTER", "REPLICATE", p)), "replicate")  # type: ignore[misc]
        until(lambda: all(_info(server)["cluster_state"] == "ok" for server in self.servers), "cluster state")
        if self._replicas:
            # A replica that has received nothing yet is not named in CLUSTER SLOTS.
            self.flush()
            self.until_replicated()
        self.until_whole()
        # Not from the start: the more patient nodes are, the less they tell each other.
        self._be_patient(self._timeout_ms)

    def _be_patient(self, timeout_ms: int) -> None:
        for server in self.servers:
            with server.client() as client:
                client.config_set("cluster-node-timeout", timeout_ms)

    def _announce(self, server: RedisServer, port: int) -> None:
        self._be_patient(QUICK_MS)
        with server.client() as client:
            client.config_set("cluster-announce-port", port)
        named = port or server.port
        until(
            lambda: all(named in {owners["primary"][1] for owners in self._slots(s).values()} for s in self.servers),
            "nodes name the port",
        )
        self._be_patient(self._timeout_ms)

    def _complete(self, server: RedisServer) -> bool:
        owners = self._slots(server).values()
        return len(owners) == self._primaries and all(len(o["replicas"]) == self._replicas for o in owners)

    def _slots(self, server: RedisServer) -> dict[tuple[int, int], Any]:
        with server.client() as client:
            return redis.cluster.parse_cluster_slots(client.execute_command("CLUSTER SLOTS"))

    def _owner(self, server: RedisServer, key: str) -> Any:
        slot = key_slot(key.encode())
        return next(owners for (first, last), owners in self._slots(server).items() if first <= slot <= last)

    def _any(self) -> RedisServer:
        return next(server for server in self.servers if server.process is not None)

    def _by_port(self, port: int) -> RedisServer:
        return next(server for server in self.servers if server.port == port)


class SentinelServers:
    """A primary and a replica that three sentinels watch. Use as a context manager."""

    def __init__(self, *, timeout_ms: int = NEVER_MS, server: str | None = None) -> None:
        kind = server or kind_of_server()
        self._timeout_ms = timeout_ms
        self.primary = RedisServer(kind, extra=["--repl-diskless-sync-delay", "0"])
        self.replica = RedisServer(
            kind, extra=["--replicaof", "127.0.0.1", str(self.primary.port), "--repl-diskless-sync-delay", "0"]
        )
        self.sentinels = [RedisServer(kind) for _ in range(3)]
        self._folder = Path(tempfile.mkdtemp(prefix="rw-sentinel-"))

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def __enter__(self) -> SentinelServers:
        try:
            for server in (self.primary, self.replica):
                server.start()
            self.until_replicated()
            for number, sentinel in enumerate(self.sentinels):
                sentinel.start([str(self._configuration(number, sentinel)), "--sentinel"])
            until(lambda: all(map(self._complete, self.sentinels)), "sentinels know each other and the replica")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for server in (*self.sentinels, self.replica, self.primary):
            server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def flush(self) -> None:
        """Forget data and scripts."""
        with self.primary.client() as client:
            client.flushall()
            client.script_flush()

    def serving(self, key: str) -> RedisServer:
        """The server that is the primary now, as the first sentinel says."""
        with self.sentinels[0].client() as client:
            _, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return self.primary if int(port) == self.primary.port else self.replica

    def replica_of(self, key: str) -> RedisServer:
        """The server that is the replica now."""
        return self.replica if self.serving(key) is self.primary else self.primary

    def take_over(self, key: str) -> None:
        """Have the sentinels make the replica the primary."""
        lost = self.serving(key)
        with self.sentinels[0].client() as client:
            client.execute_command("SENTINEL", "FAILOVER", SERVICE)
        self.until_failed_over(key, lost)

    def until_replicated(self) -> None:
        """Wait until the replica has what the primary has written."""
        _until_replicated(self.primary, 1)

    def until_failed_over(self, key: str, lost: RedisServer) -> None:
        """Wait until the first sentinel names another server than `lost`."""
        until(lambda: self.serving(key) is not lost, "the replica did not take over")

    def _configuration(self, number: int, sentinel: RedisServer) -> Path:
        path = self._folder / f"{number}.conf"
        path.write_text(
            f"port {sentinel.port}\nbind 127.0.0.1\ndir {sentinel.data}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {self._timeout_ms}\n"
            f"sentinel failover-timeout {SERVICE} 6000\n"
        )
        return path

    def _complete(self, sentinel: RedisServer) -> bool:
        with sentinel.client() as client:
            state: Any = client.sentinel_master(SERVICE)
        return bool(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2)


Topology = ClusterServers | SentinelServers


class _RawCluster(redis.asyncio.RedisCluster):
    async def keys(self, pattern: str = "*") -> list[bytes]:  # type: ignore[override]
        """Of all nodes."""
        return [key async for key in self.scan_iter(pattern)]

    async def pubsub_channels(self, pattern: str = "*", **_: Any) -> list[bytes]:
        """Of all nodes."""
        found: list[bytes] = await self.execute_command("PUBSUB CHANNELS", pattern, target_nodes=self.get_nodes())
        return found


async def raw_client(url: str) -> Any:
    """redis-py's own client of what is behind a URL, for looking at keys."""
    target = parse(url)
    if target.kind != "cluster":
        return connect(url)
    (host, port), *_ = target.addresses
    options = parse_url(target.server)
    return await _RawCluster(host, port, protocol=2, **options).initialize()


async def kill_clients(client: Any, kind: str) -> int:
    """Cut all connections of a kind but the client's own; how many."""
    command = ("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
    if isinstance(client, redis.asyncio.RedisCluster):
        return int(sum((await client.execute_command(*command, target_nodes=client.get_nodes())).values()))
    return int(await client.execute_command(*command))


def is_one_server(url: str) -> bool:
    """Whether a URL is that of a single server."""
    return parse(url).kind == "server"


def _until_replicated(server: RedisServer, replicas: int) -> None:
    def caught_up() -> bool:
        with server.client() as client:
            info: Any = client.info("replication")
        states = [info[f"slave{n}"] for n in range(info["connected_slaves"])]
        return len(states) >= replicas and all(
            state["state"] == "online" and state["offset"] == info["master_repl_offset"] for state in states
        )

    until(caught_up, "the replica does not catch up")


def _info(server: RedisServer) -> dict[str, Any]:
    with server.client() as client:
        lines = client.execute_command("CLUSTER", "INFO").decode().split()
    pairs = dict(line.split(":", 1) for line in lines)
    return {name: int(value) if value.isdigit() else value for name, value in pairs.items()}


@contextmanager
def topology_with_replicas(kind: str, timeout_ms: int = NEVER_MS, server: str | None = None) -> Iterator[Topology]:
    """A `cluster` or a `sentinel` topology whose primaries have a replica each."""
    if kind == "cluster":
        with ClusterServers(replicas=1, timeout_ms=timeout_ms, server=server) as cluster:
            yield cluster
    else:
        with SentinelServers(timeout_ms=timeout_ms, server=server) as sentinels:
            yield sentinels
