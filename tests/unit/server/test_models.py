"""What the server does with its model: inline tags, better weights, threads."""

import asyncio
import json
import re
from html import unescape
from pathlib import Path

import pytest
import torch

from regard.inspection.alignment import align
from regard.nn.state_dict import named_weights
from regard.server.app import create_app
from regard.server.html_markup import split_html
from regard.server.inspection import follow
from regard.server.serve import choose_threads
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from tests.unit.server.serving import ask


def test_inline_tags_travel_by_the_models_attention(finished_run: Path) -> None:
    model = Translator.load(finished_run)
    app = create_app(model)
    source, target = model.recipe.data.language_pair
    asked = {"q": "ein <b>Hund</b> <i>a <u>dog</u></i>", "source": source, "target": target}
    html = ask(app, "POST", "/translate", json={**asked, "format": "html"}).json()["translatedText"]
    (plain,) = model.translate(["ein Hund a dog"])
    assert sorted(re.findall("<.*?>", html)) == sorted(re.findall("<.*?>", asked["q"]))
    assert unescape(re.sub("<.*?>", "", html)) == plain
    alignment = align(model, "ein Hund a dog", plain)
    assert alignment is not None
    expected = split_html(asked["q"]).join([plain], [alignment])
    assert html == expected
    streamed = ask(app, "POST", "/v1/translate/stream", json={**asked, "format": "html"}).text
    assert json.dumps(html, ensure_ascii=False)[1:-1] in streamed


def test_better_weights_of_a_run_that_learns_are_taken_over(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.server.inspection.LOOK_AGAIN", 0.01)
    folder = RunDir(run_folder)
    folder.card_file.unlink()
    model = Translator.load(run_folder)
    service = create_app(model).state.service
    better = {name: tensor + 1 for name, tensor in folder.weights().items()}

    async def follow_it() -> None:
        following = asyncio.create_task(follow(service, model))
        await asyncio.sleep(0.05)
        folder.write_weights(better)
        folder.write_card({})
        await following

    asyncio.run(asyncio.wait_for(follow_it(), 20))
    for name, tensor in named_weights(model.network).items():
        assert torch.equal(tensor, better[name]), name


def test_a_small_model_is_served_by_one_thread(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Translator.load(finished_run, "cpu")
    chosen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    choose_threads(model)
    assert chosen == [], "as the environment says"
    monkeypatch.delenv("OMP_NUM_THREADS")
    choose_threads(model)
    assert chosen == [1]
    monkeypatch.setattr("regard.server.serve.SMALL", 10)
    choose_threads(model)
    assert chosen == [1]
