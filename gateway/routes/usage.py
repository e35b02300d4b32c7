"""`GET /v1/usage`: what keys have used, by day and model."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from gateway import wire_format
from gateway.services import caller_of, services_of
from shared.api_keys import TENANT_PATTERN
from shared.errors import InvalidRequestError, PermissionDeniedError
from shared.usage import UsageRow, days_of, parse_day

router = APIRouter(tags=["operation"])

_JSON = "application/json"
Day = Annotated[str | None, Query(max_length=10, description="a day (UTC) such as 2026-01-31; unset: today")]


@router.get("/v1/usage", response_model=None)
async def get_usage(
    request: Request,
    start: Day = None,
    end: Day = None,
    tenant: Annotated[str | None, Query(max_length=64, description="for administrators; unset: all")] = None,
    key: Annotated[str | None, Query(max_length=64, description="the public id of a key")] = None,
    model: Annotated[str | None, Query(max_length=256)] = None,
) -> Response:
    """Jobs that ended and their tokens, by day, tenant, key and model: of all tenants for administrators."""
    services, own = services_of(request), caller_of(request).tenant
    if not services.admins.is_admin(request):
        if tenant not in (None, own):
            message = "tenant: only keys of the scope admin see other tenants"
            raise PermissionDeniedError(message, param="tenant", code="missing_scope")
        tenant = own
    elif tenant is not None and TENANT_PATTERN.fullmatch(tenant) is None:
        raise InvalidRequestError("tenant: this is no name of a tenant", param="tenant")
    today = await services.usage.today()
    first = today if start is None else parse_day(start, "start")
    last = today if end is None else parse_day(end, "end")
    rows = [
        _shown(row)
        for row in await services.usage.usage(days_of(first, last), tenant)
        if key in (None, row.key) and model in (None, row.model)
    ]
    return Response(wire_format.encode({"object": "list", "data": rows, "has_more": False}), media_type=_JSON)


def _shown(row: UsageRow) -> dict[str, object]:
    return {
        "object": "usage",
        "date": row.day.isoformat(),
        "tenant": row.tenant,
        "key": row.key or None,
        "model": row.model,
        "requests": row.requests,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "completion_tokens": row.completion_tokens,
    }
