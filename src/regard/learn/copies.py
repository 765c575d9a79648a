"""The training text cut into pieces at random, several times over: BPE-dropout, and sampling from a unigram model.

A GPU goes through a small corpus in a second, faster than one process can cut it. So the copies are made beforehand, by
several processes, and each epoch learns from the next one. What is drawn follows from the seed alone, and what is on
disk does not change: a training that goes on, or with others beside it, sees the same pieces.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from regard.errors import RegardError
from regard.fast import cores
from regard.recipe import Recipe
from regard.run import Run
from regard.text.corpus import train_pairs
from regard.text.drawing import DrawingTokenizer
from regard.text.forms import FORMS
from regard.text.store import write_store

PAIRS_WORTH_A_PROCESS = 100_000
"""takes about as long to cut, some 4 seconds, as a process needs to start"""


def copy_files(run: Run, recipe: Recipe) -> list[Path]:
    count = recipe.training.copies if recipe.training.sampling else 0
    return [run.data / f"train-{number:03d}.arrow" for number in range(count)]


def write_copies(run: Run, recipe: Recipe, pairs: int) -> None:
    """Write all copies; the run has its recipe and tokenizer, and so many pairs."""
    copies = len(copy_files(run, recipe))
    processes = min(copies, cores(), 1 + pairs * copies // PAIRS_WORTH_A_PROCESS)
    shares = [range(first, copies, processes) for first in range(processes)]
    # Not multiprocessing: it would run the user's own script once more in each process, or fork one with threads.
    command = [sys.executable, "-m", "regard.learn.copies", str(run)]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    others = [
        subprocess.Popen(
            [*command, *map(str, share)], env={**os.environ, **path}, stderr=subprocess.PIPE
        )
        for share in shares[1:]
    ]
    try:
        _write(run, recipe, shares[0])
        for process in others:
            _, told = process.communicate()
            if process.returncode:
                last = told.decode(errors="replace").strip().split("\n")[-1]
                raise RegardError(f"{run.data}: a copy of the training text was not made: {last}")
    finally:
        for process in others:
            process.kill()  # those that have ended do not mind
            with process:  # waits, and closes its pipe
                pass


def _write(run: Run, recipe: Recipe, numbers: range | list[int]) -> None:
    plain, training, files = run.tokenizer(recipe), recipe.training, copy_files(run, recipe)
    for number in numbers:
        seed = (training.seed, number)
        kind, labels = recipe.tokenizer.kind, recipe.labelled
        tokenizer = DrawingTokenizer.of(plain, kind, training.sampling, seed, labels)
        rows = FORMS[recipe.task](recipe).rows
        write_store(files[number], train_pairs(recipe.data), tokenizer, recipe.data.clean, rows)


if __name__ == "__main__":
    _run = Run(sys.argv[1])
    _write(_run, _run.recipe(), [int(number) for number in sys.argv[2:]])
