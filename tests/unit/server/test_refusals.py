"""Bad requests are refused with a reason; slow and disconnected clients do not block the server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from regard.recipe import Recipe
from regard.server.app import create_app
from regard.server.schemas import MAX_MUTED_HEADS, Settings, TraceRequest
from regard.tasks import Translator
from tests.unit.server.client import (
    PAIR,
    ServedUppercaseModel,
    batcher_of,
    english_to_german,
    events,
    run,
    send,
    translate,
    until,
)

JSON = {"content-type": "application/json"}


@pytest.fixture
def model(small_recipe: Callable[..., Recipe]) -> ServedUppercaseModel:
    return english_to_german(small_recipe)


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
        (400, {"content": b'{"q": "\\ud800", "source": "en", "target": "de"}', "headers": JSON}),
        (400, {"content": b"{", "headers": JSON}),
        (400, {"content": b"\xff", "headers": JSON}),
        (400, {"content": b"["* 10_000, "headers": JSON}),
        (400, {"content": b"q=%ff", "headers": {"content-type": "application/x-www-form-urlencoded"}}),
        (400, {"content": b"a&" * 2000, "headers": {"content-type": "application/x-www-form-urlencoded"}}),
        (400, {"json": {"q": [0] * 300_000, **PAIR}}),
        (413, {"json": {"q": "a" * 100_001, **PAIR}}),
        (413, {"json": {"q": ["a"] * 129, **PAIR}}),
        (413, {"json": {"q": "No. " * 5000, **PAIR}}),
        (413, {"json": {"q": "a" * 2_000_000, **PAIR}}),
        (415, {"content": b'{"q": "a", "source": "en", "target": "de"}'}),
        (415, {"content": b"", "headers": {"content-type": "text/plain"}}),
        (400, {"files": {"q": b"a", **PAIR}}),
        (400, {"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=y"}}),
        (400, {"content": b"--x", "headers": {"content-type": "multipart/form-data"}}),
        (400, {"files": [(f"{n}", (None, "a")) for n in range(1001)]}),
        (400, {"params": {"q": "a"}}),
        (415, {"params": {"q": "a", **PAIR}, "content": b"q"}),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(
    model: ServedUppercaseModel, status: int, request_: dict[str, Any]
) -> None:
    app = create_app(model)
    assert send(app, "POST", "/translate", **request_).status_code == status
    assert model.batches == []
    assert str(status) in documented_statuses(app)


def documented_statuses(app: FastAPI) -> dict[str, Any]:
    """The responses of /translate in the description of the API, by their statuses."""
    description = send(app, "GET", "/openapi.json").json()
    responses: dict[str, Any] = description["paths"]["/translate"]["post"]["responses"]
    return responses


@pytest.mark.parametrize(
    ("glossary", "reason"),
    [
        ("dog Hund", "glossary:1: a line must be source term, tab, target term"),
        ("dog\tHund\n\ndog\tKöter", "glossary:3: 'dog' is translated as 'Köter' here and as 'Hund' before"),
        ({" dog": "Hund"}, "glossary term ' dog': must not be empty or begin or end with a space"),
        ({"dog": ""}, "glossary term '': must not be empty or begin or end with a space"),
        ({"dog": 3}, "glossary: 'dog' is translated as 3, which is not a text"),
        ([["dog", "Hund"]], "glossary [['dog', 'Hund']]: must be an object of terms and their translations, or lines "
                            "of source term, tab, target term"),
        ({f"dog{n}": "Hund" for n in range(1001)}, "glossary: 1,001 terms, at most 1,000 are allowed"),
        ({"dog": "x" * 101}, f"glossary: '{'x' * 58}… has 101 characters, at most 100 are allowed"),
        ({"dog": "x\n" * 60 + "x"}, f"glossary: '{'x' + chr(92) + 'n'}"),
        ({f"t{n}": f"T{n}" for n in range(17)}, "a sentence with 17 glossary terms: at most 16 are allowed"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/translate", "/v1/translate/stream"])
def test_a_bad_glossary_is_refused_with_one_line(
    model: ServedUppercaseModel, path: str, glossary: Any, reason: str
) -> None:
    text = " ".join(f"t{n}" for n in range(17))
    body = {"q": text, **PAIR, "glossary": glossary}
    response = send(create_app(model), "POST", path, json=body)
    assert response.status_code == 400
    assert response.json()["error"].startswith(reason)
    assert "\n" not in response.json()["error"]
    assert len(response.json()["error"]) < 200
    assert not [batch for batch in model.batches if batch != [""]]
    if isinstance(glossary, str):
        assert send(create_app(model), "POST", path, data=body).json() == response.json()


def test_terms_that_a_model_cannot_generate_are_refused(make_run: Callable[..., Path]) -> None:
    data = {"train": {"pairs": "pairs.tsv"}, "languages": ["en", "de"]}
    run = make_run(data=data, tokenizer={"kind": "word", "vocab_size": 300})
    app = create_app(Translator.load(run, "cpu"))
    body = {"q": "no such term", **PAIR, "glossary": {"curd": "Quark", "whey": "Molke"}}
    for path in ("/translate", "/v1/translate/stream"):
        response = send(app, "POST", path, json=body)
        assert response.status_code == 400
        assert response.json()["error"] == (
            "'Quark' and 1 more cannot be guaranteed: this model's tokenizer cannot encode them without unknown tokens"
        )
    sampling = make_run(data=data, decoding={"temperature": 0.5})
    response = send(create_app(Translator.load(sampling, "cpu")), "POST", "/translate", json=body)
    assert response.status_code == 400
    assert "sampling cannot guarantee constraints" in response.json()["error"]


def test_the_tokens_of_terms_count(model: ServedUppercaseModel) -> None:
    app = create_app(model, Settings(max_sentence_tokens=20))
    assert translate(app, "dog", glossary={"dog": "x" * 50})["translatedText"] == "DOG"
    body = {"q": "dog", **PAIR, "glossary": {"dog": "x" * 60}}
    response = send(app, "POST", "/translate", json=body)
    assert response.status_code == 413
    assert "a sentence of 23 tokens: at most 20 are allowed" in response.json()["error"]


def test_as_many_heads_as_a_large_model_has_can_be_muted() -> None:
    heads = [f"encoder.{number // 16}.{number % 16}" for number in range(MAX_MUTED_HEADS)]
    assert TraceRequest(q="a", mute=heads).mute == heads
    with pytest.raises(ValidationError, match="at most 10000 items"):
        TraceRequest(q="a", mute=[*heads, "encoder.0.0"])


@pytest.mark.parametrize("q", ["a" * 100_000, ["a"] * 128], ids=["characters", "texts"])
def test_the_limits_themselves_are_allowed(model: ServedUppercaseModel, q: str | list[str]) -> None:
    assert send(create_app(model), "POST", "/translate", json={"q": q, **PAIR}).is_success


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_tokens": 7000}, "7,236 tokens: at most 7,000 are allowed in one request"),
        ({"max_sentence_tokens": 200}, "a sentence of 201 tokens: at most 200 are allowed"),
    ],
)
@pytest.mark.parametrize("path", ["/translate", "/v1/translate/stream"])
def test_too_many_tokens_are_refused_before_the_search(
    model: ServedUppercaseModel, path: str, limits: dict[str, Any], reason: str
) -> None:
    unbroken = {"q": "QmFzZTY0" * 2700, **PAIR}
    response = send(create_app(model, Settings(**limits)), "POST", path, json=unbroken)
    assert response.status_code == 413
    assert reason in response.json()["error"]
    assert model.batches == []


def test_a_refused_language_pair_mentions_that_the_recipe_names_no_languages(
    small_recipe: Callable[..., Recipe],
) -> None:
    unnamed = ServedUppercaseModel(small_recipe(data={"train": {"pairs": "pairs.tsv"}}))
    response = send(create_app(unnamed), "POST", "/translate", json={"q": "a", **PAIR})
    assert response.json()["error"] == (
        "en to de is not supported: this server translates source to target "
        "(the model's recipe names no languages)"
    )


def test_a_body_is_not_read_beyond_its_limit(model: ServedUppercaseModel) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while read < 100:
            read += 1
            yield b"x" * 1000

    app = create_app(model, Settings(max_body_bytes=10_000))
    assert send(app, "POST", "/translate", content=endless(), headers=JSON).status_code == 413
    assert read <= 12


def test_a_body_that_does_not_arrive_times_out(model: ServedUppercaseModel) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(10)

    app = create_app(model, Settings(timeout=0.05))
    assert send(app, "POST", "/translate", content=slow(), headers=JSON).status_code == 503


@pytest.mark.parametrize("path", ["/translate", "/v1/translate/stream"])
def test_a_slow_translation_times_out(model: ServedUppercaseModel, path: str) -> None:
    app = create_app(model, Settings(timeout=0.05))
    model.may_continue.clear()
    response = send(app, "POST", path, json={"q": "One. Two", **PAIR})
    model.may_continue.set()
    if path == "/translate":
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
    assert "within 0.05 seconds" in response.text
    assert batcher_of(app).queued == 0


@pytest.mark.parametrize("path", ["/translate", "/v1/translate/stream"])
def test_a_full_queue_returns_429(model: ServedUppercaseModel, path: str) -> None:
    app = create_app(model, Settings(max_queued_sentences=2))

    async def test(client: httpx.AsyncClient) -> None:
        model.may_continue.clear()
        first = asyncio.create_task(client.post("/translate", json={"q": "a", **PAIR}))
        await until(lambda: len(model.batches) == 1)
        second = asyncio.create_task(client.post("/translate", json={"q": "One. Two", **PAIR}))
        await until(lambda: batcher_of(app).queued == 2)
        third = await client.post(path, json={"q": "c", **PAIR})
        assert third.status_code == 429
        assert "the queue is full" in third.json()["error"]
        model.may_continue.set()
        assert (await first).json() == {"translatedText": "A"}
        assert (await second).json() == {"translatedText": "ONE. TWO"}

    run(app, test)


def test_a_server_that_is_shutting_down_is_not_ready(model: ServedUppercaseModel) -> None:
    app = create_app(model)
    assert send(app, "GET", "/ready").status_code == 200
    app.state.service.models.refuse()
    assert send(app, "GET", "/health").status_code == 200
    assert send(app, "GET", "/ready").status_code == 503
    assert send(app, "POST", "/translate", json={"q": "a", **PAIR}).status_code == 503
    assert "503" in documented_statuses(app)


@pytest.mark.parametrize("path", ["/translate", "/detect", "/v1/translate/stream"])
def test_api_keys(model: ServedUppercaseModel, path: str) -> None:
    app = create_app(model, Settings(api_keys=("first", "zweitér")))
    body = {"q": "a", **PAIR}
    assert send(app, "POST", path, json=body).status_code == 403
    assert send(app, "POST", path, json={**body, "api_key": "firs"}).status_code == 403
    assert send(app, "POST", path, json={**body, "api_key": "zweitér"}).status_code == 200
    assert send(app, "POST", path, data={**body, "api_key": "first"}).status_code == 200
    bearer = {"authorization": "Bearer first"}
    for key in ({}, {"api_key": None}, {"api_key": ""}):
        assert send(app, "POST", path, json={**body, **key}, headers=bearer).status_code == 200
    assert send(app, "POST", path, json={**body, "api_key": ""}).status_code == 403
    assert send(create_app(model), "POST", path, json={**body, "api_key": "x"}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/translate", 405),
        ("GET", "/none", 404),
        ("PUT", "/detect", 405),
        ("GET", "/redoc", 404),
    ],
)
def test_unknown_routes_and_methods(
    model: ServedUppercaseModel, method: str, path: str, status: int
) -> None:
    assert send(create_app(model), method, path).status_code == status


def test_an_internal_error_is_logged_and_reported(
    model: ServedUppercaseModel, caplog: pytest.LogCaptureFixture
) -> None:
    app = create_app(model)
    response = send(app, "POST", "/translate", json={"q": ["good", "bad"], **PAIR})
    assert response.status_code == 500
    assert "POST /translate failed" in caplog.text
    assert translate(app, "good") == {"translatedText": "GOOD"}
    body = {"q": "good\nbad\ngood", **PAIR}
    received = events(send(app, "POST", "/v1/translate/stream", json=body))
    assert [name for name, _ in received] == ["start", "part", "error"]


def test_a_disconnected_client_leaves_the_queue(model: ServedUppercaseModel) -> None:
    app = create_app(model)
    batcher = batcher_of(app)
    sent: list[Any] = []
    body = json.dumps({"q": "One. Two. Three.", **PAIR}).encode()

    async def request(disconnect: asyncio.Event) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await disconnect.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/translate", "headers": headers}
        await app({**scope, "query_string": b"", "asgi": {"version": "3.0"}}, receive, send)

    async def test(_: httpx.AsyncClient) -> None:
        model.may_continue.clear()
        events = [asyncio.Event(), asyncio.Event()]
        tasks = [asyncio.create_task(request(events[0]))]
        await until(lambda: len(model.batches) == 1)
        tasks.append(asyncio.create_task(request(events[1])))
        await until(lambda: batcher.queued == 3)
        for event in events:
            event.set()
        await asyncio.gather(*tasks)
        assert batcher.queued == 0
        assert sent == []
        model.may_continue.set()
        await batcher.drain()
        assert len(model.batches) == 1

    run(app, test)
