"""Every key name, and job ids. All keys of a job carry the hash tag `{pool.lane}`, so a script touches one slot."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import JobNotFoundError

#: Consumer group of every queue stream.
GROUP = "workers"
#: Classes in the order in which they are served.
CLASSES = ("high", "normal", "batch")
#: Streams within a lane and class; a tenant's jobs are in one of them.
BUCKETS = 8
DEFAULT_LANES = 16
MAX_LANES = 256
#: Tokens of the prompt that decide its lane when nothing else does.
AFFINITY_TOKENS = 64

POOL_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(?:\.[A-Za-z0-9_-]+)*\Z")
_JOB_ID = re.compile(r"(?P<pool>[A-Za-z0-9][A-Za-z0-9._-]{0,95})\.(?P<lane>\d{1,3})\.(?P<unique>[0-9a-f]{32})\Z")


@dataclass(frozen=True, slots=True)
class JobId:
    """A job's id, `<pool>.<lane>.<32 hex digits>`: whoever has it finds every key of the job."""

    pool: str
    lane: int
    unique: str

    def __str__(self) -> str:
        return f"{self.pool}.{self.lane}.{self.unique}"

    @classmethod
    def new(cls, pool: str, lane: int) -> JobId:
        """A fresh id; it sorts by time (48 bits of milliseconds, then 80 random bits)."""
        return cls(pool, lane, f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}")

    @classmethod
    def parse(cls, text: str) -> JobId:
        """Take an id apart.

        Raises:
            JobNotFoundError: `text` is not an id, so there is no such job.
        """
        job_id = cls.match(text)
        if job_id is None:
            raise JobNotFoundError("no job has this id", param="id")
        return job_id

    @classmethod
    def match(cls, text: str) -> JobId | None:
        """Take an id apart; None if `text` is not one."""
        match = _JOB_ID.match(text)
        if match is None or int(match["lane"]) >= MAX_LANES:
            return None
        return cls(match["pool"], int(match["lane"]), match["unique"])


def lane_tag(pool: str, lane: int) -> str:
    """Hash tag shared by all keys of a lane."""
    return f"rw:{{{pool}.{lane}}}"


def queue(pool: str, lane: int, job_class: str, bucket: int) -> str:
    """Stream, group `workers`: one entry per job."""
    return f"{lane_tag(pool, lane)}:q:{job_class}:{bucket}"


def resume(pool: str, lane: int) -> str:
    """Stream of jobs handed back by a draining worker."""
    return f"{lane_tag(pool, lane)}:q:resume"


def lane_streams(pool: str, lane: int) -> list[str]:
    """All queue streams of a lane in the order in which `pull` reads them: resume, then class by class."""
    return [resume(pool, lane)] + [queue(pool, lane, c, b) for c in CLASSES for b in range(BUCKETS)]


def job(job_id: JobId) -> str:
    """Hash: envelope, status, owner, epoch, result."""
    return f"{lane_tag(job_id.pool, job_id.lane)}:job:{job_id}"


def events(job_id: JobId) -> str:
    """Stream of frames, and the pub/sub channel of the same name."""
    return f"{lane_tag(job_id.pool, job_id.lane)}:ev:{job_id}"


def stats(pool: str, lane: int) -> str:
    """Hash of exact counters, and the round robin's state."""
    return f"{lane_tag(pool, lane)}:stats"


def dead(pool: str, lane: int) -> str:
    """Stream of dead letters."""
    return f"{lane_tag(pool, lane)}:dead"


def outbox(pool: str, lane: int) -> str:
    """Stream of finished jobs that owe a webhook."""
    return f"{lane_tag(pool, lane)}:outbox"


def webhook(job_id: JobId) -> str:
    """Hash: how far the delivery of a job's webhook is."""
    return f"{lane_tag(job_id.pool, job_id.lane)}:hook:{job_id}"


def webhooks(pool: str, lane: int, what: str) -> str:
    """Sorted sets of ids of jobs: `due` by when their webhook is tried next, `owed` (not delivered yet) by the end of
    the job, `undelivered` (given up) by when that was; all in milliseconds.
    """
    return f"{lane_tag(pool, lane)}:hooks:{what}"


def webhook_state(what: str) -> str:
    """Of all pools: `counts` (hash: deliveries and attempts by outcome), `secrets` (hash: what signs, by tenant)."""
    return f"rw:{{webhooks}}:{what}"


def delayed(pool: str, lane: int) -> str:
    """Sorted set of jobs whose time has not come, by that time in milliseconds."""
    return f"{lane_tag(pool, lane)}:delayed"


def tenant_jobs(pool: str, lane: int, tenant: str) -> str:
    """Sorted set of a tenant's jobs in a lane, by the last part of their ids."""
    return f"{lane_tag(pool, lane)}:jobs:{tenant}"


def expiring(pool: str, lane: int) -> str:
    """Sorted set of a lane's jobs, `<last part of the id>:<tenant>`, by when their hashes expire in milliseconds."""
    return f"{lane_tag(pool, lane)}:expiring"


def last_pull(pool: str, lane: int, owner: str) -> str:
    """String: what a worker's last pull from a lane gave it, in case the answer was lost on the way."""
    return f"{lane_tag(pool, lane)}:pull:{owner}"


