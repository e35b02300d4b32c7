"""The table of scopes: it has every route, and a path gets what its route has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.routing import Route

from gateway import scopes
from gateway.app import create_app
from gateway.scopes import TABLE, check, check_complete, needed_for
from shared.errors import InvalidRequestError, PermissionDeniedError
from shared.settings import GatewaySettings


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(GatewaySettings())


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    for context in iter_route_contexts(app.routes):
        for method in context.methods or ():
            assert context.path is not None
            yield method, context.path


def test_every_route_has_a_scope_and_no_scope_is_without_a_route(app: FastAPI) -> None:
    found = {route for route in routes(app) if route[0] != "HEAD"}
    assert len(found) > 30
    assert found == set(TABLE)


def test_an_application_with_a_route_that_has_none_is_refused(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LookupError, match="GET /v1/new"):
        check_complete([("GET", "/health"), ("GET", "/v1/new")])
    monkeypatch.delitem(scopes.TABLE, ("POST", "/v1/jobs"))
    with pytest.raises(LookupError, match="POST /v1/jobs"):
        create_app(GatewaySettings())


def test_nothing_but_probes_is_open() -> None:
    assert {path for (_, path), needed in TABLE.items() if needed is None} == {"/health", "/ready"}


@pytest.mark.parametrize(
    "path",
    [
        "/health", "/v1/jobs", "/v1/jobs/x", "/v1/jobs/x/events", "/v1/jobs/x/y/events", "/v1/jobs/",
        "/v1/jobs//events",
        "/v1/adapters", "/v1/adapters/", "/v1/adapters/a/b", "/v1/adapters/a/b/../c", "/v1/models/x/y", "/v1/models",
        "/v1/files/x/content", "/v1/pools/p/load", "/v1/pools/p/q/load", "/v1/pools", "/v1/nothing", "/", "",
        "/metrics", "/metrics/", "/V1/jobs", "//v1/jobs", "/v1/responses/r/cancel", "/openapi.json", "/docs",
        "/v1/load_lora_adapter", "/v1/usage", "/v1/jobs/x%2fevents",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "PUT"])
def test_a_path_gets_what_its_route_has(app: FastAPI, method: str, path: str) -> None:
    """The table is asked before the router is: both must find the same."""
    scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": [], "query_string": b""}
    served = None
    for context in iter_route_contexts(app.routes):
        route = context.original_route
        assert isinstance(route, Route)
        if route.path_regex.match(scope["path"]) and method in (context.methods or ()):
            served = context.path
            break
    got = needed_for(method, path)
    if served is None:
        assert got is not None or path in ("/health", "/ready"), "what is no route is not open"
    else:
        assert got == TABLE["GET" if method == "HEAD" else method, served]


@pytest.mark.parametrize("control", ["\n", "\r", "\x00", "\x7f"])
def test_a_path_with_control_characters_is_no_route_s(control: str) -> None:
    """A router's pattern ends before a last line feed too, so such a path would lead to a handler."""
    for method, path in TABLE:
        for bad in (path + control, path.replace("/", "/" + control, 1)):
            with pytest.raises(InvalidRequestError, match="control characters"):
                needed_for(method, bad)


def test_a_scope_too_few() -> None:
    check(frozenset({"admin"}), frozenset({"admin", "inference"}))
    check(frozenset(), frozenset())
    with pytest.raises(PermissionDeniedError, match=r"Missing scopes: admin or inference$") as caught:
        check(frozenset({"metrics"}), frozenset({"admin", "inference"}))
    assert (caught.value.status, caught.value.error_code) == (403, "missing_scope")
