"""The scheduler: how many trainings at a time, what failures mean, deadlines; with programs that only pretend.

One training in this process: data are prepared once and shared, scores and outputs are written.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from regard.experiments import jobs as module
from regard.experiments.experiment import TrainingJob, make_design, training_jobs
from regard.experiments.jobs import (
    SCORES,
    FixedSlots,
    MemorySlots,
    Scheduler,
    finished,
    provide_data,
    train_and_score,
)
from regard.storage.run_dir import RunDir
from regard.training.prepare_data import prepare
from tests.cli.commands import write_recipe, write_task

PROGRAM = """
import json, pathlib, sys, time
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
run = pathlib.Path(job["run"])
marker = run.with_name(run.name + ".started")
again = marker.exists()
marker.touch()
{body}
run.mkdir(exist_ok=True)
(run / "checkpoints").mkdir(exist_ok=True)
scores = {{name: {{"score": 1.0}} for name in job["variants"]}}
(run / "scores.json").write_text(json.dumps({{"scores": scores}}))
"""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> list[TrainingJob]:
    folder = tmp_path_factory.mktemp("jobs")
    write_task(folder, list, 5)
    recipe = write_recipe(folder, data={"root": str(folder)}, evaluation={"metrics": ["bleu"]})
    return training_jobs(make_design(str(recipe), ["model.heads=1,2"], seeds=1))


def run(
    out: Path,
    jobs: Sequence[TrainingJob],
    body: str,
    monkeypatch: pytest.MonkeyPatch,
    deadline: float = 60.0,
) -> tuple[Scheduler, list[TrainingJob], list[str]]:
    program = out / "program.py"
    program.write_text(PROGRAM.format(body=body))
    monkeypatch.setattr(module, "WORKER", (sys.executable, str(program)))
    lines: list[str] = []
    scheduler = Scheduler(out, "valid", FixedSlots(2), lines.append)
    done = list(scheduler.run(jobs, time.monotonic() + deadline, threading.Event()))
    return scheduler, done, lines


def test_finished_trainings_are_reported_and_their_large_files_removed(
    tmp_path: Path, jobs: list[TrainingJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finished(tmp_path, jobs[0]) is None
    _, done, _ = run(tmp_path, jobs, "", monkeypatch)
    assert {job.name for job in done} == {job.name for job in jobs}
    found = finished(tmp_path, jobs[0])
    assert found is not None
    assert found["scores"] == {"model.heads=1": {"score": 1.0}}
    assert not (tmp_path / "runs" / jobs[0].name / "checkpoints").exists()


def test_divergence_is_a_result_and_other_failures_are_not(
    tmp_path: Path, jobs: list[TrainingJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "run.mkdir()\n"
        "reason = 'the loss is not finite (NaN)' if 'heads=1' in run.name else 'disk full'\n"
        "sys.exit('regard: ' + reason)"
    )
    scheduler, done, lines = run(tmp_path, jobs, body, monkeypatch)
    assert [job.name for job in done] == [jobs[0].name]
    assert finished(tmp_path, jobs[0]) == {"diverged": "the loss is not finite (NaN)"}
    assert scheduler.failures == {jobs[1].name: "regard: disk full"}
    assert lines == [f"{jobs[1].name}: failed: regard: disk full"]


def test_a_training_that_does_not_fit_beside_others_waits(
    tmp_path: Path, jobs: list[TrainingJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "if 'heads=2' in run.name and not again: sys.exit('regard: out of memory')\n"
        "if 'heads=1' in run.name: time.sleep(0.8)"
    )
    scheduler, done, lines = run(tmp_path, jobs, body, monkeypatch)
    assert [job.name for job in done] == [job.name for job in jobs]
    assert scheduler.slots.maximum == 1
    assert len(lines) == 1


def test_trainings_are_told_to_save_before_the_deadline(
    tmp_path: Path, jobs: list[TrainingJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    body = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: (run.with_name(run.name + '.saved').touch(), sys.exit(130)))\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(module, "SAVE_SECONDS", 5.0)
    scheduler, done, lines = run(tmp_path, jobs, body, monkeypatch, deadline=6.0)
    assert (done, lines, scheduler.failures, scheduler.running) == ([], [], {}, {})
    assert len([*(tmp_path / "runs").glob("*.saved")]) == 2


def test_a_gpu_takes_as_many_trainings_as_fit_its_memory() -> None:
    now, used = 0.0, 0
    slots = MemorySlots(lambda: 100 - used, maximum=8, clock=lambda: now)
    running = 0
    for _ in range(20):
        if slots.free(running):
            running += 1
            used += 18
            assert not slots.free(running), (
                "the memory of a training that has just started is unknown"
            )
        now += module.SETTLE_SECONDS
    assert running == 5  # with four, 28 are free, more than 1.5 times 18; with five, 10
    assert running * 18 <= 100
    fixed = MemorySlots(lambda: 100, maximum=1, clock=lambda: now)
    assert fixed.free(0)
    assert not fixed.free(1)


def test_a_result_without_one_of_the_variants_is_not_finished(
    tmp_path: Path, jobs: list[TrainingJob]
) -> None:
    folder = tmp_path / "runs" / jobs[0].name
    folder.mkdir(parents=True)
    for content in ('{"scores": {}}', "[]", "{"):
        (folder / "scores.json").write_text(content)
        assert finished(tmp_path, jobs[0]) is None
    (folder / "scores.json").write_text(json.dumps({"diverged": "not finite"}))
    assert finished(tmp_path, jobs[0]) == {"diverged": "not finite"}


# ---------------------------------------------------------------------------------------------
# One training, in this process


def test_data_are_shared_and_scores_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path, list, 30)
    training: dict[str, Any] = {"steps": 2, "warmup": 1, "validate_every": 1, "checkpoint_every": 2}
    training |= {"validate_sentences": 0, "best_checkpoint_metric": "loss"}
    model = {"d_model": 16, "d_ff": 16, "heads": 2}
    data = {"root": str(tmp_path)}
    path = write_recipe(
        tmp_path,
        data=data,
        model=model,
        training=training,
        decoding={"extra_length": 1},  # an untrained model does not stop
        evaluation={"metrics": ["bleu"]},
    )
    vary = ["decoding.beam=1,2", "model.norm_order=pre,post"]
    first, second = training_jobs(make_design(str(path), vary, seeds=1))
    prepared: list[Path] = []

    def counted(run: RunDir, *more: Any) -> None:
        prepared.append(run.folder)
        prepare(run, *more)

    monkeypatch.setattr(module, "prepare", counted)
    job: dict[str, Any] = {
        "run": str(tmp_path / "runs" / first.name),
        "prepared": str(tmp_path / "prepared"),
        "split": "valid",
        "recipe": first.recipe.model_dump(mode="json"),
        "variants": dict(zip(first.variants, first.decodings, strict=True)),
    }
    train_and_score(job)
    folder = Path(job["run"])
    found = json.loads((folder / SCORES).read_text())
    assert {*found["scores"]} == {*first.variants}
    outputs = {one["outputs"] for one in found["scores"].values()}
    assert outputs == {"outputs-0.jsonl", "outputs-1.jsonl"}
    assert all(len((folder / name).read_text().splitlines()) == 50 for name in outputs)
    assert found["steps"] == 2
    assert [step for step, _ in found["curve"]] == [1, 2]

    other = RunDir(tmp_path / "runs" / second.name)
    provide_data(second.recipe, other, tmp_path / "prepared")
    assert len(prepared) == 1, "the second training shares the data of the first"
    assert other.metadata_file.samefile(RunDir(folder).metadata_file)

    before = (folder / "model.safetensors").read_bytes()
    (folder / SCORES).unlink()
    train_and_score(job)  # killed before the scores were written
    assert json.loads((folder / SCORES).read_text())["scores"].keys() == found["scores"].keys()
    assert (folder / "model.safetensors").read_bytes() == before
