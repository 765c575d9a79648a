"""Time of a packed training step in several processes, and what the exchange of gradients takes of it.

    torchrun --nproc-per-node 2 benchmarks/distributed_step.py multi30k --folder /tmp/step --json step-2.json

Every process must see the folder ``--folder``, in which the data are prepared. Compare the figures with those of one
process: the same batches, so tokens per second are comparable.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from regard.recipe import load_recipe
from regard.storage.run_dir import RunDir
from regard.training.distributed import process_group
from regard.training.prepare_data import open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.run import hardware, open_run
from regard.training.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", help="a recipe that supports packed batches")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the prepared data")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    recipe = load_recipe(options.recipe, [*options.changes, "training.batching=packed"])
    run = RunDir(options.folder)
    with process_group(recipe.training.device) as group:

        def prepare_run() -> None:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            open_run(run, recipe)
            prepare(run, recipe, ProgressReporter(run, enabled=False))

        group.on_main(prepare_run)
        group.check_shared_file(run.metadata_file)
        trainer = Trainer(run, recipe, open_prepared(run, recipe), group)
        found = measure(trainer, options.steps)
        if group.is_main:
            print(json.dumps(found, indent=2))
            if options.json:
                options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def measure(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Milliseconds of a step and of the all-reduce alone, means over this many."""
    with trainer.rehearsal() as run_step:
        for _ in range(trainer.warmup_steps):
            run_step()
        trainer.synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        tokens = sum(run_step() for _ in range(steps))
        trainer.synchronize()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    gradients, exchange = trainer.train_step.gradients, 0.0
    if gradients is not None:
        gradients.average()
        trainer.synchronize()
        trainer.group.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            gradients.average()
        trainer.synchronize()
        exchange = time.perf_counter() - start
    return {
        "processes": trainer.group.size,
        "hardware": hardware(trainer.group.device),
        "parameters": sum(parameter.numel() for parameter in trainer.train_step.parameters),
        "target_tokens_per_step": round(tokens / steps),
        "step_ms": round(1e3 * seconds / steps, 3),
        "cpu_ms": round(1e3 * cpu_seconds / steps, 3),
        "target_tokens_per_second": round(tokens / seconds),
        "all_reduce_bytes": 0 if gradients is None else gradients.buffer.nbytes,
        "all_reduce_ms": round(1e3 * exchange / steps, 3),
    }


if __name__ == "__main__":
    main()
