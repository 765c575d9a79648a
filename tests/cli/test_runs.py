"""``regard runs``: list, compare and prune; overlap with the training data in ``evaluate`` and in training."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.commands import inside, succeeds_inside, write, write_recipe, write_task


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two short runs that differ in the seed; 30 of 150 test sources are in the training data."""
    folder = tmp_path_factory.mktemp("runs")
    write_task(folder, list, 300)
    for side in ("src", "tgt"):
        train = (folder / f"train.{side}").read_text().splitlines()
        test = (folder / f"test.{side}").read_text().splitlines()
        write(folder / f"test.{side}", [*train[:30], *test[30:]])
    recipe = write_recipe(
        folder,
        data={"test": {"source": "test.src", "target": "test.tgt"}},
        training={"steps": 30, "warmup": 5, "validate_every": 15},
    )
    trained = succeeds_inside("train", recipe, "--out", "runs/a", cwd=folder)
    assert (
        "30 of 150 test sources (20.0%) are in the training data" in trained.stderr + trained.stdout
    )
    succeeds_inside("train", recipe, "--set", "training.seed=2", "--out", "runs/b", cwd=folder)
    return folder


def test_runs_are_listed(two_runs: Path) -> None:
    lines = succeeds_inside("runs", cwd=two_runs).stdout.splitlines()
    assert lines[0].split()[:2] == ["run", "task"]
    assert [line.split()[0] for line in lines[1:]] == ["runs/a", "runs/b"]
    assert all("finished" in line for line in lines[1:])
    listed = json.loads(succeeds_inside("runs", "list", "runs", "--json", cwd=two_runs).stdout)
    assert [one["state"] for one in listed] == ["finished", "finished"]
    assert all(one["disk"] > 1000 and one["parameters"] > 1000 for one in listed)
    assert "no such folder" in inside("runs", "nothing", cwd=two_runs).stderr


def test_runs_are_compared_by_their_stored_outputs(two_runs: Path) -> None:
    done = succeeds_inside("runs", "compare", "runs/a", "runs/b", cwd=two_runs)
    assert "runs/b against runs/a" in done.stdout
    assert "training.seed  1  2" in done.stdout
    assert "p = " in done.stdout
    assert done.stderr == ""
    answer = json.loads(
        succeeds_inside("runs", "compare", "runs/a", "runs/b", "--json", cwd=two_runs).stdout
    )
    assert answer["differences"] == {"training.seed": ["1", "2"]}
    card = json.loads((two_runs / "runs/b/card.json").read_text())
    assert answer["runs"][1]["scores"] == card["test"]
    assert answer["comparisons"]["runs/b"][0]["system"] == pytest.approx(card["test"][0]["value"])
    assert "at least two" in inside("runs", "compare", "runs/a", cwd=two_runs).stderr


def test_outputs_are_computed_if_they_are_not_stored(two_runs: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(two_runs / "runs" / name, tmp_path / name)
    (tmp_path / "b" / "test_outputs.jsonl").write_text('"changed"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REGARD_DATA", "")
        done = succeeds_inside("runs", "compare", tmp_path / "a", tmp_path / "b", cwd=two_runs)
    assert f"{tmp_path / 'b'} has no stored outputs" in done.stderr
    assert "against" in done.stdout


def test_evaluate_says_what_is_in_the_training_data(two_runs: Path) -> None:
    done = succeeds_inside("evaluate", "runs/a", "--beam", "1", cwd=two_runs)
    assert (
        "30 of 150 test sources (20.0%) are in the training data; scores of the other 120:"
        in done.stdout
    )
    answer = json.loads(
        succeeds_inside("evaluate", "runs/a", "--beam", "1", "--json", cwd=two_runs).stdout
    )
    overlap = answer["training_overlap"]
    assert (overlap["sources"], overlap["total"], overlap["percent"]) == (30, 150, 20.0)
    assert len(overlap["scores_without"]) == len(answer["scores"])


def test_prune_lists_first_and_deletes_only_with_yes(two_runs: Path, tmp_path: Path) -> None:
    shutil.copytree(two_runs / "runs", tmp_path / "runs")
    model = (tmp_path / "runs/a/model.safetensors").read_bytes()
    listed = succeeds_inside("runs", "prune", "--json", cwd=tmp_path)
    answer = json.loads(listed.stdout)
    assert not answer["deleted"]
    assert answer["bytes"] == sum(one["bytes"] for one in answer["runs"]) > 0
    assert list((tmp_path / "runs/a/checkpoints").glob("step-*"))
    done = succeeds_inside("runs", "prune", "--yes", cwd=tmp_path)
    assert "deleted" in done.stdout
    assert not list((tmp_path / "runs/a/checkpoints").glob("step-*"))
    assert not (tmp_path / "runs/a/data").exists()
    assert (tmp_path / "runs/a/model.safetensors").read_bytes() == model
    assert "nothing to delete" in succeeds_inside("runs", "prune", cwd=tmp_path).stdout
    for file in two_runs.glob("*.???"):
        shutil.copy(file, tmp_path)
    # The training files are read again, because the stored hashes are gone.
    done = succeeds_inside("evaluate", "runs/a", "--beam", "1", cwd=tmp_path)
    assert "30 of 150 test sources (20.0%)" in done.stdout
    (tmp_path / "train.src").unlink()
    done = succeeds_inside("evaluate", "runs/a", "--beam", "1", cwd=tmp_path)
    assert "Cannot check whether test sources are in the training data" in done.stderr


def test_runs_joined_by_plus_are_an_ensemble(two_runs: Path) -> None:
    both = "runs/a+runs/b"
    done = succeeds_inside("translate", both, "--input", "test.src", "--beam", "2", cwd=two_runs)
    assert len(done.stdout.splitlines()) == 150
    answers = [
        json.loads(succeeds_inside("evaluate", one, "--beam", "2", "--json", cwd=two_runs).stdout)
        for one in (both, "runs/a")
    ]
    assert answers[0]["training_overlap"]["sources"] == 30
    assert answers[0]["scores"][0]["value"] != answers[1]["scores"][0]["value"]
    against = succeeds_inside(
        "evaluate", both, "--beam", "1", "--against", "runs/a", cwd=two_runs
    ).stdout
    assert "p = " in against
    refused = inside("translate", both, "one", "--alignment", "a.txt", cwd=two_runs)
    assert "--alignment a.txt: not supported for an ensemble" in refused.stderr
    assert "no such folder" in inside("translate", "runs/a+runs/c", "one", cwd=two_runs).stderr
