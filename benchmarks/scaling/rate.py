"""CPU time to read, tokenize, deduplicate and write sentences of the built-in grammar, with a trained tokenizer."""

import argparse
import tempfile
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

from regard.data.corpus import train_pairs
from regard.data.tokenizer import Tokenizer
from regard.demo.corpus import generate
from regard.recipe import make_recipe
from regard.storage.resumable_output import WHOLE
from regard.storage.run_dir import RunDir
from regard.training.prepare_data_shards import PART_PAIRS, PartFiles, merge_parts, write_parts
from regard.training.train_test_overlap import SourceOverlap

RATE_PAIRS = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def measure(_: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return measure_rate(Path(folder))


def measure_rate(folder: Path) -> dict[str, Any]:
    """Pairs per CPU second of reading, which every process does, and of writing and merging parts."""
    data = {"train": {"pairs": "train.tsv"}, "valid": {"pairs": "valid.tsv"}}
    (folder / "valid.tsv").write_text("a b\tb a\n")
    sentences = list(generate("train", 20_000))
    with (folder / "train.tsv").open("w", encoding="utf-8") as file:
        for number in range(RATE_PAIRS):
            source, target = sentences[number % len(sentences)]
            file.write(f"{number}: {source}\t{number}: {target}\n")
    recipe = make_recipe({"data": {"root": str(folder), **data}}, "the benchmark")
    run = RunDir(folder / "run")
    PartFiles(run).begin({})
    trained = Tokenizer.train(recipe.tokenizer, lambda: islice(train_pairs(recipe.data), 10_000))
    trained.save(run.folder)
    start = time.process_time()
    deque(train_pairs(recipe.data), maxlen=0)
    reading = time.process_time() - start
    times = [time.process_time()]
    write_parts(run, recipe, WHOLE, PART_PAIRS)
    times.append(time.process_time())
    merge_parts(run, recipe, SourceOverlap(recipe))
    times.append(time.process_time())
    return {
        "pairs": RATE_PAIRS,
        "pairs_per_cpu_second_reading": round(RATE_PAIRS / reading),
        "pairs_per_cpu_second_tokenizing": round(RATE_PAIRS / (times[1] - times[0])),
        "pairs_per_cpu_second_merging": round(RATE_PAIRS / (times[2] - times[1])),
        "pairs_per_cpu_second": round(RATE_PAIRS / (times[2] - times[0])),
    }


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    names = {"_reading": "reading", "_tokenizing": "tokenizing", "_merging": "merging parts"}
    names[""] = "tokenizing and merging parts"
    return [
        (f"pairs per CPU second, {name}", f"{record[f'pairs_per_cpu_second{key}']:,}")
        for key, name in names.items()
        if f"pairs_per_cpu_second{key}" in record
    ]
