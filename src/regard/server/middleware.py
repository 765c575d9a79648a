"""What happens to every request before and after its route: security headers, metrics, host check, slow headers."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import h11
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.server.schemas import RequestRefused, Settings
from regard.server.service import INTERNAL_ERROR

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from regard.server.batching import Metrics


log = logging.getLogger("regard.server")

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""on every response: the page loads nothing from other origins, and other origins cannot embed it"""


def error_response(
    status: int, reason: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse({"error": reason}, status, headers)


def refusal_response(refused: RequestRefused) -> JSONResponse:
    retry = {"retry-after": "1"} if refused.status in (429, 503) else None
    return error_response(refused.status, refused.reason, retry)


class RequestMiddleware:
    """Adds security headers to every response, counts requests, and answers unexpected exceptions with status 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(SECURITY_HEADERS)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = 499  # nginx's code for a closed connection; only the metrics see it
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                await error_response(500, INTERNAL_ERROR)(scope, receive, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - start)


# ---------------------------------------------------------------------------------------------
# Checks before a request is read


class GuardMiddleware:
    """Refuses requests before their bodies are read: those for an unknown host."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                check_host(Headers(scope=scope).get("host"), self.settings)
        except RequestRefused as refused:
            await refusal_response(refused)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def check_host(host: str | None, settings: Settings) -> None:
    """Refuse a request whose Host header is none of this server's names.

    A page of another site can have its name resolve to this machine (DNS rebinding); the browser then sends requests
    with that name to this server and lets the page read the responses. An IP address cannot be misused in this way.
    A request without the header does not come from a browser.
    """
    if host is None or "*" in settings.allowed_hosts:
        return
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    name = name.lower().removesuffix(".")
    if name in ("localhost", *map(str.lower, settings.allowed_hosts)):
        return
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise RequestRefused(
            421,
            f"host {name[:100]!r} is not a name of this server; "
            "its administrator can add it with --allowed-host",
        ) from None


# ---------------------------------------------------------------------------------------------
# Connections


class TimeLimitedProtocol(H11Protocol):
    """uvicorn's HTTP protocol, but it closes a connection whose request headers do not arrive in time.

    The time for the body is limited when it is read (``schemas.read_body``).
    """

    header_seconds = 10.0
    """time for the first request from the connection on; for later ones from their first byte on"""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.header_seconds, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        incomplete = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        if not incomplete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.header_seconds, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
