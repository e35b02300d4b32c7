"""One try of a webhook: a POST to an address that was looked at, with an end to everything."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, Final, Literal

import httpcore
import httpx

from shared.address_guard import AddressGuard, ForbiddenAddressError, UnknownHostError
from shared.errors import InvalidRequestError

#: What became of a try: those without an answer by what kept it from coming.
SendOutcome = Literal["delivered", "gone", "answered", "timeout", "connection", "tls", "address"]
OUTCOMES: Final[tuple[SendOutcome, ...]] = (
    "delivered", "gone", "answered", "timeout", "connection", "tls", "address",
)  # fmt: skip
_GONE: Final = 410
#: Bytes of an answer that are read, so that its sender is done with it; nothing is done with them.
_ANSWER_BYTES: Final = 16 * 1024
_ANSWER_S: Final = 1.0
Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Sent:
    """How a try ended. `error` is in words, for the one whose job it is; `retry_after_s` as the receiver asks for."""

    outcome: SendOutcome
    status: int | None = None
    error: str = ""
    retry_after_s: float = 0.0


class Sender:
    """Sends webhooks. No proxy, no redirect, no cookie; each has a connection of its own.

    Args:
        guard: decides which addresses may be reached.
        timeout_s: from the look-up of the host to the head of the answer.
        trust: what certificates are checked against; unset: certifi's, or what SSL_CERT_FILE names.
    """

    def __init__(self, guard: AddressGuard, timeout_s: float, trust: ssl.SSLContext | None = None) -> None:
        self._guard, self._timeout_s = guard, timeout_s
        self._trust = _authorities() if trust is None else trust

    async def send(self, url: str, headers: Headers, body: bytes) -> Sent:
        """Try once. Never raises for what the other side does."""
        try:
            target = self._guard.parse(url, "callback_url")
        except InvalidRequestError as error:
            return Sent("address", error=error.message)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(target, headers, body)
        except TimeoutError:
            return Sent("timeout", error=f"no answer within {self._timeout_s:g} s")
        except ForbiddenAddressError as error:
            return Sent("address", error=error.message)
        except UnknownHostError as error:
            return Sent("connection", error=error.message)
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            return _failed(error)

    async def _post(self, url: httpx.URL, headers: Headers, body: bytes) -> Sent:
        request = httpcore.Request(
            "POST",
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=[
                (b"host", url.netloc),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
                *headers,
            ],
            content=body,
        )
        pool = httpcore.AsyncConnectionPool(
            ssl_context=self._trust, network_backend=_Pinned(self._guard), max_connections=1, retries=0
        )
        async with pool:
            response = await pool.handle_async_request(request)
            try:
                await _read_a_little(response)
            finally:
                await response.aclose()
        return _answered(response.status, response.headers)


@cache
def _authorities() -> ssl.SSLContext:
    """Read once: that takes its time."""
    return httpx.create_ssl_context()


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to addresses, and only to such as the guard has seen; the name that a certificate has to have is still
    the host's."""

    def __init__(self, guard: AddressGuard) -> None:
        self._guard, self._backend = guard, httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address of the host that takes it. Raises as `AddressGuard.resolve`."""
        failure: Exception | None = None
        for address in await self._guard.resolve(host, port):
            try:
                return await self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
            except httpcore.NetworkError as error:
                failure = error
        raise failure or httpcore.ConnectError("the host has no address")

    async def sleep(self, seconds: float) -> None:
        """As the library asks."""
        await asyncio.sleep(seconds)


async def _read_a_little(response: httpcore.Response) -> None:
    """The status is known: whatever happens to the rest of the answer changes nothing."""
    size = 0
    try:
        async with asyncio.timeout(_ANSWER_S):
            async for piece in response.aiter_stream():
                size += len(piece)
                if size >= _ANSWER_BYTES:
                    return
    except (TimeoutError, httpcore.NetworkError, httpcore.ProtocolError, OSError):
        return


def _answered(status: int, headers: Headers) -> Sent:
    if 200 <= status < 300:
        return Sent("delivered", status)
    if status == _GONE:
        return Sent("gone", status, "it answered 410: it wants no more")
    why = "; redirects are not followed" if 300 <= status < 400 else ""
    return Sent("answered", status, f"it answered {status}{why}", _retry_after(headers))


def _retry_after(headers: Headers) -> float:
    """Seconds that an answer asks to wait; 0 where it does not, or is not understood."""
    text = next((value for name, value in headers if name.lower() == b"retry-after"), b"").decode("latin-1").strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError, TypeError):
        return 0.0


def _failed(error: Exception) -> Sent:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Sent("tls", error=f"its certificate is not valid: {cause.verify_message}")
        if isinstance(cause, ssl.SSLError):
            return Sent("tls", error="TLS failed")
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpcore.ConnectError):
        return Sent("connection", error="it cannot be reached")
    if isinstance(error, httpcore.ProtocolError):
        return Sent("connection", error="what it answered is not HTTP")
    return Sent("connection", error="the connection was lost")
