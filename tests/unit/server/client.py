"""A fake model, and helpers that send requests to the application without a network."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import httpx
from fastapi import FastAPI

from regard.inference.engine import SearchInterrupted
from regard.recipe import Recipe
from regard.server.dynamic_batching import Batcher, SearchOptions
from regard.server.middleware import SECURITY_HEADERS
from regard.server.model_pool import ModelEntry
from regard.tasks import Translation

PAIR = {"source": "en", "target": "de"}


class UppercaseModel:
    """Translates into capitals and records its calls. Clear ``may_continue`` to make it block."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.options: list[SearchOptions] = []
        self.constraints: list[Sequence[Sequence[str]] | None] = []
        self.threads: set[int] = set()
        self.may_continue = threading.Event()
        self.may_continue.set()
        self.interrupt = threading.Event()

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [1 + len(text) // 3 for text in texts]

    def search(
        self,
        texts: Sequence[str],
        *,
        beam: int | None,
        length_penalty: float | None,
        nbest: int,
        constraints: Sequence[Sequence[str]] | None = None,
    ) -> list[list[Translation]]:
        self.batches.append(list(texts))
        self.options.append(SearchOptions(beam, length_penalty, nbest))
        self.constraints.append(constraints)
        self.threads.add(threading.get_ident())
        end = time.monotonic() + 20
        while not self.may_continue.wait(0.001):
            if self.interrupt.is_set():
                raise SearchInterrupted("the search was interrupted")
            assert time.monotonic() < end
        if "bad" in texts:
            raise ValueError("bad")
        ends = [""] + [f" {rank}" for rank in range(1, nbest)]
        return [
            [Translation(text.upper() + end, 0.0, 0.0, [text], [0.0], True) for end in ends]
            for text in texts
        ]


class ServedUppercaseModel(UppercaseModel):
    """With a recipe, as the application needs it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe


def english_to_german(small_recipe: Callable[..., Recipe]) -> ServedUppercaseModel:
    return model_of(small_recipe, "en", "de")


def model_of(small_recipe: Callable[..., Recipe], source: str, target: str) -> ServedUppercaseModel:
    data = {"train": {"pairs": "pairs.tsv"}, "languages": [source, target]}
    return ServedUppercaseModel(small_recipe(data=data))


def entry(
    small_recipe: Callable[..., Recipe], source: str, target: str, name: str = "", size: int = 0
) -> ModelEntry:
    """An entry that loads a model for two languages; its name is ``source-target`` by default."""
    recipe = model_of(small_recipe, source, target).recipe
    return ModelEntry(
        name or f"{source}-{target}", recipe, lambda: ServedUppercaseModel(recipe), size=size
    )


def batcher_of(app: FastAPI) -> Batcher:
    """The queue of the first model."""
    loaded = app.state.service.models.entries[0].loaded
    assert loaded is not None
    batcher: Batcher = loaded.batcher
    return batcher


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def run(app: FastAPI, test: Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async def in_client() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            await asyncio.wait_for(test(client), 20)

    asyncio.run(in_client())


def send(app: FastAPI, method: str, path: str, **request: Any) -> httpx.Response:
    """Send one request. Every response must have the security headers, and every error a reason."""
    responses: list[httpx.Response] = []

    async def test(client: httpx.AsyncClient) -> None:
        responses.append(await client.request(method, path, **request))

    run(app, test)
    (response,) = responses
    assert {name: response.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
    if not response.is_success:
        assert list(response.json()) == ["error"]
        assert response.json()["error"]
    return response


def translate(app: FastAPI, q: str | list[str], **more: Any) -> Any:
    response = send(app, "POST", "/translate", json={"q": q, **PAIR, **more})
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """The server-sent events of a response: name and data."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in response.text.split("\n\n") if block]
    return [(name[len("event: ") :], json.loads(data[len("data: ") :])) for name, data in blocks]
