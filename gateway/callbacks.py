"""Where a job's webhook goes: checked at the submit, shown with the job."""

from __future__ import annotations

import msgspec

from shared.address_guard import AddressGuard
from shared.jobs import JobView
from shared.protocol import FINAL_STATUSES
from shared.webhook_calls import Delivery, DeliveryState
from shared.webhooks import Webhooks


class CallbackBody(msgspec.Struct, frozen=True):
    """How far a job's webhook is. Times are Unix seconds, null where not yet.

    `state` is `waiting` until the job has ended, then `pending`, and in the end `delivered`, `gone` or `failed`.
    """

    url: str
    state: DeliveryState
    attempts: int = 0
    last_attempt_at: int | None = None
    last_status: int | None = None
    last_error: str | None = None
    next_attempt_at: int | None = None
    finished_at: int | None = None

    @classmethod
    def of(cls, delivery: Delivery) -> CallbackBody:
        """As it is known of the delivery."""
        return cls(
            url=delivery.url,
            state=delivery.state,
            attempts=delivery.attempts,
            last_attempt_at=delivery.last_ms // 1000 or None,
            last_status=delivery.last_status,
            last_error=delivery.last_error,
            next_attempt_at=delivery.next_ms // 1000 or None,
            finished_at=delivery.ended_ms // 1000 or None,
        )


class Callbacks:
    """Checks and shows them."""

    def __init__(self, guard: AddressGuard, webhooks: Webhooks) -> None:
        self._guard, self._webhooks = guard, webhooks

    async def check(self, url: str) -> None:
        """Pass a URL that a webhook may be sent to.

        Raises:
            InvalidRequestError: it may not be; `param` is `callback_url`.
        """
        await self._guard.check(url, "callback_url")

    async def of(self, view: JobView) -> CallbackBody | None:
        """How far a job's webhook is; None for a job without one."""
        url = view.envelope.callback_url
        if url is None:
            return None
        delivery = await self._webhooks.delivery(view.id) if view.status in FINAL_STATUSES else None
        return planned(url, ended=view.status in FINAL_STATUSES) if delivery is None else CallbackBody.of(delivery)


def planned(url: str | None, *, ended: bool = False) -> CallbackBody | None:
    """What is known before the first try."""
    return None if url is None else CallbackBody(url, "pending" if ended else "waiting")
