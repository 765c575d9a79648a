"""Machines that die, come back or lose the network: seconds until the others train again from the last checkpoint.

The machines are network namespaces of this one, so this needs Linux and the right to make them. The measurement is that
of ``tests/long/test_elastic.py``, which also checks the training.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TEST = "tests/long/test_elastic.py::test_hosts_die_return_and_lose_the_network"
NAMES = {
    "killed": "one of three machines is killed: two continue",
    "returned": "it is started again: three continue",
    "partitioned": "the main process's machine loses the network: two continue",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def measure(_: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-s", "-q", "-p", "no:cacheprovider", TEST]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.exit(done.stdout)
    seconds = json.loads(lines[-1])
    return {"seconds": {key: round(value, 1) for key, value in seconds.items()}}


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    seconds = record["seconds"]
    return [(name, f"{seconds[key]} s") for key, name in NAMES.items()]
