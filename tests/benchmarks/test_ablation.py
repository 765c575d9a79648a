"""benchmarks/ablation.py: it resumes where it stopped, and its table can be checked by hand."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from regard.storage.run_dir import RunDir
from regard.training.prepare_data import open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.resume import check_run_folder, open_run
from tests.cli.commands import write_task
from tests.scripts import load_script


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/ablation.py")


def plan(benchmark: ModuleType, recipe: str, runs: Path = Path("runs"), **more: Any) -> Any:
    return benchmark.Plan(recipe, [], **{"test": False, "runs": runs, **more})


@pytest.mark.parametrize(
    ("recipe", "same"),
    [("multi30k-tiny", ["no R-Drop"]), ("multi30k", ["R-Drop 5", "dropout 0.3"])],
)
def test_every_variant_is_valid(
    benchmark: ModuleType, recipe: str, same: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Only variants that equal the recipe are skipped."""
    valid = list(benchmark.valid_variants(plan(benchmark, recipe), list(benchmark.VARIANTS)))
    assert valid == [name for name in benchmark.VARIANTS if name not in same]
    assert capsys.readouterr().out.count("skipped, equal to the recipe") == len(same)


def test_a_variant_that_the_recipe_does_not_allow_is_skipped(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [benchmark.BASE, "R-Drop 1"]
    found = benchmark.valid_variants(plan(benchmark, "wikitext2-mlm"), names)
    assert list(found) == [benchmark.BASE]
    assert "R-Drop 1: skipped: " in capsys.readouterr().out


def test_a_second_stage_waits_for_the_first(
    benchmark: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    planned = plan(benchmark, str(write_task(tmp_path, list, 40)), tmp_path / "runs", seeds=[1, 2])
    first, then = "both directions, no tag", "both directions, then one"
    taught = "taught by an ensemble"
    assert list(benchmark.valid_variants(planned, [then])) == []
    assert f"{then}: skipped, it needs {first}" in capsys.readouterr().out
    assert list(benchmark.valid_variants(planned, [then, first])) == [then, first]
    job, data = benchmark.Job, benchmark.SharedData(planned)
    assert benchmark._next([job(then, 1), job(first, 1)], {}, data) == job(first, 1)
    assert benchmark._next([job(then, 1)], {job(first, 1): None}, data) is None
    assert benchmark._next([job(then, 1)], {job(first, 2): None}, data) == job(then, 1)
    assert benchmark._next([job(then, 1)], {}, data) == job(then, 1)
    command = planned.command(job(then, 2))
    assert command[-1] == f'training.init_from="{planned.folder(job(first, 2))}"'
    both = [str(planned.folder(job(benchmark.BASE, seed))) for seed in (1, 2)]
    assert planned.command(job(taught, 3))[-1] == f"training.teacher={json.dumps(both)}"
    waiting = [job(taught, 1), job(benchmark.BASE, 2)]
    assert benchmark._next(waiting, {}, data) == job(benchmark.BASE, 2)


def test_an_ensemble_of_the_seeds_is_scored(
    benchmark: ModuleType, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = str(write_task(tmp_path, list, 40))
    planned = plan(benchmark, recipe, tmp_path / "runs", seeds=[1, 2])
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    for seed in (1, 2):
        shutil.copytree(finished_run, planned.folder(benchmark.Job("the recipe", seed)))
    one = {"valid": 40.0, "test": {}, "seconds": 1.0, "hardware": "none"}
    name = "the recipe: ensemble of its seeds"
    results: dict[str, Any] = {"the recipe/1": one, "the recipe/2": one, f"{name}/1": one}
    benchmark.score_ensembles(planned, ["the recipe"], results)
    assert set(results) == {"the recipe/1", "the recipe/2", f"{name}/1+2"}
    assert results[f"{name}/1+2"]["valid"] < 40
    assert f"| {name} | 1 |" in benchmark.table(results, "bleu")


def test_the_test_set_is_used_only_on_request(benchmark: ModuleType) -> None:
    job = benchmark.Job("both directions", 2)
    assert plan(benchmark, "multi30k").load(job).data.test is None
    tested = plan(benchmark, "multi30k", test=True).load(job)
    assert tested.data.test is not None
    assert tested.training.seed == 2


def test_intervals_are_those_of_student_and_welch(benchmark: ModuleType) -> None:
    for freedom, point in ((1, 12.7062), (2, 4.30265), (3.5, 2.94), (10, 2.22814), (50, 2.00856)):
        assert benchmark.student_t(freedom) == pytest.approx(point, rel=2e-4)
    value, error = benchmark.mean([40.0, 42.0, 41.0])  # 4.30265 / sqrt 3
    assert (value, error) == pytest.approx((41.0, 2.4841), abs=1e-3)
    # Equal variances: 2 + 2 degrees, 2.77645 sqrt(2/3). A variance of zero adds nothing.
    value, error = benchmark.difference([39.0, 38.0, 40.0], [40.0, 42.0, 41.0])
    assert (value, error) == pytest.approx((-2.0, 2.2669), abs=1e-3)
    value, error = benchmark.difference([39.0, 39.0, 39.0], [40.0, 42.0, 41.0])
    assert (value, error) == pytest.approx((-2.0, 2.4841), abs=1e-3)
    assert benchmark.difference([39.0], [40.0, 42.0]) == (-2.0, None)


def test_the_table_has_a_row_for_each_variant(benchmark: ModuleType) -> None:
    results = {
        f"{name}/{seed}": {"valid": value, "test": test, "seconds": 60.0}
        for name, values, test in (
            ("R-Drop 1", (39.0, 38.0, 40.0), {}),
            ("the recipe", (40.0, 42.0, 41.0), {"bleu": 43.0}),
        )
        for seed, value in enumerate(values, 1)
    }
    lines = benchmark.table(results, "bleu").split("\n")
    assert lines[0].startswith("| variant | seeds | valid bleu | against the recipe | test bleu |")
    assert lines[2] == "| the recipe | 3 | 41.00 ± 2.48 |  | 43.00 ± 0.00 | 60 |"
    assert lines[3] == "| R-Drop 1 | 3 | 39.00 ± 2.48 | -2.00 ± 2.27 |  | 60 |"
    assert "seeds is 1.00 (4 degrees of freedom)" in lines[5]
    assert "seeds is 2.27." in lines[5]


def test_data_are_prepared_once_for_all_trainings_with_the_same_ids(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REGARD_DATA", raising=False)
    recipe = str(write_task(tmp_path, list, 40))
    planned = plan(benchmark, recipe, tmp_path / "runs")
    first, second, larger = (
        benchmark.Job(name, seed)
        for name, seed in (("the recipe", 1), ("dropout 0.1", 2), ("vocabulary of 3,000", 1))
    )
    data = benchmark.SharedData(planned)
    assert data.folder(first) == data.folder(second)
    assert data.folder(first) != data.folder(larger)
    data.provide(second)
    assert not planned.folder(second).exists(), "nothing is prepared yet"
    run = RunDir(planned.folder(first))
    run.folder.mkdir(parents=True)
    run.write_recipe(planned.load(first))
    prepare(run, planned.load(first), ProgressReporter(run, enabled=False))
    data.store(first)
    shutil.rmtree(run.data)
    data.provide(second)
    monkeypatch.setattr("regard.training.prepare_data.write_dataset", None)  # would fail if called
    other = RunDir(planned.folder(second))
    check_run_folder(other)
    open_run(other, planned.load(second))
    prepare(other, planned.load(second), ProgressReporter(other, enabled=False))
    assert len(open_prepared(other, planned.load(second)).train) == 40


TRAIN = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / "checkpoints").mkdir(parents=True, exist_ok=True)
if "EMA" in folder.name and not (folder / "began").exists():
    (folder / "began").touch()
    time.sleep(60)
found = {"valid": 40.0, "test": {}, "seconds": 1.0, "hardware": "none"}
(folder / "scores.json").write_text(json.dumps(found))
"""


def test_it_stops_in_time_and_resumes(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REGARD_DATA", raising=False)
    recipe = str(write_task(tmp_path, list, 40))
    changed = "EMA 0.999"
    monkeypatch.setattr(
        benchmark.Plan,
        "command",
        lambda plan, job: [sys.executable, "-c", TRAIN, str(plan.folder(job))],
    )
    monkeypatch.setattr(benchmark, "SAVE_SECONDS", 0.0)
    out, runs = tmp_path / "ablation.json", tmp_path / "runs"
    arguments = [recipe, "--out", str(out), "--runs", str(runs), "--seeds", "1", "--jobs", "2"]
    arguments += ["--only", "the recipe", changed]
    benchmark.main([*arguments, "--minutes", "0.03"])
    first = json.loads(out.read_text())["results"]
    assert set(first) == {"the recipe/1"}
    assert not (runs / "the-recipe-1" / "checkpoints").exists()
    (runs / "the-recipe-1" / "scores.json").unlink()  # finished trainings are not repeated
    benchmark.main([*arguments, "--minutes", "1"])
    assert set(json.loads(out.read_text())["results"]) == {"the recipe/1", f"{changed}/1"}
    assert f"| {changed} | 1 | 40.00 | +0.00 |" in out.with_suffix(".md").read_text()
    with pytest.raises(SystemExit):
        benchmark.main([*arguments, "--set", "training.log_every=3"])
