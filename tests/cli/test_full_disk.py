"""A training whose files cannot grow: one line that names the file, and nothing after it."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.commands import Done, inside, succeeds_inside, write_recipe, write_task


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files of this process cannot grow beyond ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def assert_named(done: Done, start: str) -> None:
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"regard: {start}")
    assert ": cannot be written: " in message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_task(tmp_path, list, 200)
    training = {"steps": 2, "warmup": 1, "validate_every": 2, "log_every": 1, "schedule": "noam"}
    write_recipe(tmp_path, training={**training, "average": "none"})
    return tmp_path


@pytest.mark.parametrize("size", [100, 1_000, 8_000, 100_000])
def test_a_file_that_cannot_be_written_is_named(folder: Path, size: int) -> None:
    with file_size_limit(size):
        done = inside("train", "recipe.yaml", "--out", "run", cwd=folder)
    assert_named(done, "run/")


def test_a_log_that_cannot_grow_is_named(folder: Path) -> None:
    succeeds_inside("train", "recipe.yaml", "--out", "run", cwd=folder)
    size = 10_000_000
    log = folder / "run/log.jsonl"
    log.write_text(log.read_text() + "\n" * (size - log.stat().st_size))
    with file_size_limit(size):
        more = ("--set", "training.steps=4")
        done = inside("train", "recipe.yaml", "--out", "run", *more, cwd=folder)
    assert_named(done, "run/log.jsonl: ")
