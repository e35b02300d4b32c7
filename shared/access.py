"""API keys and terms of tenants in Redis: found one by one by gateways, changed by operators."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from shared import keys
from shared.api_keys import (
    ID_PATTERN,
    MAX_NAME,
    SCOPES,
    ApiKey,
    PresentedKey,
    Scope,
    checked_tenant,
    new_key,
    presented,
)
from shared.batch_record import decode, encode
from shared.errors import ConflictError, InvalidRequestError, NotFoundError
from shared.jobstore import JobStore
from shared.scripts import Call, load
from shared.tenant_terms import MAX_MODELS, MAX_WEIGHT, MIN_WEIGHT, NO_LIMIT, TenantTerms

R = TypeVar("R", ApiKey, TenantTerms)

_MODEL: Final = re.compile(r"[\x21-\x7e]{1,256}")
_ROUNDS: Final = 20


class AccessNews(msgspec.Struct, kw_only=True, frozen=True):
    """What is said on the channel: `keys` or `tenants` of these names have changed."""

    op: str
    names: list[str] = []


def write_call(what: str, changes: Sequence[tuple[str, bytes, bytes]]) -> Call:
    """Change records: of each its name, the record as it was read and as it is to be, empty for none."""
    key, script = keys.access(what), load("record_write")
    news = msgspec.msgpack.encode(AccessNews(op=what, names=[name for name, _, _ in changes]))
    arguments = [part for change in changes for part in change]
    return Call(("EVALSHA", script.sha, 1, key, keys.access("ctl"), news, *arguments), key, script)


def parse_news(data: bytes) -> AccessNews | None:
    """A message of the channel; None for one that does not read, which may be about anything."""
    try:
        return msgspec.msgpack.decode(data, type=AccessNews)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


class Access(JobStore):
    """A job store with the calls that concern keys and tenants.

    Every method raises ServiceUnavailableError where Redis is away, ForeignDataError for a record that does not read.
    """

    async def key(self, key_id: str) -> ApiKey | None:
        """A key's record, whatever its state; None where there is none, also for text that is no id."""
        # What is no id may be a whole key, which must not get into a command.
        return await self._one("keys", key_id, ApiKey) if ID_PATTERN.fullmatch(key_id) else None

    async def existing_key(self, key_id: str) -> ApiKey:
        """A key's record. Raises NotFoundError."""
        key = await self.key(key_id)
        if key is None:
            raise _no_key()
        return key

    async def all_keys(self) -> list[ApiKey]:
        """All keys, the oldest first."""
        return sorted((await self._all("keys", ApiKey)).values(), key=lambda key: (key.created_ms, key.id))

    async def any_keys(self) -> bool:
        """Whether any key was ever made here."""
        return bool(await self._ask("EXISTS", keys.access("keys")))

    async def create_key(
        self, tenant: str, scopes: Sequence[str], *, name: str = "", expires_s: float | None = None
    ) -> tuple[str, ApiKey]:
        """Make a key.

        Returns:
            The key itself, which is kept nowhere, and its record.

        Raises:
            InvalidRequestError: a name that is none of a tenant, or a scope that there is not.
        """
        now = await self.now_ms()
        secret, record = _make(now, checked_tenant(tenant), _scopes(scopes), _name(name), _expiry(now, expires_s))
        if not await self._write("keys", [(record.id, b"", encode(record))]):
            raise ConflictError("a key of this id was made meanwhile: try again")
        return secret, record

    async def revoke_key(self, key_id: str) -> ApiKey:
        """Let a key open nothing any more. Repeating it is harmless. Raises NotFoundError."""
        now = await self.now_ms()

        def revoked(held: ApiKey) -> ApiKey:
            return held if held.revoked_ms else msgspec.structs.replace(held, revoked_ms=now)

        return await self._change_key(key_id, revoked)

    async def rotate_key(
        self, key_id: str, grace_s: float, expires_s: float | None = None
    ) -> tuple[str, ApiKey, ApiKey]:
        """Make a key that opens the same, and let the old one expire after a grace.

        Args:
            expires_s: life of the new key; None: as long as the old one was made for.

        Returns:
            The new key, its record, and the old one's.

        Raises:
            NotFoundError: there is no such key.
            ConflictError: it opens nothing any more, or was rotated already.
        """
        for _ in range(_ROUNDS):
            data = await self._ask("HGET", keys.access("keys"), _key_id(key_id))
            if data is None:
                raise _no_key()
            old, now = decode(data, ApiKey), await self.now_ms()
            if old.state(now) != "active" or old.replaced_by:
                why = f"rotated to {old.replaced_by}" if old.replaced_by else old.state(now)
                raise ConflictError(f"the key {key_id} is {why}: make a new one")
            life_ms = old.expires_ms - old.created_ms if old.expires_ms else 0
            expires = _expiry(now, expires_s) if expires_s is not None else now + life_ms if life_ms else 0
            secret, new = _make(now, old.tenant, old.scopes, old.name, expires)
            last = now + round(max(0.0, grace_s) * 1e3)
            last = min(old.expires_ms, last) if old.expires_ms else last
            ended = msgspec.structs.replace(old, expires_ms=last, replaced_by=new.id)
            if await self._write("keys", [(new.id, b"", encode(new)), (old.id, data, encode(ended))]):
                return secret, new, ended
        raise _busy()

    async def terms(self, tenant: str) -> TenantTerms | None:
        """What a tenant is granted; None where nobody has said so."""
        return await self._one("tenants", tenant, TenantTerms)

    async def all_terms(self) -> list[TenantTerms]:
        """Of all tenants that have any, by name."""
        return [terms for _, terms in sorted((await self._all("tenants", TenantTerms)).items())]

    async def change_terms(self, tenant: str, change: Callable[[TenantTerms], TenantTerms]) -> TenantTerms:
        """Change what a tenant is granted; who has no terms begins with the defaults.

        Raises:
            InvalidRequestError: a name that is none of a tenant, or a value out of bounds; nothing was changed.
        """
        name = checked_tenant(tenant)
        for _ in range(_ROUNDS):
            data = await self._ask("HGET", keys.access("tenants"), name)
            held = TenantTerms(name=name) if data is None else decode(data, TenantTerms)
            wanted = change(held)
            check_terms(wanted)
            if await self._write("tenants", [(name, data or b"", encode(wanted))]):
                return wanted
        raise _busy()

    async def forget_terms(self, tenant: str) -> bool:
        """Let a tenant have the settings' limits again. False: it had no terms."""
        for _ in range(_ROUNDS):
            data = await self._ask("HGET", keys.access("tenants"), tenant)
            if data is None:
                return False
            if await self._write("tenants", [(tenant, data, b"")]):
                return True
        raise _busy()

    async def _change_key(self, key_id: str, change: Callable[[ApiKey], ApiKey]) -> ApiKey:
        for _ in range(_ROUNDS):
            data = await self._ask("HGET", keys.access("keys"), _key_id(key_id))
            if data is None:
                raise _no_key()
            wanted = change(decode(data, ApiKey))
            # Also where nothing changes: gateways hear it once more.
            if await self._write("keys", [(key_id, data, encode(wanted))]):
                return wanted
        raise _busy()

    async def _write(self, what: str, changes: Sequence[tuple[str, bytes, bytes]]) -> bool:
        return bool(await self._run(write_call(what, changes)))

    async def _one(self, what: str, name: str, kind: type[R]) -> R | None:
        data = await self._ask("HGET", keys.access(what), name)
        return None if data is None else decode(data, kind)

    async def _all(self, what: str, kind: type[R]) -> Mapping[str, R]:
        held = await self._ask("HGETALL", keys.access(what))
        return {name.decode(errors="replace"): decode(data, kind) for name, data in held.items()}


