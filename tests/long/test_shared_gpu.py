"""benchmarks/scale.py shared-gpu in a small form, on a CPU: two processes have the losses of one."""

import json
from pathlib import Path

import pytest

from tests.scripts import ROOT, load_script


def test_losses_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = tmp_path / "result.json"
    options = ["--json", str(result), "--device", "cpu", "--parts", "losses", "sharded"]
    options += ["--preset", "tiny", "--tokens", "200", "--pairs", "100", "--losses", "3"]
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    load_script("benchmarks/scale.py").main(["shared-gpu", *options])
    (found,) = json.loads(result.read_text())["shared-gpu"]
    for part, kinds in (("losses", ["overlap", "no overlap"]), ("sharded", ["overlap"])):
        assert "error" not in found[part], found[part]["error"]
        assert list(found[part]["losses"]) == kinds
        for kind in kinds:
            assert len(found[part]["losses"][kind]["losses"]) == 3
            assert found[part]["largest_relative_difference"][kind] < 1e-5
    assert found["losses"]["losses"]["overlap"]["equal_weights"]
    assert found["losses"]["all_reduce_bytes"] > 0
    assert found["losses"]["all_reduce_ms"] > 0
