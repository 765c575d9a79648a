"""The HTTP API: LibreTranslate's routes, Regard's own routes, metrics, the page /docs, and the files of the page."""

import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from regard.recipe import Recipe
from regard.server.app import create_app, render_docs
from regard.server.model_pool import ModelEntry
from regard.server.schemas import Settings
from regard.tasks import Translation, Translator
from tests.unit.server.client import (
    PAIR,
    ServedUppercaseModel,
    english_to_german,
    entry,
    events,
    send,
    translate,
)


@pytest.fixture
def model(small_recipe: Callable[..., Recipe]) -> ServedUppercaseModel:
    return english_to_german(small_recipe)


# LibreTranslate's routes


def test_white_space_and_line_breaks_are_kept(model: ServedUppercaseModel) -> None:
    app = create_app(model)
    text = "  One. Two!\r\n\n\tthree  \n--\n"
    assert translate(app, text) == {"translatedText": text.upper()}
    assert model.batches == [["One.", "Two!", "three"]]
    assert translate(app, "") == {"translatedText": ""}


def test_a_form_gets_the_same_response_as_json(model: ServedUppercaseModel) -> None:
    app = create_app(model)
    response = send(
        app, "POST", "/translate", data={"q": "Größe & more", **PAIR, "alternatives": "1"}
    )
    assert response.json() == translate(app, "Größe & more", alternatives=1)
    assert send(app, "POST", "/translate", data={"q": ["a", "b"], **PAIR}).json() == {
        "translatedText": ["A", "B"]
    }


def test_multipart_and_query_parameters_get_the_same_response(model: ServedUppercaseModel) -> None:
    """As LibreTranslate's clients in browsers send them."""
    app = create_app(model)
    fields = {"q": "Größe & more", **PAIR, "alternatives": "1"}
    expected = translate(app, "Größe & more", alternatives=1)
    multipart = {name: (None, value) for name, value in fields.items()}
    assert send(app, "POST", "/translate", files=multipart).json() == expected
    assert send(app, "POST", "/translate", params=fields).json() == expected
    q = {"q": fields.pop("q")}
    assert send(app, "POST", "/translate", params=fields, data=q).json() == expected


ORIGIN = "https://example.org"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type",
}


@pytest.mark.parametrize(
    ("origins", "allowed"),
    [((), None), ((ORIGIN,), ORIGIN), (("*",), "*"), (("https://other.org",), None)],
)
def test_cors(model: ServedUppercaseModel, origins: tuple[str, ...], allowed: str | None) -> None:
    app = create_app(model, Settings(cors_origins=origins))
    body = {"q": "a", **PAIR}
    response = send(app, "POST", "/translate", json=body, headers={"origin": ORIGIN})
    assert response.headers.get("access-control-allow-origin") == allowed
    if allowed:
        preflight = send(app, "OPTIONS", "/translate", headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == allowed
        assert "content-type" in preflight.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in preflight.headers


def test_lists_alternatives_and_detection(model: ServedUppercaseModel) -> None:
    app = create_app(model)
    en = {"confidence": 100.0, "language": "en"}
    assert translate(app, ["One. Two", "c"], alternatives=2, source="auto") == {
        "translatedText": ["ONE. TWO", "C"],
        "alternatives": [["ONE. 1 TWO 1", "ONE. 2 TWO 2"], ["C 1", "C 2"]],
        "detectedLanguage": [en, en],
    }
    assert translate(app, "a", source="auto") == {"translatedText": "A", "detectedLanguage": en}
    assert send(app, "POST", "/detect", data={"q": "a"}).json() == [en]


def test_the_language_of_a_text_is_detected(small_recipe: Callable[..., Recipe]) -> None:
    pytest.importorskip("py3langid")
    app = create_app([entry(small_recipe, one, "de") for one in ("en", "fr-CA", "es")])
    french = "Le chien est dans le jardin et il dort."
    first, *others = send(app, "POST", "/detect", json={"q": french}).json()
    assert first["language"] == "fr-CA"
    assert first["confidence"] > 90
    assert [one["language"] for one in others] in (["en", "es"], ["es", "en"])
    texts = ["The dog is in the garden and sleeps.", french]
    detected = translate(app, texts, source="auto")["detectedLanguage"]
    assert [one["language"] for one in detected] == ["en", "fr-CA"]
    assert {
        one["confidence"] for one in send(app, "POST", "/detect", json={"q": "1 + 1"}).json()
    } == {100 / 3}
    app = create_app([entry(small_recipe, one, "de") for one in ("xx", "en")])
    assert (
        len({one["confidence"] for one in send(app, "POST", "/detect", json={"q": french}).json()})
        == 1
    )


def test_the_confidence_is_that_of_the_worst_sentence(
    model: ServedUppercaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = model.search

    def unsure(texts: Sequence[str], **options: Any) -> list[list[Translation]]:
        return [
            [one._replace(confidence=1 / (1 + len(one.text))) for one in some]
            for some in search(texts, **options)
        ]

    monkeypatch.setattr(model, "search", unsure)
    app = create_app(model)
    assert translate(app, "One. Three", confidence=True)["confidence"] == 1 / 6
    assert translate(app, ["a", ""], confidence=True)["confidence"] == [0.5, 1.0]
    assert "confidence" not in translate(app, "One")


def test_html_keeps_its_tags(model: ServedUppercaseModel) -> None:
    result = translate(create_app(model), "<p>a <b>b &lt;</b></p><script>c</script>", format="html")
    assert result == {"translatedText": "<p>A <b>B &lt;</b></p><script>c</script>"}


def test_options_reach_the_model(model: ServedUppercaseModel) -> None:
    app = create_app(model)
    translate(app, "a", beam=3, length_penalty=0.5)
    translate(app, "a", beam=1, alternatives=6)
    translate(app, "a")
    assert model.options == [(3, 0.5, 1, None), (7, None, 7, None), (None, None, 1, None)]


def test_languages_and_settings(model: ServedUppercaseModel) -> None:
    app = create_app(model, Settings(max_characters=77, api_keys=("secret",)))
    assert send(app, "GET", "/languages").json() == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "de", "name": "German", "targets": []},
    ]
    for method in ("GET", "POST"):
        response = send(app, method, "/frontend/settings").json()
        assert response["charLimit"] == 77
        assert response["keyRequired"] is True
        assert response["language"]["source"] == {"code": "en", "name": "English"}
        assert ".docx" in response["supportedFilesFormat"]


