"""Probes and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from gateway.services import Services, services_of
from shared.errors import RopewayError
from shared.metrics import exposition

log = structlog.get_logger(__name__)

router = APIRouter(tags=["operation"])

#: Seconds that a probe waits for Redis.
REDIS_TIMEOUT_S = 2.0


@router.get("/health")
async def health(request: Request) -> Response:
    """Whether the process lives: 503 only if a restart would help."""
    alive = services_of(request).hub.alive
    return JSONResponse({"status": "ok" if alive else "failed"}, 200 if alive else 503)


@router.get("/ready")
async def ready(request: Request) -> Response:
    """Whether requests can be taken: Redis answers, and a model has a card or is meant to be here."""
    services = services_of(request)
    # Not cancelled when it is late: a command that is broken off costs its connection.
    check = asyncio.create_task(_redis_answers(services))
    await asyncio.wait({check}, timeout=REDIS_TIMEOUT_S)
    redis = check.done() and check.result()
    models = [pool.card.pool for pool in services.catalogue.pools]
    well = redis and bool(models or services.settings.pools) and services.hub.connected
    state: dict[str, Any] = {"status": "ready" if well else "unready", "redis": redis, "models": models}
    return JSONResponse(state, 200 if well else 503, headers={} if well else {"retry-after": "1"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Metrics as OpenMetrics for who accepts it, else in the text format of Prometheus."""
    services = services_of(request)
    services.metrics.streams.set(services.hub.streams)
    if services.task_queues is not None:
        # Not cancelled when it is late: threads cannot be.
        look = asyncio.create_task(asyncio.to_thread(services.task_queues.look))
        await asyncio.wait({look}, timeout=REDIS_TIMEOUT_S)
    for name in {pool.card.pool for pool in services.catalogue.pools}.union(services.settings.pools):
        services.metrics.serves(name)
    body, media_type = exposition(services.metrics.registry, request.headers.get("accept"))
    return Response(body, media_type=media_type)


async def _redis_answers(services: Services) -> bool:
    try:
        await services.store.now_ms()
        await services.catalogue.refresh_if_empty()
    except RopewayError as error:
        log.warning("ready.redis_away", error=error.message)
        return False
    return True
