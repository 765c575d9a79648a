"""benchmarks/speedrun.py: every attempt is a valid recipe; the clock, and the table."""

import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from regard.recipe import load_recipe
from tests.scripts import load_script


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/speedrun.py")


def test_every_attempt_is_a_valid_recipe_that_validates_on_all_pairs(benchmark: ModuleType) -> None:
    for attempt in benchmark.ATTEMPTS.values():
        recipe = load_recipe("multi30k", [*benchmark.COMMON, *attempt.changes])
        assert recipe.training.validate_sentences == 1014
        assert recipe.training.steps % recipe.training.validate_every == 0


def test_the_clock_stops_with_the_first_score_that_reaches_the_goal(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(command: list[str], **_: Any) -> None:
        out = Path(command[command.index("--out") + 1])
        out.mkdir()
        events = [
            {"event": "start", "time": 103.0, "step": 0},
            {"event": "step", "time": 105.0, "step": 50},
            {"event": "step", "time": 109.0, "step": 100},
            {"event": "valid", "time": 110.0, "bleu": 40.9},
            {"event": "valid", "time": 120.0, "bleu": 40.95},
            {"event": "average", "time": 121.5, "objective": -41.2},
        ]
        (out / "log.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
        card = {"hardware": "GPU", "seconds": 15.0, "preparing_seconds": 4.0}
        (out / "card.json").write_text(json.dumps(card))

    monkeypatch.setattr(subprocess, "run", train)
    monkeypatch.setattr(benchmark.time, "time", lambda: 100.0)
    found = benchmark.run("recipe", False, 41.0, [])
    assert found["seconds"] == 21.5
    assert found["best"] == 41.2
    assert found["steps"] == [[3.0, 0], [5.0, 50], [9.0, 100]]
    assert benchmark.run("recipe", False, 50.0, [])["seconds"] is None
    row = benchmark.table([found]).splitlines()[2]
    assert row == f"| {benchmark.ATTEMPTS['recipe'].words} | filled | GPU | 22 | 41.2 |"
