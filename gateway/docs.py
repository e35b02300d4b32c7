"""The OpenAPI document, the page that shows it, which needs nothing from elsewhere, and the way to both.

Routes read bodies themselves, so that errors and limits are theirs; here their bodies and errors get into the document.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

#: Models of bodies of routes, in the order in which they were named.
_documented: dict[type[BaseModel], None] = {}
_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
#: What the framework says of errors that are never answered.
_NEVER = ("HTTPValidationError", "ValidationError")
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


def body_docs(*models: type[BaseModel], required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of a route whose body is of one of these models."""
    _documented.update(dict.fromkeys(models))
    refs = [{"$ref": _REF.format(model=model.__name__)} for model in models]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI) -> None:
    """Make the application's document hold the models of `body_docs` and its errors; serve the page at `/docs`, and at
    `/` where all is.
    """
    page = files("gateway").joinpath("docs.html").read_text("utf-8")

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = document_of(app)
        return app.openapi_schema

    async def docs(request: Request) -> Response:
        return HTMLResponse(page, headers=_PAGE_HEADERS)

    async def root(request: Request) -> Response:
        return JSONResponse(
            {"name": app.title, "version": app.version, "docs": "/docs", "openapi": "/openapi.json", "api": "/v1"}
        )

    app.openapi = document  # type: ignore[method-assign]
    app.add_api_route("/docs", docs, include_in_schema=False)
    app.add_api_route("/", root, include_in_schema=False)


def document_of(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document."""
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, definitions = models_json_schema([(model, "validation") for model in _documented], ref_template=_REF)
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    _add_errors(schema)
    return schema


def _add_errors(schema: dict[str, Any]) -> None:
    """Give every operation the body of errors, and say how keys are sent."""
    components = schema["components"]
    for name in _NEVER:
        components["schemas"].pop(name, None)
    components["schemas"]["Error"] = _ERROR
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"key": []}, {}]
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "An error", "content": content}
