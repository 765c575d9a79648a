"""Run an experiment: train all variants with all seeds, compare them, write results, figures and a report."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.demo.corpus import write_corpus
from regard.errors import RegardError
from regard.experiments.experiment_design import Design, TrainingJob, training_jobs
from regard.experiments.job_scheduler import (
    Scheduler,
    finished,
    make_slots,
    remove_large_files,
    run_folder,
)
from regard.experiments.report import write_report
from regard.experiments.results import (
    collect,
    paired_tests,
    summarize_experiment,
    to_json,
    write_results,
)
from regard.training.planner import duration
from regard.training.stopping import catch_signals

FOREVER = 1e9
CORPUS = "corpus"
"""subfolder with the built-in corpus"""


def demo_changes(base: str, changes: Sequence[str], out: Path) -> list[str]:
    """The changes, with the folder of the built-in corpus if the recipe is ``demo`` and names no other data."""
    if base != "demo" or any(change.startswith("data.") for change in changes):
        return list(changes)
    return [*changes, f"data.root={(out / CORPUS).resolve()}"]


def _write_demo_corpus(design: Design, out: Path) -> None:
    corpus = out / CORPUS
    if f"data.root={corpus.resolve()}" in design.changes and not (corpus / "test.de").exists():
        write_corpus(corpus)


def run_experiment(
    design: Design,
    out: Path,
    *,
    minutes: float | None = None,
    jobs: int | None = None,
    command: str = "",
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train what is missing; returns the contents of results.json, and what happened in this call.

    That is ``failures``, messages by the name of the run, and ``interrupted``, whether a signal ended it.

    It ends after ``minutes``, or on Ctrl-C: trainings are saved, and the same call resumes them. jobs: trainings at a
    time; None: as many as the device takes. report: gets lines of progress.
    """
    deadline = time.monotonic() + (FOREVER if minutes is None else 60 * minutes)
    with _locked(out):
        _write_demo_corpus(design, out)
        every = training_jobs(design)
        for job in every:
            if finished(out, job) is not None:
                remove_large_files(run_folder(out, job))
        waiting = [job for job in every if finished(out, job) is None]
        if len(waiting) < len(every):
            report(f"{len(every) - len(waiting)} of {len(every)} training runs are already done")
        slots = make_slots(jobs, every[0].recipe.training.device)
        scheduler = Scheduler(out, design.split, slots, report)
        content = _write(design, every, out, command, tests=False)
        progress = _Progress(len(every), len(waiting), report)
        with catch_signals() as stopped:
            for job in scheduler.run(waiting, deadline, stopped):
                content = _write(design, every, out, command, tests=False)
                progress.done(job, finished(out, job) or {})
        if content["trainings"]:
            content = _write(design, every, out, command, tests=True)
    left = sum(finished(out, job) is None for job in every)
    if left:
        report(f"{left} of {len(every)} training runs are not done; run the same command to resume")
    return {**content, "failures": scheduler.failures, "interrupted": stopped.is_set()}


def check_failures(content: Mapping[str, Any]) -> None:
    """Raise if a training failed for another reason than divergence."""
    if failures := content["failures"]:
        listing = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        raise RegardError(f"{len(failures)} training runs failed: {listing}")


def _write(
    design: Design, jobs: Sequence[TrainingJob], out: Path, command: str, tests: bool
) -> dict[str, Any]:
    """Write results, figures and report of what is finished; the paired tests only at the end, since they are slow."""
    found = {job.name: scores for job in jobs if (scores := finished(out, job)) is not None}
    results = collect(jobs, found)
    paired = paired_tests(design, results, out / "runs") if tests else {}
    summary = summarize_experiment(design, results, paired)
    content = to_json(design, results, summary, len(jobs), command)
    write_results(out, content)
    write_report(out, content)
    return content


class _Progress:
    """Prints a line for each finished training, with the time left."""

    def __init__(self, total: int, waiting: int, report: Callable[[str], None]) -> None:
        self.total, self.left, self.report = total, waiting, report
        self.waiting, self.start = waiting, time.monotonic()

    def done(self, job: TrainingJob, scores: dict[str, Any]) -> None:
        self.left -= 1
        each = (time.monotonic() - self.start) / (self.waiting - self.left)
        rest = f", about {duration(each * self.left)} left" if self.left else ""
        counted = f"{self.total - self.left} of {self.total}{rest}"
        if "diverged" in scores:
            self.report(f"{', '.join(job.variants)}, seed {job.seed}: diverged; {counted}")
            return
        for variant in job.variants:
            value = scores["scores"][variant]["score"]
            self.report(f"{variant}, seed {job.seed}: {value:.2f}; {counted}")


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Allow one process at a time; refuses a folder with other files."""
    if out.exists() and not out.is_dir():
        raise RegardError(f"{out}: a file, not a folder; choose another --out")
    lock = out / ".lock"
    if out.is_dir() and not lock.exists():
        others = sorted(one.name for one in out.iterdir() if one.name != CORPUS)
        if others:
            raise RegardError(
                f"{out}: the folder contains other files ({', '.join(others[:3])}); choose another --out"
            )
    out.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegardError(f"{out}: another process runs this experiment") from None
        yield
