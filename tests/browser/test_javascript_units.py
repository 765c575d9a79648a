"""Runs the unit tests of the page's JavaScript with node's test runner."""

import shutil
import subprocess
from pathlib import Path

import pytest

UNIT_TESTS = sorted(Path(__file__).parent.glob("unit/*.test.mjs"))


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("path", UNIT_TESTS, ids=lambda path: path.name)
def test_javascript_unit(path: Path) -> None:
    result = subprocess.run(
        ["node", "--test", str(path)],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
