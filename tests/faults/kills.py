"""Kill a command at random moments, run it again until it ends, and compare its files with those of an unbroken run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cli.commands import sequences, write, write_recipe, write_task
from tests.faults.processes import Process, start, start_program

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
STEPS = 16
LINES = 96
PAIRS = 4000
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "regard"]
UNFINISHED = (".partial", ".journal", ".unfinished")
"""parts of the names of temporary files"""


@dataclass(frozen=True)
class Command:
    """A command to kill. To add one, append it to ``COMMANDS``."""

    name: str
    arguments: Callable[[Path], list[str]]
    """its arguments, from the folder with the data"""
    outputs: tuple[str, ...]
    """files that must be equal, byte for byte, to those of an unbroken run; may contain ``*``"""
    share: float
    """share of all kills"""
    stopped: tuple[int, ...]
    """exit statuses after SIGTERM or SIGINT"""
    start: Callable[[list[str], Path], Process] = start
    check: Callable[[Path], None] = lambda folder: None
    """further checks of the folder, after every kill"""


def write_data(folder: Path) -> None:
    """Data, a recipe with everything that could break exact resuming, and a trained model in the folder ``model``."""
    write_task(folder, sorted, count=120)
    write_recipe(
        folder,
        model={"d_model": 16, "heads": 2, "d_ff": 16, "dropout": 0.2},
        training={"steps": STEPS, "schedule": "noam", "warmup": 4, "tokens_per_batch": 96}
        | {"accumulate": 2, "validate_every": 4, "checkpoint_every": 2, "keep_checkpoints": 3}
        | {"validate_sentences": 4, "log_every": 3, "ema": 0.9},
        decoding={"beam": 1, "extra_length": 2},
    )
    source = (folder / "train.src").read_text().splitlines()
    write(folder / "in.txt", (source[number % len(source)] for number in range(LINES)))
    words = sequences(PAIRS, "abcdefgh", range(4, 20), seed=2)
    pairs = [(" ".join(one), " ".join(sorted(one))) for one in words]
    write(
        folder / "pairs.tsv", map("\t".join, [*pairs, *pairs[::7], *(("a", "") for _ in range(9))])
    )
    process = start(["train", "recipe.yaml", "--out", "model"], folder)
    assert process.wait() == 0, process.text


def small_chunks() -> None:
    """Let commands save more often than they would for so few lines."""
    from regard.cli import text_io
    from regard.training import distillation, prepare_data

    text_io.CHUNK_LINES = distillation.CHUNK_SIZE = 8
    prepare_data.PAIRS_PER_PROCESS = 100


# ---------------------------------------------------------------------------------------------
# The commands


def check_run(folder: Path) -> None:
    """Every file of a run is complete, or absent; a model always has a checkpoint."""
    from regard.storage.run_dir import RunDir
    from regard.training.checkpoint import checkpoint_files, load_checkpoint

    run = RunDir(folder / "run")
    files = checkpoint_files(run.checkpoints)
    for path in files:
        load_checkpoint(path)
    if run.weights_file.exists():
        run.weights()
        assert files, "a model without a checkpoint"
    run.card()


def start_with_two_cores(arguments: list[str], cwd: Path) -> Process:
    """The copies of the data are written by several processes."""

    def two_cores() -> None:
        os.environ["OMP_NUM_THREADS"] = "2"

    return start(arguments, cwd, two_cores)


def torchrun(arguments: list[str], cwd: Path) -> Process:
    return start_program([*TORCHRUN, *arguments], cwd, {})


def sampled(folder: Path) -> list[str]:
    """A training whose data take most of the time."""
    changes = ("tokenizer.kind=bpe", "training.subword_sampling=0.1", "training.subword_copies=6")
    few = ("training.steps=2", "training.warmup=1", "tokenizer.vocab_size=280")
    sets = [word for change in (*changes, *few) for word in ("--set", change)]
    return ["train", "recipe.yaml", "--out", "run", *sets]


def serve_and_translate(arguments: list[str], cwd: Path) -> Process:
    """Start a server that must answer requests until it is killed."""
    process = start(arguments, cwd)
    line = first_line(process)
    if line is not None:
        (cwd / "answer.txt").write_text(ask(line.split()[-1]), encoding="utf-8")
    return process


def first_line(process: Process) -> str | None:
    """The first line of output; None if the process ends before it."""
    while process.poll() is None:
        text = process.text
        if "\n" in text:
            return text.partition("\n")[0]
        time.sleep(0.005)
    return None


def ask(address: str) -> str:
    body = {"q": "a b c d e f\ng h", "source": "src", "target": "tgt"}
    request = urllib.request.Request(
        f"{address}/translate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: str = json.load(response)["translatedText"]
    return answer


def experiment(folder: Path) -> list[str]:
    """Four training runs, two at a time."""
    options = ["--vary", "training.label_smoothing=0.0,0.1", "--seeds", "2", "--jobs", "2"]
    return ["experiment", "recipe.yaml", *options, "--out", "experiment"]


RUN_FILES = ("run/model.safetensors", "run/tokenizer.model", "run/recipe.yaml")
COMMANDS = [
    Command(
        "train",
        lambda folder: ["train", "recipe.yaml", "--out", "run"],
        RUN_FILES,
        0.26,
        (130, -signal.SIGTERM),
        check=check_run,
    ),
    Command(
        "train, two processes (torchrun)",
        lambda folder: ["train", "recipe.yaml", "--out", "run"],
        RUN_FILES,
        0.02,
        (0, 1, 130, -signal.SIGTERM, -signal.SIGINT),
        torchrun,
        check_run,
    ),
    Command(
        "train, preparing data",
        sampled,
        (*RUN_FILES, *(f"run/data/train-{number:03d}.arrow" for number in range(6))),
        0.04,
        (130, -signal.SIGTERM),
        start_with_two_cores,
        check_run,
    ),
    Command(
        "translate",
        lambda folder: (
            [
                "translate",
                "model",
                "--input",
                "in.txt",
                "--output",
                "out.txt",
                "--threads",
                "2",
                "--alignment",
                "out.align",
            ]
        ),
        ("out.txt", "out.align"),
        0.25,
        (130, -signal.SIGTERM),
    ),
    Command(
        "data clean",
        lambda folder: (
            ["data", "clean", "pairs.tsv", "--output", "clean.tsv", "--report", "rejected.tsv"]
        ),
        ("clean.tsv", "rejected.tsv"),
        0.09,
        (130, -signal.SIGTERM),
    ),
    Command(
        "experiment",
        experiment,
        ("experiment/runs/*/model.safetensors", "experiment/runs/*/outputs-*.jsonl"),
        0.04,
        (130, -signal.SIGTERM),
    ),
    Command(
        "distill",
        lambda folder: ["distill", "model", "--input", "in.txt", "--output", "out.tsv"],
        ("out.tsv",),
        0.22,
        (130, -signal.SIGTERM),
    ),
    Command(
        "serve",
        lambda folder: ["serve", "model", "--port", "0", "--threads", "2"],
        ("answer.txt",),
        0.08,
        (0, 130, -signal.SIGTERM),
        serve_and_translate,
    ),
]


# ---------------------------------------------------------------------------------------------
# Killing


@dataclass
class Outcome:
    """What happened to one command."""

    command: str
    kills: Counter[str] = field(default_factory=Counter)
    """by signal; only those that came before the end"""
    late: int = 0
    """signals after the end"""
    statuses: Counter[str] = field(default_factory=Counter)
    """exit statuses after SIGTERM and SIGINT"""
    completed: int = 0
    """runs that were killed, repeated, and ended as the unbroken one"""
    defects: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.kills.values())


def kill_command(command: Command, data: Path, work: Path, kills: int, seed: int) -> Outcome:
    """Kill a command this often, in several sequences of kills that each end with a complete run."""
    outcome, draw = Outcome(command.name), random.Random(f"{seed} {command.name}")
    start_time = time.monotonic()
    expected, seconds = unbroken(command, data, work)
    while outcome.total < kills and len(outcome.defects) < 5:
        folder = fresh_copy(data, work / "broken")
        try:
            for _ in range(draw.randint(1, 4)):
                if kill_once(command, folder, draw, seconds, outcome):
                    break
            assert_completes(command, folder, expected)
            outcome.completed += 1
        except AssertionError as error:
            outcome.defects.append(f"after {dict(outcome.kills)}: {error}")
    outcome.seconds = time.monotonic() - start_time
    return outcome


def unbroken(command: Command, data: Path, work: Path) -> tuple[dict[str, bytes], float]:
    """The files of a run that nothing disturbs, and how long it takes."""
    folder = fresh_copy(data, work / "unbroken")
    begin = time.monotonic()
    process = command.start(command.arguments(folder), folder)
    if command.name == "serve":
        seconds = time.monotonic() - begin
        process.send(signal.SIGINT)
        assert process.wait() == 0, process.text
    else:
        assert process.wait() == 0, process.text
        seconds = time.monotonic() - begin
    return outputs(command, folder), seconds


def outputs(command: Command, folder: Path) -> dict[str, bytes]:
    """The contents of all output files of a command, by their paths in the folder."""
    paths = [path for pattern in command.outputs for path in sorted(folder.glob(pattern))]
    assert len(paths) >= len(command.outputs), f"output files are missing: {paths}"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def fresh_copy(data: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(data, folder))


def kill_once(
    command: Command, folder: Path, draw: random.Random, seconds: float, outcome: Outcome
) -> bool:
    """Start the command and kill it; returns whether it had ended before."""
    number, delay = draw.choice(SIGNALS), draw.uniform(0, 1.05 * seconds)
    serve = command.name == "serve"
    starter = start if serve else command.start
    process = starter(command.arguments(folder), folder)
    end = time.monotonic() + delay
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.001)
    if process.poll() is not None:
        outcome.late += 1
        assert process.status == 0, f"status {process.status}: {process.text}"
        return True
    process.send(number)
    status = process.wait()
    process.assert_nothing_left()
    if status == 0 and not serve:
        outcome.late += 1
        return True
    outcome.kills[number.name] += 1
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL, f"status {status} after SIGKILL"
    else:
        outcome.statuses[f"{number.name} {status}"] += 1
        early = process.text == ""  # before the command had begun
        allowed = (*command.stopped, 130, -number) if early else command.stopped
        assert status in allowed, f"status {status} after {number.name}: {process.text}"
        torch_run = command.start is torchrun  # which reports its own tracebacks
        assert torch_run or "Traceback" not in process.text, f"{number.name}: {process.text}"
    command.check(folder)
    return False


def assert_completes(command: Command, folder: Path, expected: dict[str, bytes]) -> None:
    """The same command once more ends as an unbroken one does."""
    process = command.start(command.arguments(folder), folder)
    if command.name == "serve":
        process.send(signal.SIGTERM)
    status = process.wait()
    assert status == 0, f"the repeated command has status {status}: {process.text}"
    process.assert_nothing_left()
    found = outputs(command, folder)
    assert found.keys() == expected.keys(), f"{[*found]}, but {[*expected]} without a kill"
    for name, content in expected.items():
        assert found[name] == content, f"{name} differs from the unbroken run's"
    left = [path.name for path in _files(folder) if any(part in path.name for part in UNFINISHED)]
    assert not left, f"temporary files are left: {left}"
    command.check(folder)


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def summary(outcome: Outcome) -> list[str]:
    """The cells of the outcome's row in the table."""
    kills = ", ".join(f"{outcome.kills[one.name]}" for one in SIGNALS)
    statuses = ", ".join(sorted(outcome.statuses)) or "-"
    defects = "; ".join(outcome.defects).replace("\n", " / ")
    result = defects or "equal to the unbroken run's, byte for byte"
    return [outcome.command, str(outcome.total), kills, statuses, str(outcome.completed), result]


def run_kills(data: Path, work: Path, kills: int, seed: int, only: str | None) -> list[Outcome]:
    """Kill all commands, or those whose name contains ``only``."""
    chosen = [one for one in COMMANDS if only is None or only in one.name]
    total = sum(one.share for one in chosen)
    outcomes = []
    for command in chosen:
        outcome = kill_command(
            command, data, work, max(1, round(kills * command.share / total)), seed
        )
        print(" | ".join(summary(outcome)), f"| {outcome.seconds:.0f} s", flush=True)
        outcomes.append(outcome)
    return outcomes


def to_json(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    return [{"cells": summary(one), "defects": one.defects} for one in outcomes]
