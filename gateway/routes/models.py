"""`GET /v1/models`: base models, and adapters with their base as `parent`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.catalogue import Pool
from gateway.served import serves
from gateway.services import caller_of, services_of
from shared.adapter_record import AdapterRecord

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Models that are served, the base models first. One without workers takes jobs, which wait for a worker."""
    services = services_of(request)
    policy = await services.policies.of(caller_of(request).tenant)
    await services.catalogue.refresh_if_empty()
    pools = {pool.card.pool: pool for pool in services.catalogue.pools}
    adapters = [
        _adapter(record, pools[record.pool])
        for record in await services.adapters.records()
        if record.pool in pools and serves(pools[record.pool], record) and record.name not in pools
    ]
    models = [model for model in (*map(_model, pools.values()), *adapters) if policy.allows(model["id"])]
    return {"object": "list", "data": models}


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> dict[str, Any]:
    """One model."""
    services = services_of(request)
    (await services.policies.of(caller_of(request).tenant)).check_model(model)
    served = await services.directory.find(model)
    return _model(served.pool) if served.record is None else _adapter(served.record, served.pool)


def _model(pool: Pool) -> dict[str, Any]:
    return _shown(pool, pool.card.pool, pool.card.created_ms, parent=None)


def _adapter(record: AdapterRecord, pool: Pool) -> dict[str, Any]:
    return _shown(pool, record.name, record.loaded_ms, parent=record.pool)


def _shown(pool: Pool, name: str, created_ms: int, *, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created_ms // 1000,
        "owned_by": "ropeway",
        "root": name,
        "parent": parent,
        "max_model_len": pool.card.max_model_len,
        "workers": len(pool.workers),
    }
