"""What is asked over HTTP is answered as LibreTranslate would, or refused with a reason; nothing fails."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import torch
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from schemathesis import BaseSchema, GenerationMode
from schemathesis.checks import not_a_server_error
from test_serve_batching import Upper, until

from regard.align import align
from regard.course import Checkpoints, course
from regard.model import Translator, weights_of
from regard.recipe import Recipe
from regard.run import Run
from regard.serve.app import HEADERS, create_app
from regard.serve.course import follow
from regard.serve.live import growing
from regard.serve.run import choose_threads
from regard.serve.service import Service
from regard.serve.settings import Settings
from regard.serve.split import split_html
from regard.trace import trace

PAIR = {"source": "en", "target": "de"}


class Capitals(Upper):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe


@pytest.fixture
def model(small_recipe: Callable[..., Recipe]) -> Capitals:
    data = {"train": {"pairs": "pairs.tsv"}, "languages": ["en", "de"]}
    return Capitals(small_recipe(data=data))


def run(app: FastAPI, test: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async def in_client() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await asyncio.wait_for(test(client), 20)

    asyncio.run(in_client())


def ask(app: FastAPI, method: str, path: str, **request: Any) -> httpx.Response:
    """One request; whatever the answer, it has the headers, and a reason if it is no success."""
    answers: list[httpx.Response] = []

    async def test(client: httpx.AsyncClient) -> None:
        answers.append(await client.request(method, path, **request))

    run(app, test)
    (answer,) = answers
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    if not answer.is_success:
        assert list(answer.json()) == ["error"]
        assert answer.json()["error"]
    return answer


def translate(app: FastAPI, q: str | list[str], **more: Any) -> Any:
    answer = ask(app, "POST", "/translate", json={"q": q, **PAIR, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


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


# Refusals


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (400, {"json": {"q": "a", "source": "de", "target": "en"}}),
        (400, {"json": {"q": "a", "source": "en"}}),
        (400, {"json": {"q": 3, **PAIR}}),
        (400, {"json": {"q": ["a", None], **PAIR}}),
        (400, {"json": {"q": "a", **PAIR, "format": "pdf"}}),
        (400, {"json": {"q": "a", **PAIR, "alternatives": 11}}),
        (400, {"json": {"q": "a", **PAIR, "beam": 21}}),
        (400, {"json": {"q": "a", **PAIR, "alpha": -1}}),
        (400, {"json": ["q"]}),
        (400, {"content": b'{"q": "\\ud800", "source": "en", "target": "de"}'}),
        (400, {"content": b"{"}),
        (400, {"content": b"\xff"}),
        (400, {"content": b"["* 10_000}),
        (400, {"content": b"q=%ff", "headers": {"content-type": "application/x-www-form-urlencoded"}}),
        (400, {"content": b"a&" * 2000, "headers": {"content-type": "application/x-www-form-urlencoded"}}),
        (400, {"json": {"q": [0] * 300_000, **PAIR}}),
        (413, {"json": {"q": "a" * 100_001, **PAIR}}),
        (413, {"json": {"q": ["a"] * 129, **PAIR}}),
        (413, {"json": {"q": "No. " * 5000, **PAIR}}),
        (413, {"json": {"q": "a" * 2_000_000, **PAIR}}),
        (415, {"files": {"q": b"a"}}),
    ],
)  # fmt: skip
def test_what_is_asked_amiss_is_refused(
    model: Capitals, status: int, request_: dict[str, Any]
) -> None:
    assert ask(create_app(model), "POST", "/translate", **request_).status_code == status
    assert model.batches == []


def test_a_body_is_read_no_further_than_its_limit(model: Capitals) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while read < 100:
            read += 1
            yield b"x" * 1000

    app = create_app(model, Settings(body_bytes=10_000))
    assert ask(app, "POST", "/translate", content=endless()).status_code == 413
    assert read <= 12


def test_a_body_that_does_not_come_is_not_waited_for(model: Capitals) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(10)

    app = create_app(model, Settings(seconds=0.05))
    assert ask(app, "POST", "/translate", content=slow()).status_code == 503


@pytest.mark.parametrize("path", ["/translate", "/v1/translate/stream"])
def test_a_translation_that_takes_too_long_is_given_up(model: Capitals, path: str) -> None:
    app = create_app(model, Settings(seconds=0.05))
    model.may_go_on.clear()
    answer = ask(app, "POST", path, json={"q": "One. Two", **PAIR})
    model.may_go_on.set()
    if path == "/translate":
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
    assert "within 0.05 seconds" in answer.text
    assert app.state.service.batcher.waiting == 0


@pytest.mark.parametrize("path", ["/translate", "/v1/translate/stream"])
def test_a_full_queue_answers_429(model: Capitals, path: str) -> None:
    app = create_app(model, Settings(queue_sentences=2))

    async def test(client: httpx.AsyncClient) -> None:
        model.may_go_on.clear()
        first = asyncio.create_task(client.post("/translate", json={"q": "a", **PAIR}))
        await until(lambda: len(model.batches) == 1)
        second = asyncio.create_task(client.post("/translate", json={"q": "One. Two", **PAIR}))
        await until(lambda: app.state.service.batcher.waiting == 2)
        third = await client.post(path, json={"q": "c", **PAIR})
        assert third.status_code == 429
        assert "waiting already" in third.json()["error"]
        model.may_go_on.set()
        assert (await first).json() == {"translatedText": "A"}
        assert (await second).json() == {"translatedText": "ONE. TWO"}

    run(app, test)


def test_a_server_that_stops_says_so(model: Capitals) -> None:
    app = create_app(model)
    assert ask(app, "GET", "/ready").status_code == 200
    app.state.service.batcher.refuses = True
    assert ask(app, "GET", "/health").status_code == 200
    assert ask(app, "GET", "/ready").status_code == 503
    assert ask(app, "POST", "/translate", json={"q": "a", **PAIR}).status_code == 503


@pytest.mark.parametrize("path", ["/translate", "/detect", "/v1/translate/stream"])
def test_keys(model: Capitals, path: str) -> None:
    app = create_app(model, Settings(api_keys=("first", "zweitér")))
    asked = {"q": "a", **PAIR}
    assert ask(app, "POST", path, json=asked).status_code == 403
    assert ask(app, "POST", path, json={**asked, "api_key": "firs"}).status_code == 403
    assert ask(app, "POST", path, json={**asked, "api_key": "zweitér"}).status_code == 200
    assert ask(app, "POST", path, data={**asked, "api_key": "first"}).status_code == 200
    bearer = {"authorization": "Bearer first"}
    assert ask(app, "POST", path, json=asked, headers=bearer).status_code == 200
    assert ask(create_app(model), "POST", path, json={**asked, "api_key": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/translate", 405),
        ("GET", "/none", 404),
        ("PUT", "/detect", 405),
        ("GET", "/docs", 404),
    ],
)
def test_no_such_route(model: Capitals, method: str, path: str, status: int) -> None:
    assert ask(create_app(model), method, path).status_code == status


def test_a_mistake_of_our_own_is_logged_and_told(
    model: Capitals, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(model)
    answer = ask(app, "POST", "/translate", json={"q": ["good", "bad"], **PAIR})
    assert answer.status_code == 500
    assert "POST /translate failed" in caplog.text
    assert translate(app, "good") == {"translatedText": "GOOD"}
    asked = {"q": "good\nbad\ngood", **PAIR}
    told = events(ask(app, "POST", "/v1/translate/stream", json=asked))
    assert [name for name, _ in told] == ["start", "part", "error"]


def test_a_client_that_goes_away_leaves_the_queue(model: Capitals) -> None:
    app = create_app(model)
    service: Service = app.state.service
    sent: list[Any] = []
    asked = json.dumps({"q": "One. Two. Three.", **PAIR}).encode()

    async def one(gone: asyncio.Event) -> None:
        messages = [{"type": "http.request", "body": asked, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/translate", "headers": []}
        await app({**scope, "query_string": b"", "asgi": {"version": "3.0"}}, receive, send)

    async def test(_: httpx.AsyncClient) -> None:
        model.may_go_on.clear()
        events = [asyncio.Event(), asyncio.Event()]
        tasks = [asyncio.create_task(one(events[0]))]
        await until(lambda: len(model.batches) == 1)
        tasks.append(asyncio.create_task(one(events[1])))
        await until(lambda: service.batcher.waiting == 3)
        for event in events:
            event.set()
        await asyncio.gather(*tasks)
        assert service.batcher.waiting == 0
        assert sent == []
        model.may_go_on.set()
        await service.batcher.finish()
        assert len(model.batches) == 1

    run(app, test)


# What is Regard's own


def events(answer: httpx.Response) -> list[tuple[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.split("\n\n") if block]
    return [(name[len("event: ") :], json.loads(data[len("data: ") :])) for name, data in blocks]


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


# All of it, with a real model


@pytest.fixture(scope="module")
def api(finished_run: Path) -> BaseSchema:
    model = Translator.load(finished_run)
    short = model.recipe.search.model_copy(
        update={"extra_length": 2}
    )  # it knows no end, and goes on
    model.recipe = model.recipe.model_copy(update={"search": short})
    app = create_app(model, Settings(batch_wait=0.0), Run(finished_run).card())
    return schemathesis.openapi.from_asgi("/openapi.json", app)


MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
POSTS = [
    "/translate",
    "/detect",
    "/v1/translate/stream",
    "/v1/trace",
    "/v1/align",
    "/v1/live",
]
GETS = [
    "/languages",
    "/frontend/settings",
    "/v1/info",
    "/v1/run",
    "/v1/run/curves",
    "/health",
    "/ready",
    "/metrics",
]
KEPT = ["/v1/trace/{id}/{place}/{layer}", "/v1/trace/{id}/{place}/{layer}/{part}"]
EXAMPLES = 90
"""of each mode of each of the six that take any: more than a thousand"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("path", POSTS)
def test_nothing_that_can_be_asked_is_an_error_of_the_server(
    api: BaseSchema, path: str, mode: GenerationMode
) -> None:
    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(api[path]["POST"].as_strategy(generation_mode=mode))
    def test(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(checks=[not_a_server_error])

    test()


@pytest.mark.parametrize("path", KEPT)
def test_what_is_not_kept_is_not_found(api: BaseSchema, path: str) -> None:
    @settings(max_examples=EXAMPLES // 4, suppress_health_check=list(HealthCheck))
    @given(api[path]["GET"].as_strategy())
    def test(case: schemathesis.Case[Any]) -> None:
        assert case.call().status_code == 404

    test()


def test_a_trace_tells_what_the_model_did(finished_run: Path) -> None:
    model = Translator.load(finished_run)
    app = create_app(model, Settings(trace_characters=20))
    asked = {"q": "ein Hund", "beam": 2, "alpha": 0.5}
    told = ask(app, "POST", "/v1/trace", json=asked).json()
    assert told.pop("id")
    expected = trace(model, "ein Hund", beam=2, alpha=0.5).to_json("attention")
    assert told == json.loads(json.dumps(expected))
    assert ask(app, "POST", "/v1/trace", json={"q": "x" * 21}).status_code == 413
    assert ask(app, "POST", "/v1/trace", json={**asked, "beam": 10**6}).status_code == 400


def test_a_trace_can_be_interfered_with(finished_run: Path) -> None:
    model = Translator.load(finished_run)
    app = create_app(model)
    (forced,) = model.tokenizer.target.encode(["dog"])
    asked = {"q": "ein Hund", "forced": forced, "mute": ["cross.1.0"]}
    told = ask(app, "POST", "/v1/trace", json=asked).json()
    assert [token["id"] for token in told["said"]][: len(forced)] == forced
    assert told["muted"] == ["cross.1.0"]
    drawn = {"q": "ein Hund", "temperature": 2.0, "seed": 7}
    expected = trace(model, "ein Hund", temperature=2.0, seed=7).translation
    assert ask(app, "POST", "/v1/trace", json=drawn).json()["translation"] == expected
    for wrong in ({"mute": ["cross.9.0"]}, {"mute": ["x"]}, {"forced": [2]}, {"temperature": 1e-9}):
        answer = ask(app, "POST", "/v1/trace", json={"q": "ein Hund", **wrong})
        assert (answer.status_code, list(answer.json())) == (400, ["error"])


def test_large_traces_are_handed_out_layer_by_layer(finished_run: Path) -> None:
    model = Translator.load(finished_run)
    app = create_app(model, Settings(trace_bytes=0, traces_bytes=0, trace_tokens=4))
    expected = trace(model, "ein Hund")
    told = ask(app, "POST", "/v1/trace", json={"q": "ein Hund"}).json()
    assert told["cross"]["data"] is None
    path = f"/v1/trace/{told['id']}"
    for name, layers in {
        "cross/1": expected.cross[1],
        "nodes/0": expected.nodes[0],
        "encoder/0/key": expected.parts["encoder"].key[0],
        "decoder/1/output": expected.parts["decoder"].output[1],
    }.items():
        answer = ask(app, "GET", f"{path}/{name}")
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.content == layers.astype("<f4").tobytes()
    for wrong in ("cross/2", "cross/-1", "cross/²", "nowhere/0", "cross/0/nothing", "nodes/0/key"):
        answer = ask(app, "GET", f"{path}/{wrong}")
        assert (answer.status_code, list(answer.json())) == (404, ["error"])
    for large in ({"q": "ein " * 5}, {"q": "ein", "forced": [5] * 3, "prefix": "a dog"}):
        assert ask(app, "POST", "/v1/trace", json=large).status_code == 413
    # The budget is spent: the next trace takes the place of this one.
    ask(app, "POST", "/v1/trace", json={"q": "Hund"})
    assert ask(app, "GET", f"{path}/cross/1").status_code == 404


def test_the_course_of_the_run_is_told(trained_run: Path) -> None:
    model = Translator.load(trained_run)
    app = create_app(model, Settings(trace_characters=20, api_keys=("key",)))
    key = {"authorization": "Bearer key"}
    told = ask(app, "GET", "/v1/run", headers=key).json()
    assert told == json.loads(json.dumps(course(model)))
    assert told["checkpoints"] == [2, 4]
    curves = ask(app, "GET", "/v1/run/curves", headers=key).json()
    assert curves == {"curves": told["curves"], "checkpoints": [2, 4]}
    found = trace(model, "ein Hund")
    said = [token.id for token in found.said]
    asked = {"q": "ein Hund", "said": said, "step": 2, "api_key": "key"}
    aligned = ask(app, "POST", "/v1/align", json=asked).json()
    assert aligned == Checkpoints(model).alignment(2, model.asked("ein Hund"), said)
    wrongs: list[dict[str, Any]] = [{"step": 3}, {"said": [10**9]}, {"said": []}, {"q": "x" * 21}]
    for wrong in wrongs:
        answer = ask(app, "POST", "/v1/align", json={**asked, **wrong})
        assert answer.status_code == (413 if "q" in wrong else 400)
    for path in ("/v1/run", "/v1/run/curves"):
        assert ask(app, "GET", path).status_code == 403


def test_a_translation_is_told_while_it_grows(finished_run: Path) -> None:
    model = Translator.load(finished_run)
    app = create_app(model, Settings(trace_characters=40))
    answer = ask(app, "POST", "/v1/live", json={"q": "ein Hund. \n Hund"})
    events = [line.partition(": ")[2] for line in answer.text.splitlines() if line]
    assert events[-2:] == ["end", "{}"]
    texts = [json.loads(data)["text"] for data in events[1:-2:2]]
    first, second = model.translate(["ein Hund.", "Hund"])
    assert texts[-1] == f"{first} \n {second}"
    assert len(set(texts)) > 2, "told more than once"
    assert ask(app, "POST", "/v1/live", json={"q": "x" * 41}).status_code == 413


def test_who_stops_watching_stops_the_search(finished_run: Path) -> None:
    model = Translator.load(finished_run)
    service = create_app(model).state.service

    async def leave() -> None:
        events = growing(service, model, "ein Hund " * 20)
        await anext(events)
        await events.aclose()
        while service.batcher.waiting:
            await asyncio.sleep(0.01)
        assert await service.batcher.call(lambda: "free") == "free"

    asyncio.run(asyncio.wait_for(leave(), 20))


def test_inline_tags_travel_by_the_models_attention(finished_run: Path) -> None:
    model = Translator.load(finished_run)
    app = create_app(model)
    source, target = model.recipe.data.language_pair
    asked = {"q": "ein <b>Hund</b> <i>a <u>dog</u></i>", "source": source, "target": target}
    html = ask(app, "POST", "/translate", json={**asked, "format": "html"}).json()["translatedText"]
    (plain,) = model.translate(["ein Hund a dog"])
    assert sorted(re.findall("<.*?>", html)) == sorted(re.findall("<.*?>", asked["q"]))
    assert unescape(re.sub("<.*?>", "", html)) == plain
    alignment = align(model, "ein Hund a dog", plain)
    assert alignment is not None
    expected = split_html(asked["q"]).join([plain], [alignment])
    assert html == expected
    streamed = ask(app, "POST", "/v1/translate/stream", json={**asked, "format": "html"}).text
    assert json.dumps(html, ensure_ascii=False)[1:-1] in streamed


def test_better_weights_of_a_run_that_learns_are_taken_over(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.serve.course.LOOK_AGAIN", 0.01)
    folder = Run(run_folder)
    folder.card_file.unlink()
    model = Translator.load(run_folder)
    service = create_app(model).state.service
    better = {name: tensor + 1 for name, tensor in folder.weights().items()}

    async def follow_it() -> None:
        following = asyncio.create_task(follow(service, model))
        await asyncio.sleep(0.05)
        folder.write_weights(better)
        folder.write_card({})
        await following

    asyncio.run(asyncio.wait_for(follow_it(), 20))
    for name, tensor in weights_of(model.network).items():
        assert torch.equal(tensor, better[name]), name


def test_a_small_model_is_served_by_one_thread(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Translator.load(finished_run, "cpu")
    chosen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    choose_threads(model)
    assert chosen == [], "as the environment says"
    monkeypatch.delenv("OMP_NUM_THREADS")
    choose_threads(model)
    assert chosen == [1]
    monkeypatch.setattr("regard.serve.run.SMALL", 10)
    choose_threads(model)
    assert chosen == [1]


def test_what_is_described_is_what_there_is(api: BaseSchema) -> None:
    paths = api.raw_schema["paths"]
    found = {(path, method) for path, methods in paths.items() for method in methods}
    gets = {(path, "get") for path in [*GETS, *KEPT]}
    assert found == {(path, "post") for path in POSTS} | gets
    for path in GETS:
        api[path]["GET"].Case().call_and_validate()
