"""Several models: routes by language, pivots, lazy loading, eviction within a limit of memory."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from regard.errors import RegardError
from regard.recipe import Recipe
from regard.server.app import create_app
from regard.server.model_pool import (
    ModelEntry,
    ModelPool,
    check_memory,
    entries_of_runs,
    is_concurrent,
)
from regard.server.prometheus import Metrics
from regard.server.schemas import RequestRefused, Settings
from regard.tasks import Translator
from tests.unit.server.client import (
    ServedUppercaseModel,
    entry,
    events,
    run,
    send,
    until,
)

Make = Callable[..., Recipe]


@pytest.fixture
def entries(small_recipe: Make) -> list[ModelEntry]:
    return [
        entry(small_recipe, "de", "en"),
        entry(small_recipe, "en", "fr", "first"),
        entry(small_recipe, "en", "fr", "second"),
    ]


def ask(app: Any, source: str, target: str, query: str = "", **more: Any) -> httpx.Response:
    body = {"q": "One. Two", "source": source, "target": target, **more}
    return send(app, "POST", f"/translate{query}", json=body)


def batches(entry: ModelEntry) -> list[list[str]]:
    """The batches of a model; none if it is not in memory."""
    if entry.loaded is None:
        return []
    assert isinstance(entry.loaded.model, ServedUppercaseModel)
    return entry.loaded.model.batches


def test_requests_are_routed_by_language(entries: list[ModelEntry]) -> None:
    app = create_app(entries)
    assert ask(app, "de", "en").json() == {"translatedText": "ONE. TWO", "model": "de-en"}
    assert ask(app, "en", "fr").json()["model"] == "first"
    assert [len(batches(one)) for one in entries] == [1, 1, 0]
    refused = ask(app, "de", "fr")
    assert refused.status_code == 400
    assert refused.json()["error"] == (
        "de to fr is not supported: this server translates de to en, en to fr"
    )


def test_a_request_may_name_its_model(entries: list[ModelEntry]) -> None:
    app = create_app(entries)
    assert ask(app, "en", "fr", model="second").json()["model"] == "second"
    assert ask(app, "en", "fr", "?model=second").json()["model"] == "second"
    assert [len(batches(one)) for one in entries] == [0, 0, 2]
    assert ask(app, "en", "fr", model="third").json()["error"] == (
        "model 'third': this server has de-en, first, second"
    )
    assert "model second translates en to fr" in ask(app, "de", "en", model="second").text


def test_a_pivot_language_combines_two_models(entries: list[ModelEntry]) -> None:
    app = create_app(entries, Settings(pivots=("en",)))
    languages = {one["code"]: one["targets"] for one in send(app, "GET", "/languages").json()}
    assert languages == {"de": ["en", "fr"], "en": ["fr"], "fr": []}
    html = ask(app, "de", "fr", q=["<p>One <b>two</b></p>"], format="html", alternatives=1)
    assert html.json() == {
        "translatedText": ["<p>ONE <b>TWO</b></p>"],
        "alternatives": [["<p>ONE <b>TWO 1</b></p>"]],
        "model": ["de-en, first"],
    }
    assert batches(entries[1]) == [["ONE TWO"]]
    stream = send(
        app, "POST", "/v1/translate/stream", json={"q": "a. b", "source": "de", "target": "fr"}
    )
    assert "".join(data.get("text", "") for _, data in events(stream)) == "A. B"
    assert ask(app, "auto", "fr").status_code == 200


def test_a_glossary_and_details_are_refused_with_a_pivot_language(
    entries: list[ModelEntry],
) -> None:
    """Its terms are those of the first language, and their translations those of the last one."""
    app = create_app(entries, Settings(pivots=("en",)))
    refused = ask(app, "de", "fr", glossary={"Hund": "chien"})
    assert refused.status_code == 400
    assert refused.json()["error"] == (
        "glossary: not supported for de to en to fr, which is translated by two models"
    )
    assert ask(app, "de", "en", glossary={"Hund": "dog"}).status_code == 200
    body = {"q": "One", "source": "de", "target": "fr"}
    refused = send(app, "POST", "/v1/translate", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("details: not supported for de to en to fr")
    body["target"] = "en"
    assert send(app, "POST", "/v1/translate", json=body).json()["translations"][0]["model"] == (
        "de-en"
    )


def test_an_admitted_request_passes_a_full_queue_after_its_pivot(
    entries: list[ModelEntry],
) -> None:
    """A request through a pivot is refused at once or not at all."""
    app = create_app(entries, Settings(pivots=("en",), max_queued_sentences=2))
    ask(app, "en", "fr")
    second = entries[1].loaded
    assert second is not None
    second.batcher._calls = 1
    assert (
        ask(app, "de", "fr").status_code == 200
    )  # two sentences; the second queue has room for the request
    second.batcher._calls = 2
    assert ask(app, "de", "fr").status_code == 429
    assert batches(entries[0]) == [["One.", "Two"]]


def test_texts_of_several_languages_go_to_their_models(small_recipe: Make) -> None:
    pytest.importorskip("py3langid")
    entries = [entry(small_recipe, source, "fr") for source in ("en", "de")]
    app = create_app(entries)
    texts = ["The dog is in the garden.", "Der Hund ist im Garten.", "The cat sleeps at night."]
    response = ask(app, "auto", "fr", q=texts).json()
    assert response["translatedText"] == [text.upper() for text in texts]
    assert response["model"] == ["en-fr", "de-fr", "en-fr"]
    assert [sum(map(len, batches(one))) for one in entries] == [2, 1]
    batcher = entries[0].loaded.batcher if entries[0].loaded else None
    assert batcher is not None
    batcher.closed = True
    assert ask(app, "auto", "fr", q=texts).status_code == 503


def test_metrics_are_counted_for_each_model(entries: list[ModelEntry]) -> None:
    app = create_app(entries)
    ask(app, "de", "en")
    lines = send(app, "GET", "/metrics").text.splitlines()
    assert 'regard_sentences_total{model="de-en"} 2.0' in lines
    assert 'regard_model_loaded{model="de-en"} 1.0' in lines
    assert 'regard_model_loaded{model="first"} 0.0' in lines
    assert 'regard_model_loads_total{model="de-en"} 1.0' in lines


# Loading and eviction


def test_the_least_recently_used_model_is_evicted(small_recipe: Make) -> None:
    entries = [entry(small_recipe, one, "en", size=40) for one in ("de", "fr", "es")]
    app = create_app(entries, Settings(memory=100))
    for source, in_memory in (("de", "de"), ("fr", "de fr"), ("de", "de fr"), ("es", "de es")):
        assert ask(app, source, "en").status_code == 200
        loaded = [one.name[:2] for one in entries if one.loaded is not None]
        assert loaded == in_memory.split()
    assert 'regard_model_loaded{model="fr-en"} 0.0' in send(app, "GET", "/metrics").text


def test_a_model_in_use_is_evicted_after_its_requests(small_recipe: Make) -> None:
    entries = [entry(small_recipe, one, "en", size=40) for one in ("de", "fr")]
    pool = ModelPool(entries, Settings(memory=50), Metrics())

    async def test() -> None:
        async with pool.use(entries[0]) as loaded:
            first = loaded[entries[0]]

            async def use_other() -> None:
                async with pool.use(entries[1]):
                    pass

            waiting = asyncio.create_task(use_other())
            await until(lambda: entries[0].loaded is None)
            await asyncio.sleep(0.01)
            assert not waiting.done()
            assert await first.batcher.call(lambda: "still here") == "still here"
        await waiting
        async with pool.use(entries[0]) as loaded:
            assert loaded[entries[0]] is not first

    asyncio.run(asyncio.wait_for(test(), 20))


def test_models_that_evict_each_other_lose_no_request(small_recipe: Make) -> None:
    """A model is held for those who wait for it, before the next one may evict it."""
    entries = [entry(small_recipe, one, "en", size=40) for one in ("de", "fr", "es")]
    app = create_app(entries, Settings(memory=50))

    async def test(client: httpx.AsyncClient) -> None:
        bodies = [{"q": "a", "source": one, "target": "en"} for one in ("de", "fr", "es")]
        for _ in range(3):
            jobs = [client.post("/translate", json=body) for body in bodies * 3]
            responses = await asyncio.gather(*jobs)
            assert {response.status_code for response in responses} == {200}

    run(app, test)
    pool = app.state.service.models
    assert pool.loaded_bytes <= 50
    assert all(one.loaded is None or one.loaded.users == 0 for one in entries)


def test_routes_through_a_pivot_do_not_wait_for_each_other(small_recipe: Make) -> None:
    """Memory for one route: a request that held one of its models would wait for the other forever."""
    entries = [
        entry(small_recipe, source, target, size=40)
        for source, target in (("de", "en"), ("en", "fr"), ("es", "en"), ("en", "it"))
    ]
    app = create_app(entries, Settings(memory=80, pivots=("en",)))

    async def test(client: httpx.AsyncClient) -> None:
        pairs = [("de", "fr"), ("es", "it"), ("de", "it"), ("es", "fr"), ("de", "en")]
        bodies = [{"q": "a", "source": source, "target": target} for source, target in pairs]
        responses = await asyncio.gather(
            *(client.post("/translate", json=body) for body in bodies * 2)
        )
        assert {response.status_code for response in responses} == {200}

    run(app, test)
    assert app.state.service.models.loaded_bytes <= 80


def test_a_request_that_is_cancelled_while_it_gets_its_model_holds_it_no_more(
    small_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = entry(small_recipe, "de", "en")
    pool = ModelPool([one], Settings(), Metrics())
    hold = pool._hold

    async def test() -> None:
        async def use() -> None:
            async with pool.use(one):
                raise AssertionError("it was cancelled before")

        task = asyncio.create_task(use())

        def hold_and_cancel(entries: Any) -> Any:
            if held := hold(entries):
                asyncio.get_running_loop().call_soon(task.cancel)
            return held

        monkeypatch.setattr(pool, "_hold", hold_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.loaded is not None
        assert one.loaded.users == 0
        assert one.loaded.unused.is_set()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_a_limit_of_memory_must_hold_two_models_with_a_pivot_between_them(
    small_recipe: Make,
) -> None:
    pairs = (("de", "en"), ("en", "fr"), ("en", "de"))
    entries = [entry(small_recipe, *pair, size=40_000_000) for pair in pairs]
    check_memory(entries, 50_000_000)
    check_memory(entries, 80_000_000, ("en",))
    with pytest.raises(RegardError) as error:
        check_memory(entries, 79_000_000, ("en",))
    assert str(error.value) == (
        "--memory 79.0 MB: de to en to fr needs de-en and en-fr together, about 80.0 MB"
    )


def test_only_the_pivot_that_is_used_counts_for_the_limit_of_memory(small_recipe: Make) -> None:
    pairs = (("de", "en"), ("en", "fr"), ("de", "es"), ("es", "fr"))
    sizes = (40_000_000, 40_000_000, 70_000_000, 70_000_000)
    entries = [
        entry(small_recipe, *pair, size=size) for pair, size in zip(pairs, sizes, strict=True)
    ]
    check_memory(entries, 80_000_000, ("en", "es"))
    with pytest.raises(RegardError, match="de to es to fr needs de-es and es-fr together"):
        check_memory(entries, 80_000_000, ("es", "en"))


def test_a_model_is_loaded_once_for_all_that_wait(small_recipe: Make) -> None:
    one = entry(small_recipe, "de", "en")
    load, loads = one.load, []

    def slow_load() -> Any:
        loads.append(one)
        return load()

    one.load = slow_load
    app = create_app([one])

    async def test(client: httpx.AsyncClient) -> None:
        body = {"q": "a", "source": "de", "target": "en"}
        jobs = [asyncio.create_task(client.post("/translate", json=body)) for _ in range(8)]
        await until(lambda: bool(loads))
        jobs[0].cancel()
        responses = await asyncio.gather(*jobs[1:])
        assert {response.status_code for response in responses} == {200}

    run(app, test)
    assert len(loads) == 1


def test_a_model_that_cannot_be_loaded_is_an_error_of_its_own(
    entries: list[ModelEntry], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Any:
        raise RegardError("the file is damaged: /secret/path")

    entries[0].load = fail
    app = create_app(entries)
    response = ask(app, "de", "en")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "60"
    assert response.json()["error"] == "model de-en cannot be loaded; see the server's log"
    assert "/secret/path" in caplog.text
    assert ask(app, "en", "fr").status_code == 200


def test_a_server_that_stops_finishes_requests_that_wait_for_their_model(
    entries: list[ModelEntry],
) -> None:
    load, may_continue = entries[0].load, threading.Event()

    def slow_load() -> Any:
        assert may_continue.wait(10)
        return load()

    entries[0].load = slow_load
    app = create_app(entries)
    pool = app.state.service.models

    async def test(client: httpx.AsyncClient) -> None:
        body = {"q": "a", "source": "de", "target": "en"}
        waiting = asyncio.create_task(client.post("/translate", json=body))
        await until(lambda: bool(pool._waiting))
        pool.refuse()
        assert (await client.post("/translate", json=body)).status_code == 503
        may_continue.set()
        assert (await waiting).status_code == 200

    run(app, test)


def test_a_closed_pool_refuses_requests(entries: list[ModelEntry]) -> None:
    app = create_app(entries)
    app.state.service.models.refuse()
    response = ask(app, "de", "en")
    assert response.status_code == 503
    assert response.headers["connection"] == "close"
    assert send(app, "GET", "/ready").status_code == 503


# Run folders


def load_on_cpu(run: Path) -> Translator:
    return Translator.load(run, "cpu")


def test_runs_become_entries(finished_run: Path, tmp_path: Path) -> None:
    same_name = tmp_path / finished_run.name
    same_name.symlink_to(finished_run)
    (one,) = entries_of_runs([finished_run], load_on_cpu, ("xx", "yy"))
    assert (one.name, one.pairs) == (finished_run.resolve().name, [("xx", "yy")])
    pool = ModelPool([one], Settings(), Metrics())
    estimate = one.size
    model = one.load()
    pool.add(one, model)
    assert model.recipe.data.language_pair == ("xx", "yy")
    assert isinstance(model, Translator)
    assert model.engine.packed is not None
    weights = (finished_run / "model.safetensors").stat().st_size
    assert one.size == weights + model.engine.packed.bytes <= estimate
    with pytest.raises(RegardError, match="given twice"):
        entries_of_runs([finished_run, same_name], Translator.load)
    with pytest.raises(RegardError, match="only for one run"):
        entries_of_runs([finished_run, tmp_path], Translator.load, ("xx", "yy"))
    with pytest.raises(RegardError, match=r"--memory 0\.0 MB: .* alone needs about"):
        check_memory([one], 1000)


def test_runs_with_the_same_name_are_called_by_their_paths(
    finished_run: Path, tmp_path: Path
) -> None:
    runs = [tmp_path / folder / "demo" for folder in ("a", "b")]
    for one in runs:
        shutil.copytree(finished_run, one)
    assert [one.name for one in entries_of_runs(runs, Translator.load)] == list(map(str, runs))


def test_an_unknown_model_is_refused(entries: list[ModelEntry]) -> None:
    pool = ModelPool(entries, Settings(), Metrics())
    with pytest.raises(RequestRefused, match="this server has de-en, first, second"):
        pool.entry("x")
    assert pool.sources() == ["de", "en"]
    assert pool.sources("fr") == ["en"]
    assert pool.sources("fr", "de-en") == []


def test_a_server_that_stops_drains_its_queues_and_follows_no_training() -> None:
    drained, cancelled = list[int](), list[int]()

    def fake(number: int, follows: bool) -> SimpleNamespace:
        async def drain() -> None:
            drained.append(number)

        task = SimpleNamespace(cancel=lambda: cancelled.append(number))
        batcher = SimpleNamespace(drain=drain)
        return SimpleNamespace(
            loaded=SimpleNamespace(batcher=batcher, following=task if follows else None)
        )

    entries = [fake(1, False), SimpleNamespace(loaded=None), fake(2, True)]
    pool = SimpleNamespace(entries=entries, refuse=lambda: drained.append(0))
    asyncio.run(ModelPool.drain(cast(Any, pool)))
    assert drained == [0, 1, 2], "new requests are refused first"
    assert cancelled == [2]


def test_a_model_may_be_evicted_while_its_queue_is_drained() -> None:
    """A model is being loaded for a request that was cancelled."""
    cancelled = list[str]()

    async def drain() -> None:
        one.loaded = None

    following = SimpleNamespace(cancel=lambda: cancelled.append("following"))
    one = SimpleNamespace(
        loaded=SimpleNamespace(batcher=SimpleNamespace(drain=drain), following=following)
    )
    pool = SimpleNamespace(entries=[one], refuse=lambda: None)
    asyncio.run(ModelPool.drain(cast(Any, pool)))
    assert cancelled == ["following"]


def test_a_server_that_starts_accepts_requests_and_follows_trainings() -> None:
    loaded = SimpleNamespace(loaded=SimpleNamespace(batcher=SimpleNamespace(closed=True)))
    entries, followed = [SimpleNamespace(loaded=None), loaded], list[object]()
    pool = SimpleNamespace(entries=entries, start_following=followed.append)
    ModelPool.start(cast(Any, pool))
    assert (pool.stopping, pool.closed, loaded.loaded.batcher.closed) == (False, False, False)
    assert followed == [loaded]


def test_only_translators_are_used_by_several_threads(
    finished_run: Path, small_recipe: Make
) -> None:
    assert not is_concurrent(ServedUppercaseModel(small_recipe()))
    assert is_concurrent(Translator.load(finished_run, "cpu"))