# Regard's own routes


def test_only_a_translator_can_be_inspected(
    model: ServedUppercaseModel, finished_run: Path
) -> None:
    def paths(app: FastAPI) -> set[str]:
        return set(send(app, "GET", "/openapi.json").json()["paths"])

    inspection = paths(create_app(Translator.load(finished_run, "cpu"))) - paths(create_app(model))
    assert inspection >= {"/v1/trace", "/v1/align", "/v1/model"}
    assert send(create_app(model), "POST", "/v1/trace", json={"q": "a"}).status_code == 404


@pytest.mark.parametrize("format", ["text", "html"])
def test_the_parts_of_a_stream_are_the_translation(
    model: ServedUppercaseModel, format: str
) -> None:
    app = create_app(model)
    text = " <p>One. Two</p>\n\n<b>three</b>\u2028four "
    body = {"q": text, **PAIR, "format": format}
    first, *parts, last = events(send(app, "POST", "/v1/translate/stream", json=body))
    assert first == ("start", {"sentences": len(parts) - 1})
    assert last == ("end", {})
    assert {name for name, _ in parts} == {"part"}
    whole = "".join(part["text"] for _, part in parts)
    assert whole == translate(app, text, format=format)["translatedText"]


def test_info_has_the_card_and_the_languages(model: ServedUppercaseModel) -> None:
    entry = ModelEntry("demo", model.recipe, lambda: model, {"steps": 7, "parameters": 9})
    response = send(create_app([entry]), "GET", "/v1/info").json()
    assert response["card"] == {"steps": 7, "parameters": 9}
    (described,) = response["models"]
    assert described["name"] == "demo"
    assert described["pairs"] == [["en", "de"]]
    assert described["parameters"] == 9
    assert (described["loaded"], described["scores"], described["examples"]) == (False, [], [])
    assert response["languages"][0]["code"] == "en"
    closed = create_app(model, Settings(api_keys=("key",)))
    assert send(closed, "GET", "/v1/info").status_code == 403
    bearer = {"authorization": "Bearer key"}
    assert send(closed, "GET", "/v1/info", headers=bearer).status_code == 200


def test_metrics_count_requests_and_sentences(model: ServedUppercaseModel) -> None:
    app = create_app(model)
    translate(app, "One. Two.")
    send(app, "GET", "/none/of/these")
    response = send(app, "GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    for line in (
        'regard_requests_total{route="/translate",status="200"} 1.0',
        'regard_requests_total{route="none",status="404"} 1.0',
        'regard_request_seconds_count{route="/translate"} 1.0',
        'regard_batch_sentences_sum{model="model"} 2.0',
        'regard_sentences_total{model="model"} 2.0',
        'regard_tokens_total{model="model"} 2.0',
        'regard_queue_sentences{model="model"} 0.0',
        *(
            f'regard_batch_sentences_bucket{{le="{2**n}.0",model="model"}} {float(n > 0)}'
            for n in range(11)
        ),
    ):
        assert line in response.text.splitlines()


def test_the_page_may_only_load_its_own_files(model: ServedUppercaseModel) -> None:
    policy = send(create_app(model), "GET", "/").headers["content-security-policy"]
    directives = dict(one.split(" ", 1) for one in policy.split("; "))
    assert directives == {
        "default-src": "'none'",
        **dict.fromkeys(("script-src", "style-src", "font-src", "connect-src"), "'self'"),
        "img-src": "'self' data:",
        **dict.fromkeys(("base-uri", "form-action", "frame-ancestors"), "'none'"),
    }


def test_only_the_files_of_the_page_are_served(model: ServedUppercaseModel, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    page = tmp_path / "web"
    (page / "parts").mkdir(parents=True)
    (page / "index.html").write_text("<!doctype html>")
    (page / "parts" / "a.js").write_text("export {}")
    app = create_app(model, page=page)
    assert send(app, "GET", "/").text == "<!doctype html>"
    assert send(app, "GET", "/").headers["content-type"].startswith("text/html")
    assert send(app, "GET", "/parts/a.js").headers["content-type"].startswith("text/javascript")
    for path in ("/../secret", "/%2e%2e/secret", "/parts", "/parts/../../secret"):
        assert send(app, "GET", path).status_code == 404
    assert send(create_app(model, page=tmp_path / "none"), "GET", "/").status_code == 404


# ---------------------------------------------------------------------------------------------
# The page /docs names every route and field, and loads nothing from other hosts


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
    page = render_docs({"info": info, "paths": {"/<u>": {"get": operation}}})
    for tag in ("<b>", "<script>", "<i>", "<u>", "<a>"):
        assert tag not in page
    assert "<code>&lt;a&gt;</code> and <code>b</code>" in page
