"""A slice of the delivery of webhooks: outboxes are emptied, and what is due is sent, many at a time.

Whoever dies at it loses nothing: an entry leaves its outbox in the step in which its webhook becomes due, and what was
claimed and not heard of again is due once more. So a receiver can get a webhook twice, under the same `webhook-id`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import httpx
import structlog

from shared.errors import ForeignDataError, ProtocolError, RopewayError, ServiceUnavailableError
from shared.settings import TasksSettings
from shared.trace_context import NO_TRACE
from shared.tracing import OFF, Attribute, Tracing
from shared.webhook_calls import Claimed, LaneSurvey, OutboxEntry, Patience, TryOutcome
from shared.webhook_secrets import WebhookSecrets
from shared.webhooks import Lane, Webhooks
from tasks.webhook_message import Message, Messages, headers
from tasks.webhook_send import Sender, Sent

_log = structlog.stdlib.get_logger("tasks.webhook_run")

#: Seconds that one slice goes on as long as there is something to do.
SLICE_S: Final = 20.0
#: Seconds beyond the time-out of a try after which it counts as lost.
_LEASE_SLACK_S: Final = 15.0
#: Longest pause between two tries, also where a receiver asks for a longer one.
LONGEST_PAUSE_S: Final = 3600.0
#: Entries of an outbox that are taken over at a time.
_PAGE: Final = 32
#: Tries to one host at a time; of one that does not answer, as long as it does not.
_PER_HOST, _PER_SILENT_HOST = 16, 1
#: Seconds that a webhook waits whose host has enough of them.
_CROWDED_S: Final = 2.0
#: Seconds between looks for more while some are being sent.
_LOOK_S: Final = 0.25
_SILENT: Final = frozenset({"timeout", "connection", "tls"})


@dataclass(slots=True)
class _Host:
    """What this slice knows of a receiver."""

    flying: int = 0
    silent: bool = False

    @property
    def crowded(self) -> bool:
        return self.flying >= (_PER_SILENT_HOST if self.silent else _PER_HOST)


def patience_of(settings: TasksSettings) -> Patience:
    """For how long a webhook is tried; for as long again it is kept when it was given up."""
    return Patience(settings.webhook_retry_s, settings.webhook_retry_s)


def pause_s(attempt: int, first_s: float, retry_after_s: float) -> float:
    """Seconds until the next try: twice as long each time, with jitter, and no shorter than the receiver asks for."""
    doubled = first_s * 2.0 ** min(attempt - 1, 32)
    waits = min(LONGEST_PAUSE_S, doubled) * random.uniform(0.75, 1.25)
    return max(waits, min(retry_after_s, LONGEST_PAUSE_S))


class WebhookRun:
    """One slice.

    Args:
        stopping: whether nothing more is to be begun.
        tracing: is told of each try, in the trace of the job's submitter.
    """

    def __init__(
        self,
        webhooks: Webhooks,
        messages: Messages,
        secrets: WebhookSecrets,
        sender: Sender,
        settings: TasksSettings,
        stopping: Callable[[], bool],
        tracing: Tracing = OFF,
    ) -> None:
        self._webhooks, self._messages, self._secrets, self._sender = webhooks, messages, secrets, sender
        self._settings, self._stopping, self._tracing = settings, stopping, tracing
        self._patience = patience_of(settings)
        self._defaults = [secret.get_secret_value() for secret in settings.webhook_secrets]
        self._signing: dict[str, Sequence[str]] = {}
        self._hosts: dict[str, _Host] = {}
        self._flying: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Go on until nothing is to do, or the slice is over.

        Raises:
            RopewayError: Redis is away; what was begun comes due again.
        """
        until = time.monotonic() + SLICE_S
        lanes = await self._webhooks.lanes()
        looked_everywhere = False
        try:
            while time.monotonic() < until and not self._stopping():
                busy = await self._busy(lanes)
                if not busy and not self._flying:
                    if looked_everywhere:
                        break
                    looked_everywhere = True
                    busy = await self._busy(await self._webhooks.lanes(every=True))
                for survey in busy:
                    if survey.outbox:
                        await self._take_over((survey.pool, survey.lane))
                claimed = await self._claim([(survey.pool, survey.lane) for survey in busy])
                if self._flying:
                    await asyncio.wait(self._flying, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                elif busy and not claimed:
                    await asyncio.sleep(_LOOK_S)
        finally:
            await asyncio.gather(*self._flying, return_exceptions=True)

    async def _busy(self, lanes: Sequence[Lane]) -> list[LaneSurvey]:
        return [survey for survey in await self._webhooks.survey(lanes) if survey.outbox or survey.due]

    async def _take_over(self, lane: Lane) -> None:
        try:
            for entry in await self._webhooks.entries(*lane, _PAGE):
                message = await self._message(entry)
                if message is None:
                    await self._webhooks.drop(entry)
                    await self._webhooks.count({"lost": 1})
                    _log.error("webhook lost: nothing is known of its job any more", job_id=entry.job_id)
                    continue
                await self._webhooks.take(entry, message.fields(), message.owed_ms, self._patience)
        except RopewayError as error:  # Redis is full, perhaps: what is sent makes room. Or of one lane a key is broken
            _log.warning("webhooks are not taken over now", pool=lane[0], lane=lane[1], error=error.message)

    async def _message(self, entry: OutboxEntry) -> Message | None:
        try:
            return await self._messages.of(entry)
        except ServiceUnavailableError:
            raise
        except Exception:  # noqa: BLE001 - bytes of anybody may fail in any way, and must not hold up all else
            _log.exception("a job that owes a webhook does not read", job_id=entry.job_id)
            return None

    async def _claim(self, lanes: Sequence[Lane]) -> int:
        """Begin tries of what is due, as many as there is room for; answers how many."""
        begun = 0
        for pool, lane in random.sample(lanes, len(lanes)):
            room = self._settings.webhook_connections - len(self._flying)
            if room <= 0:
                break
            lease = self._settings.webhook_timeout_s + _LEASE_SLACK_S
            try:
                claims = await self._webhooks.claim(pool, lane, room, lease, self._patience)
            except ForeignDataError as error:  # it must not keep those of other lanes
                _log.error("a lane's webhooks do not read", pool=pool, lane=lane, error=error.message)
                continue
            if claims.given_up:
                await self._webhooks.count({"failed": len(claims.given_up)})
                _log.warning("webhooks given up: their time is over", job_ids=claims.given_up)
            for claimed in claims.claimed:
                begun += await self._begin(claimed)
        return begun

    async def _begin(self, claimed: Claimed) -> bool:
        name = _host(claimed.url)
        host = self._hosts.setdefault(name, _Host())
        if host.crowded:
            await self._webhooks.done(claimed, "later", self._patience, delay_s=_CROWDED_S)
            return False
        host.flying += 1
        task = asyncio.create_task(self._try(claimed, host), name="webhook")
        self._flying.add(task)
        task.add_done_callback(self._flying.discard)
        return True

    async def _try(self, claimed: Claimed, host: _Host) -> None:
        try:
            secrets = await self._secrets_of(claimed.tenant)
            sent = await self._send(claimed, secrets)
            host.silent = sent.outcome in _SILENT
            await self._end(claimed, sent)
        except RopewayError as error:  # Redis is away: it comes due again
            _log.warning("a try of a webhook is not entered", job_id=claimed.job_id, error=error.message)
        except Exception:  # noqa: BLE001 - one must not end the others
            _log.exception("a try of a webhook failed", job_id=claimed.job_id)
        finally:
            host.flying -= 1

    async def _send(self, claimed: Claimed, secrets: Sequence[str]) -> Sent:
        parent = {"traceparent": claimed.trace} if claimed.trace else NO_TRACE
        attributes: dict[str, Attribute] = {
            "http.request.method": "POST",
            "ropeway.job.id": claimed.job_id,
            "ropeway.webhook.attempt": claimed.attempt,
        }
        with self._tracing.span("webhook", parent, kind="client", attributes=attributes) as span:
            if span.trace:
                claimed = replace(claimed, trace=span.trace["traceparent"])
            sent = await self._sender.send(claimed.url, headers(claimed, secrets, datetime.now(UTC)), claimed.body)
            if sent.status is not None:
                span.set({"http.response.status_code": sent.status})
            if sent.outcome != "delivered":
                span.failed(sent.outcome)
            return sent

    async def _end(self, claimed: Claimed, sent: Sent) -> None:
        known: dict[str, TryOutcome] = {"delivered": "delivered", "gone": "gone"}
        outcome = known.get(sent.outcome, "retry")
        pause = pause_s(claimed.attempt, self._settings.webhook_first_retry_s, sent.retry_after_s)
        state = await self._webhooks.done(
            claimed, outcome, self._patience, status=sent.status, error=sent.error, delay_s=pause
        )
        counts = Counter({f"try:{sent.outcome}": 1})
        if state in ("delivered", "gone", "failed"):
            counts[state] = 1
        await self._webhooks.count(counts)
        say = _log.info if outcome == "delivered" else _log.warning
        say(
            "webhook tried", job_id=claimed.job_id, host=_host(claimed.url), attempt=claimed.attempt,
            outcome=sent.outcome, status=sent.status, state=state,
        )  # fmt: skip

    async def _secrets_of(self, tenant: str) -> Sequence[str]:
        """What signs for a tenant, asked for once in a slice."""
        if tenant not in self._signing:
            try:
                self._signing[tenant] = await self._secrets.signing(tenant, self._defaults)
            except ProtocolError:
                _log.exception("a tenant's secret does not read", tenant=tenant)
                raise
        return self._signing[tenant]


def _host(url: str) -> str:
    """Where a webhook goes, without what its path may hide; empty for what is no URL."""
    try:
        return httpx.URL(url).netloc.decode("ascii", "replace")
    except (httpx.InvalidURL, ValueError):
        return ""
