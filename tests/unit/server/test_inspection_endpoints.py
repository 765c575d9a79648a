"""Inspection over HTTP: traces, the training history, live translation."""

import asyncio
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI

from regard.inspection import attribution
from regard.inspection.activations import architecture_json
from regard.inspection.attribution import attribute_token
from regard.inspection.head_ablation import ablate_heads, all_heads
from regard.inspection.page_data import depth_lenses, model_info
from regard.inspection.teacher_forcing import force_ids
from regard.inspection.trace import trace
from regard.inspection.training_history import PastCheckpoints, training_history
from regard.recipe import DecodingOptions, Recipe
from regard.server import inspection_endpoints
from regard.server.app import create_app
from regard.server.inspection_endpoints import (
    TraceCache,
    _malloc_trim,
    memory_bytes,
    return_free_memory,
)
from regard.server.schemas import LiveRequest, RequestRefused, Settings
from regard.server.streaming import stream_partials
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from tests.unit.server.client import batcher_of, events, run, send


def test_a_trace_is_the_one_python_returns(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    app = create_app(model, Settings(max_trace_characters=20))
    body = {"q": "ein Hund", "beam": 2, "length_penalty": 0.5}
    result = send(app, "POST", "/v1/trace", json=body).json()
    assert result.pop("id")
    expected = trace(model, "ein Hund", beam=2, length_penalty=0.5).to_json("attention")
    assert result == json.loads(json.dumps(expected))
    assert send(app, "POST", "/v1/trace", json={"q": "x" * 21}).status_code == 413
    assert send(app, "POST", "/v1/trace", json={**body, "beam": 10**6}).status_code == 400


def test_a_trace_with_forced_tokens_muted_heads_and_sampling(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    app = create_app(model)
    (forced,) = model.tokenizer.target.encode(["dog"])
    body = {"q": "ein Hund", "forced": forced, "mute": ["cross_attention.1.0"]}
    result = send(app, "POST", "/v1/trace", json=body).json()
    assert [token["id"] for token in result["outputs"]][: len(forced)] == forced
    assert result["muted"] == ["cross_attention.1.0"]
    sampled = {"q": "ein Hund", "temperature": 2.0, "seed": 7}
    expected = trace(model, "ein Hund", temperature=2.0, seed=7).translation
    assert send(app, "POST", "/v1/trace", json=sampled).json()["translation"] == expected
    for wrong in (
        {"mute": ["cross_attention.9.0"]},
        {"mute": ["x"]},
        {"forced": [2]},
        {"temperature": 1e-9},
    ):
        response = send(app, "POST", "/v1/trace", json={"q": "ein Hund", **wrong})
        assert (response.status_code, list(response.json())) == (400, ["error"])


def test_large_traces_are_fetched_layer_by_layer(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    app = create_app(model, Settings(inline_trace_bytes=0, trace_cache_bytes=0, max_trace_tokens=4))
    expected = trace(model, "ein Hund")
    result = send(app, "POST", "/v1/trace", json={"q": "ein Hund"}).json()
    assert result["cross_attention"]["data"] is None
    path = f"/v1/trace/{result['id']}"
    for name, layers in {
        "cross_attention/1": expected.cross_attention[1],
        "nodes/0": expected.nodes[0],
        "encoder/0/key": expected.projections["encoder"].key[0],
        "decoder/1/output": expected.projections["decoder"].output[1],
    }.items():
        response = send(app, "GET", f"{path}/{name}")
        assert response.headers["content-type"] == "application/octet-stream"
        assert response.content == layers.astype("<f4").tobytes()
    wrong_paths = ["2", "-1", "²", "0/nothing"]
    for wrong in [*(f"cross_attention/{one}" for one in wrong_paths), "nowhere/0", "nodes/0/key"]:
        response = send(app, "GET", f"{path}/{wrong}")
        assert (response.status_code, list(response.json())) == (404, ["error"])
    for large in ({"q": "ein " * 5}, {"q": "ein", "forced": [5] * 3, "prefix": "a dog"}):
        assert send(app, "POST", "/v1/trace", json=large).status_code == 413
    # The cache is full: the next trace replaces this one.
    send(app, "POST", "/v1/trace", json={"q": "Hund"})
    assert send(app, "GET", f"{path}/cross_attention/1").status_code == 404


def test_the_memory_of_a_trace_counts_all_of_its_objects(finished_run: Path) -> None:
    one = trace(Translator.load(finished_run, "cpu"), "ein Hund a dog", beam=5)
    assert memory_bytes(one) > len(pickle.dumps(one))
    assert memory_bytes(one) > memory_bytes(replace(one, beam=[])) > one.attention_bytes
    large = np.zeros(100_000, np.float32)
    assert 400_000 < memory_bytes([large[:1], large[1:2]]) < 401_000, "views hold the whole array"
    assert 400_000 <= memory_bytes(torch.zeros(100_000)[:1].numpy()) < 401_000
    cache = TraceCache(10 * memory_bytes(one))
    for _ in range(30):
        cache.add(replace(one, text="copy"))
    assert 0 < cache.bytes <= 10 * memory_bytes(one)


def test_the_least_recently_used_trace_is_dropped(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    first = trace(model, "ein Hund")
    cache = TraceCache(2 * memory_bytes(first))
    used, unused = cache.add(first), cache.add(first)
    assert cache.layer(used, "encoder", "0").shape == first.encoder[0].shape
    newest = cache.add(first)
    for kept in (used, newest):
        cache.layer(kept, "encoder", "0")
    with pytest.raises(RequestRefused, match="no such trace"):
        cache.layer(unused, "encoder", "0")


def test_the_training_history_of_the_run(trained_run: Path) -> None:
    model = Translator.load(trained_run, "cpu")
    app = create_app(model, Settings(max_trace_characters=len("ein Hund"), api_keys=("key",)))
    key = {"authorization": "Bearer key"}
    result = send(app, "GET", "/v1/run", headers=key).json()
    assert result == json.loads(json.dumps(training_history(model)))
    assert result["checkpoints"] == [2, 4]
    curves = send(app, "GET", "/v1/run/curves", headers=key).json()
    assert curves == {"curves": result["curves"], "checkpoints": [2, 4]}
    found = trace(model, "ein Hund")
    outputs = [token.id for token in found.outputs]
    body = {"q": "ein Hund", "outputs": outputs, "step": 2, "api_key": "key"}
    aligned = send(app, "POST", "/v1/align", json=body).json()
    assert aligned == PastCheckpoints(model).alignment(2, model.request("ein Hund"), outputs)
    wrongs: list[dict[str, Any]] = [
        {"step": 3},
        {"outputs": [10**9]},
        {"outputs": []},
        {"q": "x" * 9},
    ]
    for wrong in wrongs:
        response = send(app, "POST", "/v1/align", json={**body, **wrong})
        assert response.status_code == (413 if "q" in wrong else 400)
    for path in ("/v1/run", "/v1/run/curves"):
        assert send(app, "GET", path).status_code == 403


# What each head is worth


@pytest.fixture
def measurable(run_folder: Path, small_recipe: Callable[..., Recipe], tmp_path: Path) -> Translator:
    """A model whose validation data are there."""
    (tmp_path / "valid.tsv").write_text("ein Hund\ta dog\nHund\tdog\n", encoding="utf-8")
    files = {"pairs": str(tmp_path / "valid.tsv")}
    data, tokenizer = {"train": files, "valid": files}, {"kind": "word", "vocab_size": 60}
    run = RunDir(run_folder)
    decoding = {"max_length": 4}  # an untrained model rarely predicts EOS
    run.write_recipe(small_recipe(data=data, tokenizer=tokenizer, decoding=decoding))
    run.write_card({"note": "for tests"})
    return Translator.load(run_folder, "cpu")


def test_the_worth_of_heads_is_measured_once(measurable: Translator) -> None:
    app = create_app(measurable)
    heads = len(all_heads(measurable))
    waiting = {"problem": None, "running": False, "done": 0, "heads": heads, "table": None}

    async def test(client: httpx.AsyncClient) -> None:
        async def state() -> Any:
            return (await client.get("/v1/lens/heads")).json()

        assert await state() == waiting
        assert (await client.post("/v1/lens/heads", json={})).json() == {**waiting, "running": True}
        async with asyncio.timeout(60):
            while (await state())["running"]:
                await asyncio.sleep(0.01)
        expected = ablate_heads(measurable, ["ein Hund", "Hund"], ["a dog", "dog"]).to_json()
        found = await state()
        assert found["table"] == json.loads(json.dumps(expected))
        assert found["done"] == heads
        assert (await client.post("/v1/lens/heads", json={})).json() == found

    run(app, test)


def test_heads_wait_while_the_queue_is_full(
    measurable: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection_endpoints, "QUEUE_PAUSE", 0.01)
    app = create_app(measurable, Settings(max_queued_sentences=1))

    async def test(client: httpx.AsyncClient) -> None:
        with batcher_of(app).admit():
            await client.post("/v1/lens/heads", json={})
            await asyncio.sleep(0.1)
            found = (await client.get("/v1/lens/heads")).json()
            assert (found["running"], found["done"], found["problem"]) == (True, 0, None)
        async with asyncio.timeout(60):
            while (found := (await client.get("/v1/lens/heads")).json())["running"]:
                await asyncio.sleep(0.01)
        assert found["table"]["sentences"] == 2

    run(app, test)


def test_why_heads_cannot_be_measured(
    finished_run: Path, measurable: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem(app: FastAPI) -> Any:
        found = send(app, "POST", "/v1/lens/heads", json={}).json()
        assert not found["running"]
        return found["problem"]

    absent = create_app(Translator.load(finished_run, "cpu"))
    assert problem(absent) == "the validation data of the run are not on this server"
    assert measurable.run is not None
    card = measurable.run.card_file.read_bytes()
    measurable.run.card_file.unlink()
    assert problem(create_app(measurable)) == "the run is still training"
    measurable.run.card_file.write_bytes(card)
    app = create_app(measurable, Settings(timeout=1e-4))

    async def test(client: httpx.AsyncClient) -> None:
        await client.post("/v1/lens/heads", json={})
        async with asyncio.timeout(60):
            while (found := (await client.get("/v1/lens/heads")).json())["running"]:
                await asyncio.sleep(0.01)
        assert found["problem"] == "a head was not measured within 0.0001 seconds"

    run(app, test)


def live(app: FastAPI, text: str) -> list[str]:
    """The texts of a live translation that ends without an error."""
    *partials, last = events(send(app, "POST", "/v1/live", json={"q": text}))
    assert {name for name, _ in partials} == {"partial"}
    assert last == ("end", {})
    return [data["text"] for _, data in partials]


def test_a_live_translation_ends_with_the_text_of_translate(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    app = create_app(model, Settings(max_trace_characters=40))
    texts = live(app, "ein Hund. \n Hund")
    first, second = model.translate(["ein Hund.", "Hund"])
    assert texts[-1] == f"{first} \n {second}"
    assert len(set(texts)) > 2, "partial translations are sent"
    assert send(app, "POST", "/v1/live", json={"q": "x" * 41}).status_code == 413


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 1},
        {"beam": 4, "beam_groups": 2, "diversity_penalty": 1.0},
        {"temperature": 2.0, "seed": 7},
        {"mbr": 4},
        {"no_repeat_ngram": 1, "length_penalty": 0.0},
        {"coverage_penalty": 0.5},
        {"protect": ["placeholders"]},
    ],
    ids=str,
)
def test_live_and_translate_agree_for_any_decoding_options(
    finished_run: Path, options: DecodingOptions
) -> None:
    model = Translator.load(finished_run, "cpu")
    model.set_decoding(**options)
    app = create_app(model)
    source, target = model.recipe.data.language_pair
    text = "ein Hund dog. 4 Hund"
    body = {"q": text, "source": source, "target": target}
    translated = send(app, "POST", "/translate", json=body).json()["translatedText"]
    assert live(app, text)[-1] == translated


def test_an_error_in_a_live_translation_is_logged_and_reported(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Translator.load(finished_run, "cpu")
    app = create_app(model)

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(Translator, "search", fail)
    response = send(app, "POST", "/v1/live", json={"q": "ein Hund"})
    assert response.text.startswith('event: error\ndata: {"error": "internal server error')
    assert "ZeroDivisionError: inside" in caplog.text


def test_closing_a_live_translation_stops_the_search(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    app = create_app(model)
    service, batcher = app.state.service, batcher_of(app)

    async def leave() -> None:
        events = stream_partials(service, LiveRequest(q="ein Hund " * 20))
        await anext(events)
        await events.aclose()
        while batcher.queued:
            await asyncio.sleep(0.01)
        assert await batcher.call(lambda: "free") == "free"

    asyncio.run(asyncio.wait_for(leave(), 20))


def test_a_non_autoregressive_model_has_iterations(make_run: Callable[..., Path]) -> None:
    model = Translator.load(make_run(model={"architecture": "non_autoregressive"}), "cpu")
    app = create_app(model)
    result = send(
        app, "POST", "/v1/trace", json={"q": "the dog", "mute": ["cross_attention.0.1"]}
    ).json()
    assert result["beam"] == []
    assert [token["id"] for token in result["iterations"][-1]["outputs"]] == [
        token["id"] for token in result["outputs"]
    ]
    assert live(app, "the dog")[-1] == model.translate(["the dog"])[0]
    refused = send(app, "POST", "/v1/trace", json={"q": "the dog", "beam": 2})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("beam 2: no effect on a non-autoregressive model")


def test_lenses_are_those_of_python(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "MOST_STEPS", 16)
    words = {"kind": "word", "vocab_size": 420}
    run = make_run(tokenizer=words, decoding={"max_length": 6}, model={"output_bias": True})
    model = Translator.load(run, "cpu")
    app = create_app(model, Settings(max_trace_characters=40))
    text = "The dog was tired."
    (outputs,) = model.tokenizer.target.encode(["Der Hund war müde."])
    forced = force_ids(model, model.request(text), outputs)
    body = {"q": text, "outputs": outputs}

    def post(lens: str, **more: Any) -> Any:
        return send(app, "POST", f"/v1/lens/{lens}", json={**body, **more})

    assert post("depth").json() == json.loads(json.dumps(depth_lenses(model, text, forced)))
    architecture = json.loads(json.dumps(architecture_json(model, forced)))
    assert post("architecture").json() == architecture
    found = post("attribution", position=1).json()
    expected = attribute_token(model, forced, 1).to_json()
    assert found["foil"] == expected["foil"]
    assert found["scores"]["occlusion"] == pytest.approx(expected["scores"]["occlusion"], abs=1e-5)
    assert post("attribution", position=1, foil=9).json()["foil"]["id"] == 9
    same = send(app, "POST", "/v1/lens/patching", json={"q": text, "other": text})
    assert (same.status_code, "same translation" in same.json()["error"]) == (400, True)
    for lens, wrong, status in (
        ("depth", {"q": "x" * 41}, 413),
        ("depth", {"outputs": [10**6]}, 400),
        ("depth", {"q": " "}, 400),
        ("attribution", {"position": 99}, 400),
        ("attribution", {"position": 1, "foil": outputs[1]}, 400),
    ):
        response = post(lens, **wrong)
        assert (response.status_code, list(response.json())) == (status, ["error"])


def test_the_page_is_told_about_the_model(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    info = send(create_app(model), "GET", "/v1/model").json()
    assert info == model_info(model, finished_run.name)
    assert info["parameters"] == sum(one.numel() for one in model.network.parameters())
    assert info["lenses"]


def test_other_networks_have_no_lenses(make_run: Callable[..., Path]) -> None:
    model = Translator.load(
        make_run(model={"architecture": "decoder_only", "encoder_layers": 6}), "cpu"
    )
    app = create_app(model)
    assert not send(app, "GET", "/v1/model").json()["lenses"]
    response = send(app, "POST", "/v1/lens/depth", json={"q": "The dog.", "outputs": [9]})
    assert (response.status_code, "lenses need" in response.json()["error"]) == (400, True)


@pytest.mark.skipif(_malloc_trim() is None, reason="needs glibc")
def test_free_memory_between_what_is_kept_is_returned() -> None:
    """As after a trace: a hundredth of the allocated objects is kept."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    objects = [bytes(2000) for _ in range(50_000)]
    kept = objects[::100]
    before = resident()
    del objects
    return_free_memory()
    assert before - resident() > 70_000_000
    assert len(kept) == 500
