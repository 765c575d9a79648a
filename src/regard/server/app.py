"""The HTTP application and its server: middleware, error handlers, routes (others: ``inspection``, ``streaming``).

``/translate``, ``/languages``, ``/detect`` and ``/frontend/settings`` are LibreTranslate's, so its clients work
unchanged. Regard's own routes begin with ``/v1``. Every error response is ``{"error": "reason"}``.
"""

from __future__ import annotations

import asyncio
import mimetypes
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from regard import __version__
from regard.errors import RegardError
from regard.inspection.alignment import align
from regard.recipe import Device, Precision
from regard.server.api_page import add_api_page
from regard.server.inspection import add_history_routes, add_trace_routes, follow_training
from regard.server.middleware import (
    GuardMiddleware,
    RequestMiddleware,
    TimeLimitedProtocol,
    error_response,
    refusal_response,
)
from regard.server.schemas import (
    DetectedLanguage,
    DetectRequest,
    ErrorResponse,
    Language,
    RequestRefused,
    Settings,
    StatusResponse,
    StreamRequest,
    TranslateRequest,
    TranslateResponse,
    cancel_on_disconnect,
    check_api_key,
    openapi_body,
    read_body,
)
from regard.server.service import ServedModel, Service
from regard.server.streaming import add_live_route
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

PAGE = Path(__file__).parents[1] / "inspection" / "web"


async def _handle_refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestRefused)
    return refusal_response(error)


async def _handle_http_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return error_response(error.status_code, error.detail, error.headers)


async def _handle_regard_error(_: Request, error: Exception) -> JSONResponse:
    return error_response(400, str(error))


def create_app(
    model: ServedModel,
    settings: Settings | None = None,
    card: Mapping[str, Any] | None = None,
    page: Path = PAGE,
) -> FastAPI:
    """The application that serves a model.

    card: the run's card, returned by ``/v1/info``. page: the folder of the page's files.
    """
    aligner = partial(align, model) if isinstance(model, Translator) else None
    service = Service(model, settings or Settings(), aligner)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.batcher.closed = False
        following = (
            asyncio.create_task(follow_training(service, model))
            if isinstance(model, Translator)
            else None
        )
        yield
        if following is not None:
            following.cancel()
            with suppress(asyncio.CancelledError):
                await following
        await service.batcher.drain()

    app = FastAPI(
        title="Regard",
        version=__version__,
        summary="Machine translation with your own model; works with LibreTranslate clients.",
        docs_url=None,  # FastAPI's documentation pages load scripts from other hosts; see api_page
        redoc_url=None,
        lifespan=lifespan,
        responses={
            status: {"model": ErrorResponse} for status in (400, 403, 413, 415, 421, 429, 503)
        },
        exception_handlers={
            RequestRefused: _handle_refused,
            RegardError: _handle_regard_error,
            HTTPException: _handle_http_error,
        },
    )
    app.state.service = service
    app.add_middleware(GuardMiddleware, settings=service.settings)
    if service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["content-type", "authorization"],
            expose_headers=["retry-after", "x-request-id"],
        )
    # The last one is the outermost.
    app.add_middleware(RequestMiddleware, metrics=service.metrics, settings=service.settings)
    _add_libretranslate_routes(app, service)
    _add_regard_routes(app, service, card or {})
    if isinstance(model, Translator):
        # Any model that translates can be served, but only this one can be inspected, in its first target language.
        inspected = model.with_target_language(service.to(service.target))
        add_trace_routes(app, service, inspected)
        add_history_routes(app, service, inspected)
        add_live_route(app, service, inspected)
    _add_monitoring_routes(app, service)
    add_api_page(app)
    _add_page(app, page)
    return app


