"""The served model: inline tags, new weights of a running training, number of threads."""

import asyncio
import json
import re
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from regard.documents.markup import split_html
from regard.inspection.alignment import align, pharaoh
from regard.nn.network import named_weights
from regard.server.app import create_app
from regard.server.inspection_endpoints import follow_training
from regard.server.schemas import Settings
from regard.server.service import Service
from regard.server.supervisor import limit_threads
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from tests.unit.server.client import batcher_of, send


def test_inline_tags_follow_the_models_attention(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    app = create_app(model)
    source, target = model.recipe.data.language_pair
    body = {"q": "ein <b>Hund</b> <i>a <u>dog</u></i>", "source": source, "target": target}
    html = send(app, "POST", "/translate", json={**body, "format": "html"}).json()["translatedText"]
    (plain,) = model.translate(["ein Hund a dog"])
    assert sorted(re.findall("<.*?>", html)) == sorted(re.findall("<.*?>", body["q"]))
    assert unescape(re.sub("<.*?>", "", html)) == plain
    alignment = align(model, "ein Hund a dog", plain)
    assert alignment is not None
    expected = split_html(body["q"]).join([plain], [alignment])
    assert html == expected
    streamed = send(app, "POST", "/v1/translate/stream", json={**body, "format": "html"}).text
    assert json.dumps(html, ensure_ascii=False)[1:-1] in streamed


def test_details_are_those_of_the_search(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    app = create_app(model)
    source, target = model.recipe.data.language_pair
    texts = ["A dog. A big cat!", "", "The <i>dog</i>"]
    pair = {"source": source, "target": target}
    body = {"q": texts, **pair, "alignment": True, "beam": 3, "format": "html"}
    response = send(app, "POST", "/v1/translate", json=body).json()
    plain = send(app, "POST", "/translate", json=body).json()["translatedText"]
    assert [one["text"] for one in response["translations"]] == plain
    assert [one["model"] for one in response["translations"]] == ["model"] * 3
    sentences = [["A dog.", "A big cat!"], [], ["The dog"]]
    for translation, some in zip(response["translations"], sentences, strict=True):
        found = [best for best, *_ in model.search(some, beam=3)]
        expected = [
            {
                "source": sentence,
                **json.loads(json.dumps(best._asdict())),
                "alignment": [
                    list(map(int, pair.split("-")))
                    for pair in pharaoh(model, sentence, best.text).split()
                ],
            }
            for sentence, best in zip(some, found, strict=True)
        ]
        assert translation["sentences"] == expected
        assert translation["confidence"] == min((one.confidence for one in found), default=1.0)
    (one,) = send(app, "POST", "/v1/translate", json={"q": "A dog.", **pair}).json()["translations"]
    assert "alignment" not in one["sentences"][0]
    assert "detectedLanguage" not in one
    auto = {"q": "A dog.", **pair, "source": "auto"}
    (one,) = send(app, "POST", "/v1/translate", json=auto).json()["translations"]
    assert one["detectedLanguage"] == {"confidence": 100.0, "language": source}


@pytest.mark.parametrize("path", ["/translate", "/v1/translate/stream", "/v1/live"])
def test_admitted_requests_are_finished(
    finished_run: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the translation neither a shutdown nor a full queue makes the result of an HTML request fail."""
    model = Translator.load(finished_run, "cpu")
    app = create_app(model, Settings(max_queued_sentences=4))
    batcher = batcher_of(app)
    search = model.engine.generate

    def shut_down_and_search(*arguments: Any, **options: Any) -> Any:
        batcher.closed, batcher._calls = True, 4
        return search(*arguments, **options)

    monkeypatch.setattr(model.engine, "generate", shut_down_and_search)
    source, target = model.recipe.data.language_pair
    body = {"q": "ein <b>Hund</b>. A <b>dog</b>.", "source": source, "target": target}
    response = send(app, "POST", path, json={**body, "format": "html"})
    assert response.status_code == 200
    assert "error" not in response.text
    assert path == "/v1/live" or "<b>" in response.text


def test_new_weights_of_a_running_training_are_loaded(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.server.inspection_endpoints.POLL_SECONDS", 0.01)
    folder = RunDir(run_folder)
    folder.card_file.unlink()
    model = Translator.load(run_folder, "cpu")
    batcher = batcher_of(create_app(model))
    better = {name: tensor + 1 for name, tensor in folder.weights().items()}

    async def write_weights() -> None:
        following = asyncio.create_task(follow_training(batcher, model))
        await asyncio.sleep(0.05)
        folder.write_weights(better)
        folder.write_card({})
        await following

    asyncio.run(asyncio.wait_for(write_weights(), 20))
    for name, tensor in named_weights(model.network).items():
        assert torch.equal(tensor, better[name]), name


def test_a_small_model_uses_one_thread(finished_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    limit_threads([finished_run])
    assert chosen == [], "OMP_NUM_THREADS takes precedence"
    monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads([finished_run])
    assert chosen == [1]
    monkeypatch.setattr("regard.server.supervisor.SMALL_MODEL", 10)
    limit_threads([finished_run])
    assert chosen == [1]


@pytest.mark.parametrize(
    ("can_align", "sentence", "translation", "aligned"),
    [
        (True, "ein Hund", "a dog", True),
        (False, "ein Hund", "a dog", False),
        (True, "ein Hund", "ein Hund", False),  # tags stay where they are
        (True, "ein Hund", " ", False),
    ],
)
def test_only_what_can_be_aligned_is_aligned(
    can_align: bool, sentence: str, translation: str, aligned: bool
) -> None:
    async def run(task: object) -> str:
        return "alignment"

    batcher = SimpleNamespace(run=run)
    model = SimpleNamespace(can_align=can_align, batcher=batcher, align=lambda *texts: None)
    found = asyncio.run(Service._align(sentence, translation, cast(Any, model), None))
    assert cast(Any, found) == ("alignment" if aligned else None)


def test_only_sentences_with_inline_tags_are_aligned() -> None:
    async def align(sentence: str, translation: str, model: object, to: object) -> str:
        return f"{sentence} {translation}"

    service = cast(Any, SimpleNamespace(_align=align))
    document = cast(Any, SimpleNamespace(elements={1: ["b"]}, sentences=["one", "two"]))
    found = [
        asyncio.run(Service.alignment(service, document, index, "x", cast(Any, None), None))
        for index in (0, 1)
    ]
    assert cast(Any, found) == [None, "two x"]
