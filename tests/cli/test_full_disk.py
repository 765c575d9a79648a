"""A training whose files cannot grow: one line that names the file, and nothing after it."""

import resource
import signal
from pathlib import Path

import pytest

from tests.cli.commands import inside, write_recipe, write_task


@pytest.mark.parametrize("size", [100, 1_000, 8_000, 100_000])
def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, size: int) -> None:
    write_task(tmp_path, list, 200)
    write_recipe(
        tmp_path,
        training={"steps": 6, "warmup": 1, "validate_every": 2, "log_every": 1, "average": "none"},
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        done = inside("train", "recipe.yaml", "--out", "run", cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    assert message.startswith("regard: run/")
    assert ": cannot be written: " in message
