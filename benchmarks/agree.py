"""Whether the fast way learns as the plain way does: the loss curves of both, with dropout, over 500 steps.

    python benchmarks/agree.py multi30k --device cuda

The fast way is ``training.batching: packed`` on a GPU, compiled and recorded; the plain way is the same batches, padded
and eager. Dropout and number formats make any two runs differ, so each way runs with several seeds: the curves agree if
the means of the two ways differ by no more than the seeds of one way do.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch

from regard.nn.dropout import Dropout
from regard.recipe import Recipe, load_recipe
from regard.storage.run_dir import RunDir
from regard.training.distributed import Group
from regard.training.prepare import open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.run import open_run
from regard.training.trainer import Trainer

WINDOW = 50
"""steps that are averaged"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", help="a recipe with packed batches, or that can have them")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    changes = [*options.changes, "training.batching=packed", f"training.device={options.device}"]
    curves: dict[str, list[list[float]]] = {"fast": [], "plain": []}
    with tempfile.TemporaryDirectory() as made:
        run = prepared(load_recipe(options.recipe, changes), Path(made) / "run")
        for seed in options.seeds:
            recipe = load_recipe(options.recipe, [*changes, f"training.seed={seed}"])
            for way, found in curves.items():
                found.append(list(curve(run, recipe, way == "fast", options.steps)))
                told = " ".join(f"{loss:.3f}" for loss in found[-1])
                print(f"seed {seed}, {way}: {told}", flush=True)
    told = agreement(curves)
    for line in told:
        print(line)
    if options.json:
        options.json.write_text(json.dumps({"curves": curves, "told": told}, indent=2) + "\n")


def prepared(recipe: Recipe, folder: Path) -> RunDir:
    """The texts of the recipe as ids: the same for all seeds."""
    run = RunDir(folder)
    run.folder.mkdir()
    report = ProgressReporter(run, speaks=False)
    open_run(run, recipe)
    prepare(run, recipe, report)
    report.end()
    return run


def curve(run: RunDir, recipe: Recipe, fast: bool, steps: int) -> Iterator[float]:
    """The mean loss of every WINDOW steps."""
    wanted = recipe.training.device
    device = "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"
    trainer = Trainer(run, recipe, open_prepared(run, recipe), Group(0, 1, torch.device(device)))
    if not fast:
        trainer.recorded = None
        for part in trainer.network.modules():
            if isinstance(part, Dropout):
                # nobody would draw a seed anew: the same words would be dropped at each step
                part.seed = None
    drawn = trainer.batches()
    for _ in range(steps // WINDOW):
        yield statistics.mean(float(trainer.step([one])) for one in islice(drawn, WINDOW))


def agreement(curves: dict[str, list[list[float]]]) -> list[str]:
    """At each window how far the ways are apart, and how far the seeds of the plain way."""
    lines = []
    for number, (fast, plain) in enumerate(
        zip(*(zip(*c, strict=True) for c in curves.values()), strict=True), 1
    ):
        apart = statistics.mean(fast) - statistics.mean(plain)
        noise = statistics.stdev(plain) if len(plain) > 1 else float("nan")
        lines.append(
            f"steps to {number * WINDOW}: fast {statistics.mean(fast):.4f}, plain {statistics.mean(plain):.4f}, "
            f"apart {apart:+.4f}, between seeds {noise:.4f}"
        )
    return lines


if __name__ == "__main__":
    main()
