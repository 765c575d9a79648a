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
