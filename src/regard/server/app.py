"""The HTTP application: middleware, error handlers, routes (others: ``inspection_endpoints``, ``streaming``), the page
``/docs``.

``/translate``, ``/languages``, ``/detect`` and ``/frontend/settings`` are LibreTranslate's, so its clients work
unchanged. Regard's own routes begin with ``/v1``. Every error response is ``{"error": "reason"}``.
"""

from __future__ import annotations

import asyncio
import json
import mimetypes
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from html import escape
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from regard import __version__
from regard.errors import RegardError
from regard.inspection.page_data import examples_of, test_scores
from regard.server.document_uploads import SUFFIXES, add_file_routes
from regard.server.inspection_endpoints import add_history_routes, add_trace_routes, start_following
from regard.server.middleware import (
    GuardMiddleware,
    RequestMiddleware,
    error_response,
    refusal_response,
)
from regard.server.model_pool import ModelEntry, ModelPool, ServedModel
from regard.server.prometheus import Metrics
from regard.server.schemas import (
    DetailedRequest,
    DetailedResponse,
    DetectedLanguage,
    DetectRequest,
    ErrorResponse,
    InfoResponse,
    Language,
    ModelInfo,
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
from regard.server.service import Service
from regard.server.streaming import add_live_route
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


class Application(FastAPI):
    """FastAPI without its telemetry, which looks for OpenTelemetry's settings at each request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Starlette.__call__(self, scope, receive, send)


class DirectRoute(APIRoute):
    """A route whose endpoint makes the response itself, without FastAPI's dependencies, which take as long."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)
            return
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


def create_app(
    models: ServedModel | Sequence[ModelEntry], settings: Settings | None = None, page: Path = PAGE
) -> FastAPI:
    """The application that serves a loaded model, or several, which are loaded when they are needed.

    page: the folder of the page's files.
    """
    if isinstance(models, Sequence):
        entries, first = list(models), None
    else:
        first = models
        entries = [ModelEntry("model", first.recipe, lambda: models)]
    pool = ModelPool(entries, settings or Settings(), Metrics(), start_following)
    if first is not None:
        pool.add(entries[0], first)
    service = Service(pool)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        pool.start()
        yield
        await pool.drain()

    app = Application(
        title="Regard",
        version=__version__,
        summary="Machine translation with your own models, compatible with LibreTranslate clients.",
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
    app.add_middleware(RequestMiddleware, models=pool)
    _add_libretranslate_routes(app, service)
    add_file_routes(app, service)
    _add_regard_routes(app, service)
    if first is None or isinstance(first, Translator):
        # Any model that translates can be served, but only a Translator can be inspected.
        add_trace_routes(app, service)
        add_history_routes(app, service)
        add_live_route(app, service)
    _add_monitoring_routes(app, service)
    add_api_page(app)
    _add_page(app, page)
    return app


def _add_libretranslate_routes(app: FastAPI, service: Service) -> None:
    settings, pairs = service.settings, service.models.pairs

    async def translate(request: Request) -> Response:
        """Translate one text or a list of texts, of any length."""
        body = await read_body(request, TranslateRequest, settings)
        response = await cancel_on_disconnect(request, service.translate(body))
        return Response(response.model_dump_json(exclude_none=True), media_type="application/json")

    app.router.add_api_route(
        "/translate",
        translate,
        methods=["POST"],
        response_model=TranslateResponse,
        openapi_extra=openapi_body(TranslateRequest, pairs, settings),
        route_class_override=DirectRoute,
    )

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
        return await service.detect(" ".join(texts), service.models.sources())

    @app.post("/frontend/settings", include_in_schema=False)
    @app.get("/frontend/settings")
    async def frontend_settings() -> dict[str, Any]:
        """Settings for a web front end."""
        names = {language.code: language.name for language in service.languages()}
        source, target = pairs[0]
        return {
            "apiKeys": bool(settings.api_keys),
            "charLimit": settings.max_characters,
            "filesTranslation": True,
            "frontendTimeout": 500,
            "keyRequired": bool(settings.api_keys),
            "language": {
                "source": {"code": source, "name": names[source]},
                "target": {"code": target, "name": names[target]},
            },
            "suggestions": False,
            "supportedFilesFormat": SUFFIXES,
        }


def _add_regard_routes(app: FastAPI, service: Service) -> None:
    settings, pairs = service.settings, service.models.pairs

    @app.post(
        "/v1/translate",
        openapi_extra=openapi_body(DetailedRequest, pairs, settings),
        response_model_exclude_none=True,
    )
    async def translate_with_details(request: Request) -> DetailedResponse:
        """Translate texts; for each sentence its tokens, probabilities, confidence, and alignment if wanted."""
        body = await read_body(request, DetailedRequest, settings)
        return await cancel_on_disconnect(request, service.translate_with_details(body))

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
    async def info(request: Request, model: str | None = None) -> InfoResponse:
        """The version of Regard, the languages, all models, and the card of the first one or of `model`."""
        check_api_key(request, None, settings)
        card = dict(service.models.entry(model).card)
        models = [
            await asyncio.to_thread(describe_entry, entry) for entry in service.models.entries
        ]
        languages = service.languages()
        return InfoResponse(version=__version__, languages=languages, models=models, card=card)


def describe_entry(entry: ModelEntry) -> ModelInfo:
    return ModelInfo(
        name=entry.name,
        pairs=entry.pairs,
        loaded=entry.loaded is not None,
        parameters=entry.card.get("parameters"),
        scores=test_scores(entry.run),
        examples=examples_of(entry.run, entry.recipe),
    )


def _add_monitoring_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> StatusResponse:
        """The server process is running."""
        return StatusResponse(status="ok")

    @app.get("/ready")
    async def ready() -> StatusResponse:
        """The server accepts requests."""
        if service.models.stopping:
            raise RequestRefused(503, "the server is shutting down")
        return StatusResponse(status="ready")

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


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
# The page /docs: the OpenAPI description as plain HTML, without scripts and files of other hosts


DOCS_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
body { color: CanvasText; background: Canvas; color-scheme: light dark; }
h2 { margin-top: 2.5rem; border-top: 1px solid GrayText; padding-top: 1rem; }
code, pre { font-family: ui-monospace, monospace; font-size: 0.9em; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; }
pre { overflow-x: auto; }
"""


def add_api_page(app: FastAPI) -> None:
    """Add ``/docs`` and its style sheet. The page is written once, at the first request."""
    pages: list[str] = []

    async def page(_: Request) -> Response:
        if not pages:
            pages.append(render_docs(app.openapi()))
        return Response(pages[0], media_type="text/html; charset=utf-8")

    async def style(_: Request) -> Response:
        return Response(DOCS_STYLE, media_type="text/css; charset=utf-8")

    app.add_route("/docs", page, include_in_schema=False)
    app.add_route("/docs.css", style, include_in_schema=False)


def render_docs(description: dict[str, Any]) -> str:
    """An OpenAPI description as an HTML page."""
    info = description["info"]
    operations = [
        _operation(method, path, operation)
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    ]
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(info["title"])} API</title>
<link rel="stylesheet" href="docs.css">
<h1>{escape(info["title"])} {escape(info["version"])}</h1>
<p>{escape(info.get("summary", ""))} Machine-readable: <a href="openapi.json">openapi.json</a>.</p>
{"".join(operations)}</html>
"""


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    paragraphs = "".join(
        f"<p>{_prose(paragraph)}</p>\n"
        for paragraph in operation.get("description", "").split("\n\n")
        if paragraph
    )
    content: dict[str, dict[str, Any]] = operation.get("requestBody", {}).get("content", {})
    schema: dict[str, Any] = next(iter(content.values()), {}).get("schema", {})
    body = _fields(schema, list(content)) if schema else ""
    return f"<h2><code>{method.upper()} {escape(path)}</code></h2>\n{paragraphs}{body}"


def _fields(schema: dict[str, Any], content_types: list[str]) -> str:
    """A table of the fields of a request body, and an example."""
    required = schema.get("required", [])
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code>{' (required)' if name in required else ''}</td>"
        f"<td>{_prose(field.get('description', ''))}{_choices(field)}</td></tr>\n"
        for name, field in schema["properties"].items()
    )
    example = {name: _example(name, schema["properties"][name]) for name in required}
    return (
        f"<p>Body: {escape(', '.join(content_types))}</p>\n"
        f"<table><tr><th>field</th><th>meaning</th></tr>\n{rows}</table>\n"
        f"<pre>{escape(json.dumps(example, ensure_ascii=False))}</pre>\n"
    )


def _prose(text: str) -> str:
    """Text as HTML, with code between backticks."""
    return re.sub("(`+)(.+?)\\1", r"<code>\2</code>", escape(text))


def _choices(field: dict[str, Any]) -> str:
    choices = ", ".join(f"<code>{escape(str(choice))}</code>" for choice in field.get("enum", []))
    return f" ({choices})" if choices else ""


def _example(name: str, field: dict[str, Any]) -> Any:
    if "enum" in field:
        return field["enum"][0]
    if name == "q":
        return "Hello."
    return {"integer": 0, "array": [0]}.get(field.get("type", ""), "")
