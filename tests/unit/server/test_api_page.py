"""The page /docs: it names every route and field, and loads nothing from other hosts."""

import re
from collections.abc import Callable
from html import escape

from regard.recipe import Recipe
from regard.server.api_page import render
from regard.server.app import create_app
from tests.unit.server.client import english_to_german, send


def test_the_page_describes_every_route(small_recipe: Callable[..., Recipe]) -> None:
    app = create_app(english_to_german(small_recipe))
    response = send(app, "GET", "/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {escape(path)}</code>" in response.text
    assert '{"source": "en", "target": "de", "q": "Hello."}' in response.text.replace("&quot;", '"')
    assert "<td><code>length_penalty</code></td>" in response.text
    assert "(<code>en</code>, <code>auto</code>)" in response.text
    upload = response.text.partition("POST /translate_file")[2].partition("<h2>")[0]
    assert "<td><code>file</code> (required)</td><td>the document</td>" in upload
    for path in ("/translate", "/translate_file", "/v1/translate/stream"):
        fields = response.text.partition(f"POST {path}<")[2].partition("<h2>")[0]
        assert "<td><code>glossary</code></td><td>how terms must be translated" in fields


def test_the_page_loads_only_its_style_sheet(small_recipe: Callable[..., Recipe]) -> None:
    app = create_app(english_to_german(small_recipe))
    text = send(app, "GET", "/docs").text
    assert "<script" not in text
    assert "//" not in re.sub("<!doctype html>", "", text)
    for link in re.findall('(?:href|src)="(.*?)"', text):
        assert send(app, "GET", f"/{link}").status_code == 200


def test_descriptions_are_escaped() -> None:
    info = {"title": "<b>", "version": "1", "summary": "<script>"}
    operation = {"description": "<i> `<a>` and ``b``"}
    page = render({"info": info, "paths": {"/<u>": {"get": operation}}})
    for tag in ("<b>", "<script>", "<i>", "<u>", "<a>"):
        assert tag not in page
    assert "<code>&lt;a&gt;</code> and <code>b</code>" in page
