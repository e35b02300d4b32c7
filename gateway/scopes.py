"""Which scope opens which route: one table, which has all of them. A route that is not in it is opened by nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from starlette.routing import compile_path

from shared.api_keys import Scope
from shared.errors import InvalidRequestError, PermissionDeniedError

#: Any of these scopes opens a route. An empty set: any key. None: no key is needed.
Needed = frozenset[Scope] | None

_INFERENCE: Final[Needed] = frozenset({"inference"})
_ADMIN: Final[Needed] = frozenset({"admin"})
_METRICS: Final[Needed] = frozenset({"metrics"})
_LOADS: Final[Needed] = frozenset({"metrics", "admin"})
_ANY_KEY: Final[Needed] = frozenset()

TABLE: Final[dict[tuple[str, str], Needed]] = {
    ("GET", "/health"): None,
    ("GET", "/ready"): None,
    ("GET", "/metrics"): _METRICS,
    ("GET", "/"): _ANY_KEY,
    ("GET", "/docs"): _ANY_KEY,
    ("GET", "/openapi.json"): _ANY_KEY,
    ("POST", "/v1/chat/completions"): _INFERENCE,
    ("POST", "/v1/completions"): _INFERENCE,
    ("POST", "/v1/responses"): _INFERENCE,
    ("GET", "/v1/responses/{response_id}"): _INFERENCE,
    ("DELETE", "/v1/responses/{response_id}"): _INFERENCE,
    ("GET", "/v1/responses/{response_id}/input_items"): _INFERENCE,
    ("POST", "/v1/responses/{response_id}/cancel"): _INFERENCE,
    ("POST", "/tokenize"): _INFERENCE,
    ("POST", "/detokenize"): _INFERENCE,
    ("GET", "/v1/models"): _INFERENCE,
    ("GET", "/v1/models/{model:path}"): _INFERENCE,
    ("POST", "/v1/files"): _INFERENCE,
    ("GET", "/v1/files"): _INFERENCE,
    ("GET", "/v1/files/{file_id}"): _INFERENCE,
    ("DELETE", "/v1/files/{file_id}"): _INFERENCE,
    ("GET", "/v1/files/{file_id}/content"): _INFERENCE,
    ("POST", "/v1/batches"): _INFERENCE,
    ("GET", "/v1/batches"): _INFERENCE,
    ("GET", "/v1/batches/{batch_id}"): _INFERENCE,
    ("POST", "/v1/batches/{batch_id}/cancel"): _INFERENCE,
    ("POST", "/v1/jobs"): _INFERENCE,
    ("GET", "/v1/jobs"): _INFERENCE,
    ("GET", "/v1/jobs/{job_id}"): _INFERENCE,
    ("GET", "/v1/jobs/{job_id}/events"): _INFERENCE,
    ("POST", "/v1/jobs/{job_id}/token"): _INFERENCE,
    ("POST", "/v1/jobs/{job_id}/cancel"): _INFERENCE,
    ("DELETE", "/v1/jobs/{job_id}"): _INFERENCE,
    ("GET", "/v1/usage"): frozenset({"inference", "admin"}),
    ("GET", "/v1/adapters"): frozenset({"inference", "admin"}),
    ("GET", "/v1/adapters/{name:path}"): frozenset({"inference", "admin"}),
    ("POST", "/v1/adapters"): _ADMIN,
    ("DELETE", "/v1/adapters/{name:path}"): _ADMIN,
    ("POST", "/v1/load_lora_adapter"): _ADMIN,
    ("POST", "/v1/unload_lora_adapter"): _ADMIN,
    ("GET", "/v1/pools"): _LOADS,
    ("GET", "/v1/pools/{pool}/load"): _LOADS,
}

# The router's own patterns, for all of them: what it takes for a route must be one here too.
_PATTERNS: Final = [(method, compile_path(path)[0], needed) for (method, path), needed in TABLE.items()]


def needed_for(method: str, path: str) -> Needed:
    """What opens a path. One that is no route's takes any key, and is told that there is nothing.

    Raises:
        InvalidRequestError: control characters, which are in no path but in some that are to be taken for another.
    """
    if any(ord(character) < 0x20 or character == "\x7f" for character in path):
        raise InvalidRequestError("the path holds control characters")
    method = "GET" if method == "HEAD" else method
    if (method, path) in TABLE:
        return TABLE[method, path]
    for known, pattern, needed in _PATTERNS:
        if known == method and pattern.match(path):
            return needed
    return _ANY_KEY


def check(scopes: frozenset[Scope], needed: frozenset[Scope]) -> None:
    """Raises PermissionDeniedError where none of a key's scopes is among those that open a route."""
    if needed and not scopes & needed:
        wanted = " or ".join(sorted(needed))
        raise PermissionDeniedError(
            f"This API key has insufficient permissions for this operation. Missing scopes: {wanted}",
            code="missing_scope",
        )


def check_complete(routes: Iterable[tuple[str, str]]) -> None:
    """Refuse an application with a route that is not in the table.

    Args:
        routes: method and path, as it was declared, of each.

    Raises:
        LookupError: one is missing, so nobody has said who may use it.
    """
    missing = sorted({route for route in routes if route[0] not in ("HEAD", "OPTIONS")} - TABLE.keys())
    if missing:
        raise LookupError(f"routes without a scope: {', '.join(f'{method} {path}' for method, path in missing)}")
