"""Request bodies in the OpenAPI document. Routes read bodies themselves, so that errors and limits are theirs."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

#: Models of bodies of routes, in the order in which they were named.
_documented: dict[type[BaseModel], None] = {}
_REF = "#/components/schemas/{model}"


def body_docs(*models: type[BaseModel], required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is of one of these models."""
    _documented.update(dict.fromkeys(models))
    refs = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI) -> None:
    """Make the application's document hold the models of `body_docs`."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, definitions = models_json_schema(
                [(model, "validation") for model in _documented],
                ref_template=_REF,
            )
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(definitions["$defs"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
