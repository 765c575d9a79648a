"""``regard plan --kind cpu`` against training steps in one and two processes of one core each.

    python benchmarks/cpu_plan.py multi30k --set model.preset=tiny --set training.tokens_per_batch=4096

The prediction is for batches of as many tokens as those that are measured (``benchmarks/distributed_step.py``). Of
several measurements, the fastest counts; both alternate, so that other work on the machine affects both. On a busy
machine, compare with the CPU time of a process and the time of the all-reduce.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from regard.recipe import load_recipe
from regard.training.cost_model import CPU, estimate

RESULTS = Path(__file__).with_suffix(".json")
STEP = Path(__file__).with_name("distributed_step.py")
PROCESSES = (1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    changes = [*options.changes, "training.batching=packed", "training.device=cpu"]
    measured: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repetitions):
            for count in PROCESSES:
                found = measure(options.recipe, changes, Path(folder), count, options.steps)
                print(count, found["step_ms"], found["cpu_ms"], found["all_reduce_ms"], flush=True)
                known = measured.setdefault(count, found)
                for key in ("step_ms", "cpu_ms", "all_reduce_ms"):
                    known[key] = min(known[key], found[key])
    tokens = round(measured[1]["target_tokens_per_step"])
    recipe = load_recipe(
        options.recipe,
        [*changes, f"training.tokens_per_batch={tokens}", "training.accumulate=1"],
    )
    predicted = estimate(recipe, CPU, PROCESSES)["steps"]
    result = {
        "recipe": options.recipe,
        "changes": options.changes,
        "tokens": tokens,
        "measured": measured,
        "predicted": {
            step["gpus"]: {
                "step_ms": round(1e3 * step["seconds"], 1),
                "exchange_ms": round(1e3 * step["exchange"], 1),
            }
            for step in predicted
        },
        "predicted_by_measured": {
            step["gpus"]: round(1e3 * step["seconds"] / measured[step["gpus"]]["step_ms"], 3)
            for step in predicted
        },
        "predicted_by_cpu_time_and_all_reduce": {
            step["gpus"]: round(1e3 * step["seconds"] / busy_ms(measured[step["gpus"]]), 3)
            for step in predicted
        },
        "load": round(os.getloadavg()[0], 1),
    }
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    stored[" ".join([options.recipe, *options.changes])] = result
    RESULTS.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


def busy_ms(found: dict[str, Any]) -> float:
    """Milliseconds of a step on an idle machine, as far as they can be told on a busy one."""
    return float(found["cpu_ms"] + found["all_reduce_ms"])


def measure(
    recipe: str, changes: list[str], folder: Path, processes: int, steps: int
) -> dict[str, Any]:
    """The figures of some steps in this many processes."""
    output = folder / "step.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += [str(STEP), recipe, "--folder", str(folder / "run"), "--json", str(output)]
    command += ["--steps", str(steps), *(f"--set={change}" for change in changes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


if __name__ == "__main__":
    main()
