"""Memory and CPU time of `regard data prepare`, in one process unless ``--workers`` says otherwise.

The pairs are synthetic. Memory is the peak of the anonymous memory of the process; pages of mapped files are shared and
can be dropped. Part of the CPU time does not depend on the number of pairs: imports, and the training of the tokenizer
on at most 20 million characters. So two sizes, both large enough for as many characters, give this fixed part, and the
pairs per CPU second after it.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from scaling.usage import run_command

WORDS = [f"{first}{second}{last}" for first in "bdfgkl" for second in "aeiou" for last in "mnrst"]

VOCABULARIES = {"bpe": 500, "unigram": 2000}
"""The kind of most recipes in this repository, and the default, which takes longer to train; with vocabularies that
these few words can fill."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pairs", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tokenizer", choices=list(VOCABULARIES), default="bpe")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return measure_prepare(Path(folder), options.pairs, options.workers, options.tokenizer)


def measure_prepare(
    folder: Path, counts: list[int], workers: int, tokenizer: str = "bpe"
) -> dict[str, Any]:
    """Peak anonymous memory and CPU time by the number of pairs, and the slope of the memory."""
    measured = {}
    for count in counts:
        with (folder / "train.tsv").open("w") as file:
            file.writelines(synthetic_pairs(count))
        (folder / "valid.tsv").write_text("bam dem\tdem bam\n")
        recipe = {
            "data": {
                "root": str(folder),
                "train": {"pairs": "train.tsv"},
                "valid": {"pairs": "valid.tsv"},
            },
            "tokenizer": {"kind": tokenizer, "vocab_size": VOCABULARIES[tokenizer]},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        out = folder / f"run-{count}"
        command = [sys.executable, "-m", "regard", "data", "prepare", str(folder / "recipe.yaml")]
        usage = run_command([*command, "--out", str(out), "--workers", str(workers)])
        measured[str(count)] = {
            "anonymous_bytes": usage.anonymous_bytes,
            "seconds": round(usage.seconds, 1),
            "cpu_seconds": round(usage.cpu_seconds, 1),
            "pairs_per_cpu_second": round(count / usage.cpu_seconds),
        }
        print(count, measured[str(count)], flush=True)
        shutil.rmtree(out)
    few, many = min(counts), max(counts)
    memory = [measured[str(count)]["anonymous_bytes"] for count in (few, many)]
    slope = (memory[1] - memory[0]) / max(1, many - few)
    return {"workers": workers, "pairs": measured, "bytes_per_pair": round(slope, 3)}


def synthetic_pairs(count: int) -> Iterator[str]:
    """Short pairs, of which one in twenty is a duplicate."""
    size = len(WORDS)
    for number in range(count):
        n = number - 7 if number % 20 == 19 else number
        first, second = WORDS[n % size], WORDS[n // size % size]
        third, fourth = WORDS[n // size**2 % size], WORDS[(n * 7 + n // 11) % size]
        yield f"{first} {second} {third} {fourth} {n % 10}\t{fourth} {third} {second} {first}\n"


def fixed_and_rate(seconds: dict[int, float]) -> tuple[float, float]:
    """CPU seconds that do not depend on the number of pairs, and pairs per CPU second after them.

    ``seconds``: CPU seconds by number of pairs; the smallest and the largest number count.
    """
    few, many = min(seconds), max(seconds)
    rate = (many - few) / (seconds[many] - seconds[few])
    return seconds[few] - few / rate, rate


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    rows, seconds = [], {}
    for count, found in record["pairs"].items():
        pairs, seconds[int(count)] = f"{int(count):,} pairs", found["cpu_seconds"]
        rows += [
            (f"peak memory, {pairs}", f"{found['anonymous_bytes'] / 1e6:.0f} MB"),
            (f"CPU time, {pairs}", f"{found['cpu_seconds']} s"),
            (f"pairs per CPU second, {pairs}", f"{found['pairs_per_cpu_second']:,}"),
        ]
    if len(seconds) > 1:
        fixed, rate = fixed_and_rate(seconds)
        rows += [
            ("CPU time that does not depend on the number of pairs", f"{fixed:.1f} s"),
            ("pairs per CPU second after it", f"{rate:,.0f}"),
            ("growth of the peak memory, bytes per pair", f"{record['bytes_per_pair']}"),
        ]
    return rows
