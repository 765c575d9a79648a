"""Runs the training runs of an experiment, as many at a time as fit on the device; they can be resumed.

A training run is finished when its run folder has ``scores.json``. Nothing else is needed to resume: the same command
starts what is missing, and each training run resumes from its own checkpoints. Each has its own process:

    python -m regard.experiments.jobs JOB.json

It prepares the data or shares them, trains or resumes, and scores. Data are prepared once for all training runs with
the same token ids; the first process to need them prepares them, and the others wait. If the process that started it
ends, training is saved and it ends, too.
"""

from __future__ import annotations

import fcntl
import hashlib
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
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from regard.data.corpus import read_pairs, valid_pairs
from regard.data.pairs import Pair
from regard.errors import RegardError
from regard.inference.device import choose_device
from regard.inference.worker_pool import available_cores
from regard.recipe import Device, Recipe, make_recipe
from regard.storage.atomic_files import write_text
from regard.storage.run_dir import RunDir
from regard.tasks import Model
from regard.training.prepare_data import data_identity, prepare
from regard.training.progress import ProgressReporter
from regard.training.run import Interrupted, train

if TYPE_CHECKING:
    from regard.experiments.experiment import TrainingJob

SCORES = "scores.json"
"""the file of a run folder with its scores; it exists when the training run is finished"""
INTERRUPTED = 130
"""exit status of a training run that was interrupted and has saved its state"""
FAILED = 2
SAVE_SECONDS = 25.0
"""how long before the deadline training runs are told to save and end"""
POLL_SECONDS = 0.2
SETTLE_SECONDS = 20.0
"""how long a training run on a GPU takes before its memory is measured"""
MEMORY_MARGIN = 1.5
"""another training run starts on a GPU if this many times the memory of the largest one is free"""
WORKER = (sys.executable, "-m", "regard.experiments.jobs")
"""the command of a training run; its argument is the file that describes it"""
OUT_OF_MEMORY = "out of memory"
DIVERGED = "the loss is not finite"


class Slots(Protocol):
    """Decides how many training runs may be active at a time."""

    maximum: int

    def free(self, running: int) -> bool:
        """Whether another training run may start while ``running`` are running."""


class FixedSlots:
    """A fixed number: on a CPU, the number of cores."""

    def __init__(self, maximum: int) -> None:
        self.maximum = maximum

    def free(self, running: int) -> bool:
        return running < self.maximum


