"""Packed, compiled, recorded training in two processes that share one GPU, compared with one process.

    python benchmarks/shared_gpu.py --out shared-gpu.json --baseline ../main/src

The processes exchange gradients through gloo, because NCCL refuses to use one GPU twice. There are three parts:

- ``losses``: without dropout, in fp32, the losses of two processes, with and without overlap, against those of one
- ``sharded``: the same for two processes that shard the weights (FSDP2)
- ``speed``: the time of a step in one process, against that of another source tree (``--baseline``), in turn

The corpus is random, so nothing is downloaded. ``--device cpu`` tries the same on a CPU.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
STEP = Path(__file__).with_name("distributed_step.py")
PARTS = ("losses", "sharded", "speed")
TIMEOUT = 100
"""seconds for one measurement"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--baseline", type=Path, help="another src folder for the part speed")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preset", default="base")
    parser.add_argument("--tokens", type=int, default=25_000, help="target tokens of a batch")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--losses", type=int, default=12, help="steps whose losses are compared")
    parser.add_argument("--steps", type=int, default=200, help="steps that are timed")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of the part speed")
    options = parser.parse_args()
    found: dict[str, Any] = {"torch": torch.__version__, "device": options.device}
    found |= {"preset": options.preset, "tokens_per_batch": options.tokens}
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(Path(folder), options)
        for part in options.parts:
            start = time.monotonic()
            found[part] = getattr(benchmark, part)()
            found[part]["seconds"] = round(time.monotonic() - start, 1)
            options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


class Benchmark:
    """The three parts, each a JSON object; it has the key ``error`` if a measurement failed."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.options = folder, options
        self.recipe = write_recipe(folder, options)
        self.one: dict[str, Any] | None = None

    def losses(self) -> dict[str, Any]:
        return self.compared(self.measure(2, steps=10, losses=self.options.losses))

    def sharded(self) -> dict[str, Any]:
        changes = ["training.sharding=full_shard"]
        return self.compared(self.measure(2, changes, losses=self.options.losses))

    def compared(self, two: dict[str, Any]) -> dict[str, Any]:
        """The figures of two processes, and their losses against those of one."""
        if self.one is None:
            self.one = self.measure(1, losses=self.options.losses)
        if "error" in self.one:
            return self.one
        if "error" in two:
            return two
        expected = self.one["losses"]["overlap"]["losses"]
        two["losses_of_one_process"] = expected
        two["largest_relative_difference"] = {
            kind: max(abs(a - b) / b for a, b in zip(found["losses"], expected, strict=True))
            for kind, found in two["losses"].items()
        }
        return two

    def speed(self) -> dict[str, Any]:
        trees = {"this": ROOT / "src"}
        if self.options.baseline:
            trees["baseline"] = self.options.baseline.resolve()
        found: dict[str, Any] = {name: [] for name in trees}
        precision = ["training.precision=auto", "model.dropout=0.1"]
        for number in range(self.options.rounds):
            # In turn, and not always the same first: a GPU becomes slower when it is warm.
            for name in list(trees)[:: -1 if number % 2 else 1]:
                one = self.measure(1, precision, self.options.steps, source=trees[name])
                if "error" in one:
                    return found | one
                found[name].append(one["step_ms"])
        if "baseline" in found:
            found["ratio"] = round(min(found["this"]) / min(found["baseline"]), 4)
        return found

    def measure(
        self,
        processes: int,
        changes: list[str] | None = None,
        steps: int = 2,
        losses: int = 0,
        source: Path = ROOT / "src",
    ) -> dict[str, Any]:
        """The output of ``distributed_step.py``."""
        output = self.folder / "step.json"
        tree = f"run-{source.parent.name}-{len(changes or [])}"
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(processes)]
        command += [str(STEP), str(self.recipe)]
        command += ["--folder", str(self.folder / tree), "--json", str(output)]
        command += ["--steps", str(steps), "--losses", str(losses)]
        command += [f"--set={change}" for change in changes or []]
        if processes > 1 and self.options.device == "cuda":
            command.append("--share-gpu")
        environment = (
            {"OMP_NUM_THREADS": "1"}
            | dict(os.environ)
            | {"PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])}
        )
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            return {"error": f"no result after {TIMEOUT} seconds"}
        if done.returncode:
            # Without what torchrun itself says about it.
            return {"error": done.stderr.partition("torch/distributed/elastic")[0][-2000:]}
        found: dict[str, Any] = json.loads(output.read_text())
        return found


def write_recipe(folder: Path, options: argparse.Namespace) -> Path:
    """A recipe for pairs of random words, about 25 a side, without dropout and in fp32."""
    draw = random.Random(1)
    words = [f"w{number}" for number in range(8_000)]
    files = {}
    for name, count in (("train", options.pairs), ("valid", 20)):
        sides: list[list[str]] = [[], []]
        for _ in range(count):
            length = 1 + int(draw.gammavariate(4, 6))
            for side, more in zip(sides, (0, draw.randrange(4)), strict=True):
                side.append(" ".join(draw.choices(words, k=min(100, length + more))))
        paths = [folder / f"{name}.{side}" for side in ("source", "target")]
        for path, side in zip(paths, sides, strict=True):
            path.write_text("\n".join(side) + "\n", encoding="utf-8")
        files[name] = {"source": str(paths[0]), "target": str(paths[1])}
    recipe = {
        "data": files,
        "tokenizer": {"kind": "word", "vocab_size": 8_000},
        "model": {"preset": options.preset, "norm_order": "pre", "dropout": 0.0},
        "training": {
            "device": options.device,
            "precision": "fp32",
            "tokens_per_batch": options.tokens,
            "batching": "packed",
            "schedule": "constant",
            "learning_rate": 0.0003,
            "warmup": 1,
            "steps": 1000,
            "validate_sentences": 0,
            "best_checkpoint_metric": "loss",
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML, too
    return path


if __name__ == "__main__":
    main()
