"""A sentence seen to pass over HTTP: traces, what the run learned, a translation while it grows."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regard.inspection.history import Checkpoints, course
from regard.inspection.trace import trace
from regard.server.app import create_app
from regard.server.settings import Settings
from regard.server.streaming import growing
from regard.tasks import Translator
from tests.unit.server.serving import ask


def test_a_trace_tells_what_the_model_did(finished_run: Path) -> None:
    model = Translator.load(finished_run)
    app = create_app(model, Settings(trace_characters=20))
    asked = {"q": "ein Hund", "beam": 2, "length_penalty": 0.5}
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
    asked = {"q": "ein Hund", "forced": forced, "mute": ["cross_attention.1.0"]}
    told = ask(app, "POST", "/v1/trace", json=asked).json()
    assert [token["id"] for token in told["said"]][: len(forced)] == forced
    assert told["muted"] == ["cross_attention.1.0"]
    drawn = {"q": "ein Hund", "temperature": 2.0, "seed": 7}
    expected = trace(model, "ein Hund", temperature=2.0, seed=7).translation
    assert ask(app, "POST", "/v1/trace", json=drawn).json()["translation"] == expected
    for wrong in (
        {"mute": ["cross_attention.9.0"]},
        {"mute": ["x"]},
        {"forced": [2]},
        {"temperature": 1e-9},
    ):
        answer = ask(app, "POST", "/v1/trace", json={"q": "ein Hund", **wrong})
        assert (answer.status_code, list(answer.json())) == (400, ["error"])


def test_large_traces_are_handed_out_layer_by_layer(finished_run: Path) -> None:
    model = Translator.load(finished_run)
    app = create_app(model, Settings(trace_bytes=0, traces_bytes=0, trace_tokens=4))
    expected = trace(model, "ein Hund")
    told = ask(app, "POST", "/v1/trace", json={"q": "ein Hund"}).json()
    assert told["cross_attention"]["data"] is None
    path = f"/v1/trace/{told['id']}"
    for name, layers in {
        "cross/1": expected.cross_attention[1],
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


def test_a_mistake_while_it_grows_is_told_and_logged(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Translator.load(finished_run)
    app = create_app(model)

    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(Translator, "find", fail)
    answer = ask(app, "POST", "/v1/live", json={"q": "ein Hund"})
    assert answer.text.startswith('event: error\ndata: {"error": "a mistake of the server')
    assert "ZeroDivisionError: inside" in caplog.text


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


def test_a_model_of_all_words_at_once_tells_its_rounds(make_run: Callable[..., Path]) -> None:
    model = Translator.load(make_run(model={"architecture": "non_autoregressive"}), "cpu")
    app = create_app(model)
    told = ask(
        app, "POST", "/v1/trace", json={"q": "the dog", "mute": ["cross_attention.0.1"]}
    ).json()
    assert told["beam"] == []
    assert [token["id"] for token in told["iterations"][-1]["said"]] == [
        token["id"] for token in told["said"]
    ]
    refused = ask(app, "POST", "/v1/trace", json={"q": "the dog", "beam": 2})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("beam 2: this model says all words at once")
