"""benchmarks/scale.py step in one process, which exchanges nothing."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import write_task
from tests.scripts import ROOT, load_script


def test_one_process_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, result = write_task(tmp_path, list, 40), tmp_path / "result.json"
    options = ["--folder", str(tmp_path / "run"), "--steps", "2", "--json", str(result)]
    monkeypatch.delenv("REGARD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    load_script("benchmarks/scale.py").main(["step", str(recipe), *options])
    (found,) = json.loads(result.read_text())["step"]
    assert found["processes"] == 1
    assert found["all_reduce_bytes"] == found["all_reduce_ms"] == 0
    assert found["step_ms"] > 0
    assert found["target_tokens_per_second"] > 0
