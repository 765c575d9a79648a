"""The scheduler: how many trainings at a time, what failures mean, deadlines; with programs that only pretend."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from regard.experiments import job_scheduler as module
from regard.experiments.experiment_design import TrainingJob, make_design, training_jobs
from regard.experiments.job_scheduler import FixedSlots, MemorySlots, Scheduler, finished
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
