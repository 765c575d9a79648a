"""Runs the trainings of an experiment, as many at a time as the device takes; they can be resumed after any kill.

A training is finished when its run folder has ``scores.json``. Nothing else is needed to resume: the same command
starts what is missing, and each training resumes from its own checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from regard.experiments.experiment_design import TrainingJob
from regard.experiments.job_worker import INTERRUPTED, SCORES
from regard.inference.precision import choose_device
from regard.inference.worker_pool import available_cores
from regard.recipe import Device
from regard.storage.atomic_files import write_text

SAVE_SECONDS = 25.0
"""how long before the deadline trainings are told to save and end"""
POLL_SECONDS = 0.2
SETTLE_SECONDS = 20.0
"""how long a training on a GPU runs before its memory is measured"""
MEMORY_MARGIN = 1.5
"""another training starts on a GPU if this many times the memory of the largest one is free"""
WORKER = (sys.executable, "-m", "regard.experiments.job_worker")
"""the command of a training; its argument is the file that describes it"""
OUT_OF_MEMORY = "out of memory"
DIVERGED = "the loss is not finite"


class Slots(Protocol):
    """Decides how many trainings run at a time."""

    maximum: int

    def free(self, running: int) -> bool:
        """Whether another training may start while ``running`` are running."""


class FixedSlots:
    """A fixed number: on a CPU, the number of cores."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum

    def free(self, running: int) -> bool:
        return running < self.maximum


class MemorySlots:
    """As many as the free memory of a GPU and the number of cores allow.

    Trainings start one after the other. ``free_bytes`` returns the free memory of the GPU.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int],
        maximum: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.free_bytes, self.maximum, self.clock = free_bytes, maximum, clock
        self.before = free_bytes()
        """free memory before the first training"""
        self.started = -SETTLE_SECONDS

    def free(self, running: int) -> bool:
        if running and (running >= self.maximum or self.clock() - self.started < SETTLE_SECONDS):
            return False
        if running:
            free = self.free_bytes()
            if free < MEMORY_MARGIN * (self.before - free) / running:
                return False
        self.started = self.clock()
        return True


def make_slots(jobs: int | None, device: Device) -> Slots:
    """The number of trainings at a time: as given, or what the device takes."""
    if jobs is not None:
        return FixedSlots(jobs)
    place = choose_device(device)
    if place.type == "cpu":
        return FixedSlots(available_cores())
    import torch

    return MemorySlots(lambda: int(torch.cuda.mem_get_info(place)[0]), available_cores())


# ---------------------------------------------------------------------------------------------
# Trainings


def run_folder(out: Path, job: TrainingJob) -> Path:
    return out / "runs" / job.name


def finished(out: Path, job: TrainingJob) -> dict[str, Any] | None:
    """The scores of a training for all variants of the job; None if there are none yet, or a variant is missing."""
    file = run_folder(out, job) / SCORES
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None
    if "diverged" in found or {*job.variants} <= found.get("scores", {}).keys():
        return found
    return None


class Scheduler:
    """Runs trainings in processes of their own."""

    def __init__(self, out: Path, split: str, slots: Slots, report: Callable[[str], None]) -> None:
        self.out, self.split, self.slots, self.report = out, split, slots, report
        self.running: dict[TrainingJob, subprocess.Popen[bytes]] = {}
        self.waiting: list[TrainingJob] = []
        self.failures: dict[str, str] = {}
        """the last line of each training that failed"""

    def run(
        self, jobs: Sequence[TrainingJob], deadline: float, stopped: threading.Event
    ) -> Iterator[TrainingJob]:
        """Run trainings until all are done, the deadline, or a stop; yields each that is done."""
        self.waiting = list(jobs)
        try:
            while (self.waiting or self.running) and not stopped.is_set():
                if time.monotonic() > deadline - SAVE_SECONDS:
                    break
                while self.waiting and self.slots.free(len(self.running)):
                    self._start(self.waiting.pop(0))
                stopped.wait(POLL_SECONDS)
                yield from self._ended()
            yield from self._stop_all()
        finally:
            for process in self.running.values():
                process.kill()
                process.wait()

    def _stop_all(self) -> Iterator[TrainingJob]:
        """Ask all trainings to save and end, and wait for them."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        latest = time.monotonic() + SAVE_SECONDS
        while self.running and time.monotonic() < latest:
            yield from self._ended()
            time.sleep(POLL_SECONDS / 2)

    def _start(self, job: TrainingJob) -> None:
        """Start a training in its own session: Ctrl-C reaches only this process, which signals each training."""
        folder = run_folder(self.out, job)
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = folder.with_name(f"{job.name}.json")
        content = {
            "run": str(folder),
            "prepared": str(self.out / "prepared"),
            "split": self.split,
            "recipe": job.recipe.model_dump(mode="json"),
            "variants": dict(zip(job.variants, job.decodings, strict=True)),
        }
        write_text(file, json.dumps(content))
        with folder.with_name(f"{job.name}.log").open("ab") as log:
            self.running[job] = subprocess.Popen(
                [*WORKER, str(file)],
                env=self._environment(),
                stdin=subprocess.PIPE,  # closed when this process ends, however it ends
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        """The environment of a training: its share of the cores, and the same import path."""
        threads = max(1, available_cores() // self.slots.maximum)
        path = os.pathsep.join(filter(None, sys.path))
        return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}

    def _ended(self) -> Iterator[TrainingJob]:
        for job in [job for job, process in self.running.items() if process.poll() is not None]:
            status = self._close(self.running.pop(job))
            folder = run_folder(self.out, job)
            if status == 0:
                remove_large_files(folder)
                yield job
            elif status not in (INTERRUPTED, -signal.SIGTERM):
                yield from self._failed(job, _last_line(folder.with_name(f"{job.name}.log")))

    @staticmethod
    def _close(process: subprocess.Popen[bytes]) -> int:
        with process:  # closes its pipe
            return process.wait()

    def _failed(self, job: TrainingJob, reason: str) -> Iterator[TrainingJob]:
        """Divergence is a result. A training that did not fit beside others waits for a place of its own."""
        if DIVERGED in reason:
            file = run_folder(self.out, job) / SCORES
            write_text(file, json.dumps({"diverged": reason.removeprefix("regard: ")}))
            yield job
        elif OUT_OF_MEMORY in reason and self.running:
            self.slots.maximum = len(self.running)
            self.waiting.insert(0, job)
            self.report(f"{job.name}: out of memory, waits until another training has ended")
        else:
            self.failures[job.name] = reason
            self.report(f"{job.name}: failed: {reason}")


def remove_large_files(run: Path) -> None:
    """Remove what only an unfinished training needs."""
    for name in ("checkpoints", "data"):
        shutil.rmtree(run / name, ignore_errors=True)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
    return lines[-1]
