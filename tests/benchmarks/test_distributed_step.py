"""benchmarks/distributed_step.py in one process, which exchanges nothing."""

import json
import sys
from pathlib import Path

import pytest

from tests.cli.commands import write_task
from tests.scripts import load_script


def test_one_process_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, result = write_task(tmp_path, list, 40), tmp_path / "result.json"
    options = ["--folder", str(tmp_path / "run"), "--steps", "2", "--json", str(result)]
    monkeypatch.setattr(sys, "argv", ["distributed_step.py", str(recipe), *options])
    monkeypatch.delenv("REGARD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    load_script("benchmarks/distributed_step.py").main()
    found = json.loads(result.read_text())
    assert found["processes"] == 1
    assert found["all_reduce_bytes"] == found["all_reduce_ms"] == 0
    assert found["step_ms"] > 0
    assert found["target_tokens_per_second"] > 0
