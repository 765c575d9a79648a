"""A server for tests, and how to ask it."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
from fastapi import FastAPI
from test_serve_batching import Upper

from regard.recipe import Recipe
from regard.server.app import HEADERS

PAIR = {"source": "en", "target": "de"}


class Capitals(Upper):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe


def capitals(small_recipe: Callable[..., Recipe]) -> Capitals:
    """A model that costs nothing."""
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


def events(answer: httpx.Response) -> list[tuple[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.split("\n\n") if block]
    return [(name[len("event: ") :], json.loads(data[len("data: ") :])) for name, data in blocks]
