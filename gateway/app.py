"""The application: middleware and routes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import FastAPI
from starlette.routing import BaseRoute, Route

from gateway import cors, docs, errors, scopes
from gateway.admin import Admins
from gateway.authentication import Authentication
from gateway.lifetime import open_services
from gateway.metrics import GatewayMetrics
from gateway.middleware import ADAPTERS, FILES, FORM_BYTES, BodyLimit, RequestScope
from gateway.routes import (
    adapters,
    batches,
    chat,
    completions,
    files,
    health,
    jobs,
    models,
    pools,
    responses,
    tokenize,
    usage,
)
from shared.settings import GatewaySettings
from shared.tracing import open_tracing


def create_app(settings: GatewaySettings) -> FastAPI:
    """The gateway as an ASGI application. Redis may be away when it starts; it is then not ready.

    Raises:
        InvalidRequestError: traces are to be sent, and what that needs is not installed.
    """
    metrics = GatewayMetrics()
    tracing = open_tracing(settings, "ropeway-gateway", secrets.token_hex(16))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            # Behind everything else: what ends with the process may still have something to say.
            stack.push_async_callback(asyncio.to_thread, tracing.close)
            app.state.services = await open_services(settings, metrics, tracing, stack)
            yield

    app = FastAPI(
        title="Ropeway",
        version=_version(),
        description="Message-queue-driven inference",
        lifespan=lifespan,
        docs_url=None,
        # RequestScope makes spans. The framework's own would look for global providers at each request, and hold
        # queries, tokens of streams among them.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        redoc_url=None,
    )
    for room in (chat, completions, responses, tokenize, models, adapters, files, batches, jobs, pools, usage, health):
        app.include_router(room.router)
        metrics.routes(_routes(room.router.routes))
        scopes.check_complete(_routes(room.router.routes))
    errors.install(app)
    docs.install(app)
    scopes.check_complete(_routes(app.routes))
    # The last one added is the outermost.
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_bytes,
        uploads={ADAPTERS: settings.max_adapter_bytes + FORM_BYTES, FILES: settings.max_file_bytes + FORM_BYTES},
    )
    admins = Admins(settings)
    app.add_middleware(Authentication, required=settings.keys_required, admins=admins)
    app.add_middleware(RequestScope, metrics=metrics, tracing=tracing)
    if settings.cors_origins:
        cors.install(app, settings.cors_origins)
    return app


def _routes(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Method and path of each."""
    for route in routes:
        if isinstance(route, Route):
            yield from ((method, route.path) for method in route.methods or ())


def _version() -> str:
    try:
        return version("ropeway")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "0"
