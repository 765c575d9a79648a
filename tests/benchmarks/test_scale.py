"""benchmarks/scale.py in a small form: preparing two sizes, and its rate."""

from pathlib import Path

import pytest

from tests.scripts import load_script


def test_memory_and_rate_of_preparing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = load_script("benchmarks/scale.py")
    found = benchmark.measure_prepare(tmp_path, [2_000, 4_000], workers=1)
    few, many = found["pairs"][2_000], found["pairs"][4_000]
    assert few["anonymous_bytes"] > 10e6
    assert many["pairs_per_cpu_second"] > 0
    assert found["bytes_per_pair"] == pytest.approx(
        (many["anonymous_bytes"] - few["anonymous_bytes"]) / 2_000, abs=0.001
    )
    monkeypatch.setattr(benchmark, "RATE_PAIRS", 3_000)
    assert benchmark.measure_rate(tmp_path)["pairs_per_cpu_second"] > 1_000


def test_one_synthetic_pair_in_twenty_is_a_duplicate() -> None:
    benchmark = load_script("benchmarks/scale.py")
    pairs = list(benchmark.synthetic_pairs(10_000))
    assert len({*pairs}) == 9_500
