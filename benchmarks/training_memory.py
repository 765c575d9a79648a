"""Peak memory of `regard train` on a million pairs, and on multi30k if $REGARD_DATA is set.

    python benchmarks/training_memory.py        # writes benchmarks/training_memory.json

Encoded pairs are memory-mapped; what grows with the corpus is stated in docs/results.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from regard.data.pairs import Pair
from regard.demo.corpus import generate

STEPS = ("training.steps=20", "training.validate_every=20", "training.validate_sentences=20")


def million_pairs() -> Iterator[Pair]:
    """Sentences of the built-in grammar, numbered so that no two pairs are equal."""
    pairs = cycle(list(generate("train", 100_000)))
    for number, pair in enumerate(islice(pairs, 1_000_000)):
        yield Pair(f"{number}: {pair.source}", f"{number}: {pair.target}")


def train(*arguments: str) -> dict[str, float]:
    """Run `regard train`; its peak resident memory and CPU time."""
    command = [sys.executable, "-m", "regard", "train", *arguments]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        sys.exit(f"failed: {command}")
    megabytes = usage.ru_maxrss / 1024
    return {"peak_megabytes": round(megabytes), "cpu_seconds": round(usage.ru_utime)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n", 1)[0]).parse_args()
    results = {}
    changes = [word for change in STEPS for word in ("--set", change)]
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder) / "million.tsv"
        with pairs.open("w", encoding="utf-8") as file:
            file.writelines(f"{pair.source}\t{pair.target}\n" for pair in million_pairs())
        small = ["--set", "model.preset=tiny", "--set", "training.tokens_per_batch=2048"]
        results["a million pairs, tiny"] = train(
            str(pairs), "--out", f"{folder}/million", *changes, *small
        )
        if "REGARD_DATA" in os.environ:
            results["multi30k-transformer, tiny"] = train(
                *("multi30k-transformer", "--set", "model.preset=tiny"),
                *("--out", f"{folder}/multi30k", *changes),
            )
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
