"""What is asked amiss is refused with a reason, and nobody is waited for in vain."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from test_serve_batching import until

from regard.recipe import Recipe
from regard.server.app import create_app
from regard.server.service import Service
from regard.server.settings import Settings
from tests.unit.server.serving import PAIR, Capitals, ask, capitals, events, run, translate


@pytest.fixture
def model(small_recipe: Callable[..., Recipe]) -> Capitals:
    return capitals(small_recipe)


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
        (400, {"json": {"q": "a", **PAIR, "length_penalty": -1}}),
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


def test_who_asks_for_languages_that_have_no_names_is_told_so(
    small_recipe: Callable[..., Recipe],
) -> None:
    unnamed = Capitals(small_recipe(data={"train": {"pairs": "pairs.tsv"}}))
    answer = ask(create_app(unnamed), "POST", "/translate", json={"q": "a", **PAIR})
    assert answer.json()["error"] == (
        "en to de is not supported: this server translates source to target "
        "(its languages were not named)"
    )


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
