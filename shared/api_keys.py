"""API keys: how one is made and read, and what is kept of it, which is never the key itself.

A key is `rw-<id>-<secret>`. The id is public: it finds the record and stands in logs, lists and usage. The secret has
256 random bits, so a plain SHA-256 of the key is all that is kept: nobody can try through so many, and a slow hash,
which protects passwords that people think up, would only slow down every request.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from dataclasses import dataclass
from typing import Final, Literal, get_args

import msgspec

from shared.errors import InvalidRequestError

Scope = Literal["inference", "admin", "metrics"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)
KeyState = Literal["active", "expired", "revoked"]

#: Letters and digits alone: a double click takes the whole secret.
_ALPHABET: Final = string.digits + string.ascii_letters
_ID_LENGTH, _SECRET_LENGTH = 12, 43  # 71 and 256 bits
_KEY: Final = re.compile(rb"rw-([0-9A-Za-z]{12})-[0-9A-Za-z]{43}")
ID_PATTERN: Final = re.compile(r"[0-9A-Za-z]{12}")
#: Of tenants, which get into names of keys in Redis.
TENANT_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_NAME: Final = 100


def checked_tenant(name: str) -> str:
    """The name, if a tenant may have it. Raises InvalidRequestError."""
    if TENANT_PATTERN.fullmatch(name) is None:
        raise InvalidRequestError(
            "tenant: must begin with a letter or digit and have at most 64 letters, digits, '.', '_' and '-'",
            param="tenant",
        )
    return name


class ApiKey(msgspec.Struct, kw_only=True, frozen=True):
    """What is kept of a key. Times are Unix milliseconds of Redis's clock, 0 for never.

    Attributes:
        id: the public part.
        digest: SHA-256 of the whole key, hexadecimal.
        tenant: whose jobs its jobs are.
        scopes: what it opens.
        name: for people.
        replaced_by: id of the key that took its place, where it was rotated.
    """

    id: str
    digest: str
    tenant: str
    scopes: list[Scope]
    name: str = ""
    created_ms: int = 0
    expires_ms: int = 0
    revoked_ms: int = 0
    replaced_by: str = ""

    def state(self, now_ms: int) -> KeyState:
        """Whether it opens anything at a time."""
        if self.revoked_ms:
            return "revoked"
        return "expired" if self.expires_ms and self.expires_ms <= now_ms else "active"

    def fits(self, presented: PresentedKey) -> bool:
        """Whether this is the key that somebody presents; in constant time."""
        return hmac.compare_digest(self.digest, presented.digest)


@dataclass(frozen=True, slots=True)
class PresentedKey:
    """A key as it came, without its secret: the public id, and SHA-256 of all of it in hexadecimal."""

    id: str
    digest: str


def new_key() -> str:
    """A fresh key. It is nowhere else: whoever makes it hands it out and keeps `presented(key)`."""
    return f"rw-{_draw(_ID_LENGTH)}-{_draw(_SECRET_LENGTH)}"


def presented(key: bytes) -> PresentedKey | None:
    """A key of this form; None for any other text."""
    match = _KEY.fullmatch(key)
    return None if match is None else PresentedKey(match[1].decode(), hashlib.sha256(key).hexdigest())


def _draw(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
