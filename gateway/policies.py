"""What each tenant may: limits, weight, models and highest class, by the operator's word or else by the settings."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from shared.errors import PermissionDeniedError
from shared.jobs import QueuedLimits, RateLimits
from shared.keys import CLASSES
from shared.protocol import JobClass
from shared.tenant_terms import NO_LIMIT, TenantTerms

#: Of a request that does not ask for any.
DEFAULT_CLASS: Final[JobClass] = "normal"


@dataclass(frozen=True, slots=True)
class Policy:
    """Of one tenant; see `TenantTerms`."""

    rates: RateLimits = field(default_factory=RateLimits)
    queued: QueuedLimits = field(default_factory=QueuedLimits)
    weight: float = 1.0
    models: tuple[str, ...] | None = None
    max_class: JobClass = "high"

    def allows(self, model: str) -> bool:
        """Whether a model or adapter may be asked for by this name."""
        return self.models is None or any(
            model.startswith(name[:-1]) if name.endswith("*") else model == name for name in self.models
        )

    def check_model(self, model: str, param: str = "model") -> None:
        """Raises PermissionDeniedError for a name that may not be asked for, whether there is such a model or not."""
        if not self.allows(model):
            message = f"{param}: your tenant may not use this model"
            raise PermissionDeniedError(message, param=param, code="model_not_allowed")

    def class_of(self, asked: JobClass, param: str) -> JobClass:
        """The class of a job: what was asked for; the tenant's highest where only the default is above that.

        Raises:
            PermissionDeniedError: more was asked for than the default and than the tenant may have.
        """
        if CLASSES.index(asked) >= CLASSES.index(self.max_class):
            return asked
        if CLASSES.index(asked) < CLASSES.index(DEFAULT_CLASS):
            raise PermissionDeniedError(
                f"{param}: the highest class of your tenant is {self.max_class}", param=param, code="class_not_allowed"
            )
        return self.max_class


class Policies:
    """Finds policies.

    Args:
        find: a tenant's terms; raises ServiceUnavailableError.
        rates, queued: of tenants whose terms do not say so.
    """

    def __init__(self, find: Callable[[str], Awaitable[TenantTerms]], rates: RateLimits, queued: QueuedLimits) -> None:
        self._find, self._rates, self._queued = find, rates, queued

    async def of(self, tenant: str) -> Policy:
        """A tenant's policy.

        Raises:
            ServiceUnavailableError: Redis is away, and nothing was heard of this tenant lately.
        """
        terms = await self._find(tenant)
        rates, queued = self._rates, self._queued
        return Policy(
            RateLimits(_limit(terms.requests, rates.requests), _limit(terms.tokens, rates.tokens)),
            QueuedLimits(_limit(terms.queued_jobs, queued.jobs), _limit(terms.queued_tokens, queued.tokens)),
            terms.weight,
            None if terms.models is None else tuple(terms.models),
            terms.max_class,
        )


def _limit(granted: int | None, default: int | None) -> int | None:
    if granted is None:
        return default
    return None if granted == NO_LIMIT else granted
