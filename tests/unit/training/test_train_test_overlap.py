"""Test sources that are in the training data are counted, from stored hashes or from the files."""

import json
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from regard.data.cleaning import write_distinct
from regard.data.corpus import fingerprint, train_pairs
from regard.data.pairs import Pair
from regard.recipe import Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.training import train_test_overlap as module
from regard.training.train_test_overlap import OverlapScores, in_training_data, record_sources

SOURCES = ["a", " b ", "d", "", "cafe\u0301"]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    (tmp_path / "train.tsv").write_text("a\tx\nb\ty\nb\tz\ncaf\u00e9\tx\n", encoding="utf-8")
    data = {"root": str(tmp_path), "train": {"pairs": "train.tsv"}, "valid": {"pairs": "train.tsv"}}
    return make_recipe({"data": data}, "test")


def card_for(run: RunDir, recipe: Recipe) -> None:
    run.folder.mkdir(exist_ok=True)
    identity = {"train": fingerprint(recipe.data.train, recipe.data)}
    run.card_file.write_text(json.dumps({"data": {"identity": identity}}))


def test_stored_hashes_and_files_agree(tmp_path: Path, recipe: Recipe) -> None:
    run = RunDir(tmp_path / "run")
    run.data.mkdir(parents=True)
    hashes = array("Q")
    assert len([*record_sources(train_pairs(recipe.data), hashes)]) == 4
    write_distinct([np.array(hashes)], 4, run.train_sources_file)
    expected = [True, True, False, False, True]
    assert in_training_data(run, recipe, SOURCES) == expected
    run.train_sources_file.write_bytes(b"damaged")
    assert in_training_data(run, recipe, SOURCES) is None
    card_for(run, recipe)
    assert in_training_data(run, recipe, SOURCES) == expected


def test_changed_or_missing_files_are_not_read(tmp_path: Path, recipe: Recipe) -> None:
    run = RunDir(tmp_path / "run")
    card_for(run, recipe)
    assert in_training_data(run, recipe, ["a"]) == [True]
    (tmp_path / "train.tsv").write_text("a\tx\n")
    assert in_training_data(run, recipe, ["a"]) is None
    (tmp_path / "train.tsv").unlink()
    assert in_training_data(run, recipe, ["a"]) is None


def test_no_stored_source_matches_nothing(tmp_path: Path, recipe: Recipe) -> None:
    run = RunDir(tmp_path / "run")
    run.data.mkdir(parents=True)
    write_distinct([], 0, run.train_sources_file)
    assert in_training_data(run, recipe, ["a", "b"]) == [False, False]


def test_the_message_gives_count_and_percentage() -> None:
    assert [*OverlapScores(0, 10, []).messages()] == []
    assert [*OverlapScores(10, 10, []).messages()] == [
        "10 of 10 test sources (100.0%) are in the training data"
    ]
    assert OverlapScores(1, 8, []).to_json()["percent"] == 12.5


@pytest.mark.parametrize(
    ("known", "scored"),
    [([False, True, False], [0, 2]), ([True] * 3, None), ([False] * 3, None)],
)
def test_scores_without_the_known_sources_need_some_of_both_kinds(
    monkeypatch: pytest.MonkeyPatch, known: list[bool], scored: list[int] | None
) -> None:
    pairs = [Pair(f"source {number}", f"target {number}") for number in range(3)]
    monkeypatch.setattr(module, "in_training_data", lambda run, recipe, sources: known)

    def score_outputs(outputs: list[str], some: list[Pair]) -> list[object]:
        assert [pairs.index(pair) for pair in some] == scored
        assert [int(output) for output in outputs] == scored
        return ["scores"]

    model = cast(Any, SimpleNamespace(recipe=None, score_outputs=score_outputs))
    found = OverlapScores.of(model, cast(Any, None), ["0", "1", "2"], pairs)
    assert found == OverlapScores(sum(known), 3, cast(Any, ["scores"] if scored else []))