def _add_libretranslate_routes(app: FastAPI, service: Service) -> None:
    settings, pairs = service.settings, service.pairs

    @app.post(
        "/translate",
        response_model_exclude_none=True,
        openapi_extra=openapi_body(TranslateRequest, pairs, settings),
    )
    async def translate(request: Request) -> TranslateResponse:
        """Translate one text or a list of texts, of any length."""
        body = await read_body(request, TranslateRequest, settings)
        return await cancel_on_disconnect(request, service.translate(body))

    @app.get("/languages")
    async def languages() -> list[Language]:
        """The languages of this server, and the target languages of each."""
        return service.languages()

    @app.post("/detect", openapi_extra=openapi_body(DetectRequest, pairs, settings))
    async def detect(request: Request) -> list[DetectedLanguage]:
        """The language of a text among the source languages of this server, most probable first, in percent.

        Without py3langid, or for languages that it does not know, they all have the same confidence.
        """
        body = await read_body(request, DetectRequest, settings)
        texts = [body.q] if isinstance(body.q, str) else body.q
        service.check_texts(texts)
        return await service.detect(" ".join(texts), service.sources)

    @app.post("/frontend/settings", include_in_schema=False)
    @app.get("/frontend/settings")
    async def frontend_settings() -> dict[str, Any]:
        """Settings for a web front end."""
        names = {language.code: language.name for language in service.languages()}
        source, target = service.source, service.target
        return {
            "apiKeys": bool(settings.api_keys),
            "charLimit": settings.max_characters,
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


def _add_regard_routes(app: FastAPI, service: Service, card: Mapping[str, Any]) -> None:
    settings, pairs = service.settings, service.pairs

    @app.post(
        "/v1/translate/stream",
        openapi_extra=openapi_body(StreamRequest, pairs, settings),
        response_class=StreamingResponse,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def stream(request: Request) -> StreamingResponse:
        """Translate a text and send each sentence as soon as it is ready, as server-sent events.

        `start` has the number of sentences. Each `part` has a `text`; all parts together are the translation. The last
        event is `end` or `error`.
        """
        events = service.stream(await read_body(request, StreamRequest, settings))
        first = await anext(events)  # a refusal is raised here, before the status is sent

        async def all_events() -> AsyncIterator[str]:
            yield first
            async for event in events:
                yield event

        return StreamingResponse(
            all_events(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    @app.get("/v1/info")
    async def info(request: Request) -> dict[str, Any]:
        """The version of Regard, the languages, and the card of the model."""
        check_api_key(request, None, settings)
        languages = [language.model_dump() for language in service.languages()]
        return {"version": __version__, "languages": languages, "card": card}


def _add_monitoring_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> StatusResponse:
        """The server process is running."""
        return StatusResponse(status="ok")

    @app.get("/ready")
    async def ready() -> StatusResponse:
        """The model is loaded and the server accepts requests."""
        if service.batcher.closed:
            raise RequestRefused(503, "the server is shutting down")
        return StatusResponse(status="ready")

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        content = generate_latest(service.metrics.registry)
        return Response(content, media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _add_page(app: FastAPI, folder: Path) -> None:
    """Serve the files of the page. They are read once, here, so no request can reach the file system."""
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if not path.is_file():
            continue
        media_type = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        response = Response(
            path.read_bytes(), media_type=media_type, headers={"cache-control": "no-cache"}
        )

        async def send_file(_: Request, response: Response = response) -> Response:
            return response

        name = path.relative_to(folder).as_posix()
        app.add_route(f"/{name}", send_file, include_in_schema=False)
        if path.name == "index.html":
            app.add_route(f"/{name.removesuffix(path.name)}", send_file, include_in_schema=False)


# ---------------------------------------------------------------------------------------------
# Serve a run: load its model, listen on a port, shut down cleanly


SMALL_MODEL = 10_000_000
"""parameters; the demo's 850,000 are well below (docs/decisions.md), the limit itself is an estimate"""
SHUTDOWN_SECONDS = 5.0
"""how long a shutdown may take in addition to the timeout of a request"""


def serve(
    run: Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: int | None = None,
    languages: tuple[str, str] | None = None,
) -> None:
    """Serve the model of a run until SIGINT or SIGTERM.

    port: 0 selects a free port. languages: codes of source and target, if the recipe names none or others.
    """
    settings = settings or Settings()
    settings = replace(settings, allowed_hosts=(*settings.allowed_hosts, host))
    model = Translator.load(run, device, precision, threads)
    if languages:
        if model.recipe.data.targets:
            raise RegardError(
                f"--languages {','.join(languages)}: {run} has several target languages, "
                "which its recipe names; leave --languages out"
            )
        data = model.recipe.data.model_copy(update={"languages": languages})
        model.recipe = model.recipe.model_copy(update={"data": data})
    limit_threads(model)
    # Workers are forked with the weights, so only for a finished run: others may get new weights later.
    if RunDir(run).card_file.is_file():
        model.start_workers()
    app = create_app(model, settings, RunDir(run).card())
    config = uvicorn.Config(
        app,
        http=TimeLimitedProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.timeout + SHUTDOWN_SECONDS),
    )
    if not model.recipe.data.named:
        source, target = model.recipe.data.language_pair
        print(
            f"regard: the recipe names no languages, so they are called {source} and {target}; "
            "name them with --languages, for example --languages en,de",
            file=sys.stderr,
        )
    with _listen(host, port) as listening:  # after loading, so that clients need not wait for it
        address = f"[{host}]" if ":" in host else host
        greeting = f"regard: serving {run} at http://{address}:{listening.getsockname()[1]}"
        Server(config, app.state.service, greeting).run(sockets=[listening])


def limit_threads(model: Translator) -> None:
    """Use one thread for a small model on a CPU: synchronizing a second one costs more than it saves.

    The environment variable OMP_NUM_THREADS takes precedence.
    """
    size = sum(parameter.numel() for parameter in model.network.parameters())
    if model.device.type == "cpu" and size < SMALL_MODEL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _listen(host: str, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        # asyncio disables Nagle's algorithm only if the protocol is given; otherwise each response waits 40 ms.
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
        except OSError:
            listening.close()
            raise
        return listening
    except OSError as error:
        raise RegardError(f"cannot listen on {host}, port {port}: {error.strerror}") from None


class Server(uvicorn.Server):
    """Shuts down at the first signal: finishes running requests, refuses new ones. A second SIGINT ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service, greeting: str) -> None:
        super().__init__(config)
        self.service = service
        self.greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.greeting, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.batcher.closed = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
