"""What signs the webhooks of each tenant. It has to be known in clear, so whoever reads Redis can sign."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shared import keys
from shared.api_keys import checked_tenant
from shared.errors import ForeignDataError
from shared.jobstore import JobStore
from shared.scripts import Call
from shared.webhook_signing import new_secret

_DEFAULT = b"default"


class TenantSecret(msgspec.Struct, frozen=True, omit_defaults=True):
    """A secret; until `until_ms` (Unix ms of Redis's clock) the one before it signs too."""

    secret: str
    made_ms: int
    previous: str | None = None
    until_ms: int = 0

    def signing(self, now_ms: int) -> list[str]:
        """Those that sign now, the newest first."""
        return [self.secret, self.previous] if self.previous and now_ms < self.until_ms else [self.secret]


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(TenantSecret)


class WebhookSecrets(JobStore):
    """A job store with the secrets of webhooks: of tenants that have their own, and the one of all others where no
    setting has any.

    Every method raises ServiceUnavailableError where Redis is away, ForeignDataError for a secret that does not read.
    """

    async def signing(self, tenant: str, settings: Sequence[str]) -> list[str]:
        """What signs for a tenant, the newest first.

        Args:
            settings: of those that have no secret of their own; empty: one that is made once, and kept in Redis.
        """
        key = keys.webhook_state("secrets")
        own, default = await self._ask("HMGET", key, _field(tenant), _DEFAULT)
        if own is None and settings:
            return list(settings)
        held = own if own is not None else default
        if held is None:
            return (await self.made_default()).signing(0)
        return _read(held).signing(await self._clock_ms())

    async def made_default(self) -> TenantSecret:
        """The secret of all who have no other; made if there is none."""
        key = keys.webhook_state("secrets")
        await self._ask("HSETNX", key, _DEFAULT, _ENCODER.encode(await self._new(new_secret())))
        return _read(await self._ask("HGET", key, _DEFAULT))

    async def of(self, tenant: str | None) -> TenantSecret | None:
        """A tenant's own secret; for None the one of all others, if it was made."""
        held = await self._ask("HGET", keys.webhook_state("secrets"), _field(tenant))
        return None if held is None else _read(held)

    async def tenants(self) -> list[str]:
        """Those that have a secret of their own, sorted."""
        names = await self._ask("HKEYS", keys.webhook_state("secrets"))
        return sorted(name[2:].decode(errors="replace") for name in names if name != _DEFAULT)

    async def replace(self, tenant: str | None, secret: str, grace_s: float) -> TenantSecret:
        """Give a tenant a secret; the one before signs beside it for so many seconds.

        Raises:
            InvalidRequestError: no tenant can have that name.
        """
        if tenant is not None:
            checked_tenant(tenant)
        before = await self.of(tenant)
        made = await self._new(secret)
        if before is not None and grace_s > 0 and before.secret != secret:
            until = made.made_ms + round(grace_s * 1e3)
            made = msgspec.structs.replace(made, previous=before.secret, until_ms=until)
        await self._ask("HSET", keys.webhook_state("secrets"), _field(tenant), _ENCODER.encode(made))
        return made

    async def remove(self, tenant: str) -> bool:
        """Take a tenant's own secret away; False: it had none."""
        return bool(await self._ask("HDEL", keys.webhook_state("secrets"), _field(tenant)))

    async def _new(self, secret: str) -> TenantSecret:
        return TenantSecret(secret, await self._clock_ms())

    async def _clock_ms(self) -> int:
        seconds, microseconds = await self._run(Call(("TIME",), keys.webhook_state("secrets")))
        return int(seconds) * 1000 + int(microseconds) // 1000


def _field(tenant: str | None) -> bytes:
    return _DEFAULT if tenant is None else b"t:" + tenant.encode()


def _read(data: bytes) -> TenantSecret:
    try:
        return _DECODER.decode(data)
    except msgspec.DecodeError as error:
        raise ForeignDataError("a webhook's secret is not one that was written here") from error
