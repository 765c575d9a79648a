"""A few kills of the harness; ``make faults`` runs all of it."""

import random
import subprocess
import sys

import pytest

from tests.cli.commands import environment

ROOT = __file__.rpartition("/tests/")[0]


@pytest.mark.skipif(sys.platform != "linux", reason="the harness reads /proc")
def test_a_few_kills() -> None:
    seed = random.SystemRandom().randrange(10**6)
    options = ["--kills", "3", "--only", "distill"]
    command = [sys.executable, "-m", "tests.faults", "--seed", str(seed), *options]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "0 defects" in done.stdout
