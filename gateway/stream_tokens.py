"""Short-lived tokens for the events of one job: for browsers, whose `EventSource` sends no headers.

A token is `<expiry, Unix s>.<HMAC-SHA256 of job id and expiry, base64url>`. It says nothing that its bearer does not
know, is good for the events of its job alone, and cannot be taken back before it expires.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable
from typing import Final

from shared.errors import AuthenticationError
from shared.secret_store import SecretStore

_PURPOSE: Final = b"ropeway job events\n"
#: A token has at most so many characters: expiry, dot, 32 bytes in base64url.
_MAX_LENGTH: Final = 64
#: Seconds between two looks at the shared secret where a token does not verify: Redis may have come back empty.
_RELOAD_S: Final = 5.0


class StreamTokens:
    """Signs and checks tokens.

    Args:
        secret: of all gateways together; None: one that is kept in Redis, made where there is none.
        store: where it is kept.
        clock: Unix seconds.
    """

    def __init__(self, secret: str | None, store: SecretStore, clock: Callable[[], float] = time.time) -> None:
        self._given = None if secret is None else secret.encode()
        self._store, self._clock = store, clock
        self._held: bytes | None = None
        self._loaded_at = -_RELOAD_S

    async def make(self, job_id: str, seconds: float) -> tuple[str, int]:
        """A token for a job, and when it expires (Unix s).

        Raises:
            ServiceUnavailableError: Redis is away and the secret is not known.
        """
        expires = int(self._clock() + seconds)
        return f"{expires}.{_signature(await self._secret(), job_id, expires)}", expires

    async def check(self, job_id: str, token: str) -> None:
        """Let a token pass.

        Raises:
            AuthenticationError: it is not one, is another job's, or has expired.
            ServiceUnavailableError: Redis is away and the secret is not known.
        """
        expiry, _, given = token.partition(".")
        if len(token) > _MAX_LENGTH or not (expiry.isascii() and expiry.isdecimal()):
            raise AuthenticationError("token: it is not valid for this job", param="token")
        expires = int(expiry)
        valid = _matches(await self._secret(), job_id, expires, given)
        if not valid and self._given is None and time.monotonic() - self._loaded_at >= _RELOAD_S:
            self._held = None
            valid = _matches(await self._secret(), job_id, expires, given)
        if not valid:
            raise AuthenticationError("token: it is not valid for this job", param="token")
        if expires <= self._clock():
            raise AuthenticationError("token: it has expired", param="token")

    async def _secret(self) -> bytes:
        if self._given is not None:
            return self._given
        if self._held is None:
            self._held = await self._store.secret()
            self._loaded_at = time.monotonic()
        return self._held


def _signature(secret: bytes, job_id: str, expires: int) -> str:
    digest = hmac.digest(secret, _PURPOSE + f"{job_id}\n{expires}".encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _matches(secret: bytes, job_id: str, expires: int, given: str) -> bool:
    return hmac.compare_digest(_signature(secret, job_id, expires).encode(), given.encode("utf-8", "replace"))
