"""Large corpora: memory and time of `regard data prepare` and of planning an epoch.

    python benchmarks/scale.py prepare --pairs 1000000 10000000    # minutes; adds to benchmarks/scale.json
    python benchmarks/scale.py rate                                # seconds
    python benchmarks/scale.py plan --rows 100000000               # under a minute, 1 GB of disk

``prepare`` writes synthetic pairs and runs the command on them in one process. Its memory is the peak of RssAnon, the
anonymous memory of the process; pages of mapped files are shared and can be dropped. ``rate`` is the CPU time to
tokenize, deduplicate and write sentences of the built-in grammar, without the training of the tokenizer. ``plan`` plans
an epoch of a synthetic dataset of offsets without token ids, and compares padding and randomness with those of a full
sort.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from regard.data import batching
from regard.data.batching import EpochPlan, Lengths, plan_batches
from regard.data.corpus import train_pairs
from regard.data.token_dataset import (
    ROWS_PER_RECORD_BATCH,
    IntArray,
    ListLayout,
    ListLengths,
    RowIndices,
)
from regard.data.tokenizer import Tokenizer
from regard.demo.corpus import generate
from regard.recipe import make_recipe
from regard.storage.resumable_output import WHOLE
from regard.storage.run_dir import RunDir
from regard.training.prepare_data_shards import PART_PAIRS, PartFiles, merge_parts, write_parts
from regard.training.train_test_overlap import SourceOverlap

RESULTS = Path(__file__).with_suffix(".json")
WORDS = [f"{first}{second}{last}" for first in "bdfgkl" for second in "aeiou" for last in "mnrst"]
BATCH_TOKENS = 25_000
RATE_PAIRS = 100_000
DOMAINS = 100
COMPARED_ROWS = 2 * batching.POOL_ROWS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("--pairs", type=int, nargs="+", default=[1_000_000, 10_000_000])
    preparing.add_argument("--workers", type=int, default=1)
    commands.add_parser("rate")
    planning = commands.add_parser("plan")
    planning.add_argument("--rows", type=int, default=100_000_000)
    options = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        if options.command == "prepare":
            results["prepare"] = measure_prepare(Path(folder), options.pairs, options.workers)
        elif options.command == "rate":
            results["rate"] = measure_rate(Path(folder))
        else:
            results["plan"] = measure_plan(Path(folder), options.rows)
    results[options.command]["load"] = round(os.getloadavg()[0], 1)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------
# Preparing


def measure_prepare(folder: Path, counts: list[int], workers: int) -> dict[str, Any]:
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
            "tokenizer": {"kind": "unigram", "vocab_size": 2000},
        }
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        out = folder / f"run-{count}"
        command = [sys.executable, "-m", "regard", "data", "prepare", str(folder / "recipe.yaml")]
        measured[count] = peak_memory(
            [*command, "--out", str(out), "--workers", str(workers)], count
        )
        print(count, measured[count], flush=True)
        subprocess.run(["rm", "-r", str(out)], check=True)
    few, many = min(counts), max(counts)
    slope = (measured[many]["anonymous_bytes"] - measured[few]["anonymous_bytes"]) / max(
        1, many - few
    )
    return {"workers": workers, "pairs": measured, "bytes_per_pair": round(slope, 3)}


def measure_rate(folder: Path) -> dict[str, Any]:
    """Pairs per CPU second of writing and merging parts."""
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
    times = [time.process_time()]
    write_parts(run, recipe, WHOLE, PART_PAIRS)
    times.append(time.process_time())
    merge_parts(run, recipe, SourceOverlap(recipe))
    times.append(time.process_time())
    return {
        "pairs": RATE_PAIRS,
        "pairs_per_cpu_second_tokenizing": round(RATE_PAIRS / (times[1] - times[0])),
        "pairs_per_cpu_second_merging": round(RATE_PAIRS / (times[2] - times[1])),
        "pairs_per_cpu_second": round(RATE_PAIRS / (times[2] - times[0])),
    }


def synthetic_pairs(count: int) -> Iterator[str]:
    """Short pairs, of which one in twenty is a duplicate."""
    size = len(WORDS)
    for number in range(count):
        n = number - 7 if number % 20 == 19 else number
        first, second = WORDS[n % size], WORDS[n // size % size]
        third, fourth = WORDS[n // size**2 % size], WORDS[(n * 7 + n // 11) % size]
        yield f"{first} {second} {third} {fourth} {n % 10}\t{fourth} {third} {second} {first}\n"


def peak_memory(command: list[str], pairs: int) -> dict[str, float]:
    """Run a command, and sample its anonymous memory."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    process = subprocess.Popen(command)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(0.05)
    seconds = time.monotonic() - start
    if process.returncode:
        sys.exit(f"failed: {command}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "anonymous_bytes": peak,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "pairs_per_cpu_second": round(pairs / cpu),
    }


