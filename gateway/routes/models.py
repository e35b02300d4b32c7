"""`GET /v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.catalogue import Pool
from gateway.services import services_of

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Models that are served. One without workers takes jobs, which wait for a worker."""
    catalogue = services_of(request).catalogue
    await catalogue.refresh_if_empty()
    return {"object": "list", "data": [_model(pool) for pool in catalogue.pools]}


@router.get("/v1/models/{model}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One model."""
    return _model(await services_of(request).catalogue.find(model))


def _model(pool: Pool) -> dict[str, Any]:
    return {
        "id": pool.card.pool,
        "object": "model",
        "created": pool.card.created_ms // 1000,
        "owned_by": "ropeway",
        "max_model_len": pool.card.max_model_len,
        "workers": len(pool.workers),
    }
