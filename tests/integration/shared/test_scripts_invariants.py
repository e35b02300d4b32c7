"""Any sequence of calls leaves every job in one state, the counters exact, the logs whole and one owner to publish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from shared import keys, scripts
from shared.calls import run
from shared.connect import connect
from shared.errors import JobNotFoundError, JobRunningError
from shared.jobs import Lease, Lifetime, Publication, Publish, PulledJob
from shared.jobstore import JobStore
from shared.keys import CLASSES, JobId
from shared.protocol import FINAL_STATUSES, Envelope
from shared.scripts import Call
from shared.upkeep import Upkeep
from tests.support.jobs import POOL, budget, check_lane, envelope, last, owned, tokens
from tests.support.redis_topology import raw_client

T = TypeVar("T")
WORKERS = st.integers(0, 2)


class Worker:
    """A worker as the scripts see it: an owner with the jobs that it believes to be its own."""

    def __init__(self, client: Any, number: int, life: int) -> None:
        self.owner = f"w{number}-{life}"
        self.store = JobStore(client)
        self.held: dict[str, PulledJob] = {}
        self.seq: dict[str, int] = {}


class Lane(RuleBasedStateMachine):
    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.client: Any = self.run(self._connect())
        self.commands = connect(self.url)
        self.store = JobStore(self.commands)
        self.jobs: dict[str, Envelope] = {}
        #: Who may publish for a job, and under which epoch, as the calls' answers have it.
        self.owners: dict[str, tuple[str, int]] = {}
        self.epochs: dict[str, int] = {}
        self.lives = 3
        self.dead: list[str] = []
        self.workers = [Worker(self.commands, i, 0) for i in range(3)]
        self.sent: Publish | None = None
        #: Jobs as owners held them once.
        self.former: list[tuple[str, PulledJob]] = []
        #: Jobs in answers that never arrived, with their epochs, by owner.
        self.lost: dict[str, dict[str, int]] = {}

    async def _connect(self) -> Any:
        client = await raw_client(self.url)
        await client.flushall()
        return client

    def run(self, call: Awaitable[T]) -> T:
        async def wait() -> T:
            return await call

        return self.runner.run(wait())

    @rule(
        job_class=st.sampled_from(CLASSES),
        tenant=st.integers(0, 3),
        prompt=st.sampled_from([1, 50, 3000]),
        adapter=st.sampled_from([None, "a" * 32, "b" * 32]),
        delay=st.sampled_from([0.0, 0.0, 0.001, 3600.0]),
    )
    def submit(self, job_class: Any, tenant: int, prompt: int, adapter: str | None, delay: float) -> None:
        job = envelope(
            job_class=job_class,
            tenant=f"t{tenant}",
            prompt=prompt,
            callback_url="https://example.test",
            adapter_identity=adapter,
        )
        assert not self.run(self.store.submit(job, lifetime=Lifetime(delay_s=delay))).duplicate
        self.jobs[job.id] = job

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def submit_again(self, data: st.DataObject) -> None:
        assert self.run(self.store.submit(self.jobs[self._any_job(data)])).duplicate

    @rule(
        number=WORKERS,
        sequences=st.integers(0, 4),
        room=st.sampled_from([20, 3500, 10**6]),
        reclaim=st.booleans(),
        charge=st.booleans(),
        lost=st.booleans(),
    )
    def pull(self, number: int, sequences: int, room: int, reclaim: bool, charge: bool, lost: bool) -> None:
        worker = self.workers[number]
        wish = budget(sequences, room, max_job=10**5, idle=not worker.held)
        # A store of its own, thrown away, is an answer that never arrives.
        store = JobStore(self.client) if lost and not worker.held else worker.store
        repeated = self._lost_and_still_owned(worker.owner)
        answer = self.run(store.pull(POOL, 0, worker.owner, wish, Lease(lease_ms=0, reclaim=reclaim, charge=charge)))
        taken = {job.envelope.id: job.epoch for job in answer.jobs}
        assert not repeated or taken == repeated
        if store is worker.store:
            self.lost.pop(worker.owner, None)
        elif taken:
            self.lost[worker.owner] = taken
        for job in answer.jobs:
            again = self.owners.get(job.envelope.id) == (worker.owner, job.epoch)
            assert job.envelope.id not in worker.held or not again
            assert job.epoch > self.epochs.get(job.envelope.id, 0) or again
            self.epochs[job.envelope.id] = job.epoch
            self.owners[job.envelope.id] = (worker.owner, job.epoch)
            self.former.append((worker.owner, job))
            if store is worker.store:
                worker.held[job.envelope.id] = job
                worker.seq[job.envelope.id] = job.last_seq
        assert not any(job.alone for job in answer.jobs) or len(worker.held) <= 1
        for job_id in answer.ended:
            self.owners.pop(job_id, None)

    @precondition(lambda self: any(w.held for w in self.workers))
    @rule(data=st.data(), count=st.integers(1, 3), end=st.booleans())
    def publish(self, data: st.DataObject, count: int, end: bool) -> None:
        worker, job = self._any_held(data)
        job_id = job.envelope.id
        first = worker.seq[job_id] + 1
        item = last(job, worker.owner, first) if end else tokens(job, worker.owner, first, count)
        self._publish(worker, item)
        worker.seq[job_id] = first + len(item.frames) - 1
        if end or not self._owns(worker, job):
            del worker.held[job_id]
        if end and self._owns(worker, job):
            del self.owners[job_id]
        self.sent = item

    def _publish(self, worker: Worker, item: Publish) -> None:
        cancelled = self.run(self.store.get(item.job_id)).cancel_requested
        owns = self.owners.get(item.job_id) == (worker.owner, item.epoch)
        expected = Publication.CANCELLED if cancelled and item.ending is None else Publication.FINE
        assert self.run(self.store.publish([item])) == [expected if owns else Publication.FENCED]

    @precondition(lambda self: self.former)
    @rule(data=st.data(), end=st.booleans())
    def publish_what_was_held_once(self, data: st.DataObject, end: bool) -> None:
        """A zombie knows how long the log is, and still gets nothing into it."""
        owner, job = data.draw(st.sampled_from(self.former))
        if self.owners.get(job.envelope.id) == (owner, job.epoch):
            return
        _, seq = self.run(self.store.status(job.envelope.id))
        item = last(job, owner, seq + 1) if end else tokens(job, owner, seq + 1)
        assert self.run(self.store.publish([item])) == [Publication.FENCED]
        assert self.run(self.store.renew(owner, [owned(job)])) == [Publication.FENCED]

    @precondition(lambda self: self.sent)
    @rule()
    def publish_again(self) -> None:
        """Nothing may change; what else is checked, the invariant does."""
        assert self.sent is not None
        before = self.run(self.store.status(self.sent.job_id))
        self.run(self.store.publish([self.sent]))
        assert self.run(self.store.status(self.sent.job_id)) == before

    @rule(number=WORKERS)
    def renew(self, number: int) -> None:
        worker = self.workers[number]
        answers = self.run(worker.store.renew(worker.owner, [owned(job) for job in worker.held.values()]))
        for job, answer in zip(list(worker.held.values()), answers, strict=True):
            assert (answer is not Publication.FENCED) == self._owns(worker, job)
            if answer is Publication.FENCED:
                del worker.held[job.envelope.id]

    @precondition(lambda self: any(w.held for w in self.workers))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        worker, job = self._any_held(data)
        assert self.run(self.store.release(worker.owner, owned(job))) == self._owns(worker, job)
        if self._owns(worker, job):
            del self.owners[job.envelope.id]
        del worker.held[job.envelope.id]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        job_id = self._any_job(data)
        before, _ = self.run(self.store.status(job_id))
        after = self.run(self.store.cancel(job_id))
        assert after == {"queued": "cancelled", "delayed": "cancelled"}.get(before, before)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def let_the_time_come(self, data: st.DataObject) -> None:
        job_id = self._any_job(data)
        if self.run(self.store.status(job_id))[0] == "delayed":
            self.run(self.client.hset(keys.job(JobId.parse(job_id)), "start_ms", 1))
            self.run(self.client.zadd(keys.delayed(POOL, 0), {job_id: 1}))

    @rule()
    def queue_what_is_due(self) -> None:
        due = self.run(self.client.zcount(keys.delayed(POOL, 0), "-inf", 1))
        assert len(self.run(self.commands_run(scripts.due(POOL, 0, 100)))) >= due

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        job_id = self._any_job(data)
        before, _ = self.run(self.store.status(job_id))
        if before == "running":
            with pytest.raises(JobRunningError):
                self.run(self.store.delete(job_id))
            return
        assert self.run(self.store.delete(job_id)) == before
        with pytest.raises(JobNotFoundError):
            self.run(self.store.status(job_id))
        del self.jobs[job_id]
        self.former = [(owner, job) for owner, job in self.former if job.envelope.id != job_id]
        self.sent = None if self.sent is not None and self.sent.job_id == job_id else self.sent
        for worker in self.workers:
            worker.held.pop(job_id, None)
        assert not self.run(self.client.keys(f"*{job_id}*"))

    async def commands_run(self, call: Call) -> Any:
        return (await run(self.commands, [call]))[0]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def let_the_deadline_pass(self, data: st.DataObject) -> None:
        name = keys.job(JobId.parse(self._any_job(data)))
        self.run(self.client.hset(name, "deadline_ms", 1))

    @rule(number=WORKERS)
    def kill(self, number: int) -> None:
        self.dead.append(self.workers[number].owner)
        self.workers[number] = Worker(self.commands, number, self.lives)
        self.lives += 1

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        self.run(self.store.forget(POOL, data.draw(st.sampled_from(self.dead)), 1))

    @precondition(lambda self: self.dead)
    @rule(data=st.data(), charge=st.booleans())
    def orphan(self, data: st.DataObject, charge: bool) -> None:
        dead = data.draw(st.sampled_from(self.dead))
        held = {job_id for job_id, (owner, _) in self.owners.items() if owner == dead}
        found = self.run(Upkeep(self.commands).orphan(POOL, dead, 1, charge=charge))
        assert found.queued + len(found.ended) == len(held) and held.issuperset(found.ended)
        for job_id in held:
            del self.owners[job_id]

    @rule()
    def lose_scripts(self) -> None:
        self.run(self.client.script_flush())

    @invariant()
    def exact(self) -> None:
        self.run(check_lane(self.client, list(self.jobs)))
        for job_id in self.jobs:
            epoch = int(self.run(self.client.hget(keys.job(JobId.parse(job_id)), "epoch")))
            assert epoch >= self.epochs.get(job_id, 0)

    def teardown(self) -> None:
        try:
            self._drain()
        finally:
            self.run(self.client.aclose())
            self.run(self.commands.aclose())
            self.runner.close()

    def _drain(self) -> None:
        """Every job ends, whatever has happened to it."""
        for job_id in self.run(self.client.zrange(keys.delayed(POOL, 0), 0, -1)):
            self.run(self.client.zadd(keys.delayed(POOL, 0), {job_id: 1}))
        self.run(self.commands_run(scripts.due(POOL, 0, 1000)))
        worker = Worker(self.commands, 9, 0)
        for _ in range(2 * len(self.jobs) + 1):
            wish = budget(idle=True, suspects=1000)
            pulled = self.run(worker.store.pull(POOL, 0, worker.owner, wish, Lease(lease_ms=0, charge=False)))
            items = [last(job, worker.owner, job.last_seq + 1) for job in pulled.jobs]
            assert set(self.run(self.store.publish(items))) <= {Publication.FINE}
        statuses = {self.run(self.store.status(job_id))[0] for job_id in self.jobs}
        assert statuses <= FINAL_STATUSES
        load = self.run(self.store.lane_load(POOL, 0))
        assert (load.queued_jobs, load.queued_tokens, load.running_jobs, load.running_tokens) == (0, 0, 0, 0)
        self.run(check_lane(self.client, list(self.jobs)))

    def _any_job(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.jobs)))

    def _any_held(self, data: st.DataObject) -> tuple[Worker, PulledJob]:
        pairs = [(w, w.held[job_id]) for w in self.workers for job_id in sorted(w.held)]
        return pairs[data.draw(st.integers(0, len(pairs) - 1))]

    def _lost_and_still_owned(self, owner: str) -> dict[str, int]:
        """Jobs of an answer that never arrived which nobody has taken since and whose end nobody has seen to."""
        lost = self.lost.get(owner, {}).items()
        return {job_id: epoch for job_id, epoch in lost if self.owners.get(job_id) == (owner, epoch)}

    def _owns(self, worker: Worker, job: PulledJob) -> bool:
        return self.owners.get(job.envelope.id) == (worker.owner, job.epoch)


def test_any_sequence_of_calls_keeps_everything_exact(redis_url: str) -> None:
    Lane.url = redis_url
    run_state_machine_as_test(
        Lane,
        settings=settings(
            max_examples=15,
            stateful_step_count=35,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
