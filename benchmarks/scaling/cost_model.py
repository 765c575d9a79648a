"""``regard plan --kind cpu`` against training steps in one and two processes of one core each.

    python benchmarks/scale.py cost-model multi30k --set model.preset=tiny --set training.tokens_per_batch=4096

The prediction is for batches of as many tokens as those that are measured (``scale.py step``). Of
several measurements, the fastest counts; both alternate, so that other work on the machine affects both. On a busy
machine, compare with the CPU time of a process and the time of the all-reduce.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from regard.recipe import load_recipe
from regard.training.cost_model import CPU, estimate
from scaling.step import StepError, run_in_processes

PROCESSES = (1, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=3)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    changes = [*options.changes, "training.batching=packed", "training.device=cpu"]
    measured: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repetitions):
            for count in PROCESSES:
                found = measure_steps(options.recipe, changes, Path(folder), count, options.steps)
                print(count, found["step_ms"], found["cpu_ms"], found["all_reduce_ms"], flush=True)
                known = measured.setdefault(str(count), found)
                for key in ("step_ms", "cpu_ms", "all_reduce_ms"):
                    known[key] = min(known[key], found[key])
    tokens = round(measured["1"]["target_tokens_per_step"])
    recipe = load_recipe(
        options.recipe,
        [*changes, f"training.tokens_per_batch={tokens}", "training.accumulate=1"],
    )
    predicted = estimate(recipe, CPU, PROCESSES)["steps"]
    return {
        "recipe": options.recipe,
        "changes": options.changes,
        "tokens": tokens,
        "measured": measured,
        "predicted": {
            str(step["gpus"]): {
                "step_ms": round(1e3 * step["seconds"], 1),
                "exchange_ms": round(1e3 * step["exchange"], 1),
            }
            for step in predicted
        },
        "predicted_by_measured": {
            str(step["gpus"]): round(
                1e3 * step["seconds"] / measured[str(step["gpus"])]["step_ms"], 3
            )
            for step in predicted
        },
        "predicted_by_cpu_time_and_all_reduce": {
            str(step["gpus"]): round(
                1e3 * step["seconds"] / busy_ms(measured[str(step["gpus"])]), 3
            )
            for step in predicted
        },
    }


def busy_ms(found: dict[str, Any]) -> float:
    """Milliseconds of a step on an idle machine, as far as they can be told on a busy one."""
    return float(found["cpu_ms"] + found["all_reduce_ms"])


def measure_steps(
    recipe: str, changes: list[str], folder: Path, processes: int, steps: int
) -> dict[str, Any]:
    """The figures of some steps in this many processes."""
    arguments = ["--steps", str(steps), *(f"--set={change}" for change in changes)]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        return run_in_processes(recipe, folder / "run", processes, arguments, environment)
    except StepError as error:
        sys.exit(str(error))


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("target tokens of a step", f"{record['tokens']:,}")]
    for count, predicted in record["predicted"].items():
        processes = "1 process" if count == "1" else f"{count} processes"
        ratio = record["predicted_by_cpu_time_and_all_reduce"][count]
        rows += [
            (f"predicted step, {processes}", f"{predicted['step_ms']:,.0f} ms"),
            (f"measured step, {processes}", f"{record['measured'][count]['step_ms']:,.0f} ms"),
            (f"predicted by measured, {processes}", f"{record['predicted_by_measured'][count]}"),
            (
                f"CPU time and all-reduce of a step, {processes}",
                f"{busy_ms(record['measured'][count]):,.0f} ms",
            ),
            (f"predicted by CPU time and all-reduce, {processes}", f"{ratio}"),
        ]
    return rows
