"""`/v1/pools`: what is queued and running, and how many workers that needs. Made for autoscalers."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from gateway.services import services_of
from shared.errors import ModelNotFoundError
from shared.keys import POOL_PATTERN

router = APIRouter(tags=["operation"])

_MAX_NAME = 96

Target = Annotated[
    float | None, Query(gt=0, allow_inf_nan=False, description="seconds that a queued job may wait; unset: the setting")
]
Jobs = Annotated[
    float | None,
    Query(ge=1, allow_inf_nan=False, description="jobs that a worker takes at once; unset: what workers say"),
]


@router.get("/v1/pools")
async def list_pools(request: Request, target_s: Target = None) -> dict[str, Any]:
    """The load of every pool that is known, or meant to be here."""
    services = services_of(request)
    await services.catalogue.refresh_if_empty()
    states = [await services.pools.look(name, target_s=target_s) for name in services.pools.names()]
    return {"object": "list", "data": [state.body() for state in states]}


@router.get("/v1/pools/{pool}/load")
async def pool_load(
    request: Request, pool: str, target_s: Target = None, jobs_per_worker: Jobs = None
) -> dict[str, Any]:
    """One pool's load. While Redis is away the answer is 503, never a queue that looks empty."""
    if len(pool) > _MAX_NAME or POOL_PATTERN.match(pool) is None:
        raise ModelNotFoundError("pool: this is no name of a pool", param="pool")
    state = await services_of(request).pools.look(pool, target_s=target_s, jobs=jobs_per_worker)
    return state.body()
