"""Redis with users and with TLS, as docs/operations.md says to set them up."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from shared import keys
from shared.connect import connect, connect_pubsub, connect_sync
from shared.errors import ServiceUnavailableError
from shared.jobs import Publication, ReplicaWait
from shared.jobstore import JobStore, SyncJobStore
from shared.keys import JobId
from shared.upkeep import Upkeep
from tests.support import jobs as parts
from tests.support.ports import free_port
from tests.support.redis_server import RedisServer, binary
from tests.support.redis_topology import ClusterServers
from tests.support.worker_harness import LANES, POOL, expected, harness, job

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text("utf-8")
PASSWORD = "pass/w@rd"
ENCODED = "pass%2Fw%40rd"


def rights() -> list[str]:
    """The user's rights as the page has them."""
    found = re.search(r"ACL SETUSER ropeway on >\S+ (.+)", PAGE)
    assert found is not None
    return found[1].split()


@contextmanager
def with_users(servers: list[RedisServer]) -> Iterator[None]:
    """Nobody but `ropeway` may do anything, and that user only what the page says."""
    admins = [server.client() for server in servers]
    for admin in admins:
        admin.acl_setuser("admin", enabled=True, passwords=["+admin"], keys=["*"], channels=["*"], categories=["+@all"])
        admin.execute_command("ACL", "SETUSER", "ropeway", "reset", "on", f">{PASSWORD}", *rights())
        admin.execute_command("AUTH", "admin", "admin")
        admin.execute_command("ACL", "SETUSER", "default", "off")
    try:
        yield
    finally:
        for admin in admins:
            admin.execute_command("ACL", "SETUSER", "default", "on")
            admin.close()


@pytest.mark.parametrize("kind", ["valkey", "redis"])
async def test_the_documented_rights_are_enough_and_no_more_than_needed(kind: str) -> None:
    if binary(kind) is None:
        pytest.skip(f"no {kind} server installed")
    server = RedisServer(kind)
    server.start()
    try:
        with with_users([server]):
            url = f"redis://ropeway:{ENCODED}@127.0.0.1:{server.port}/0"
            await _serve(url)
            client: Any = connect(url)
            for command in (
                ["FLUSHALL"],
                ["CONFIG", "GET", "*"],
                ["GET", "other"],
                ["KEYS", "*"],
                ["PUBLISH", "x", "y"],
            ):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    await client.execute_command(*command)
            await client.aclose()
            await _refused(url.replace("ropeway", "somebody"), "refused the credentials")
    finally:
        server.close()


async def test_in_a_cluster_every_connection_has_the_credentials() -> None:
    with ClusterServers() as cluster, with_users(cluster.servers):
        url = cluster.url.replace("//", f"//ropeway:{ENCODED}@")
        await _serve(url)
        await _refused(cluster.url, "refused the credentials")


async def _serve(url: str) -> None:
    """Everything that gateways, workers and operators do."""
    async with harness(url) as h:
        worker = await h.worker()
        envelope = job(max_tokens=20)
        await (await h.submit(envelope)).end()
        assert (await h.result(envelope.id)).choices == expected(envelope)
        assert await h.store.readers(envelope.id) is not None
        client = connect(url)
        upkeep = Upkeep(client)
        await upkeep.pause(POOL)
        await worker.event("pool paused")
        await upkeep.unpause(POOL)
        assert await upkeep.lock_sweep(POOL, "me", 1.0)
        for lane in range(LANES):
            await upkeep.sweep_lane(POOL, lane, 1.0)
        assert [job_id async for job_id in upkeep.job_ids(POOL)] == [envelope.id]
        assert await upkeep.restore(envelope.id) is False
        await JobStore(client, replicas=ReplicaWait(0)).submit(job(max_tokens=1))
        await client.aclose()


async def _refused(url: str, why: str) -> None:
    client = connect(url, retry=Retry(NoBackoff(), 0))
    with pytest.raises(ServiceUnavailableError, match=why):
        await JobStore(client).pools()
    await client.aclose()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate for 127.0.0.1 that vouches for itself, and one that vouches for somebody else."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "other"):
        command = [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt",
        ]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True)
        except FileNotFoundError:
            pytest.skip("no openssl to make certificates with")
    return folder


def tls(certificates: Path) -> list[str]:
    files = {"cert-file": "server.crt", "key-file": "server.key", "ca-cert-file": "server.crt"}
    options = [part for name, file in files.items() for part in (f"--tls-{name}", str(certificates / file))]
    return ["--tls-port", str(free_port()), "--tls-auth-clients", "no", "--tls-cluster", "yes", *options]


async def test_tls_to_one_server_and_to_a_cluster(certificates: Path) -> None:
    if binary("redis") is None:
        pytest.skip("no redis server installed; the embedded one has no TLS")
    extra = [tls(certificates) for _ in range(4)]
    server = RedisServer("redis", extra=extra[0])
    server.start()
    query = f"?ssl_ca_certs={certificates}/server.crt"
    try:
        await _talk(f"rediss://127.0.0.1:{extra[0][1]}/0{query}")
        await _refused(f"rediss://127.0.0.1:{extra[0][1]}/0?ssl_ca_certs={certificates}/other.crt", "not available")
    finally:
        server.close()
    with ClusterServers(server="redis", extra=extra[1:]):
        await _talk("rediss+cluster://" + ",".join(f"127.0.0.1:{options[1]}" for options in extra[1:]) + query)


async def _talk(url: str) -> None:
    """A job, its frames over the channel, and a thread that publishes."""
    client, subscriber, threads = connect(url), connect_pubsub(url), connect_sync(url)
    store = JobStore(client)
    for lane in range(8):
        envelope = parts.envelope(lane=lane)
        pubsub: Any = subscriber.pubsub()
        await pubsub.subscribe(keys.events(JobId.parse(envelope.id)))
        assert (await pubsub.get_message(timeout=10))["type"] == "subscribe"
        await store.submit(envelope)
        (taken,) = (await store.pull(parts.POOL, lane, "w", parts.budget(), parts.KEEP)).jobs
        assert SyncJobStore(threads).publish([parts.last(taken, "w", 1)]) == [Publication.FINE]
        assert (await pubsub.get_message(timeout=10))["type"] == "message"
        await pubsub.aclose()
    threads.close()
    for one in (client, subscriber):
        await one.aclose()
