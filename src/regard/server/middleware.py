"""What happens to every request before and after its route.

Security headers, request ids, metrics and the access log; host check and rate limit; a time limit for headers.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from regard.server.schemas import RequestRefused, Settings
from regard.server.service import INTERNAL_ERROR

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from regard.server.model_pool import ModelPool


log = logging.getLogger("regard.server")
access_log = logging.getLogger("regard.access")

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
_RAW_SECURITY_HEADERS = [(name.encode(), text.encode()) for name, text in SECURITY_HEADERS.items()]


def error_response(
    status: int, reason: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    return JSONResponse({"error": reason}, status, headers)


def refusal_response(refused: RequestRefused) -> JSONResponse:
    retry = {"retry-after": str(refused.retry_after)} if refused.status in (429, 503) else None
    return error_response(refused.status, refused.reason, retry)


REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
"""an id that a client or a proxy may give in the header ``X-Request-ID``"""


class RequestMiddleware:
    """Adds security headers and a request id to every response, counts and logs requests, answers errors with 500.

    While the server stops, every response closes its connection, so that the client's next request opens another one.
    settings.access_log: write one JSON object for each request to the logger ``regard.access``. It has the route, not
    the path, because a path or a query may contain text.
    """

    def __init__(self, app: ASGIApp, models: ModelPool) -> None:
        self.app = app
        self.models = models
        self.metrics = models.metrics
        self.settings = models.settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status, size = time.monotonic(), 0, 0
        client_id = Headers(scope=scope).get("x-request-id", "")
        request_id = client_id if REQUEST_ID.fullmatch(client_id) else secrets.token_hex(8)

        async def send_with_headers(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(b"x-request-id", request_id.encode()), *_RAW_SECURITY_HEADERS]
                if self.models.stopping:
                    headers.append((b"connection", b"close"))
                message["headers"] = [*message.get("headers", ()), *headers]
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:
            status = 499  # nginx's code for a closed connection; only the metrics see it
        except Exception:
            log.exception("%s %s failed, request %s", scope["method"], scope["path"], request_id)
            if not status:
                await error_response(500, INTERNAL_ERROR)(scope, receive, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            seconds = time.monotonic() - start
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            if self.settings.access_log:
                entry = {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "id": request_id,
                    "client": (scope.get("client") or ("",))[0],
                    "method": scope["method"],
                    "route": route,
                    "status": status,
                    "seconds": round(seconds, 4),
                    "bytes": size,
                }
                access_log.info("%s", json.dumps(entry))


# ---------------------------------------------------------------------------------------------
# Checks before a request is read


class GuardMiddleware:
    """Refuses requests before their bodies are read: those for an unknown host, or too many of one client."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.rate_limiter = RateLimiter(settings.rate_limit) if settings.rate_limit else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                headers = Headers(scope=scope)
                check_host(headers.get("host"), self.settings)
                if self.rate_limiter is not None and scope["method"] == "POST":
                    key = headers.get("authorization", "").removeprefix("Bearer ")
                    self.rate_limiter.check(client_name(scope, key, self.settings))
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
    if host is None or "*" in settings.allowed_hosts or is_own_name(host, settings.allowed_hosts):
        return
    raise RequestRefused(
        421,
        f"host {_host_name(host)[:100]!r} is not a name of this server; "
        "its administrator can add it with --allowed-host",
    )


@lru_cache(1_000)
def is_own_name(host: str, allowed: tuple[str, ...]) -> bool:
    """Whether a Host header is localhost, an allowed name, or an IP address."""
    name = _host_name(host)
    if name in ("localhost", *map(str.lower, allowed)):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _host_name(host: str) -> str:
    """A Host header without its port."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    return name.lower().removesuffix(".")


def client_name(scope: Scope, key: str, settings: Settings) -> str:
    """Who sends a request: the owner of a valid API key, else an address; of IPv6 the network, 64 bits.

    Behind a proxy on this machine, uvicorn takes the address from the header ``X-Forwarded-For``.
    """
    if key in settings.api_keys:
        return f"key {settings.api_keys.index(key)}"
    address = str((scope.get("client") or ("",))[0])
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((ip, 64), strict=False)) if ip.version == 6 else address


class RateLimiter:
    """A token bucket for each client: ``per_minute`` requests at once, and as many in each minute after that.

    now: a clock in seconds. The clients that were seen last are kept, at most ``MAX_CLIENTS``.
    """

    MAX_CLIENTS = 10_000

    def __init__(self, per_minute: int, now: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self.now = now
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when

    def check(self, client: str) -> None:
        """Take a token from the client's bucket; refuse the request if it is empty."""
        now, rate = self.now(), self.per_minute / 60
        tokens, then = self._buckets.pop(client, (float(self.per_minute), now))
        tokens = min(float(self.per_minute), tokens + (now - then) * rate)
        if tokens < 1:
            self._buckets[client] = tokens, now
            wait = math.ceil((1 - tokens) / rate)
            reason = f"more than {self.per_minute} requests per minute: try again in {wait} s"
            raise RequestRefused(429, reason, retry_after=wait)
        self._buckets[client] = tokens - 1, now
        if len(self._buckets) > self.MAX_CLIENTS:
            self._buckets.popitem(last=False)


# ---------------------------------------------------------------------------------------------
# Connections


class TimeLimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, but it closes a connection whose request headers do not arrive in time or are too large.

    The time for the body is limited when it is read (``schemas.read_body``).
    """

    header_seconds = 10.0
    """time for the first request from the connection on; for later ones from their first byte on"""
    max_header_bytes = 1 << 16
    _timer: asyncio.TimerHandle | None = None
    _header_bytes: int | None = 0
    """what has arrived of incomplete headers; None between requests and while a body arrives"""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        self._stop_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._header_bytes is not None:
            self._header_bytes += len(data)
            if self._header_bytes > self.max_header_bytes:
                self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_seconds, self._time_out)

    def _time_out(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()  # the client may wait for the response before it sends the rest
        else:
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
