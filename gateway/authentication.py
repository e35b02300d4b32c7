"""Middleware: who a request is from, and whether its key opens what it asks for. Nothing but probes is open."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import errors, scopes
from gateway.admin import Admins
from gateway.keyring import ANONYMOUS, Keyring
from shared.errors import RopewayError

_EVENTS = re.compile(r"/v1/jobs/[^/]+/events\Z")


class Authentication:
    """Asks for a key of the scope that the route needs; gives tenant, key's id and scopes to the routes.

    Args:
        required: whether keys are asked for; else everything is open, and everyone the same tenant.
        admins: who may administer where none are.
    """

    def __init__(self, app: ASGIApp, required: bool, admins: Admins) -> None:
        self._app, self._required, self._admins = app, required, admins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                await self._admit(scope)
            except RopewayError as error:
                await errors.answer_of(error, str(scope["state"].get("internal_id")))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _admit(self, scope: Scope) -> None:
        """Let a request in, or raise what it is answered with."""
        state = scope.setdefault("state", {})
        needed = scopes.needed_for(scope["method"], scope["path"])
        state |= {"tenant": ANONYMOUS, "authenticated": False, "scopes": frozenset()}
        if needed is None:
            return
        if not self._required:
            if needed == frozenset({"admin"}):
                self._admins.check(Request(scope))
            return
        state["authenticated"] = True
        if _brings_token(scope):
            # Nobody's tenant: without the route's own check nothing is to be seen.
            state |= {"tenant": "", "needs_token": True}
            return
        keyring: Keyring = scope["app"].state.services.keyring
        identity = await keyring.identify(Headers(scope=scope).get("authorization"))
        state |= {"tenant": identity.tenant, "key_id": identity.key, "scopes": identity.scopes}
        scopes.check(identity.scopes, needed)


def _brings_token(scope: Scope) -> bool:
    """Whether a reader of a job's events comes with a token in place of a key: the route checks it."""
    return (
        scope["method"] == "GET"
        and _EVENTS.match(scope["path"]) is not None
        and b"token=" in scope["query_string"]
        and "authorization" not in Headers(scope=scope)
    )
