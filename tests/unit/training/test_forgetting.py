"""Forgetting is measured on old and new data, where they can be read."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from regard.data.pairs import Pair
from regard.recipe import Recipe, make_recipe
from regard.storage.run_dir import RunDir, describe_fine_tuning
from regard.tasks import Model
from regard.training import forgetting
from regard.training.forgetting import BEFORE, score_after, score_before, scoring_seconds
from regard.training.progress import ProgressReporter


class Messages(ProgressReporter):
    """Collects the messages."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run)
        self.texts: list[str] = []

    def message(self, text: str) -> None:
        self.texts.append(text)


def recipe_for(run: Path, folder: Path) -> Recipe:
    (folder / "new.tsv").write_text("".join(f"ein Hund {n}\ta dog\n" for n in range(40)))
    values: dict[str, Any] = {
        "data": {"root": str(folder), "train": {"pairs": "new.tsv"}, "test": {"pairs": "new.tsv"}},
        "training": {"init_from": str(run)},
        "decoding": {"beam": 1},
        "evaluation": {"metrics": ["chrf"]},
    }
    return make_recipe(values, "test")


def test_old_data_that_are_gone_are_reported_and_new_data_are_scored(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forgetting, "SCORED_PAIRS", 10)
    recipe, run = recipe_for(finished_run, tmp_path), RunDir(tmp_path / "run")
    run.data.mkdir(parents=True)
    reporter = Messages(run)
    score_before(run, recipe, reporter, None)
    assert (
        "Forgetting is not measured on old data: data.train.pairs: no such file"
        in reporter.texts[0]
    )
    assert f"Before fine-tuning, new data (test of {run}, 10 pairs): chrF2" in reporter.texts[1]
    before = json.loads((run.data / BEFORE).read_text())
    assert [*before["sets"]] == ["new"]
    model = Model.load(finished_run, "cpu")
    model.recipe = recipe
    card = score_after(run, recipe, model, reporter, None)
    assert card is not None
    scores = card["sets"]["new"]
    assert scores["after"][0]["value"] == scores["before"][0]["value"]  # the same model
    assert reporter.texts[2:] == describe_fine_tuning(card)
    before["sets"]["new"]["before"][0]["value"] += 1
    (run.data / BEFORE).write_text(json.dumps(before))
    score_after(run, recipe, model, reporter, None)
    worse = f"The new data score worse than before fine-tuning: use {before['from']}, or"
    assert reporter.texts[-1].startswith(worse)
    late = time.monotonic() - 1
    assert score_after(run, recipe, model, reporter, late) is None
    assert reporter.texts[-1] == "No time left to measure forgetting"


def test_a_text_that_is_too_long_does_not_end_the_training(
    finished_run: Path, tmp_path: Path
) -> None:
    recipe, run = recipe_for(finished_run, tmp_path), RunDir(tmp_path / "run")
    (tmp_path / "new.tsv").write_text("ein " * 5_000 + "\ta dog\n")
    run.data.mkdir(parents=True)
    reporter = Messages(run)
    score_before(run, recipe, reporter, None)
    assert "Forgetting is not measured on new data: text 1 has" in reporter.texts[1]
    assert scoring_seconds(run, recipe) == 0


def test_a_time_limit_reduces_the_number_of_scored_pairs(finished_run: Path) -> None:
    model, pairs = Model.load(finished_run, "cpu"), [Pair("ein Hund", "a dog")] * 300
    assert forgetting._affordable(model, pairs, None) == 300
    assert forgetting._affordable(model, pairs, time.monotonic()) == forgetting.WARM_UP_PAIRS


def test_scores_are_described_with_both_values() -> None:
    values = {"metric": "bleu", "name": "BLEU", "value": 30.0}
    sets = {
        "old": {
            "set": "test of runs/a",
            "pairs": 500,
            "before": [values],
            "after": [{**values, "value": 25.04}],
        },
        "new": {"set": "validation of runs/b", "pairs": 9, "before": [], "after": [values]},
    }
    assert describe_fine_tuning({"sets": sets}) == [
        "Old data (test of runs/a, 500 pairs): BLEU 30.0 before, 25.0 after",
        "New data (validation of runs/b, 9 pairs): BLEU 30.0 after",
    ]


def test_old_pairs_get_the_language_of_the_old_model(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = recipe_for(finished_run, tmp_path), RunDir(tmp_path / "run")
    run.data.mkdir(parents=True)
    sets = {name: {"pairs": 1, "before": []} for name in ("old", "new")}
    (run.data / BEFORE).write_text(json.dumps({"from": "x", "seconds": 0, "sets": sets}))
    scored = list[list[str]]()

    def score(model: object, pairs: list[str]) -> list[object]:
        scored.append(pairs)
        return []

    monkeypatch.setattr(forgetting, "_scored_pairs", lambda recipe: ("test", ["a", "b"]))
    monkeypatch.setattr(forgetting, "with_target_language", lambda pairs, *_: ["tagged", *pairs])
    monkeypatch.setattr(forgetting, "_score", score)
    monkeypatch.setattr(forgetting, "describe_fine_tuning", lambda card: [])
    assert score_after(run, recipe, Model.load(finished_run, "cpu"), Messages(run), None)
    assert scored == [["tagged", "a"], ["a"]]
