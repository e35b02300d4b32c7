"""Pages of other origins, where a setting names them. Keys travel in headers, never in cookies."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

#: Headers of answers that scripts may read.
EXPOSED = (
    "X-Ropeway-Job-Id",
    "X-Request-Id",
    "Location",
    "Retry-After",
    "Idempotent-Replayed",
    *(f"X-RateLimit-{which}-{what}" for what in ("Requests", "Tokens") for which in ("Limit", "Remaining", "Reset")),
)
#: Seconds that a browser remembers what it may do.
MAX_AGE_S = 600


def install(app: FastAPI, origins: Sequence[str]) -> None:
    """Answer preflights, and tag answers to these origins; `*` is any. Call it last: it has to be the outermost."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=EXPOSED,
        max_age=MAX_AGE_S,
    )
