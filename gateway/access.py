"""Keys and policies of this gateway: from the settings and from Redis, and how changes there are heard of."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from pydantic import SecretStr

from gateway.keyring import ADMIN_SCOPES, METRICS_SCOPES, STATIC_SCOPES, Keyring, StaticKey
from gateway.lookups import Lookups
from gateway.policies import Policies
from shared.access import Access, parse_news
from shared.api_keys import ApiKey, Scope
from shared.errors import RopewayError
from shared.jobs import QueuedLimits, RateLimits
from shared.settings import GatewaySettings
from shared.tenant_terms import TenantTerms

log = structlog.get_logger(__name__)


class Gate:
    """Who may ask, and for what.

    Attributes:
        keyring: finds out whom a key stands for.
        policies: what tenants may.
    """

    def __init__(self, access: Access, settings: GatewaySettings) -> None:
        self._access, self._settings = access, settings
        self._said_unused = False
        fresh_s, outage_s = settings.key_cache_s, settings.key_outage_s
        self._keys: Lookups[ApiKey] = Lookups(access.key, fresh_s=fresh_s, outage_s=outage_s)
        self._terms: Lookups[TenantTerms] = Lookups(self._ask_terms, fresh_s=fresh_s, outage_s=outage_s)
        metrics = [settings.metrics_key] if settings.metrics_key else []
        static = [
            *_static(settings.admin_api_keys, ADMIN_SCOPES),
            *_static(settings.api_keys, STATIC_SCOPES),
            *_static(metrics, METRICS_SCOPES),
        ]
        self.keyring = Keyring(static, self._keys.find)
        self.policies = Policies(
            self._find_terms,
            RateLimits(settings.rate_limit_requests, settings.rate_limit_tokens),
            QueuedLimits(settings.max_tenant_queued_jobs, settings.max_tenant_queued_tokens),
        )

    def hear(self, data: bytes | None) -> None:
        """Take a message of the channel about keys and tenants, or None where some may have been missed."""
        news = None if data is None else parse_news(data)
        if news is None:
            self._keys.doubt()
            self._terms.doubt()
            return
        if news.op == "keys" and not self._settings.keys_required:
            self._say_unused()
        for name in news.names:
            if news.op == "keys":
                self._keys.forget(name)
            elif news.op == "tenants":
                self._terms.forget(name)

    async def warn_if_open(self) -> None:
        """Say once that everybody is let in; louder where somebody made keys, and may think otherwise."""
        if self._settings.keys_required:
            return
        log.warning("gateway.open", host=self._settings.host, hint="ROPEWAY_REQUIRE_KEYS=true asks for keys")
        try:
            unused = await self._access.any_keys()
        except RopewayError as error:  # what Redis has is not known now, and nothing depends on it
            log.debug("gateway.keys_unknown", error=error.message)
            return
        if unused:
            self._say_unused()

    def _say_unused(self) -> None:
        """Say, once, that there are keys and that they keep nobody out."""
        if not self._said_unused:
            self._said_unused = True
            log.error("gateway.open_despite_keys", hint="there are keys, none is asked for: ROPEWAY_REQUIRE_KEYS=true")

    async def _ask_terms(self, tenant: str) -> TenantTerms:
        return await self._access.terms(tenant) or TenantTerms(name=tenant)

    async def _find_terms(self, tenant: str) -> TenantTerms:
        return await self._terms.find(tenant) or TenantTerms(name=tenant)


def _static(secrets: Sequence[SecretStr], scopes: frozenset[Scope]) -> list[StaticKey]:
    return [StaticKey(secret.get_secret_value(), scopes) for secret in secrets]
