"""`/v1/adapters`: list, show, load, unload; and vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from gateway.adapter_desk import LoadOrder
from gateway.docs import body_docs
from gateway.schemas import LoadAdapterRequest, UnloadAdapterRequest, parse
from gateway.services import body_of, caller_of, services_of
from gateway.uploads import UploadForm, boundary_of, receive
from shared.adapter_record import AdapterRecord
from shared.errors import ConflictError, InvalidRequestError, OverloadedError
from shared.lora.source import parse_source, upload_source

router = APIRouter(tags=["adapters"])

_JSON = "application/json"
_TRUE, _FALSE = frozenset({"true", "1"}), frozenset({"false", "0", ""})
Wait = Annotated[float, Query(ge=0, allow_inf_nan=False, description="seconds to wait for the load's end, bounded")]


@router.get("/v1/adapters", response_model=None)
async def list_adapters(request: Request) -> Response:
    """All adapters, those too whose load failed or whose last jobs are running."""
    services = services_of(request)
    admin = services.admins.is_admin(request)
    views = await services.adapters.views(sources=admin)
    if not admin:
        policy = await services.policies.of(caller_of(request).tenant)
        views = [view for view in views if policy.allows(view.id)]
    return Response(msgspec.json.encode({"object": "list", "data": views}), media_type=_JSON)


@router.post("/v1/adapters", status_code=202, openapi_extra=body_docs(LoadAdapterRequest), response_model=None)
async def create_adapter(request: Request, wait: Wait = 0.0) -> Response:
    """Load an adapter: from a folder or the hub with a JSON body, or from its files in a multipart form."""
    services = services_of(request)
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is None:
        order = _order(await body_of(request, LoadAdapterRequest))
        record = await services.adapters.load(order)
    else:
        order, record = await _uploaded(request, boundary)
    if wait > 0:
        await services.adapters.wait(record, min(wait, services.settings.adapter_wait_s))
    view = await services.adapters.view(order.name, sources=True)
    status = 202 if view.state == "loading" else 200
    headers = {"location": f"/v1/adapters/{order.name}"}
    return Response(msgspec.json.encode(view), status_code=status, media_type=_JSON, headers=headers)


@router.get("/v1/adapters/{name:path}", response_model=None)
async def get_adapter(request: Request, name: str) -> Response:
    """One adapter."""
    services = services_of(request)
    admin = services.admins.is_admin(request)
    if not admin:
        (await services.policies.of(caller_of(request).tenant)).check_model(name)
    view = await services.adapters.view(name, sources=admin)
    return Response(msgspec.json.encode(view), media_type=_JSON)


@router.delete("/v1/adapters/{name:path}", response_model=None)
async def delete_adapter(request: Request, name: str) -> Response:
    """Unload an adapter: new jobs get 404 from now on, those that are queued or running end as they would have."""
    services = services_of(request)
    in_flight = await services.adapters.unload(name)
    body = {"id": name, "object": "adapter", "deleted": True, "in_flight": in_flight}
    return Response(msgspec.json.encode(body), media_type=_JSON)


@router.post("/v1/load_lora_adapter", openapi_extra=body_docs(LoadAdapterRequest), response_model=None)
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter and wait until that has ended; as of vLLM."""
    services = services_of(request)
    order = _order(await body_of(request, LoadAdapterRequest))
    record = await services.adapters.load(order)
    await services.adapters.wait(record, services.settings.adapter_wait_s)
    return PlainTextResponse(f"Success: LoRA adapter '{order.name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=body_docs(UnloadAdapterRequest), response_model=None)
async def unload_lora_adapter(request: Request) -> Response:
    """Unload an adapter; as of vLLM."""
    services = services_of(request)
    body = await body_of(request, UnloadAdapterRequest)
    await services.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _order(body: LoadAdapterRequest, source: str | None = None) -> LoadOrder:
    """What a body asks for.

    Raises:
        InvalidRequestError: `lora_path` is missing, or nothing that is read.
    """
    if source is None:
        if body.lora_path is None:
            raise InvalidRequestError("lora_path: this field is required", param="lora_path")
        parse_source(body.lora_path)
    return LoadOrder(
        name=body.lora_name,
        source=body.lora_path or "" if source is None else source,
        base_model=body.base_model,
        replace=bool(body.load_inplace),
        pinned=bool(body.pin),
    )


async def _uploaded(request: Request, boundary: bytes) -> tuple[LoadOrder, AdapterRecord]:
    """Write the files of a form to the store, and have them loaded; nothing stays of what is refused.

    Fields may stand before or behind the files; what they say is looked at when all is there.
    """
    services = services_of(request)
    store = await services.in_thread(services.adapter_store)
    form = UploadForm(store, boundary, services.settings.max_adapter_bytes)
    await receive(form, request.stream())
    try:
        body = parse(LoadAdapterRequest, _typed(form.fields))
        if body.lora_path is not None:
            raise InvalidRequestError("lora_path: cannot go with files", param="lora_path")
        order = _order(body, upload_source(form.upload))
        await services.adapters.check(order)
    except BaseException:
        await services.in_thread(form.abandon)
        raise
    try:
        return order, await services.adapters.load(order)
    except (InvalidRequestError, ConflictError, OverloadedError):  # of other errors the load may be under way
        await services.in_thread(form.abandon)
        raise


def _typed(fields: dict[str, str]) -> dict[str, object]:
    """Text of a form as the JSON of a body would have it."""
    typed: dict[str, object] = dict(fields)
    for name in ("load_inplace", "pin"):
        if name in fields:
            text = fields[name].lower()
            if text not in _TRUE | _FALSE:
                raise InvalidRequestError(f"{name}: must be true or false", param=name)
            typed[name] = text in _TRUE
    return typed
