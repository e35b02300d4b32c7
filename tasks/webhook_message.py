"""What a webhook says: the event about a job that has ended, and the headers that prove who says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import msgspec
import structlog
from standardwebhooks import Webhook

from gateway import job_view, wire_format
from gateway.callbacks import planned
from gateway.job_view import JobBody
from shared.errors import JobNotFoundError, ProtocolError
from shared.job_index import JobIndex
from shared.keys import JobId
from shared.protocol import Head, JobClass, TokenizerBundle, decode
from shared.readings import parse_number
from shared.trace_context import trace_id
from shared.webhook_calls import Claimed, OutboxEntry

_log = structlog.stdlib.get_logger("tasks.webhook_message")

_TRACEPARENT_CHARS: Final = 55


class Event(msgspec.Struct, frozen=True):
    """The body. `timestamp` is when the job ended, ISO 8601; `data` the job as `GET /v1/jobs/{id}` shows it."""

    type: str
    timestamp: str
    data: JobBody


@dataclass(frozen=True, slots=True)
class Message:
    """A webhook that is to be sent.

    Attributes:
        body: its bytes; `brief` those without the job's result.
        owed_ms: when the job ended, Unix ms.
    """

    url: str
    tenant: str
    type: str
    body: bytes
    brief: bytes
    trace: str
    owed_ms: int

    def fields(self) -> dict[str, str | bytes]:
        """As the webhook's hash has them."""
        return {
            "url": self.url,
            "tenant": self.tenant,
            "type": self.type,
            "body": self.body,
            "brief": self.brief,
            "trace": self.trace,
        }


class Messages:
    """Makes them out of entries of outboxes.

    Args:
        max_bytes: of a body; one that would be larger is sent without the job's result.
    """

    def __init__(self, index: JobIndex, max_bytes: int) -> None:
        self._index, self._max_bytes = index, max_bytes
        self._hidden: dict[str, frozenset[int]] = {}

    async def of(self, entry: OutboxEntry) -> Message | None:
        """The message about an entry's job; None where nothing is known of it any more, or it has no URL.

        Raises:
            ServiceUnavailableError: Redis is away.
        """
        try:
            if entry.deleted is not None:
                return self._of_deleted(entry)
            view = await self._index.get(entry.job_id)
            if view.envelope.callback_url is None:
                return None
            asks = view.envelope.sampling
            hidden = frozenset[int]()
            if asks.logprobs is not None or asks.prompt_logprobs is not None:
                hidden = await self._special_ids(JobId.parse(entry.job_id).pool)
            body = job_view.of_view(view, hidden, callback=planned(view.envelope.callback_url, ended=True))
        except JobNotFoundError:
            return None
        except ProtocolError as error:
            _log.warning("a job does not read: its webhook has no result", job_id=entry.job_id, error=error.message)
            return await self._of_unreadable(entry)
        trace = view.envelope.trace.get("traceparent", "")
        return self._message(body, view.envelope.callback_url, view.tenant, view.finished_ms, trace)

    def _message(self, job: JobBody, url: str, tenant: str, ended_ms: int, trace: str = "") -> Message:
        kind = f"job.{job.status}"
        when = datetime.fromtimestamp(ended_ms / 1e3, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        body = wire_format.encode(Event(kind, when, job))
        brief = wire_format.encode(Event(kind, when, msgspec.structs.replace(job, result=None)))
        return Message(url, tenant, kind, body if len(body) <= self._max_bytes else brief, brief, trace, ended_ms)

    async def _of_unreadable(self, entry: OutboxEntry) -> Message | None:
        """From what lists show: a job is also ended because its envelope does not read."""
        found = await self._index.entries([JobId.parse(entry.job_id)])
        if not found or found[0].head.callback_url is None:
            return None
        url = found[0].head.callback_url
        job = msgspec.structs.replace(job_view.of_entry(found[0]), callback=planned(url, ended=True))
        return self._message(job, url, await self._index.owner(entry.job_id), found[0].finished_ms)

    def _of_deleted(self, entry: OutboxEntry) -> Message | None:
        fields = entry.deleted or {}
        head = decode(fields.get(b"head", b""), Head)
        if head.callback_url is None:
            return None
        submitted, ended = (parse_number(fields.get(name)) // 1000 for name in (b"submitted_us", b"finished_us"))
        job = JobBody(
            id=entry.job_id,
            kind=head.kind,
            model=head.model,
            adapter=head.adapter,
            status=entry.status,
            job_class=msgspec.convert(fields.get(b"class", b"normal").decode(errors="replace"), JobClass),
            created_at=submitted // 1000,
            finished_at=ended // 1000 or None,
            request_id=head.request_id,
            metadata=head.metadata,
            callback=planned(head.callback_url, ended=True),
        )
        return self._message(job, head.callback_url, fields.get(b"tenant", b"").decode(errors="replace"), ended)

    async def _special_ids(self, pool: str) -> frozenset[int]:
        """Ids that texts of a model do not show by default, without its whole tokenizer."""
        if pool not in self._hidden:
            bundle = await self._index.get_bundle(pool)
            self._hidden[pool] = frozenset() if bundle is None else special_ids(bundle)
        return self._hidden[pool]


class _AddedToken(msgspec.Struct):
    id: int
    special: bool = False


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def special_ids(bundle: TokenizerBundle) -> frozenset[int]:
    """Ids of a tokenizer's special tokens, read from its file."""
    try:
        added = msgspec.json.decode(bundle.tokenizer_json, type=_Tokenizer).added_tokens
    except msgspec.DecodeError as error:
        _log.warning("a tokenizer does not read", error=str(error))
        return frozenset()
    return frozenset(token.id for token in added if token.special)


def webhook_id(job_id: str) -> str:
    """The same for each try of a job's webhook, so that its receiver knows one that it has had."""
    return f"msg_{JobId.parse(job_id).unique}"


def headers(claimed: Claimed, secrets: Sequence[str], now: datetime) -> list[tuple[bytes, bytes]]:
    """Headers of one try, as the Standard Webhooks specification has them, signed with each secret.

    Args:
        now: in UTC; receivers refuse what is some minutes old.
    """
    name, content = webhook_id(claimed.job_id), claimed.body.decode()
    signatures = " ".join(Webhook(secret).sign(name, now, content) for secret in secrets)
    found = {
        "content-type": "application/json",
        "user-agent": "Ropeway-Webhooks/1",
        "webhook-id": name,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": signatures,
    }
    if len(claimed.trace) == _TRACEPARENT_CHARS and trace_id({"traceparent": claimed.trace}):
        found["traceparent"] = claimed.trace
    return [(key.encode(), value.encode()) for key, value in found.items()]
