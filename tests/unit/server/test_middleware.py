"""Every request: host check, headers that do not arrive, long texts that do not block others."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import uvicorn

from regard.documents.markup import split_html
from regard.recipe import Recipe
from regard.server.app import create_app
from regard.server.middleware import TimeLimitedProtocol
from regard.server.schemas import Settings
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


HALF = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "closed"),
    [(b"", True), (HALF, True), (WHOLE, False), (WHOLE + HALF, True)],
    ids=["nothing", "half", "whole", "half of the second request"],
)
def test_headers_that_do_not_arrive_time_out(
    model: ServedUppercaseModel, monkeypatch: pytest.MonkeyPatch, data: bytes, closed: bool
) -> None:
    monkeypatch.setattr(TimeLimitedProtocol, "header_seconds", 0.2)
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
            assert await asyncio.wait_for(reader.read(), 5) == b""
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
