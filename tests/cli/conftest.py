"""A small model, trained once through the command line, for all tests that only use it."""

from pathlib import Path

import pytest

from tests.cli.commands import succeeds, write_recipe, write_task


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``run``, which has learned to copy, and its data. Tests must not change it."""
    folder = tmp_path_factory.mktemp("workshop")
    write_task(folder, list, count=3000)
    recipe = write_recipe(
        folder,
        data={"test": {"source": "test.src", "target": "test.tgt"}},
        training={"steps": 300, "validate_every": 100, "log_every": 20},
    )
    succeeds("train", recipe, "--out", "run", cwd=folder)
    return folder