class MemorySlots:
    """As many as the free memory of a GPU and the number of cores allow.

    Training runs start one after the other. ``free_bytes`` returns the free memory of the GPU.
    """

    def __init__(
        self,
        free_bytes: Callable[[], int],
        maximum: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.free_bytes, self.maximum, self.clock = free_bytes, maximum, clock
        self.before = free_bytes()
        """free memory before the first training run"""
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
    """The number of training runs at a time: as given, or what the device takes."""
    if jobs is not None:
        return FixedSlots(jobs)
    torch_device = choose_device(device)
    if torch_device.type == "cpu":
        return FixedSlots(available_cores())
    import torch

    return MemorySlots(lambda: int(torch.cuda.mem_get_info(torch_device)[0]), available_cores())


# ---------------------------------------------------------------------------------------------
# Training runs


def run_folder(out: Path, job: TrainingJob) -> Path:
    return out / "runs" / job.name


def finished(out: Path, job: TrainingJob) -> dict[str, Any] | None:
    """The scores of a training run for all variants of the job; None if there are none yet, or a variant is missing."""
    file = run_folder(out, job) / SCORES
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(stored, dict):
        return None
    if "diverged" in stored or {*job.variants} <= stored.get("scores", {}).keys():
        return stored
    return None


class Scheduler:
    """Starts each training run in its own process."""

    def __init__(self, out: Path, split: str, slots: Slots, report: Callable[[str], None]) -> None:
        self.out, self.split, self.slots, self.report = out, split, slots, report
        self.running: dict[TrainingJob, subprocess.Popen[bytes]] = {}
        self.waiting: list[TrainingJob] = []
        self.failures: dict[str, str] = {}
        """the last line of each training run that failed"""

    def run(
        self, jobs: Sequence[TrainingJob], deadline: float, stopped: threading.Event
    ) -> Iterator[TrainingJob]:
        """Run training runs until all are done, the deadline, or a stop; yields each that is done."""
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
        """Ask all training runs to save and end, and wait for them."""
        for process in self.running.values():
            process.send_signal(signal.SIGTERM)
        latest = time.monotonic() + SAVE_SECONDS
        while self.running and time.monotonic() < latest:
            yield from self._ended()
            time.sleep(POLL_SECONDS / 2)

    def _start(self, job: TrainingJob) -> None:
        """Start a training run in its own session: Ctrl-C reaches only this process, which signals each of them."""
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
        """The environment of a training run: its share of the cores, and the same import path."""
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
        """Divergence is a result. A training run that did not fit beside others waits until it can run alone."""
        if DIVERGED in reason:
            file = run_folder(self.out, job) / SCORES
            write_text(file, json.dumps({"diverged": reason.removeprefix("regard: ")}))
            yield job
        elif OUT_OF_MEMORY in reason and self.running:
            self.slots.maximum = len(self.running)
            self.waiting.insert(0, job)
            self.report(f"{job.name}: out of memory; waiting until another training run ends")
        else:
            self.failures[job.name] = reason
            self.report(f"{job.name}: failed: {reason}")


def remove_large_files(run: Path) -> None:
    """Remove what only an unfinished training run needs."""
    for name in ("checkpoints", "data"):
        shutil.rmtree(run / name, ignore_errors=True)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
    return lines[-1]


# ---------------------------------------------------------------------------------------------
# One training run, in its own process


LOCK_SECONDS = 120.0
"""how long to wait for a process of an earlier command that is still saving"""


def main(job_file: str) -> int:
    """Train and score what the file describes; returns the exit status."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        train_and_score(json.loads(Path(job_file).read_text(encoding="utf-8")))
    except Interrupted:
        return INTERRUPTED
    except RegardError as error:
        print(f"regard: {error}", file=sys.stderr)
        return FAILED
    return 0


def _end_with_parent() -> None:
    """Wait until standard input is closed, which the parent does only by ending; then end as on a signal."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def train_and_score(job: dict[str, Any]) -> None:
    """Train, or resume, in the run folder of a job; write the outputs and scores of its variants."""
    run = RunDir(job["run"])
    recipe = make_recipe(job["recipe"], str(run))
    _wait_until_unlocked(run)
    if run.card():
        model = Model.load(run.folder, recipe.training.device)
    else:
        provide_data(recipe, run, Path(job["prepared"]))
        model = train(recipe, run.folder)
    pairs = split_pairs(recipe, job["split"])
    scores: dict[str, dict[str, Any]] = {}
    for name, decoding in job["variants"].items():
        file = f"outputs-{len(scores)}.jsonl"
        scores[name] = score(model, recipe, decoding, pairs, run.folder / file)
    write_text(run.folder / SCORES, json.dumps({"scores": scores, **describe(run)}, indent=1))


def split_pairs(recipe: Recipe, split: str) -> list[Pair]:
    """The pairs that variants are scored on."""
    if split == "valid":
        return list(valid_pairs(recipe.data))
    assert recipe.data.test is not None
    return list(read_pairs(recipe.data.test, recipe.data, "data.test"))


def score(
    model: Model, recipe: Recipe, decoding: dict[str, Any], pairs: Sequence[Pair], outputs: Path
) -> dict[str, Any]:
    """The score of the first metric, a mean over target languages, and the file with the outputs."""
    values = recipe.model_dump(mode="json") | {"decoding": decoding}
    values["evaluation"]["metrics"] = values["evaluation"]["metrics"][:1]
    model.recipe = make_recipe(values, "the recipe of the experiment")
    start = time.monotonic()
    if recipe.text_only:
        results = model.evaluate(pairs)
        return {"score": fmean(result.value for result in results), "outputs": None}
    lines = model.predict_pairs(pairs)
    seconds = time.monotonic() - start
    write_text(outputs, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
    results = model.score_outputs(lines, pairs)
    return {
        "score": fmean(result.value for result in results),
        "outputs": outputs.name,
        "decoding_seconds": round(seconds, 2),
    }


def describe(run: RunDir) -> dict[str, Any]:
    """What the report says about a training."""
    card = run.card()
    curve = [
        [event["step"], event["loss"]]
        for event in run.log()
        if event.get("event") == "valid" and isinstance(event.get("loss"), float)
    ]
    return {
        "loss": card["valid"]["loss"],
        "steps": card["steps"],
        "seconds": card["seconds"],
        "target_tokens": card["target_tokens"],
        "parameters": card["parameters"],
        "hardware": card["hardware"],
        "curve": curve,
    }


# ---------------------------------------------------------------------------------------------
# Data


def provide_data(recipe: Recipe, run: RunDir, prepared: Path) -> None:
    """Link the prepared data into a run that has none; prepare them first if no other training run has."""
    if run.metadata_file.exists():
        return
    identity = json.dumps(data_identity(recipe), sort_keys=True)
    folder = prepared / hashlib.sha256(identity.encode()).hexdigest()[:16]
    prepared.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, however it ends
        if not folder.exists():
            part = RunDir(folder.with_suffix(".part"))
            shutil.rmtree(part.folder, ignore_errors=True)
            part.folder.mkdir()
            part.write_recipe(recipe)
            prepare(part, recipe, ProgressReporter(part))
            part.folder.replace(folder)
    shared = RunDir(folder)
    shutil.rmtree(run.data, ignore_errors=True)
    run.folder.mkdir(parents=True, exist_ok=True)
    for path in shared.tokenizer_files():
        (run.folder / path.name).unlink(missing_ok=True)
        link(path, run.folder / path.name)
    partial = run.folder / "data.part"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(shared.data, partial, copy_function=link)
    partial.replace(run.data)


def link(source: str | Path, target: str | Path) -> None:
    """A hard link, or a copy where links are not possible; the files are never changed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _wait_until_unlocked(run: RunDir) -> None:
    """Wait for the training run of an earlier command that was killed and is still saving."""
    deadline = time.monotonic() + LOCK_SECONDS
    while run.is_locked() and time.monotonic() < deadline:
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
