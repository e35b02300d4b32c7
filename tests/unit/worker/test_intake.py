"""Which lanes are pulled, when, and with what budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.request import Capacity
from shared.errors import ForeignDataError, ServiceUnavailableError
from shared.jobs import LaneLoad, Lease, PullBudget, Pulled, PulledJob
from shared.keys import CLASSES, JobId, home_lanes
from tests.unit.worker.parts import held
from worker.holdings import Admission, Holdings
from worker.intake import Intake, IntakeConfig
from worker.job import HeldJob
from worker.metrics import WorkerMetrics
from worker.reclaim import ReclaimRule

LANES = 8


class Lanes:
    """A store whose lanes hold counts of jobs; each pull takes one."""

    def __init__(self) -> None:
        self.queued: dict[int, int] = {}
        self.alone: set[int] = set()
        self.broken: set[int] = set()
        self.away: set[int] = set()
        self.buried: set[int] = set()
        self.pulls: list[tuple[int, PullBudget]] = []
        self.looks: list[list[int]] = []
        self.news = asyncio.Condition()

    async def pull(self, pool: str, lane: int, owner: str, budget: PullBudget, lease: Lease) -> Pulled:
        async with self.news:
            self.pulls.append((lane, budget))
            self.news.notify_all()
        if lane in self.broken:
            raise ForeignDataError("m")
        if lane in self.away:
            raise ServiceUnavailableError("m")
        if lane in self.alone and not budget.idle:
            return Pulled(alone_waiting=1)
        if lane in self.buried:
            self.buried.remove(lane)
            return Pulled(ended={"a": "failed", "b": "expired"}, buried=["a"])
        if not self.queued.get(lane):
            return Pulled()
        self.queued[lane] -= 1
        envelope = held().envelope
        return Pulled([PulledJob(envelope, 1, 1, 0, 2**50, 1.0, False, lane in self.alone)])

    async def node(self, pool: str, lane: int) -> str:
        return f"node of {lane % 2}"

    async def lane_loads(self, pool: str, lanes: list[int]) -> list[LaneLoad | None]:
        self.looks.append(list(lanes))
        if self.broken:
            raise ForeignDataError("m")
        return [None if lane in self.away else LaneLoad(queued_jobs=self.queued.get(lane, 0)) for lane in lanes]

    async def lane_load(self, pool: str, lane: int) -> LaneLoad:
        return LaneLoad(queued_jobs=self.queued.get(lane, 0) + (lane in self.alone))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.news, asyncio.timeout(20):
            await self.news.wait_for(condition)


class Engine:
    """Takes jobs in at once and keeps them until told."""

    def __init__(self, admission: Admission, sequences: int) -> None:
        self.admission, self.sequences = admission, sequences
        self.jobs: list[HeldJob] = []
        self.refresh([])

    def refresh(self, arrived: list[HeldJob]) -> None:
        capacity = Capacity(self.sequences - len(self.jobs), 10**6)
        self.admission.update(dict.fromkeys(CLASSES, capacity), arrived)

    def admit(self, job: HeldJob) -> None:
        self.jobs.append(job)
        self.refresh([job])


class Setup:
    def __init__(
        self,
        *,
        sequences: int = 4,
        steal_delay_s: float = 0.0,
        poll_s: float = 600.0,
        all_poll_s: float | None = None,
        max_adapters: int | None = None,
    ) -> None:
        self.lanes, self.holdings, self.admission = Lanes(), Holdings(), Admission(10**6)
        self.engine, self.metrics = Engine(self.admission, sequences), WorkerMetrics("m")
        config = IntakeConfig("pool", LANES, "me", poll_s, all_poll_s or poll_s, steal_delay_s, max_adapters)
        self.intake = Intake(
            self.lanes, self.lanes, config, ReclaimRule(1.0, 3), self.engine,  # type: ignore[arg-type]
            self.holdings, self.admission, self.metrics,
        )  # fmt: skip
        self.holdings.on_empty = self.intake.room

    async def __aenter__(self) -> Setup:
        self.task = asyncio.create_task(self.intake.run())
        # The first look at the counters is over when the task waits.
        await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.intake.stop()
        await self.task

    def finish(self, job: HeldJob) -> None:
        self.engine.jobs.remove(job)
        self.engine.refresh([])
        self.intake.room()
        self.holdings.remove(job)


async def test_a_wake_pulls_its_lane_and_no_other() -> None:
    async with Setup() as s:
        s.lanes.queued[3] = 1
        s.intake.wake(3)
        await s.lanes.until(lambda: bool(s.lanes.pulls))
        assert [lane for lane, _ in s.lanes.pulls] == [3]
        budget = s.lanes.pulls[0][1]
        assert budget.idle and budget.sequences["normal"] == 4


async def test_jobs_that_a_pull_gave_up_are_counted() -> None:
    async with Setup() as s:
        s.lanes.buried.add(3)
        s.intake.wake(3)
        await s.lanes.until(lambda: not s.lanes.buried)
    assert s.metrics.registry.get_sample_value("ropeway_dead_letters_total", {"model_name": "m"}) == 1


async def test_home_lanes_are_pulled_at_once_and_before_others() -> None:
    async with Setup(steal_delay_s=0.2) as s:
        owners = ["me", "other"]
        s.intake.owners(owners)
        homes = home_lanes("me", owners, LANES)
        foreign = next(lane for lane in range(LANES) if lane not in homes)
        s.lanes.queued = {foreign: 1, homes[0]: 1}
        s.intake.wake(foreign)
        s.intake.wake(homes[0])
        await s.lanes.until(lambda: len(s.lanes.pulls) >= 2)
        assert [lane for lane, _ in s.lanes.pulls][:2] == [homes[0], foreign]


async def test_nothing_is_pulled_without_room_and_at_once_when_there_is() -> None:
    async with Setup(sequences=2) as s:
        s.lanes.queued = {1: 5}
        s.intake.wake(1)
        await s.lanes.until(lambda: len(s.lanes.pulls) >= 2)
        s.intake.wake(1)
        await asyncio.sleep(0.05)
        assert len(s.engine.jobs) == 2 and len(s.lanes.pulls) == 2, "no pull without a budget"
        s.finish(s.engine.jobs[0])
        await s.lanes.until(lambda: len(s.lanes.pulls) >= 3)
        assert len(s.engine.jobs) == 2 and s.lanes.queued[1] == 2


async def test_a_lost_wake_is_made_up_for_by_polling() -> None:
    async with Setup(poll_s=0.02) as s:
        s.lanes.queued = {6: 1}
        await s.lanes.until(lambda: bool(s.lanes.pulls))
        assert s.lanes.pulls[0][0] == 6


async def test_home_lanes_are_left_alone_while_no_wake_can_be_lost() -> None:
    hears = True
    setup = Setup(poll_s=0.01, all_poll_s=600.0)
    setup.intake.hears_all = lambda: hears
    async with setup as s:
        await asyncio.sleep(0.2)
        assert len(s.lanes.looks) == 1, "the first look at all of them"
        s.lanes.queued[3] = 1  # its wake is lost
        hears = False  # as one interval later: what was asked was not answered
        await s.lanes.until(lambda: s.lanes.pulls != [])
        assert s.lanes.pulls[0][0] == 3
        hears = True
        looks = len(s.lanes.looks)
        s.lanes.queued[5] = 2
        s.lanes.away.add(5)
        s.intake.wake(5)
        await s.lanes.until(lambda: any(lane == 5 for lane, _ in s.lanes.pulls))
        while len(s.lanes.looks) == looks:  # something was heard, so they are looked at until nothing waits
            await asyncio.sleep(0.01)
        s.lanes.away.clear()
        async with asyncio.timeout(20):
            while s.lanes.queued[5]:  # however often it was tried before
                await asyncio.sleep(0.01)


async def test_home_lanes_are_looked_at_while_anything_waits_in_them() -> None:
    """A job that this worker could not have may be one that it can have by now, and no wake says so."""
    setup = Setup(poll_s=0.01, all_poll_s=600.0)
    setup.intake.hears_all = lambda: True
    async with setup as s:
        looks = s.lanes.looks
        s.lanes.queued[4] = 1
        s.lanes.away.add(4)
        s.intake.wake(4)
        while len(looks) < 5:
            await asyncio.sleep(0.01)


async def test_a_lane_whose_node_is_away_keeps_no_other_waiting_and_is_tried_again() -> None:
    async with Setup() as s:
        s.lanes.away.add(2)
        s.lanes.queued |= {2: 1, 3: 2}
        s.intake.wake(2)
        await s.lanes.until(lambda: [lane for lane, _ in s.lanes.pulls].count(2) >= 3)
        s.intake.wake(3)
        await s.lanes.until(lambda: len(s.engine.jobs) == 2)
        s.lanes.away.clear()
        await s.lanes.until(lambda: len(s.engine.jobs) == 3)


async def test_a_lane_whose_node_is_away_is_left_out_of_the_look_at_all() -> None:
    async with Setup(poll_s=0.02) as s:
        s.lanes.away.add(2)
        s.lanes.queued |= {2: 1, 3: 1}
        await s.lanes.until(lambda: bool(s.lanes.pulls))
        assert {lane for lane, _ in s.lanes.pulls} == {3}


async def test_a_lane_whose_data_is_broken_rests_and_keeps_no_other_waiting() -> None:
    async with Setup(poll_s=0.01) as s:
        s.lanes.broken.add(2)
        s.lanes.queued |= {1: 1, 3: 1}
        for lane in (2, 1, 3):
            s.intake.wake(lane)
        await s.lanes.until(lambda: {1, 2, 3} <= {lane for lane, _ in s.lanes.pulls})
        s.lanes.queued[4] = 1  # found by polling, though not one lane's counters can be told
        await s.lanes.until(lambda: 4 in {lane for lane, _ in s.lanes.pulls})
        s.intake.wake(2)
        s.lanes.queued[5] = 1
        await s.lanes.until(lambda: s.lanes.queued[5] == 0)
    assert [lane for lane, _ in s.lanes.pulls].count(2) == 1


async def test_an_empty_lane_is_not_pulled_by_polling() -> None:
    async with Setup(poll_s=0.01) as s:
        await asyncio.sleep(0.1)
        assert s.lanes.pulls == []


async def test_nothing_else_is_pulled_beside_a_job_that_runs_alone() -> None:
    async with Setup() as s:
        s.lanes.alone, s.lanes.queued = {2}, {2: 1, 5: 1}
        s.intake.wake(2)
        await s.lanes.until(lambda: s.lanes.queued[2] == 0)
        s.intake.wake(5)
        await asyncio.sleep(0.05)
        assert len(s.engine.jobs) == 1 and s.lanes.queued[5] == 1
        s.lanes.alone = set()
        s.finish(s.engine.jobs[0])
        await s.lanes.until(lambda: s.lanes.queued[5] == 0)


async def test_a_worker_empties_itself_for_a_job_that_has_to_run_alone() -> None:
    async with Setup() as s:
        s.lanes.queued = {1: 1}
        s.intake.wake(1)
        await s.lanes.until(lambda: s.lanes.queued[1] == 0)
        s.lanes.alone, s.lanes.queued = {2}, {2: 1, 1: 3}
        s.intake.wake(2)
        await s.lanes.until(lambda: s.lanes.pulls[-1][0] == 2)
        s.intake.wake(1)
        await asyncio.sleep(0.05)
        assert s.lanes.queued == {2: 1, 1: 3}, "it pulls nothing while it empties itself"
        s.finish(s.engine.jobs[0])
        await s.lanes.until(lambda: s.lanes.queued[2] == 0)
        assert s.lanes.queued[1] == 3 and len(s.engine.jobs) == 1


async def test_a_paused_pool_is_not_pulled_from_and_goes_on_at_once() -> None:
    async with Setup() as s:
        s.intake.pause(True)
        s.lanes.queued = {2: 1, 5: 1}
        s.intake.wake(2)
        s.intake.poll_all()
        await asyncio.sleep(0.05)
        assert s.lanes.pulls == []
        s.intake.pause(False)
        await s.lanes.until(lambda: len(s.engine.jobs) == 2)
        assert {lane for lane, _ in s.lanes.pulls} >= {2, 5}


async def test_a_paused_worker_can_be_stopped() -> None:
    async with Setup() as s:
        s.intake.pause(True)
        await asyncio.sleep(0.01)
    assert s.task.done()


async def test_jobs_that_were_pulled_are_kept_when_nobody_knows_who_answered() -> None:
    async with Setup() as s:
        asked = 0

        async def node(pool: str, lane: int) -> str:
            nonlocal asked
            asked += 1
            if asked == 2:
                raise ServiceUnavailableError("no node serves this lane's slot")
            return "node"

        s.lanes.node = node  # type: ignore[method-assign]
        s.lanes.queued[3] = 1
        s.intake.wake(3)
        await s.lanes.until(lambda: bool(s.lanes.pulls))
        async with asyncio.timeout(20):
            while not s.engine.jobs:
                await asyncio.sleep(0.001)
    assert [job.id for job in s.engine.jobs] == [job.id for job in s.holdings.all()]


async def test_the_budget_says_which_adapters_are_here_and_how_many_more_may_come() -> None:
    async with Setup(max_adapters=3) as s:
        for number, identity in enumerate(["a" * 32, "a" * 32, "b" * 32, None]):
            job = held(job_id=str(JobId.new("pool", number)))
            job.envelope.adapter_identity = identity
            s.holdings.add(job)
        s.lanes.queued = {1: 1}
        s.intake.wake(1)
        await s.lanes.until(lambda: bool(s.lanes.pulls))
        budget = s.lanes.pulls[0][1]
        assert (budget.adapters, budget.more_adapters) == ({"a" * 32, "b" * 32}, 1)


async def test_a_worker_that_is_alone_takes_jobs_of_any_number_of_adapters() -> None:
    async with Setup(max_adapters=3) as s:
        for owners, more in ((["me"], None), (["me", "other"], 3)):
            s.intake.owners(owners)
            s.lanes.pulls.clear()
            s.lanes.queued = {1: 1}
            s.intake.wake(1)
            await s.lanes.until(lambda: bool(s.lanes.pulls))
            assert s.lanes.pulls[0][1].more_adapters == more
            s.finish(s.engine.jobs[0])


async def test_where_no_adapters_are_served_there_is_no_limit_of_them() -> None:
    async with Setup() as s:
        s.lanes.queued = {1: 1}
        s.intake.wake(1)
        await s.lanes.until(lambda: bool(s.lanes.pulls))
        assert s.lanes.pulls[0][1].more_adapters is None