def check_terms(terms: TenantTerms) -> None:
    """Raises InvalidRequestError for a value out of bounds; `param` names it."""
    for name in ("requests", "tokens", "queued_jobs", "queued_tokens"):
        limit = getattr(terms, name)
        if limit is not None and limit != NO_LIMIT and not 1 <= limit < 2**53:
            raise InvalidRequestError(f"{name}: must be at least 1", param=name)
    if not MIN_WEIGHT <= terms.weight <= MAX_WEIGHT:
        raise InvalidRequestError(f"weight: must be from {MIN_WEIGHT} to {MAX_WEIGHT:g}", param="weight")
    models = terms.models or []
    if len(models) > MAX_MODELS or not all(_MODEL.fullmatch(name) for name in models):
        raise InvalidRequestError(
            f"models: must be at most {MAX_MODELS} names of up to 256 printable characters", param="models"
        )


def _make(now_ms: int, tenant: str, scopes: Sequence[Scope], name: str, expires_ms: int) -> tuple[str, ApiKey]:
    secret = new_key()
    mine = presented(secret.encode())
    assert isinstance(mine, PresentedKey)
    return secret, ApiKey(
        id=mine.id,
        digest=mine.digest,
        tenant=tenant,
        scopes=list(scopes),
        name=name,
        created_ms=now_ms,
        expires_ms=expires_ms,
    )


def _scopes(names: Sequence[str]) -> list[Scope]:
    wrong = [name for name in names if name not in SCOPES]
    if wrong or not names:
        raise InvalidRequestError(f"scope: must be of {', '.join(SCOPES)}", param="scope")
    return [scope for scope in SCOPES if scope in names]


def _name(text: str) -> str:
    if len(text) > MAX_NAME or not text.isprintable():
        raise InvalidRequestError(f"name: must be at most {MAX_NAME} printable characters", param="name")
    return text


def _expiry(now_ms: int, seconds: float | None) -> int:
    if seconds is None:
        return 0
    if not 0 < seconds < 1e10:
        raise InvalidRequestError("expires: must be more than nothing", param="expires")
    return now_ms + round(seconds * 1e3)


def _key_id(text: str) -> str:
    """Raises NotFoundError for what cannot be an id: a whole key must not get into a command or a message."""
    if ID_PATTERN.fullmatch(text) is None:
        raise _no_key()
    return text


def _no_key() -> NotFoundError:
    return NotFoundError("no key has this id, which stands between the hyphens of a key; see `ropeway keys list --all`")


def _busy() -> ConflictError:
    return ConflictError("it is being changed by others all the time: try again")
