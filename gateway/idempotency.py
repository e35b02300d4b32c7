"""`Idempotency-Key`: a request that is sent again attaches to the jobs of the first, live or ended."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel
from starlette.requests import Request

from gateway.preparation import Prepared
from shared.errors import ConflictError, InvalidRequestError
from shared.tenants import IdempotentRequest, Tenants

HEADER = "idempotency-key"
#: Set to `true` on the answer to a request that attached to an earlier one.
REPLAYED = "idempotent-replayed"
_KEY = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,253}[\x21-\x7e])?\Z")


class KeyReusedError(ConflictError):
    """The key stands for a request with another body."""

    code = "idempotency_key_reused"


def key_of(request: Request) -> str | None:
    """The request's key, None without one.

    Raises:
        InvalidRequestError: more than 255 characters, or others than printable ASCII.
    """
    key = request.headers.get(HEADER)
    if key is not None and _KEY.match(key) is None:
        raise InvalidRequestError("Idempotency-Key: must be 1 to 255 printable ASCII characters", param=HEADER)
    return key


def digest_of(path: str, body: BaseModel) -> str:
    """A hash of what is asked: of fields and values, not of how they were written."""
    asked = json.dumps(body.model_dump(mode="json", by_alias=True, exclude_unset=True), sort_keys=True)
    return hashlib.blake2b(f"{path}\n{asked}".encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class Idempotency:
    """Remembers keys for as long as a job and its result can be there.

    Args:
        ttl_s: seconds that a key is remembered.
    """

    def __init__(self, tenants: Tenants, ttl_s: float) -> None:
        self._tenants, self._ttl_s = tenants, ttl_s

    async def attach(
        self, tenant: str, key: str, digest: str, prepared: Prepared, ttl_s: float | None = None
    ) -> tuple[Prepared, bool]:
        """The request as it was first prepared under this key, and whether that was an earlier one.

        Its jobs are to be submitted in any case, which changes nothing for those that are there: whoever entered the
        key may have died before it submitted them.

        Raises:
            KeyReusedError: the key stands for another request.
            ServiceUnavailableError: Redis is away.
        """
        shape = prepared.shape
        mine = IdempotentRequest(digest=digest, job_ids=list(shape.job_ids), created=shape.created)
        held = await self._tenants.claim(tenant, key, mine, max(self._ttl_s, ttl_s or 0.0))
        if held.digest != digest or len(held.job_ids) != len(mine.job_ids):
            raise KeyReusedError("Idempotency-Key: this key stands for a request with another body", param=HEADER)
        if held.job_ids == mine.job_ids:
            return prepared, False
        return _under(prepared, held.job_ids, held.created), True


def _under(prepared: Prepared, job_ids: Sequence[str], created: int) -> Prepared:
    envelopes = list(prepared.envelopes)
    for envelope, job_id in zip(envelopes, job_ids, strict=True):
        envelope.id = job_id
    return Prepared(envelopes, replace(prepared.shape, job_ids=list(job_ids), created=created))
