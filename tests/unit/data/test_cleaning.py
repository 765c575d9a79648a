import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from regard.data import cleaning
from regard.data.cleaning import find_duplicates, read_duplicates, write_distinct

PARTS = st.lists(
    st.lists(st.integers(0, 9).map(lambda n: n * (2**64 // 10)), max_size=30), max_size=5
)


@given(parts=PARTS, bucket=st.sampled_from([1, 7, 2**20]))
def test_duplicates_and_distinct_hashes_are_those_of_a_set(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[int]], bucket: int
) -> None:
    folder = tmp_path_factory.mktemp("buckets")
    arrays = [np.array(part, np.uint64) for part in parts]
    flat = [value for part in parts for value in part]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cleaning, "HASHES_PER_BUCKET", bucket)
        find_duplicates(arrays, len(flat), folder / "duplicates")
        write_distinct(arrays, len(flat), folder / "distinct.npy")
    expected = [value in flat[:index] for index, value in enumerate(flat)]
    assert read_duplicates(folder / "duplicates", 0, len(flat)).tolist() == expected
    assert read_duplicates(folder / "duplicates", 3, 5).tolist() == expected[3:8]
    assert np.load(folder / "distinct.npy").tolist() == sorted({*flat})
    assert {path.name for path in folder.iterdir()} == {"duplicates", "distinct.npy"}


def test_a_large_corpus_does_not_need_more_files_than_a_process_may_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A billion pairs fill a thousand buckets; many systems allow 1,024 open files, macOS 256."""
    monkeypatch.setattr(cleaning, "HASHES_PER_BUCKET", 1)
    hashes = np.random.default_rng(1).integers(0, 500, 1000, np.uint64) << np.uint64(55)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 200, limits[1]))
    try:
        find_duplicates([hashes], len(hashes), tmp_path / "duplicates")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    found = read_duplicates(tmp_path / "duplicates", 0, len(hashes))
    assert int(found.sum()) == len(hashes) - len({*hashes.tolist()})


def test_hashes_are_distributed_over_buckets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleaning, "HASHES_PER_BUCKET", 100)
    hashes = np.random.default_rng(1).integers(0, 2**64, 5000, np.uint64)
    buckets = [
        (bucket, positions)
        for bucket, positions in cleaning._buckets([hashes], 5000, tmp_path, True)
    ]
    assert len(buckets) == 64
    assert max(len(bucket) for bucket, _ in buckets) < 150
    for bucket, positions in buckets:
        assert (hashes[positions] == bucket).all()
        assert (np.diff(positions) > 0).all()
