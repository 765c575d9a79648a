"""What is asked over HTTP is answered as LibreTranslate would; and what the server tells besides."""

from collections.abc import Callable
from pathlib import Path

import pytest

from regard.recipe import Recipe
from regard.server.app import create_app
from regard.server.settings import Settings
from tests.unit.server.serving import PAIR, Capitals, ask, capitals, events, translate


@pytest.fixture
def model(small_recipe: Callable[..., Recipe]) -> Capitals:
    return capitals(small_recipe)


# What LibreTranslate has


def test_white_space_and_line_breaks_stay(model: Capitals) -> None:
    app = create_app(model)
    text = "  One. Two!\r\n\n\tthree  \n--\n"
    assert translate(app, text) == {"translatedText": text.upper()}
    assert model.batches == [["One.", "Two!", "three"]]
    assert translate(app, "") == {"translatedText": ""}


def test_a_form_is_answered_as_json_is(model: Capitals) -> None:
    app = create_app(model)
    answer = ask(app, "POST", "/translate", data={"q": "Größe & more", **PAIR, "alternatives": "1"})
    assert answer.json() == translate(app, "Größe & more", alternatives=1)
    assert ask(app, "POST", "/translate", data={"q": ["a", "b"], **PAIR}).json() == {
        "translatedText": ["A", "B"]
    }


def test_lists_alternatives_and_detection(model: Capitals) -> None:
    app = create_app(model)
    en = {"confidence": 100.0, "language": "en"}
    assert translate(app, ["One. Two", "c"], alternatives=2, source="auto") == {
        "translatedText": ["ONE. TWO", "C"],
        "alternatives": [["ONE. 1 TWO 1", "ONE. 2 TWO 2"], ["C 1", "C 2"]],
        "detectedLanguage": [en, en],
    }
    assert translate(app, "a", source="auto") == {"translatedText": "A", "detectedLanguage": en}
    assert ask(app, "POST", "/detect", data={"q": "a"}).json() == [en]


def test_html_keeps_its_tags(model: Capitals) -> None:
    found = translate(create_app(model), "<p>a <b>b &lt;</b></p><script>c</script>", format="html")
    assert found == {"translatedText": "<p>A <b>B &lt;</b></p><script>c</script>"}


def test_options_reach_the_model(model: Capitals) -> None:
    app = create_app(model)
    translate(app, "a", beam=3, alpha=0.5)
    translate(app, "a", beam=1, alternatives=6)
    translate(app, "a")
    assert model.options == [(3, 0.5, 1, None), (7, None, 7, None), (None, None, 1, None)]


def test_languages_and_settings(model: Capitals) -> None:
    app = create_app(model, Settings(characters=77, api_keys=("secret",)))
    assert ask(app, "GET", "/languages").json() == [
        {"code": "en", "name": "English", "targets": ["de"]},
        {"code": "de", "name": "German", "targets": []},
    ]
    for method in ("GET", "POST"):
        told = ask(app, method, "/frontend/settings").json()
        assert told["charLimit"] == 77
        assert told["keyRequired"] is True
        assert told["language"]["source"] == {"code": "en", "name": "English"}
        assert told["supportedFilesFormat"] == []


# What is Regard's own


@pytest.mark.parametrize("form", ["text", "html"])
def test_the_parts_of_a_stream_are_the_translation(model: Capitals, form: str) -> None:
    app = create_app(model)
    text = " <p>One. Two</p>\n\n<b>three</b>\u2028four "
    asked = {"q": text, **PAIR, "format": form}
    first, *parts, last = events(ask(app, "POST", "/v1/translate/stream", json=asked))
    assert first == ("start", {"sentences": len(parts) - 1})
    assert last == ("end", {})
    assert {name for name, _ in parts} == {"part"}
    whole = "".join(part["text"] for _, part in parts)
    assert whole == translate(app, text, format=form)["translatedText"]


def test_what_the_model_is(model: Capitals) -> None:
    told = ask(create_app(model, card={"steps": 7}), "GET", "/v1/info").json()
    assert told["card"] == {"steps": 7}
    assert told["languages"][0]["code"] == "en"
    closed = create_app(model, Settings(api_keys=("key",)))
    assert ask(closed, "GET", "/v1/info").status_code == 403
    bearer = {"authorization": "Bearer key"}
    assert ask(closed, "GET", "/v1/info", headers=bearer).status_code == 200


def test_counts(model: Capitals) -> None:
    app = create_app(model)
    translate(app, "One. Two.")
    ask(app, "GET", "/none/of/these")
    told = ask(app, "GET", "/metrics")
    assert told.headers["content-type"].startswith("text/plain")
    for line in (
        'regard_requests_total{route="/translate",status="200"} 1.0',
        'regard_requests_total{route="none",status="404"} 1.0',
        'regard_request_seconds_count{route="/translate"} 1.0',
        "regard_batch_sentences_sum 2.0",
        "regard_sentences_total 2.0",
        "regard_tokens_total 2.0",
        "regard_queue_sentences 0.0",
    ):
        assert line in told.text.splitlines()


def test_the_page_and_nothing_beside_it(model: Capitals, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    page = tmp_path / "web"
    (page / "parts").mkdir(parents=True)
    (page / "index.html").write_text("<!doctype html>")
    (page / "parts" / "a.js").write_text("export {}")
    app = create_app(model, page=page)
    assert ask(app, "GET", "/").text == "<!doctype html>"
    assert ask(app, "GET", "/").headers["content-type"].startswith("text/html")
    assert ask(app, "GET", "/parts/a.js").headers["content-type"].startswith("text/javascript")
    for path in ("/../secret", "/%2e%2e/secret", "/parts", "/parts/../../secret"):
        assert ask(app, "GET", path).status_code == 404
    assert ask(create_app(model, page=tmp_path / "none"), "GET", "/").status_code == 404
