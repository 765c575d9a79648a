"""The page ``/docs``: the OpenAPI description as plain HTML, without scripts and without files of other hosts."""

from __future__ import annotations

import json
import re
from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response

STYLE = """
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
            pages.append(render(app.openapi()))
        return Response(pages[0], media_type="text/html; charset=utf-8")

    async def style(_: Request) -> Response:
        return Response(STYLE, media_type="text/css; charset=utf-8")

    app.add_route("/docs", page, include_in_schema=False)
    app.add_route("/docs.css", style, include_in_schema=False)


def render(description: dict[str, Any]) -> str:
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
        f"<p>{_prose(one)}</p>\n" for one in operation.get("description", "").split("\n\n") if one
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
    choices = ", ".join(f"<code>{escape(str(one))}</code>" for one in field.get("enum", []))
    return f" ({choices})" if choices else ""


def _example(name: str, field: dict[str, Any]) -> Any:
    if "enum" in field:
        return field["enum"][0]
    if name == "q":
        return "Hello."
    return {"integer": 0, "array": [0]}.get(field.get("type", ""), "")
