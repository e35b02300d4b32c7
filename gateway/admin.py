"""Who may load and unload adapters where no keys are asked for, and who is shown where they came from."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from shared.errors import PermissionDeniedError
from shared.settings import GatewaySettings


class Admins:
    """Administrators. Where keys are asked for, their scopes say who is one (see `gateway.scopes`); else it is everyone
    where only this machine gets here.

    Then a page that a browser on this machine shows could be one too: its script may send forms to any address, and
    give a name of its own the address of this machine. So what comes from a page, or under another name, is refused.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._local = _is_loopback(settings.host)

    def check(self, request: Request) -> None:
        """Let an administrator pass where no keys are asked for.

        Raises:
            PermissionDeniedError: others than this machine get here, or it comes from a page.
        """
        if not self._local:
            raise PermissionDeniedError(
                "Adapters cannot be changed here: set ROPEWAY_ADMIN_API_KEYS, and send one of those keys",
                code="admin_key_required",
            )
        _check_no_page(request)

    def is_admin(self, request: Request) -> bool:
        """Whether a request is an administrator's."""
        state = request.scope.get("state", {})
        if state.get("authenticated"):
            return "admin" in state["scopes"]
        try:
            self.check(request)
        except PermissionDeniedError:
            return False
        return True


def _check_no_page(request: Request) -> None:
    """Raises PermissionDeniedError for a request that a browser sent for a page of anywhere else."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2] != host
    if foreign or not _is_loopback(_name_of(host)):
        raise PermissionDeniedError(
            "Adapters can be changed from this machine alone, and by no page of anywhere else, unless "
            "ROPEWAY_ADMIN_API_KEYS is set and one of those keys sent",
            code="admin_key_required",
        )


def _name_of(host: str) -> str:
    """A `Host` header without its port; empty for one that is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
