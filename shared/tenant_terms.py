"""What a tenant is granted, where an operator has said so."""

from __future__ import annotations

from typing import Final

import msgspec

from shared.protocol import JobClass

#: In place of a limit: none at all, whatever the settings say.
NO_LIMIT: Final = -1
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
MAX_MODELS: Final = 1000


class TenantTerms(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Of one tenant. A limit that is None is the gateway settings', `NO_LIMIT` is none.

    Attributes:
        requests, tokens: per minute.
        queued_jobs, queued_tokens: queued at once, over all models.
        weight: share of the queue beside other tenants of the same class, relative to 1.
        models: names of models and adapters that it may ask for; one that ends in `*` stands for all that begin so.
            None: all.
        max_class: the highest class of its jobs.
    """

    name: str
    requests: int | None = None
    tokens: int | None = None
    queued_jobs: int | None = None
    queued_tokens: int | None = None
    weight: float = 1.0
    models: list[str] | None = None
    max_class: JobClass = "high"
