"""What a training is judged by, and when it has had enough."""

import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from regard.data.corpus import Pair
from regard.recipe import make_recipe
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import Progress
from regard.training.progress import ProgressReporter
from regard.training.trainer import Stop, _spread, finished


def recipe_with(**training: Any) -> Any:
    return make_recipe({"data": {"train": {"pairs": "x.tsv"}}, "training": training}, "test")


@given(count=st.integers(1, 300), asked=st.integers(0, 300))
def test_examples_are_spread_over_the_whole_file(count: int, asked: int) -> None:
    pairs = [Pair(str(number), "") for number in range(count)]
    training = recipe_with(validate_sentences=asked, best_checkpoint_metric="loss").training
    places = [int(pair.source) for pair in _spread(pairs, count, training)]
    assert len(places) == min(count, asked)
    edges = [*places, count] if places else []
    gaps = [after - before for before, after in pairwise(edges)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert places[:1] == [0][: len(places)]


@pytest.mark.parametrize(
    ("steps", "stop"), [([100, 150, 170, 190], Stop.NOT_YET), ([100, 200, 300], Stop.PATIENCE)]
)
def test_a_validation_because_time_was_over_costs_no_patience(steps: list[int], stop: Stop) -> None:
    """The first is the best. What is learned in portions of time ends no sooner."""
    progress = Progress(step=steps[-1], validations=[(step, step / 100, 1.0) for step in steps])
    training = recipe_with(patience=2, validate_every=100).training
    trainer: Any = SimpleNamespace(progress=progress, training=training)
    assert finished(trainer) is stop


def test_the_time_left_ends_with_the_minutes_given(tmp_path: Path) -> None:
    report = ProgressReporter(RunDir(tmp_path), speaks=False)
    report.begin(0, 1000, time.monotonic() + 60)
    report.begun -= 100  # ten steps took a hundred seconds
    assert report.left(10, 1000) <= timedelta(seconds=60)
    assert report.left(999, 1000) < timedelta(seconds=1)
    report.deadline = None
    assert report.left(10, 1000) >= timedelta(seconds=9900)
