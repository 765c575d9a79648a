"""Peak memory of `regard train` on a million pairs, and on multi30k if $REGARD_DATA is set.

Encoded pairs are memory-mapped; what grows with the corpus is stated in docs/results.md.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from regard.data.pairs import Pair
from regard.demo.corpus import generate
from scaling.usage import run_command

STEPS = ("training.steps=20", "training.validate_every=20", "training.validate_sentences=20")


def million_pairs() -> Iterator[Pair]:
    """Sentences of the built-in grammar, numbered so that no two pairs are equal."""
    pairs = cycle(list(generate("train", 100_000)))
    for number, pair in enumerate(islice(pairs, 1_000_000)):
        yield Pair(f"{number}: {pair.source}", f"{number}: {pair.target}")


def train(*arguments: str) -> dict[str, float]:
    """Run `regard train`; its peak resident memory and CPU time."""
    usage = run_command([sys.executable, "-m", "regard", "train", *arguments])
    return {
        "peak_megabytes": round(usage.resident_bytes / 2**20),
        "cpu_seconds": round(usage.cpu_seconds),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def measure(_: argparse.Namespace) -> dict[str, Any]:
    found = {}
    changes = [word for change in STEPS for word in ("--set", change)]
    with tempfile.TemporaryDirectory() as folder:
        pairs = Path(folder) / "million.tsv"
        with pairs.open("w", encoding="utf-8") as file:
            file.writelines(f"{pair.source}\t{pair.target}\n" for pair in million_pairs())
        small = ["--set", "model.preset=tiny", "--set", "training.tokens_per_batch=2048"]
        found["a million pairs, tiny"] = train(
            str(pairs), "--out", f"{folder}/million", *changes, *small
        )
        if "REGARD_DATA" in os.environ:
            found["multi30k-transformer, tiny"] = train(
                *("multi30k-transformer", "--set", "model.preset=tiny"),
                *("--out", f"{folder}/multi30k", *changes),
            )
    return {"runs": found}


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (f"peak memory, {name}", f"{found['peak_megabytes']:,} MiB")
        for name, found in record["runs"].items()
    ]
