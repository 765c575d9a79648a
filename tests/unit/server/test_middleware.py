"""Every request: access log, rate limit, host check, headers that do not arrive, long texts that block nobody."""

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
import uvicorn

from regard.documents.markup import split_html
from regard.recipe import Recipe
from regard.server.app import create_app
from regard.server.middleware import RateLimiter, TimeLimitedProtocol, client_name
from regard.server.schemas import RequestRefused, Settings
from tests.unit.server.client import PAIR, ServedUppercaseModel, english_to_german, run, send


@pytest.fixture
def model(small_recipe: Callable[..., Recipe]) -> ServedUppercaseModel:
    return english_to_german(small_recipe)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("LocalHost:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("192.168.1.7", True),
        ("translate.example.org", True),
        ("evil.example.org", False),
        ("localhost.evil.example.org:8000", False),
        ("127.0.0.1.evil.example.org", False),
        ("", False),
    ],
)
def test_the_host_must_be_a_name_of_the_server(
    model: ServedUppercaseModel, host: str, allowed: bool
) -> None:
    """Otherwise a page of another site could reach a local server with DNS rebinding."""
    app = create_app(model, Settings(allowed_hosts=("Translate.example.org",)))
    response = send(app, "GET", "/languages", headers={"host": host})
    assert response.status_code == (200 if allowed else 421)
    everyone = create_app(model, Settings(allowed_hosts=("*",)))
    assert send(everyone, "GET", "/languages", headers={"host": host}).status_code == 200


def test_requests_are_logged_without_their_texts(
    model: ServedUppercaseModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "regard.access")
    app = create_app(model, Settings(access_log=True))
    body = {"q": "secret words", **PAIR}
    response = send(app, "POST", "/translate", json=body, headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    wrong = {"x-request-id": "a b", "host": "evil.example.org"}
    refused = send(app, "POST", "/translate?q=secret", headers=wrong)
    assert re.fullmatch("[0-9a-f]{16}", refused.headers["x-request-id"])
    send(app, "GET", "/secret")
    first, second, third = (json.loads(record.message) for record in caplog.records)
    assert first["time"].endswith("+00:00")
    assert first["seconds"] >= 0
    assert {**first, "time": "", "seconds": 0} == {
        "time": "", "id": "abc-1", "client": "127.0.0.1", "method": "POST", "route": "/translate",
        "status": 200, "seconds": 0, "bytes": len(response.content),
    }  # fmt: skip
    assert (second["status"], second["id"]) == (421, refused.headers["x-request-id"])
    assert (third["status"], third["route"]) == (404, "none")
    assert "secret" not in caplog.text.lower()
    caplog.clear()
    send(create_app(model), "GET", "/languages")
    assert not caplog.records


def test_a_token_bucket_refills() -> None:
    time = 0.0
    limiter = RateLimiter(6, lambda: time)
    for _ in range(6):
        limiter.check("a")
    limiter.check("b")
    with pytest.raises(RequestRefused, match="more than 6 requests per minute") as refused:
        limiter.check("a")
    assert (refused.value.status, refused.value.retry_after) == (429, 10)
    time = 9.5
    with pytest.raises(RequestRefused, match="try again in 1 s"):
        limiter.check("a")
    time = 10.5
    limiter.check("a")
    with pytest.raises(RequestRefused):
        limiter.check("a")
    limiter.MAX_CLIENTS = 2
    for client in "bcd":
        limiter.check(client)
    assert list(limiter._buckets) == ["c", "d"]


def test_each_client_has_its_own_rate_limit(model: ServedUppercaseModel) -> None:
    app = create_app(model, Settings(rate_limit=2, api_keys=("key",)))
    body = {"q": "a", **PAIR, "api_key": "key"}
    statuses = [send(app, "POST", "/translate", json=body).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    assert send(app, "POST", "/translate", json=body).headers["retry-after"] == "30"
    assert send(app, "GET", "/languages").status_code == 200
    bearer = {"authorization": "Bearer key"}
    assert send(app, "POST", "/translate", json=body, headers=bearer).status_code == 200
    wrong = {"authorization": "Bearer other"}
    assert send(app, "POST", "/translate", json=body, headers=wrong).status_code == 429


def test_an_ipv6_client_is_a_network() -> None:
    first, second = (
        client_name({"type": "http", "client": (address, 1)}, "", Settings())
        for address in ("2001:db8::1", "2001:db8::2")
    )
    assert first == second == "2001:db8::/64"


HALF = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
TOO_LARGE = HALF + b"x" * 100_000
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "closed"),
    [(b"", True), (HALF, True), (WHOLE, False), (WHOLE + HALF, True), (TOO_LARGE, True)],
    ids=["nothing", "half", "whole", "half of the second request", "too large"],
)
def test_headers_that_do_not_arrive_time_out(
    model: ServedUppercaseModel, monkeypatch: pytest.MonkeyPatch, data: bytes, closed: bool
) -> None:
    seconds = 30 if data == TOO_LARGE else 0.2
    monkeypatch.setattr(TimeLimitedProtocol, "header_seconds", seconds)
    config = uvicorn.Config(
        create_app(model), port=0, http=TimeLimitedProtocol, log_level="warning"
    )

    async def test() -> None:
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        if data.startswith(WHOLE):
            assert b"200 OK" in await reader.read(10_000)
            if data == WHOLE:
                await asyncio.sleep(0.4)
                writer.write(WHOLE)
                assert b"200 OK" in await reader.read(10_000)
        if closed:
            with suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), 4) == b""
        writer.close()
        server.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(test(), 20))


def test_splitting_long_html_does_not_block_other_requests(
    model: ServedUppercaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(model, Settings(max_queued_sentences=100_000))
    loops: list[Any] = []

    def split(text: str, language: str) -> Any:
        try:
            loops.append(asyncio.get_running_loop())
        except RuntimeError:
            loops.append(None)
        return split_html(text, language)

    monkeypatch.setattr("regard.server.service.split_html", split)

    async def test(client: httpx.AsyncClient) -> None:
        body = {"q": "<p>a <b>b</b></p>" * 500, **PAIR, "format": "html"}
        response = await client.post("/translate", json=body)
        assert response.json()["translatedText"] == body["q"].upper().replace("<P>", "<p>").replace(
            "</P>", "</p>"
        ).replace("<B>", "<b>").replace("</B>", "</b>")

    run(app, test)
    assert loops == [None], "it ran on the event loop"