def anonymous_bytes(pid: int | str) -> int:
    """The anonymous memory of a process; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")]
    return sum(found)


# ---------------------------------------------------------------------------------------------
# Planning


def measure_plan(folder: Path, rows: int) -> dict[str, Any]:
    """Time and memory to start an epoch, and what pools cost in padding and randomness."""
    source, target = (synthetic_lengths(folder / name, rows, name) for name in ("source", "target"))
    memory, peaks = anonymous_bytes("self"), [0]
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.01):
            peaks.append(anonymous_bytes("self") - memory)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    plan = EpochPlan(source, target, planner, seed=1, epoch=0)
    next(plan.batches())
    first_batch = time.perf_counter() - start
    start = time.perf_counter()
    next(plan.batches(plan.pools // 2 * batching.POOL_ROWS + 17))
    resumed = time.perf_counter() - start
    finished.set()
    watcher.join()
    return {
        "rows": rows,
        "pools": plan.pools,
        "seconds_to_first_batch": round(first_batch, 2),
        "seconds_to_resume_in_the_middle": round(resumed, 2),
        "peak_anonymous_megabytes": round(max(peaks) / 1e6),
        "compared_rows": COMPARED_ROWS,
        "full_sort": compare(source, target, COMPARED_ROWS),
        "pools_of_2**20": compare(source, target, batching.POOL_ROWS),
    }


def planner(source: Lengths, target: Lengths, seed: int, epoch: int) -> list[RowIndices]:
    return plan_batches(source, target, BATCH_TOKENS, seed, epoch)


def synthetic_lengths(path: Path, rows: int, side: str) -> ListLengths:
    """Lengths of about 13 tokens with a long tail, as the offsets of record batches in a mapped file.

    Targets are as long as sources, give or take a fifth.
    """
    rng, noise = np.random.default_rng(0), np.random.default_rng(1)
    starts, total, longest = [], 0, 0
    with path.open("wb") as file:
        for start in range(0, rows, ROWS_PER_RECORD_BATCH):
            count = min(ROWS_PER_RECORD_BATCH, rows - start)
            values = rng.lognormal(np.log(13), 0.5, count)
            if side == "target":
                values *= noise.normal(1.05, 0.18, count)
            lengths = np.clip(values, 1, 250).astype(np.int32)
            starts.append(start + len(starts))
            np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)]).tofile(file)
            total, longest = total + int(lengths.sum()), max(longest, int(lengths.max()))
    ids: IntArray = np.memmap(path, np.int32, "r")
    firsts = [*range(0, rows, ROWS_PER_RECORD_BATCH), rows]
    offsets = np.array(starts, np.int64)
    return ListLengths(ids, ListLayout(np.array(firsts), offsets, offsets, total, longest))


def compare(source: ListLengths, target: ListLengths, pool_rows: int) -> dict[str, float]:
    """Padding, and how far the batches of a corpus of contiguous domains are from random ones (1 is random)."""
    sides = [side[:COMPARED_ROWS] for side in (source, target)]
    batching.POOL_ROWS, kept = pool_rows, batching.POOL_ROWS
    try:
        plans = list(EpochPlan(sides[0], sides[1], planner, 1, 0).batches())
    finally:
        batching.POOL_ROWS = kept
    padded = sum(len(rows) * sum(int(side[rows].max()) + 1 for side in sides) for _, rows in plans)
    tokens = sum(int(side.sum()) + len(side) for side in sides)
    return {
        "padding_percent": round(100 * (1 - tokens / padded), 2),
        "batches": len(plans),
        "domain_chi_square_per_degree_of_freedom": round(
            float(np.mean([chi_square(rows) for _, rows in plans])), 3
        ),
    }


def chi_square(rows: RowIndices) -> float:
    counts = np.bincount(rows * DOMAINS // COMPARED_ROWS, minlength=DOMAINS)
    expected = len(rows) / DOMAINS
    return float(((counts - expected) ** 2 / expected).sum() / (DOMAINS - 1))


if __name__ == "__main__":
    main()
