"""benchmarks/scale.py plan in a small form."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.scripts import ROOT


def test_pools_against_a_full_sort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    plan = import_module("scaling.plan")
    monkeypatch.setattr(plan.batching, "POOL_ROWS", 8_192)
    monkeypatch.setattr(plan, "COMPARED_ROWS", 32_768)
    found = plan.measure_plan(tmp_path, 40_000)
    assert found["pools"] == 5
    full, pools = found["full_sort"], found["pools_of_2**20"]
    assert 0 < full["padding_percent"] < pools["padding_percent"]
    assert full["batches"] <= pools["batches"]
    assert plan.batching.POOL_ROWS == 8_192
    figures = dict(plan.figures({**found, "load": 1.0}))
    assert figures["padding, pools"] == f"{found['pools_of_2**20']['padding_percent']}%"
