"""Webhooks in Redis: from each lane's outbox, over tries that come due, to how each delivery ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shared import keys, webhook_calls
from shared.calls import run
from shared.errors import ConflictError, ForeignDataError, NotFoundError, ProtocolError, ServiceUnavailableError
from shared.jobstore import JobStore
from shared.keys import JobId
from shared.protocol import FINAL_STATUSES
from shared.redis_errors import typed
from shared.scripts import Call
from shared.webhook_calls import Claimed, Claims, Delivery, LaneSurvey, OutboxEntry, Patience, TryOutcome

Lane = tuple[str, int]


class Webhooks(JobStore):
    """A job store with the calls that concern webhooks.

    Every method raises ServiceUnavailableError where Redis is away.
    """

    async def lanes(self, *, every: bool = False) -> list[Lane]:
        """Lanes of all pools; with `every` also those that a pool of fewer lanes may have left behind."""
        found: list[Lane] = []
        for pool in await self.pools():
            try:
                card = await self.get_card(pool)
            except ProtocolError:  # of another version: all that it may have
                found += [(pool, lane) for lane in range(keys.MAX_LANES)]
                continue
            lanes = keys.MAX_LANES if every else 0 if card is None else card.lanes
            found += [(pool, lane) for lane in range(lanes)]
        return found

    async def survey(self, lanes: Sequence[Lane]) -> list[LaneSurvey]:
        """What lanes owe. Those whose node is away, or whose keys hold something else, are left out.

        Raises:
            ServiceUnavailableError: none of them could be asked.
        """
        if not lanes:
            return []
        now = await self.now_ms()
        calls = [call for pool, lane in lanes for call in webhook_calls.survey(pool, lane, now)]
        answers = [typed(a) if isinstance(a, Exception) else a for a in await run(self._redis, calls)]
        if all(isinstance(answer, ServiceUnavailableError) for answer in answers):
            raise answers[0]
        each = len(calls) // len(lanes)
        found = []
        for at, (pool, lane) in enumerate(lanes):
            part = answers[at * each : (at + 1) * each]
            if not any(isinstance(answer, Exception) for answer in part):
                found.append(webhook_calls.parse_survey(pool, lane, part))
        return found

    async def entries(self, pool: str, lane: int, count: int) -> list[OutboxEntry]:
        """The first entries of a lane's outbox; what nobody here wrote is taken out of it."""
        outbox, found = keys.outbox(pool, lane), list[OutboxEntry]()
        for entry, fields in await self._ask("XRANGE", outbox, "-", "+", "COUNT", count):
            parsed = webhook_calls.parse_entry(pool, lane, entry, fields)
            if parsed is None:
                await self._ask("XDEL", outbox, entry)
            else:
                found.append(parsed)
        return found

    async def drop(self, entry: OutboxEntry) -> None:
        """Take an entry out that nothing can be sent of any more."""
        await self._ask("XDEL", keys.outbox(entry.pool, entry.lane), entry.entry)

    async def take(
        self, entry: OutboxEntry, fields: Mapping[str, str | bytes], owed_ms: int, patience: Patience
    ) -> bool:
        """Take an entry over: its webhook is tried from now on. False: somebody else has.

        Args:
            fields: `url`, `tenant`, `type`, `body`, `brief` (the body without the job's content), `trace`.
            owed_ms: when the job ended.
        """
        return bool(await self._run(webhook_calls.take(entry, fields, owed_ms, patience)))

    async def claim(self, pool: str, lane: int, most: int, lease_s: float, patience: Patience) -> Claims:
        """Take up to so many deliveries that are due; one that nothing is heard of comes due after the lease."""
        return webhook_calls.parse_claims(await self._run(webhook_calls.claim(pool, lane, most, lease_s, patience)))

    async def done(
        self,
        claimed: Claimed,
        outcome: TryOutcome,
        patience: Patience,
        *,
        status: int | None = None,
        error: str = "",
        delay_s: float = 0.0,
    ) -> str | None:
        """Say how a try ended; answers the delivery's state then, None where another try is under way."""
        answer = await self._run(webhook_calls.done(claimed, outcome, status, error, delay_s, patience))
        return None if answer is None else str(answer.decode())

    async def delivery(self, job_id: str) -> Delivery | None:
        """How far a job's webhook is; None before the job has ended, for one without, and where it has expired."""
        parsed = JobId.parse(job_id)
        return webhook_calls.parse_delivery(job_id, await self._run(webhook_calls.read(parsed)))

    async def listed(self, pool: str, lane: int, *, undelivered: bool, most: int) -> list[Delivery]:
        """Deliveries of a lane that are pending, or that were given up; the oldest first."""
        index = keys.webhooks(pool, lane, "undelivered" if undelivered else "owed")
        found = []
        for name in await self._ask("ZRANGE", index, 0, most - 1):
            job_id = JobId.match(name.decode(errors="replace"))
            delivery = None if job_id is None else await self.delivery(str(job_id))
            if delivery is not None:
                found.append(delivery)
        return found

    async def redeliver(self, job_id: str, patience: Patience) -> None:
        """Send a job's webhook once more, under the same id, whatever became of it.

        Raises:
            JobNotFoundError: no job has this id, and its webhook is not kept either.
            ConflictError: the job has not ended.
            NotFoundError: the job owes no webhook.
        """
        parsed = JobId.parse(job_id)
        if await self._run(webhook_calls.again(parsed, patience)):
            return
        view = await self.get(job_id)
        if view.envelope.callback_url is None:
            raise NotFoundError("the job has no callback_url", param="id")
        if view.status not in FINAL_STATUSES:
            raise ConflictError("the job has not ended: its webhook is sent when it has")
        outbox = keys.outbox(parsed.pool, parsed.lane)
        await self._ask("XADD", outbox, "*", "id", job_id, "status", view.status, "again", "1")
        await self._ask("PEXPIRE", outbox, patience.try_ms, "NX")

    async def count(self, outcomes: Mapping[str, int]) -> None:
        """Count how tries and deliveries ended."""
        key = keys.webhook_state("counts")
        for answer in await self._run_all([Call(("HINCRBY", key, name, n), key) for name, n in outcomes.items()]):
            if isinstance(answer, Exception):
                raise answer

    async def counts(self) -> dict[str, int]:
        """What `count` has counted, ever."""
        held: dict[bytes, bytes] = await self._ask("HGETALL", keys.webhook_state("counts"))
        try:
            return {name.decode(): int(value) for name, value in held.items()}
        except ValueError as error:
            raise ForeignDataError("the counts of webhooks are not those that were written here") from error


def summed(surveys: Sequence[LaneSurvey]) -> tuple[int, int | None]:
    """Of several lanes: webhooks that are not delivered yet, and the end of the job that has waited longest."""
    times: list[int] = [survey.oldest_ms for survey in surveys if survey.oldest_ms is not None]
    return sum(survey.owed for survey in surveys), min(times, default=None)
