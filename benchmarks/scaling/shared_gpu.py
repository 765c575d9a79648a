"""Packed, compiled, recorded training in two processes that share one GPU, compared with one process.

    python benchmarks/scale.py shared-gpu --baseline ../main/src

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
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from regard.training.model_card import hardware
from scaling.step import StepError, exchange_figures, run_in_processes

ROOT = Path(__file__).parents[2]
PARTS = ("losses", "sharded", "speed")
TIMEOUT = 100
"""seconds for one measurement"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--baseline", type=Path, help="another src folder for the part speed")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--preset", default="base")
    parser.add_argument("--tokens", type=int, default=25_000, help="target tokens of a batch")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--losses", type=int, default=12, help="steps whose losses are compared")
    parser.add_argument("--steps", type=int, default=200, help="steps that are timed")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of the part speed")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {
        "hardware": hardware(torch.device(options.device)),
        "torch": torch.__version__,
        "device": options.device,
        "preset": options.preset,
        "tokens_per_batch": options.tokens,
    }
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(Path(folder), options)
        for part in options.parts:
            start = time.monotonic()
            try:
                found[part] = getattr(benchmark, part)()
            except StepError as error:
                found[part] = {"error": str(error)}
            found[part]["seconds"] = round(time.monotonic() - start, 1)
    return found


class Benchmark:
    """The three parts, each a JSON object; a measurement that fails raises ``StepError``."""

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
        """The figures of ``scale.py step``."""
        arguments = ["--steps", str(steps), "--losses", str(losses)]
        arguments += [f"--set={change}" for change in changes or []]
        if processes > 1 and self.options.device == "cuda":
            arguments.append("--share-gpu")
        folder = self.folder / f"run-{source.parent.name}-{len(changes or [])}"
        path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        return run_in_processes(
            str(self.recipe), folder, processes, arguments, {"PYTHONPATH": path}, TIMEOUT
        )


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


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("preset", record["preset"]),
        ("target tokens of a batch", f"{record['tokens_per_batch']:,}"),
    ]
    for part, name in (("losses", "two processes"), ("sharded", "two sharded processes")):
        if part not in record:
            continue
        if "error" in record[part]:
            rows.append((name, "failed"))
            continue
        difference = max(record[part]["largest_relative_difference"].values())
        count = len(record[part]["losses_of_one_process"])
        rows.append((f"difference of {count} losses from one process, {name}", f"{difference:.1e}"))
        rows += [(f"{figure}, {name}", value) for figure, value in exchange_figures(record[part])]
    if "ratio" in record.get("speed", {}):
        rows.append(("step time against the other source tree", f"{record['speed']['ratio']}"))
    return rows
