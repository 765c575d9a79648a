"""The pieces of an experiment that need no training; tests/cli/test_experiment.py runs a whole one."""

from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.experiments.experiment import check_failures, demo_changes


def test_the_demo_brings_its_corpus_unless_other_data_are_named(tmp_path: Path) -> None:
    steps = "training.steps=5"
    root = f"data.root={(tmp_path / 'corpus').resolve()}"
    assert demo_changes("demo", [steps], tmp_path) == [steps, root]
    assert demo_changes("demo", ["data.root=/my"], tmp_path) == ["data.root=/my"]
    assert demo_changes("my.yaml", [steps], tmp_path) == [steps]


def test_failures_are_one_error() -> None:
    check_failures({"failures": {}})
    with pytest.raises(RegardError, match=r"^2 training runs failed: a: disk full; b: killed$"):
        check_failures({"failures": {"a": "disk full", "b": "killed"}})
