"""Validation examples, early stopping, and the time left."""

import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from regard.data.pairs import Pair
from regard.recipe import make_recipe
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import TrainingState
from regard.training.progress import ProgressReporter
from regard.training.trainer import StopReason, evenly_spaced, finished


def recipe_with(**training: Any) -> Any:
    return make_recipe({"data": {"train": {"pairs": "x.tsv"}}, "training": training}, "test")


@given(count=st.integers(1, 300), examples=st.integers(0, 300))
def test_examples_are_evenly_spaced_over_the_file(count: int, examples: int) -> None:
    pairs = [Pair(str(number), "") for number in range(count)]
    indices = [int(pair.source) for pair in evenly_spaced(pairs, count, examples)]
    assert len(indices) == min(count, examples)
    edges = [*indices, count] if indices else []
    gaps = [after - before for before, after in pairwise(edges)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert indices[:1] == [0][: len(indices)]


@pytest.mark.parametrize(
    ("steps", "stop"),
    [([100, 150, 170, 190], StopReason.NONE), ([100, 200, 300], StopReason.PATIENCE)],
)
def test_a_validation_at_a_time_limit_costs_no_patience(steps: list[int], stop: StopReason) -> None:
    """The first validation is the best. Training in several sessions must not stop sooner."""
    state = TrainingState(step=steps[-1], validations=[(step, step / 100, 1.0) for step in steps])
    training = recipe_with(patience=2, validate_every=100).training
    assert finished(state, training) is stop


def test_the_time_left_is_at_most_the_time_to_the_deadline(tmp_path: Path) -> None:
    reporter = ProgressReporter(RunDir(tmp_path), enabled=False)
    reporter.start(0, 1000, time.monotonic() + 60)
    reporter.start_time -= 100  # ten steps took a hundred seconds
    assert reporter.time_left(10, 1000) <= timedelta(seconds=60)
    assert reporter.time_left(999, 1000) < timedelta(seconds=1)
    reporter.deadline = None
    assert reporter.time_left(10, 1000) >= timedelta(seconds=9900)
