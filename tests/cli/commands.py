"""Helpers that run Regard through its command line, and write small recipes and data."""

import io
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
Done = subprocess.CompletedProcess[str]

SOURCES = Path(__file__).parents[2] / "src"
PYTHON = [sys.executable, "-W", "error"]
REGARD = [*PYTHON, "-m", "regard"]
TIMEOUT = 120
SMALL_MODEL = [
    *("--set=model.d_model=16", "--set=model.heads=2", "--set=model.d_ff=32"),
    *(
        "--set=model.encoder_layers=1",
        "--set=model.decoder_layers=1",
        "--set=decoding.extra_length=6",
    ),
]
"""options of ``regard train`` without a recipe, where the model does not matter"""


def environment() -> dict[str, str]:
    """This process's environment without the corpora and GPUs, and with one thread, because the models are small."""
    inherited = {name: value for name, value in os.environ.items() if name != "REGARD_DATA"}
    path = os.pathsep.join(filter(None, [str(SOURCES), inherited.get("PYTHONPATH")]))
    ours = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "COLUMNS": "120"}
    return {"OMP_NUM_THREADS": "1", **inherited, **ours}


def regard(*arguments: object, cwd: Path, stdin: str = "", start: list[str] = REGARD) -> Done:
    """Run a command in a process of its own, whether it succeeds or not."""
    return subprocess.run(
        [*start, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT,
        check=False,
    )


def inside(*arguments: object, cwd: Path) -> Done:
    """Run a command in this process, which saves the seconds that importing torch takes."""
    from regard.cli.main import main

    stdout, stderr = io.StringIO(), io.StringIO()
    argv = ["regard", *map(str, arguments)]
    code: object = 0
    previous, sys.argv = sys.argv, argv
    corpora = os.environ.pop("REGARD_DATA", None)
    try:
        with chdir(cwd), redirect_stdout(stdout), redirect_stderr(stderr):
            main()
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.argv = previous
        if corpora is not None:
            os.environ["REGARD_DATA"] = corpora
    status = code if isinstance(code, int) else 0
    return subprocess.CompletedProcess(argv, status, stdout.getvalue(), stderr.getvalue())


def succeeds(*arguments: object, cwd: Path, stdin: str = "") -> Done:
    done = regard(*arguments, cwd=cwd, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done


def succeeds_inside(*arguments: object, cwd: Path) -> Done:
    done = inside(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done


def started(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    """Start a command and return while it runs; its standard streams are pipes."""
    return subprocess.Popen(
        [*REGARD, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def together(jobs: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """Run all jobs, two at a time, and return their results by name."""
    with ThreadPoolExecutor(2) as pool:
        running = {name: pool.submit(job) for name, job in jobs.items()}
        return {name: job.result() for name, job in running.items()}


def in_workers(jobs: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    """The same in two worker processes, which import torch once, for jobs that use ``inside``."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, _initialize_worker) as pool:
        running = {name: pool.submit(job) for name, job in jobs.items()}
        return {name: job.result() for name, job in running.items()}


def _initialize_worker() -> None:
    os.environ.clear()
    os.environ.update(environment())


def write(path: Path, lines: Iterable[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def sequences(count: int, letters: str, lengths: range, seed: int = 1) -> list[list[str]]:
    """Distinct random sequences."""
    draw = random.Random(seed)
    found: dict[tuple[str, ...], None] = {}
    while len(found) < count:
        found[tuple(draw.choices(letters, k=draw.choice(lengths)))] = None
    return [list(one) for one in found]


def write_task(folder: Path, task: Callable[[list[str]], Iterable[str]], count: int) -> Path:
    """Write data of a task, with ``count`` training sequences, and a recipe; return the path of the recipe."""
    every = sequences(count + 200, "abcdefgh", range(2, 7))
    for name, some in (("test", every[:150]), ("valid", every[150:200]), ("train", every[200:])):
        write(folder / f"{name}.src", map(" ".join, some))
        write(folder / f"{name}.tgt", (" ".join(task(one)) for one in some))
    return write_recipe(folder)


def write_recipe(folder: Path, **sections: Mapping[str, Any]) -> Path:
    """Write a recipe that learns short sequences quickly; ``sections`` replace some of its values."""
    recipe: dict[str, dict[str, Any]] = {
        "data": {
            "train": {"source": "train.src", "target": "train.tgt"},
            "valid": {"source": "valid.src", "target": "valid.tgt"},
        },
        "tokenizer": {"kind": "word", "vocab_size": 40},
        "model": {
            "d_model": 64,
            "heads": 4,
            "d_ff": 128,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "dropout": 0.0,
            "norm_order": "pre",
        },
        "training": {
            "device": "cpu",
            "steps": 500,
            "tokens_per_batch": 512,
            "schedule": "cosine",
            "learning_rate": 0.005,
            "warmup": 50,
            "label_smoothing": 0.0,
            "validate_every": 500,
            "validate_sentences": 20,
        },
        # A model that has not learned anything writes as much as it may.
        "decoding": {"beam": 2, "extra_length": 6},
    }
    full = {
        name: {**recipe.get(name, {}), **sections.get(name, {})} for name in {**recipe, **sections}
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(full), encoding="utf-8")
    return path
