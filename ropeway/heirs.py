"""What becomes of a worker's jobs when the worker has died and its parent knows it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from ropeway.console import err
from shared import keys
from shared.connect import connect
from shared.errors import ProtocolError, RopewayError, ServiceUnavailableError
from shared.upkeep import Upkeep

#: Seconds for which it makes sense to try: after a lease others take the jobs by themselves.
_TRY_S = 30.0


class Heirs:
    """Lets the jobs of a worker that died go on at once: a `ropeway.supervise.Companion`.

    Each of its processes gets an owner's id from here. Once one of them has been waited for it is dead for certain, so
    nobody has to wait until its lease is over.

    Args:
        redis_url: where its jobs are.
        max_attempts: of the worker's settings.
    """

    def __init__(self, redis_url: str, max_attempts: int) -> None:
        self._redis_url, self._max_attempts = redis_url, max_attempts
        self._owner = ""

    def starts(self) -> Sequence[str]:
        """The option with the id of the process that starts now."""
        self._owner = uuid.uuid4().hex
        return ["--owner", self._owner]

    async def ended(self, code: int) -> None:
        """Queue again what the process held. Where that cannot be done its lease runs out, as everywhere else."""
        owner = self._owner
        client = connect(self._redis_url)
        try:
            async for attempt in AsyncRetrying(
                retry=retry_if_exception_type(ServiceUnavailableError),
                wait=wait_random_exponential(multiplier=0.1, max=2.0),
                stop=stop_after_delay(_TRY_S),
                reraise=True,
            ):
                with attempt:
                    await self._hand_over(Upkeep(client), owner, charge=code != 0)
        except RopewayError as error:
            why = f"ropeway: jobs of the worker that ended go on when its lease is over: {error.message}"
            err.print(why, style="yellow", markup=False, soft_wrap=True)
        finally:
            await client.aclose()

    async def _hand_over(self, upkeep: Upkeep, owner: str, *, charge: bool) -> None:
        for pool in await upkeep.pools():
            try:
                card = await upkeep.get_card(pool)
            except ProtocolError:
                card = None
            lanes = keys.MAX_LANES if card is None else card.lanes
            await upkeep.orphan(pool, owner, lanes, max_attempts=self._max_attempts, charge=charge)