def card(pool: str) -> str:
    """Hash: what gateways and workers of a pool agree on."""
    return f"rw:{{{pool}}}:card"


def tokenizer(pool: str) -> str:
    """String: tokenizer and chat template, msgpack."""
    return f"rw:{{{pool}}}:tok"


def adapter_targets(pool: str) -> str:
    """String: what an adapter of the pool may change, msgpack; only where its workers serve adapters."""
    return f"rw:{{{pool}}}:lora"


def workers(pool: str) -> str:
    """Sorted set of owners by heartbeat, in milliseconds of Redis's clock."""
    return f"rw:{{{pool}}}:workers"


def worker(pool: str, owner: str) -> str:
    """Hash of one worker: capacity, version, state."""
    return f"rw:{{{pool}}}:worker:{owner}"


def wake(pool: str) -> str:
    """Channel: a lane has work."""
    return f"rw:{{{pool}}}:wake"


def control(pool: str) -> str:
    """Channel: cancel, drain."""
    return f"rw:{{{pool}}}:ctl"


def paused(pool: str) -> str:
    """String, there while the pool is paused: its workers take nothing."""
    return f"rw:{{{pool}}}:paused"


def sweep_lock(pool: str) -> str:
    """String: which gateway sweeps the pool just now."""
    return f"rw:{{{pool}}}:sweep"


def adapters(what: str) -> str:
    """What is known of all adapters of all pools: one hash tag, so that one script changes it together.

    `names` (hash: name to record), `draining` (hash: `<name>@<version>` to the record that the name had),
    `unused` (sorted set: contents that no name points to, by the ms since which), `revision` (number, rises with every
    change); strings that expire: `deleting:<identity>` (there while a content is being deleted),
    `loading:<name>@<version>` (somebody is at a load), `tasks` (a process that loads adapters is there), `keeper` (one
    of them looks after all loads).
    """
    return f"rw:{{adapters}}:{what}"


def batches(what: str) -> str:
    """What is known of all files and batches: one hash tag, so that one script changes it together.

    `file:<id>` and `batch:<id>` (strings: records in JSON), `files:<tenant>` and `batches:<tenant>` (sorted sets: ids
    by the ms of their making), `files_expire` (sorted set: ids of files by the ms in which their contents go), `open`
    (set: batches that have not ended), `progress:<id>` (hash: how far a batch is), `parts:<id>` (list: pieces of its
    output), `running:<id>` (string that expires: who is at a batch), `counts` (hash: what has ended).
    """
    return f"rw:{{batches}}:{what}"


def rate(tenant: str) -> str:
    """Hash: a tenant's token buckets."""
    return f"rw:{{{tenant}}}:rate"


def queued(tenant: str) -> str:
    """Hash: a tenant's queued jobs, as far as gateways know; only where they are limited."""
    return f"rw:{{{tenant}}}:queued"


def idempotency(tenant: str, digest: str) -> str:
    """String: the request that a tenant's idempotency key, of this hash, stands for."""
    return f"rw:{{{tenant}}}:idem:{digest}"


def access(what: str) -> str:
    """Who may ask: `keys` and `tenants` (hashes: records in JSON by id and by name), and the channel `ctl` on which
    gateways hear of changes."""
    return f"rw:{{access}}:{what}"


def usage(pool: str, lane: int, day: int, tenant: str) -> str:
    """Hash: what a tenant's jobs of a lane that ended on a day, in days since 1970, have used."""
    return f"{usage_tenants(pool, lane, day)}:{tenant}"


def usage_tenants(pool: str, lane: int, day: int) -> str:
    """Set: tenants of which jobs ended in a lane on a day."""
    return f"{lane_tag(pool, lane)}:usage:{day}"


def token_secret() -> str:
    """String: what gateways sign stream tokens with, where no setting says it."""
    return "rw:token_secret"


def pools() -> str:
    """Set of pool names that have a card."""
    return "rw:pools"


def bucket_of(tenant: str) -> int:
    """The bucket, 0 to 7, of a tenant's jobs."""
    return _hash(tenant.encode()) % BUCKETS


def lane_of(lanes: int, *, adapter: str | None, prompt_cache_key: str | None, token_ids: Sequence[int]) -> int:
    """A job's lane: its affinity. Adapter and cache key decide; else the prompt's first tokens; else chance."""
    if adapter is not None or prompt_cache_key is not None:
        return _hash(repr((adapter, prompt_cache_key)).encode()) % lanes
    if len(token_ids) >= AFFINITY_TOKENS:
        return _hash(repr(list(token_ids[:AFFINITY_TOKENS])).encode()) % lanes
    return secrets.randbelow(lanes)


def home_lanes(owner: str, owners: Sequence[str], lanes: int) -> list[int]:
    """Lanes whose highest rendezvous weight among `owners` is `owner`'s (Thaler and Ravishankar, 1998)."""

    def home(lane: int) -> str:
        return max(owners, key=lambda candidate: (_hash(f"{lane}:{candidate}".encode()), candidate))

    return [lane for lane in range(lanes) if home(lane) == owner]


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
