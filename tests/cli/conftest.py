"""A small model, trained once through the command line, for all tests that only use it."""

import fcntl
import os
from pathlib import Path

import pytest

from tests.cli.commands import succeeds, write_recipe, write_task


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``run``, which has learned to copy, and its data. Tests must not change it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return _train(tmp_path_factory.mktemp("workshop"))
    # The processes of pytest-xdist share it: the first one trains, the others wait.
    folder = tmp_path_factory.getbasetemp().parent / "workshop"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "run" / "card.json").exists():
            folder.mkdir(exist_ok=True)
            _train(folder)
    return folder


def _train(folder: Path) -> Path:
    write_task(folder, list, count=3000)
    recipe = write_recipe(
        folder,
        data={"test": {"source": "test.src", "target": "test.tgt"}},
        training={"steps": 300, "validate_every": 100, "log_every": 20},
    )
    succeeds("train", recipe, "--out", "run", cwd=folder)
    return folder
