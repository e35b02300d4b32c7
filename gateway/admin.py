"""Who may load and unload adapters."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from gateway.admission import bearer_token
from shared.errors import AuthenticationError, PermissionDeniedError
from shared.settings import GatewaySettings


class AdminKeys:
    """The keys that may. Without any, everyone may where no API keys are asked for and only this machine gets here.

    Then a page that a browser on this machine shows could too: its script may send forms to any address, and give a
    name of its own the address of this machine. So what comes from a page, or under another name, is refused.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._keys = [key.get_secret_value().encode() for key in settings.admin_api_keys]
        self._open = not settings.api_keys and _is_loopback(settings.host)

    def check(self, request: Request) -> None:
        """Let an administrator pass. Every key is compared, each in constant time.

        Raises:
            AuthenticationError: there is no key.
            PermissionDeniedError: it is none of an administrator's, or there are none.
        """
        if not self._keys:
            if self._open:
                _check_no_page(request)
                return
            raise PermissionDeniedError(
                "Adapters cannot be changed here: set ROPEWAY_ADMIN_API_KEYS, and send one of those keys",
                code="admin_key_required",
            )
        given = bearer_token(request.headers.get("authorization"))
        if given is None:
            raise AuthenticationError("An administrator's key is needed: Authorization: Bearer <key>")
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all of them: time must not tell which
        if not any(matches):
            raise PermissionDeniedError(
                "This key may not change adapters; one of ROPEWAY_ADMIN_API_KEYS may", code="admin_key_required"
            )

    def is_admin(self, request: Request) -> bool:
        """Whether `check` would pass."""
        try:
            self.check(request)
        except (AuthenticationError, PermissionDeniedError):
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
