"""The HTTP side: routes, and what stands around them.

``/translate``, ``/languages``, ``/detect`` and ``/frontend/settings`` are LibreTranslate's, so that its clients
work unchanged. What is Regard's own stands under ``/v1``. An answer that is no success is ``{"error": "why"}``.
"""

from __future__ import annotations

import asyncio
import logging
import mimetypes
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from regard import __version__
from regard.errors import RegardError
from regard.inspection.alignment import align
from regard.server.batching import RequestRefused
from regard.server.inspection import add_course, add_trace, follow
from regard.server.metrics import Metrics
from regard.server.schemas import (
    Detected,
    DetectRequest,
    Language,
    Problem,
    State,
    StreamRequest,
    Translated,
    TranslateRequest,
    check_key,
    describe,
    read,
    while_connected,
)
from regard.server.service import MISTAKE, Served, Service
from regard.server.settings import Settings
from regard.server.streaming import add_live
from regard.tasks import Translator

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("regard.server")

PAGE = Path(__file__).parents[1] / "inspection" / "web"

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""On every answer: nothing is loaded from elsewhere, nothing is guessed, nothing is told to others."""


class Guard:
    """Around everything: headers on each answer, counts, and a last resort for our own mistakes."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 0

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            await self.app(scope, receive, send_guarded)
        except ClientDisconnect:
            status = 499  # as nginx has it; nobody is there to read it
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if not status:
                await _problem(500, MISTAKE)(scope, receive, send_guarded)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(time.monotonic() - start)


def _problem(status: int, reason: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": reason}, status, headers)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestRefused)
    retry = {"retry-after": "1"} if error.status in (429, 503) else None
    return _problem(error.status, error.reason, retry)


async def _no_route(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return _problem(error.status_code, error.detail, error.headers)


async def _not_translatable(_: Request, error: Exception) -> JSONResponse:
    return _problem(400, str(error))


def create_app(
    model: Served,
    settings: Settings | None = None,
    card: Mapping[str, Any] | None = None,
    page: Path = PAGE,
) -> FastAPI:
    """The application that serves a model. card is told to those who ask what the model is."""
    aligned = partial(align, model) if isinstance(model, Translator) else None
    service = Service(model, settings or Settings(), aligned)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.batcher.refuses = False
        following = (
            asyncio.create_task(follow(service, model)) if isinstance(model, Translator) else None
        )
        yield
        if following is not None:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
        await service.batcher.finish()

    app = FastAPI(
        title="Regard",
        version=__version__,
        summary="Translation by a model of your own; LibreTranslate's clients work unchanged.",
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses={status: {"model": Problem} for status in (400, 403, 413, 415, 429, 503)},
        exception_handlers={
            RequestRefused: _refused,
            RegardError: _not_translatable,
            HTTPException: _no_route,
        },
    )
    app.state.service = service
    app.add_middleware(Guard, metrics=service.metrics)
    _add_libretranslate(app, service)
    _add_own(app, service, card or {})
    if isinstance(model, Translator):
        # Anything that translates can be served, but only this can be seen into: of several languages, the first.
        seen = model.into(service.language(service.target))
        add_trace(app, service, seen)
        add_course(app, service, seen)
        add_live(app, service, seen)
    _add_operations(app, service)
    _add_page(app, page)
    return app


def _add_libretranslate(app: FastAPI, service: Service) -> None:
    settings, pairs = service.settings, service.pairs

    @app.post(
        "/translate",
        response_model_exclude_none=True,
        openapi_extra=describe(TranslateRequest, pairs, settings),
    )
    async def translate(request: Request) -> Translated:
        """Translate a text of any length, or several."""
        asked = await read(request, TranslateRequest, settings)
        return await while_connected(request, service.translate(asked))

    @app.get("/languages")
    async def languages() -> list[Language]:
        """The languages of this server, and into which each is translated."""
        return service.languages()

    @app.post("/detect", openapi_extra=describe(DetectRequest, pairs, settings))
    async def detect(request: Request) -> list[Detected]:
        """The languages a text may have: those this server translates from. Which it is, is not looked at."""
        asked = await read(request, DetectRequest, settings)
        service.check_texts([asked.q] if isinstance(asked.q, str) else asked.q)
        return service.detected(service.sources)

    @app.post("/frontend/settings", include_in_schema=False)
    @app.get("/frontend/settings")
    async def frontend_settings() -> dict[str, Any]:
        """What a page in front of this server should know."""
        names = {language.code: language.name for language in service.languages()}
        source, target = service.source, service.target
        return {
            "apiKeys": bool(settings.api_keys),
            "charLimit": settings.characters,
            "filesTranslation": False,
            "frontendTimeout": 500,
            "keyRequired": bool(settings.api_keys),
            "language": {
                "source": {"code": source, "name": names[source]},
                "target": {"code": target, "name": names[target]},
            },
            "suggestions": False,
            "supportedFilesFormat": [],
        }


def _add_own(app: FastAPI, service: Service, card: Mapping[str, Any]) -> None:
    settings, pairs = service.settings, service.pairs

    @app.post(
        "/v1/translate/stream",
        openapi_extra=describe(StreamRequest, pairs, settings),
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def stream(request: Request) -> StreamingResponse:
        """Translate a text and send each sentence when it is ready, as server-sent events.

        `start` tells how many sentences there are; each `part` has a `text`, and all of them one after the other
        are the translation; `end`, or an `error`, comes last.
        """
        events = service.stream(await read(request, StreamRequest, settings))
        first = await anext(events)  # refused here, while the status can still say so

        async def all_events() -> AsyncIterator[str]:
            yield first
            async for event in events:
                yield event

        return StreamingResponse(
            all_events(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    @app.get("/v1/info")
    async def info(request: Request) -> dict[str, Any]:
        """What the model is: its languages, and the card of its run."""
        check_key(request, None, settings)
        languages = [language.model_dump() for language in service.languages()]
        return {"version": __version__, "languages": languages, "card": card}


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> State:
        """The process lives."""
        return State(status="ok")

    @app.get("/ready")
    async def ready() -> State:
        """The model is loaded, and requests are let in."""
        if service.batcher.refuses:
            raise RequestRefused(503, "the server is stopping")
        return State(status="ready")

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Counts for Prometheus."""
        counts = generate_latest(service.metrics.registry)
        return Response(counts, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _add_page(app: FastAPI, folder: Path) -> None:
    """The files of the page, read now and once: no path from a request ever reaches the file system."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if not path.is_file():
            continue
        content = path.read_bytes()
        kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        answer = Response(content, media_type=kind, headers={"cache-control": "no-cache"})

        async def send_file(_: Request, answer: Response = answer) -> Response:
            return answer

        name = path.relative_to(folder).as_posix()
        app.add_route(f"/{name}", send_file, include_in_schema=False)
        if path.name == "index.html":
            app.add_route(f"/{name.removesuffix(path.name)}", send_file, include_in_schema=False)
