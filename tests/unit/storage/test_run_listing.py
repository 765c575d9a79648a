"""The list of runs and what can be deleted of them, on folders that are written here, without training."""

import fcntl
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from regard.errors import RegardError
from regard.recipe import make_recipe
from regard.storage.run_dir import RunDir
from regard.storage.run_listing import find_runs, prunable, prune, summarize

RESULT = {"metric": "bleu", "name": "BLEU", "value": 31.25, "low": 30.0, "high": 32.5}
RESULT |= {"signature": "s", "higher_is_better": True}
BUNDLE = {"recipe.yaml", "tokenizer.model", "model.safetensors", "card.json"}


def write_run(folder: Path, card: dict[str, Any] | None = None) -> RunDir:
    """A run folder with one file of every kind; it is finished if it has a card."""
    run = RunDir(folder)
    run.checkpoints.mkdir(parents=True)
    run.data.mkdir()
    train = {"source": "train.en", "target": "train.de"}
    run.write_recipe(make_recipe({"data": {"train": train}}, "test"))
    (folder / "tokenizer.model").write_bytes(b"tokenizer")
    save_file({"a": np.zeros((3, 4)), "b": np.zeros(5)}, run.weights_file)
    run.lock_file.touch()
    (run.checkpoints / "step-000000100.safetensors").write_bytes(b"x" * 1000)
    (run.checkpoints / "notes.txt").write_text("mine")
    (run.data / "train.arrow").write_bytes(b"x" * 500)
    run.metadata_file.write_text("{}")
    (run.data / ".train.arrow.77.unfinished").write_bytes(b"x" * 50)
    run.log_file.write_text(
        '{"event": "start", "parameters": 99}\n{"event": "valid", "best": true, "bleu": 12.5, "loss": 3}\n'
    )
    if card is not None:
        run.write_card(card)
    return run


def test_runs_are_found_in_subfolders(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "group" / "a")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "recipe.yaml").write_text("a recipe that the user wrote")
    assert [run.folder.name for run in find_runs(tmp_path)] == ["b", "a"]
    assert [run.folder for run in find_runs(tmp_path / "b")] == [tmp_path / "b"]
    with pytest.raises(RegardError, match="no such folder"):
        find_runs(tmp_path / "missing")


def test_a_finished_run_is_described_by_its_card(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"parameters": 1234, "test": [RESULT]})
    found = summarize(run)
    assert (found.state, found.task, found.languages) == ("finished", "translation", "en-de")
    assert (found.parameters, found.score) == (1234, "BLEU 31.2 (30.0-32.5)")
    assert found.disk == sum(
        path.stat().st_size for path in run.folder.rglob("*") if path.is_file()
    )
    assert json.dumps(found.to_json())


def test_without_test_data_the_final_validation_score_is_shown(tmp_path: Path) -> None:
    card = {"test": [], "valid": {"bleu": 12.5}, "valid_scores": [RESULT]}
    assert summarize(write_run(tmp_path / "run", card)).score == "validation BLEU 31.2 (30.0-32.5)"
    card["valid_scores"] = []
    assert summarize(write_run(tmp_path / "short", card)).score == "validation bleu 12.5"


def test_other_states(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    found = summarize(run)
    assert (found.state, found.score, found.parameters) == (
        "interrupted",
        "validation bleu 12.5",
        99,
    )
    with run.lock_file.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert summarize(run).state == "training"
    run.log_file.unlink()
    assert summarize(run).parameters == 17
    run.write_card({})
    assert summarize(run, verify=True).state == "finished"
    run.weights_file.write_bytes(b"changed")
    assert summarize(run).state == "finished"
    assert "model.safetensors: changed" in str(summarize(run, verify=True).problem)
    (run.folder / "tokenizer.model").unlink()
    assert "tokenizer.model: missing" in str(summarize(run).problem)
    run.recipe_file.write_text("task: [")
    damaged = summarize(run)
    assert (damaged.state, damaged.task) == ("damaged", "")
    assert "\n" not in str(damaged.problem)


@pytest.mark.parametrize("card", [None, {"test": []}])
def test_prune_deletes_what_is_not_needed(tmp_path: Path, card: dict[str, Any] | None) -> None:
    run = write_run(tmp_path / "run", card)
    found = prunable(summarize(run))
    sizes = {kind: found.bytes_of(kind) for kind in found.files}
    finished = {"checkpoints": 1000, "prepared data": 502, "temporary files": 50}
    assert sizes == (finished if card else {**dict.fromkeys(finished, 0), "temporary files": 50})
    before = {path.relative_to(run.folder) for path in run.folder.rglob("*") if path.is_file()}
    assert prune(found) == found.bytes
    after = {path.relative_to(run.folder) for path in run.folder.rglob("*") if path.is_file()}
    assert len(before - after) == (4 if card else 1)
    kept = {"log.jsonl", "checkpoints/notes.txt", "checkpoints/.lock"}
    assert {*map(str, after)} >= {*kept, *(BUNDLE if card else BUNDLE - {"card.json"})}
    assert not prunable(summarize(run)).bytes


def test_prune_touches_neither_links_nor_running_nor_damaged_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"test": []})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "train.arrow").write_bytes(b"shared")
    for path in [*run.data.iterdir()]:
        path.unlink()
    run.data.rmdir()
    run.data.symlink_to(elsewhere)
    found = prunable(summarize(run))
    assert found.bytes_of("prepared data") == 0
    with run.lock_file.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert prunable(summarize(run)).bytes == 0
        with pytest.raises(RegardError, match="another process is training here"):
            prune(found)
    prune(found)
    assert (elsewhere / "train.arrow").exists()
    (run.folder / "tokenizer.model").write_bytes(b"changed")
    assert prunable(summarize(run)).bytes == 0
