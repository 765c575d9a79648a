"""benchmarks/scale.py prepare and rate in a small form."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import ROOT


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("scaling.prepare")


def test_memory_and_cpu_time_of_preparing(prepare: ModuleType, tmp_path: Path) -> None:
    found = prepare.measure_prepare(tmp_path, [2_000, 4_000], workers=1)
    few, many = found["pairs"]["2000"], found["pairs"]["4000"]
    assert few["anonymous_bytes"] > 10e6
    assert many["pairs_per_cpu_second"] == pytest.approx(4_000 / many["cpu_seconds"], rel=0.05)
    assert found["bytes_per_pair"] == pytest.approx(
        (many["anonymous_bytes"] - few["anonymous_bytes"]) / 2_000, abs=0.001
    )


def test_pairs_per_cpu_second(
    prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = import_module("scaling.rate")
    monkeypatch.setattr(rate, "RATE_PAIRS", 3_000)
    found = rate.measure_rate(tmp_path)
    assert found["pairs_per_cpu_second"] > 1_000
    assert found["pairs_per_cpu_second_reading"] > found["pairs_per_cpu_second_tokenizing"]


def test_one_synthetic_pair_in_twenty_is_a_duplicate(prepare: ModuleType) -> None:
    pairs = list(prepare.synthetic_pairs(10_000))
    assert len({*pairs}) == 9_500


def test_the_fixed_part_of_the_cpu_time(prepare: ModuleType) -> None:
    """15 s, and 10 s for each million pairs."""
    fixed, rate = prepare.fixed_and_rate({1_000_000: 25.0, 4_000_000: 55.0})
    assert fixed == pytest.approx(15)
    assert rate == pytest.approx(100_000)
