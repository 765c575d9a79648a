"""Start of an epoch of a synthetic dataset, offsets without token ids; its batches against those of a full sort."""

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from regard.data import batching
from regard.data.batching import EpochPlan, Lengths, plan_batches
from regard.data.token_dataset import (
    ROWS_PER_RECORD_BATCH,
    IntArray,
    ListLayout,
    ListLengths,
    RowIndices,
)
from scaling.usage import anonymous_bytes

BATCH_TOKENS = 25_000
DOMAINS = 100
COMPARED_ROWS = 2 * batching.POOL_ROWS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=100_000_000)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return measure_plan(Path(folder), options.rows)


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
    starts: list[int] = []
    total = longest = 0
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


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (f"first batch of {record['rows']:,} pairs", f"{record['seconds_to_first_batch']} s"),
        ("first batch after a resume", f"{record['seconds_to_resume_in_the_middle']} s"),
        ("peak memory of planning", f"{record['peak_anonymous_megabytes']} MB"),
    ]
    for key, name in (("full_sort", "full sort"), ("pools_of_2**20", "pools")):
        found = record[key]
        chi_square = found["domain_chi_square_per_degree_of_freedom"]
        rows += [
            (f"padding, {name}", f"{found['padding_percent']}%"),
            (
                f"chi-square of the domains of a batch per degree of freedom, {name}",
                f"{chi_square}",
            ),
        ]
    return rows
