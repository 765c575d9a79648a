"""Faults other than kills: a disk that is full or fails, folders that are read-only or vanish, a clock that jumps …

Each fault is a function with a description. It raises AssertionError if a command does something else than documented:
it ends with status 2 and one line that names the file, and the same command completes once the fault is gone.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.faults.kills import COMMANDS, assert_completes, fresh_copy, unbroken
from tests.faults.processes import Process, limit_file_size, start

TRAIN, TRANSLATE, DISTILL = (
    next(one for one in COMMANDS if one.name == name) for name in ("train", "translate", "distill")
)
NOBODY = 65534


@dataclass
class Found:
    """The result of one fault."""

    name: str
    behaviour: str
    cases: int = 0
    defect: str | None = None

    @property
    def cells(self) -> list[str]:
        return [self.name, str(self.cases), self.behaviour, self.defect or "as documented"]


Fault = Callable[[Path, Path], int]
"""From the folders of the data and for work to the number of cases."""
FAULTS: dict[str, tuple[str, Fault]] = {}


def fault(name: str, behaviour: str) -> Callable[[Fault], Fault]:
    def register(function: Fault) -> Fault:
        FAULTS[name] = (behaviour, function)
        return function

    return register


def run_conditions(data: Path, work: Path, only: str | None) -> list[Found]:
    """Try all faults, or those whose name contains ``only``."""
    results = []
    for name, (behaviour, function) in FAULTS.items():
        if only is not None and only not in name:
            continue
        found = Found(name, behaviour)
        try:
            found.cases = function(data, work)
        except AssertionError as error:
            found.defect = str(error)[-600:].replace("\n", " / ")
        print(" | ".join(found.cells), flush=True)
        results.append(found)
    return results


def assert_refused(process: Process, words: str) -> None:
    """Status 2, and one line of the command that contains some words."""
    status = process.wait()
    text = process.text
    assert status == 2, f"status {status}: {text}"
    assert "Traceback" not in text, text
    assert process.last_line.startswith("regard: "), text
    assert words in process.last_line, f"no {words!r} in: {process.last_line}"


# ---------------------------------------------------------------------------------------------
# A disk that is full or fails


@fault("file size limit (RLIMIT_FSIZE)", "status 2, one line with the file; completes when lifted")
def file_size_limit(data: Path, work: Path) -> int:
    """Every limit from a few bytes to the largest file fails at another write, in the middle of it."""
    cases = 0
    for command in (TRAIN, TRANSLATE, DISTILL):
        expected, _ = unbroken(command, data, work)
        size = 60
        while True:
            folder = fresh_copy(data, work / "limited")
            limit = partial(limit_file_size, size)
            process = start(command.arguments(folder), folder, limit, "/dev/null")
            if process.wait() == 0:
                break
            assert process.status == 2, f"{command.name}, {size} bytes: status {process.status}"
            process = start(command.arguments(folder), folder, limit, "../out")
            if process.wait() == 0:  # the first attempt left less to write
                break
            if len(process.text) + 300 < size:  # otherwise the message does not fit into its file
                assert_refused(process, "cannot be written")
            assert_completes(command, folder, expected)
            cases += 1
            size = int(size * 1.7)
    return cases


@fault("full disk (tmpfs)", "status 2, one line with the file; completes when there is space")
def full_disk(data: Path, work: Path) -> int:
    cases = 0
    for command in (TRAIN, TRANSLATE):
        expected, _ = unbroken(command, data, work)
        used = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
        for extra in (20_000, 60_000, 150_000, 300_000, 600_000):
            folder = work / "disk"
            folder.mkdir(exist_ok=True)
            options = f"size={used + 4096 * 40 + extra}"
            mounted = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)],
                capture_output=True,
                check=False,
            )
            if mounted.returncode:
                return 0  # not allowed to mount
            try:
                shutil.copytree(data, folder / "copy")
                process = start(
                    command.arguments(folder / "copy"), folder / "copy", output="../../out"
                )
                if process.wait() == 0:
                    continue
                assert_refused(process, "No space left on device")
                subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True)
                assert_completes(command, folder / "copy", expected)
                cases += 1
            finally:
                subprocess.run(["umount", "-l", str(folder)], check=True)
    return cases


def failing_fsync(failing: int) -> Callable[[], None]:
    """Let one call of os.fsync fail, counted from 1; all writes of files pass through it."""

    def patch() -> None:
        usual, calls = os.fsync, itertools.count(1)

        def fsync(descriptor: int) -> None:
            if next(calls) == failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            usual(descriptor)

        vars(os)["fsync"] = fsync

    return patch


@fault(
    "EIO from fsync, every third to fifth call",
    "status 2, one line with the file; completes when repeated",
)
def io_error(data: Path, work: Path) -> int:
    cases = 0
    for command, stride in ((TRAIN, 3), (TRANSLATE, 5), (DISTILL, 4)):
        expected, _ = unbroken(command, data, work)
        for call in itertools.count(1, stride):
            folder = fresh_copy(data, work / "failing")
            process = start(command.arguments(folder), folder, failing_fsync(call))
            if process.wait() == 0:
                break
            assert_refused(process, os.strerror(errno.EIO))
            assert_completes(command, folder, expected)
            cases += 1
    return cases


# ---------------------------------------------------------------------------------------------
# Folders


def as_nobody() -> None:
    """Without the privileges of root, whom permissions do not stop."""
    if os.getuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@fault("read-only folder", "status 2, one line with the folder; nothing is changed")
def read_only(data: Path, work: Path) -> int:
    cases = 0
    for command in (TRAIN, TRANSLATE, DISTILL):
        folder = fresh_copy(data, work / "read-only")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        work.chmod(0o755)
        process = start(command.arguments(folder), folder, as_nobody, "../nobody")
        try:
            assert_refused(process, "ermission denied")
        finally:
            folder.chmod(0o755)
        cases += 1
    return cases


@fault("folder vanishes", "status 2, one line with the file")
def vanishing(data: Path, work: Path) -> int:
    """The folder of the run is removed while it is trained, and the folder of the output while it is translated."""
    _, seconds = unbroken(TRAIN, data, work)
    draw, cases = random.Random(1), 0
    for _ in range(8):
        folder = fresh_copy(data, work / "vanishing")
        process = start(TRAIN.arguments(folder), folder, output="../out")
        end = time.monotonic() + draw.uniform(0.2, 0.9) * seconds
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.001)
        shutil.rmtree(folder / "run", ignore_errors=True)
        if process.wait() != 0:
            assert_refused(process, "run")
            cases += 1
    folder = fresh_copy(data, work / "vanishing")
    (folder / "sub").mkdir()
    arguments = ["translate", "model", "--input", "in.txt", "--output", "sub/out.txt"]
    process = start(arguments, folder, output="../out")
    while process.poll() is None and not list((folder / "sub").iterdir()):
        time.sleep(0.0005)
    shutil.rmtree(folder / "sub", ignore_errors=True)
    if process.wait() != 0:
        assert_refused(process, "sub/")
        cases += 1
    return cases


# ---------------------------------------------------------------------------------------------
# The environment


@fault("clock goes backwards", "the same weights; times come from the monotonic clock")
def clock(data: Path, work: Path) -> int:
    expected, _ = unbroken(TRAIN, data, work)

    def backwards() -> None:
        usual, calls = time.time, itertools.count()
        time.time = lambda: usual() - 3600 * next(calls)
        time.time_ns = lambda: int(time.time() * 1e9)

    folder = fresh_copy(data, work / "clock")
    process = start(TRAIN.arguments(folder), folder, backwards)
    assert process.wait() == 0, process.text
    seconds = json.loads((folder / "run/card.json").read_text())["seconds"]
    assert 0 <= seconds < 300, f"the card says {seconds} seconds"
    assert_completes(TRAIN, folder, expected)
    return 1


@fault(
    "two training runs in one folder", "the second: status 2, one line; the first is not disturbed"
)
def two_training_runs(data: Path, work: Path) -> int:
    expected, _ = unbroken(TRAIN, data, work)
    folder = fresh_copy(data, work / "twice")
    first = start(TRAIN.arguments(folder), folder)
    while not (folder / "run/checkpoints/.lock").exists():
        time.sleep(0.001)
    time.sleep(0.05)
    os.kill(first.id, signal.SIGSTOP)
    second = start(TRAIN.arguments(folder), folder, output=".second")
    assert_refused(second, "another process is training here")
    os.kill(first.id, signal.SIGCONT)
    assert first.wait() == 0, first.text
    assert_completes(TRAIN, folder, expected)
    return 1


@fault("data files change", "status 2, one line; completes when they are restored")
def changed_data(data: Path, work: Path) -> int:
    expected, _ = unbroken(TRAIN, data, work)
    cases = 0
    for name in ("train.src", "train.tgt", "valid.src"):
        folder = fresh_copy(data, work / "changed")
        half = [*TRAIN.arguments(folder), "--set", "training.steps=8"]
        assert start(half, folder).wait() == 0
        content = (folder / name).read_text()
        (folder / name).write_text(content.replace("a", "b", 1))
        process = start(TRAIN.arguments(folder), folder)
        assert_refused(process, "the data have changed")
        (folder / name).write_text(content)
        assert_completes(TRAIN, folder, expected)
        cases += 1
    return cases


def resume_elsewhere(data: Path, work: Path, elsewhere: Callable[[], None]) -> int:
    """Train the first half in another environment; the second half says so, and the weights differ by rounding only."""
    import torch
    from safetensors.torch import load

    expected, _ = unbroken(TRAIN, data, work)
    folder = fresh_copy(data, work / "elsewhere")
    half = [*TRAIN.arguments(folder), "--set", "training.steps=8"]
    first = start(half, folder, elsewhere)
    assert first.wait() == 0, first.text
    process = start(TRAIN.arguments(folder), folder)
    assert process.wait() == 0, process.text
    assert "may differ in rounding" in process.text, process.text
    weights = load((folder / "run/model.safetensors").read_bytes())
    for name, weight in load(expected["run/model.safetensors"]).items():
        assert torch.allclose(weights[name], weight, atol=1e-3), (
            f"{name} differs by more than rounding"
        )
    return 1


@fault("another number of threads", "resumes and says so; the weights may differ in rounding")
def other_threads(data: Path, work: Path) -> int:
    def two_threads() -> None:
        import torch

        torch.set_num_threads(2)

    return resume_elsewhere(data, work, two_threads)


@fault("a run of another torch version", "resumes and says so; the weights may differ in rounding")
def other_torch(data: Path, work: Path) -> int:
    """Only the name of the version is another one here: the files are safetensors, JSON and YAML."""

    def older() -> None:
        import torch

        vars(torch)["__version__"] = "2.11.0"

    return resume_elsewhere(data, work, older)
