"""Who a request is from: keys of the settings, and those that operators made, which are kept hashed in Redis."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from shared.api_keys import ApiKey, Scope, presented
from shared.errors import AuthenticationError

ANONYMOUS: Final = "default"
#: Of the settings' API keys: all but administration, as ever.
STATIC_SCOPES: Final[frozenset[Scope]] = frozenset({"inference", "metrics"})
ADMIN_SCOPES: Final[frozenset[Scope]] = frozenset({"inference", "metrics", "admin"})
METRICS_SCOPES: Final[frozenset[Scope]] = frozenset({"metrics"})


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom a key stands for.

    Attributes:
        tenant: whose jobs its jobs are.
        key: the key's public name, for usage and logs.
        scopes: what it opens.
    """

    tenant: str
    key: str
    scopes: frozenset[Scope]


class StaticKey:
    """A key of the settings: a tenant of its own, named by a hash."""

    def __init__(self, key: str, scopes: frozenset[Scope]) -> None:
        self.data = key.encode()
        name = f"key-{hashlib.blake2b(self.data, digest_size=8).hexdigest()}"
        self.identity = Identity(name, name, scopes)


class Keyring:
    """The accepted keys.

    Args:
        static: of the settings; the first that fits counts.
        find: the record of a key by its public id, None for none; raises ServiceUnavailableError.
        clock: Unix seconds.
    """

    def __init__(
        self,
        static: Sequence[StaticKey],
        find: Callable[[str], Awaitable[ApiKey | None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._static, self._find, self._clock = static, find, clock

    async def identify(self, authorization: str | None) -> Identity:
        """Whom an `Authorization` header stands for.

        Static keys are all compared, each in constant time; of the others the record is found by the id, which is
        public, and the hash of the whole is compared in constant time.

        Raises:
            AuthenticationError: there is no key, it is not known, has expired or was revoked.
            ServiceUnavailableError: Redis is away, and nothing was heard of this key lately.
        """
        given = _bearer(authorization)
        if given is None:
            raise AuthenticationError("An API key is needed: Authorization: Bearer <key>")
        fitting = [key.identity for key in self._static if hmac.compare_digest(given, key.data)]
        if fitting:
            return fitting[0]
        key = presented(given)
        record = None if key is None else await self._find(key.id)
        if key is None or record is None or not record.fits(key):
            raise AuthenticationError("This API key is not known")
        if record.state(int(self._clock() * 1e3)) != "active":
            raise AuthenticationError("This API key has expired or was revoked")
        return Identity(record.tenant, record.id, frozenset(record.scopes))


def _bearer(authorization: str | None) -> bytes | None:
    """The key of an `Authorization` header, as its bytes came; None without one."""
    scheme, _, token = (authorization or "").partition(" ")
    # As bytes: what the text of a header takes for white space may be a part of a letter.
    key = token.encode("latin-1", "replace").strip(b" \t")
    return key if key and scheme.lower() == "bearer" else None
