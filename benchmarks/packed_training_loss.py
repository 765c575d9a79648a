"""Whether packed training learns like padded training: loss curves of both, with dropout, over 500 steps.

    python benchmarks/packed_training_loss.py multi30k --device cuda

Packed is ``training.batching: packed`` on a GPU, compiled and in a CUDA graph; padded is the same batches in eager
mode. Dropout and rounding make any two runs differ, so each mode runs with several seeds: the curves agree if the means
of the two modes differ by no more than the seeds of one mode do.
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
from regard.training.distributed import ProcessGroup
from regard.training.prepare_data import open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.resume import open_run
from regard.training.trainer import Trainer

WINDOW = 50
"""steps per mean"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", help="a recipe that supports packed batches")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    changes = [*options.changes, "training.batching=packed", f"training.device={options.device}"]
    curves: dict[str, list[list[float]]] = {"packed": [], "padded": []}
    with tempfile.TemporaryDirectory() as folder:
        run = prepare_run(load_recipe(options.recipe, changes), Path(folder) / "run")
        for seed in options.seeds:
            recipe = load_recipe(options.recipe, [*changes, f"training.seed={seed}"])
            for mode, found in curves.items():
                found.append(list(curve(run, recipe, mode == "packed", options.steps)))
                losses = " ".join(f"{loss:.3f}" for loss in found[-1])
                print(f"seed {seed}, {mode}: {losses}", flush=True)
    lines = agreement(curves)
    for line in lines:
        print(line)
    if options.json:
        options.json.write_text(json.dumps({"curves": curves, "summary": lines}, indent=2) + "\n")


def prepare_run(recipe: Recipe, folder: Path) -> RunDir:
    """A run with prepared data, used for all seeds."""
    run = RunDir(folder)
    run.folder.mkdir()
    report = ProgressReporter(run, enabled=False)
    open_run(run, recipe)
    prepare(run, recipe, report)
    report.close()
    return run


def curve(run: RunDir, recipe: Recipe, packed: bool, steps: int) -> Iterator[float]:
    """The mean loss of every WINDOW steps."""
    device = "cuda" if recipe.training.device != "cpu" and torch.cuda.is_available() else "cpu"
    trainer = Trainer(
        run, recipe, open_prepared(run, recipe), ProcessGroup(0, 1, torch.device(device))
    )
    if not packed:
        trainer.disable_cuda_graph()
        for module in trainer.network.modules():
            if isinstance(module, Dropout):
                # Nothing would renew the seed, so every step would drop the same values.
                module.seed = None
    batches = trainer.batches()
    for _ in range(steps // WINDOW):
        yield statistics.mean(float(trainer.step([one])) for one in islice(batches, WINDOW))


def agreement(curves: dict[str, list[list[float]]]) -> list[str]:
    """The difference of the two modes in each window, and the deviation between the seeds of the padded mode."""
    lines = []
    for number, (packed, padded) in enumerate(
        zip(*(zip(*c, strict=True) for c in curves.values()), strict=True), 1
    ):
        means = statistics.mean(packed), statistics.mean(padded)
        noise = statistics.stdev(padded) if len(padded) > 1 else float("nan")
        lines.append(
            f"up to step {number * WINDOW}: packed {means[0]:.4f}, padded {means[1]:.4f}, "
            f"difference {means[0] - means[1]:+.4f}, deviation between seeds {noise:.4f}"
        )
    return lines


if __name__ == "__main__":
    main()
