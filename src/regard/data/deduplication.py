"""Deduplication on disk: hashes are distributed over files, the hash buckets, and each bucket is sorted on its own.

Memory is that of one bucket, whatever the number of hashes. Equal hashes are in the same bucket, so duplicates are
found bucket by bucket; buckets are ranges of hash values, so sorted buckets one after the other are sorted as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

HASHES_PER_BUCKET = 2**20
"""about how many hashes a bucket has: 16 MB with their positions"""
MAX_BUCKET_BITS = 10
"""more files than this are not open at a time; buckets then become larger"""


def find_duplicates(hashes: Iterable[Hashes], count: int, output: Path) -> None:
    """Write a file with one byte for each hash: 1 if the same hash occurred before it, else 0.

    hashes: in several arrays, ``count`` in all. The order of the hashes decides which one is the first.
    """
    output.write_bytes(b"")
    if not count:
        return
    with output.open("r+b") as file:
        file.truncate(count)
    mask = np.memmap(output, np.uint8, "r+", shape=(count,))
    for bucket, positions in _buckets(hashes, count, output.parent, with_positions=True):
        order = np.argsort(bucket, kind="stable")  # equal hashes stay in order
        repeated = order[1:][bucket[order[1:]] == bucket[order[:-1]]]
        mask[positions[repeated]] = 1
    mask.flush()


def read_duplicates(path: Path, start: int, count: int) -> Mask:
    """A part of what ``find_duplicates`` wrote."""
    with path.open("rb") as file:
        file.seek(start)
        return np.frombuffer(file.read(count), np.bool_)


def write_distinct(hashes: Iterable[Hashes], count: int, output: Path) -> None:
    """Write the distinct hashes in ascending order as an ``.npy`` file; ``count`` is their number with duplicates."""
    with TemporaryDirectory(dir=output.parent, prefix=".distinct-") as folder:
        values = Path(folder) / "values"
        total = 0
        with values.open("wb") as file:
            for bucket, _ in _buckets(hashes, count, output.parent, with_positions=False):
                distinct = np.unique(bucket)
                distinct.tofile(file)
                total += len(distinct)
        shape = (total,)
        stored = np.lib.format.open_memmap(values.with_suffix(".npy"), "w+", np.uint64, shape)
        with values.open("rb") as file:
            for start in range(0, total, HASHES_PER_BUCKET):
                part = np.fromfile(file, np.uint64, HASHES_PER_BUCKET)
                stored[start : start + len(part)] = part
        del stored
        values.with_suffix(".npy").replace(output)


def _buckets(
    hashes: Iterable[Hashes], count: int, parent: Path, with_positions: bool
) -> Iterator[tuple[Hashes, npt.NDArray[np.int64]]]:
    """The hashes of each bucket in their order, with their positions among all hashes if requested."""
    bits = min(MAX_BUCKET_BITS, (count // HASHES_PER_BUCKET).bit_length())
    with TemporaryDirectory(dir=parent, prefix=".buckets-") as folder:
        paths = [Path(folder) / str(number) for number in range(1 << bits)]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in paths]
            done = 0
            for some in hashes:
                positions = np.arange(done, done + len(some))
                done += len(some)
                number = some >> np.uint64(64 - bits) if bits else np.zeros(len(some), np.uint64)
                order = np.argsort(number, kind="stable")
                ends = np.searchsorted(number[order], np.arange(1 << bits), side="right")
                for file, chosen in zip(files, np.split(order, ends[:-1]), strict=True):
                    records = some[chosen]
                    if with_positions:
                        records = np.stack([records, positions[chosen].astype(np.uint64)], 1)
                    records.tofile(file)
        for path in paths:
            records = np.fromfile(path, np.uint64)
            path.unlink()
            if with_positions:
                records = records.reshape(-1, 2)
                yield records[:, 0].copy(), records[:, 1].astype(np.int64)
            else:
                yield records, np.empty(0, np.int64)
