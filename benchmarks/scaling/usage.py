"""Memory and CPU time of processes."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

INTERVAL = 0.05
"""seconds between two samples"""


class Usage(NamedTuple):
    """What a command took."""

    seconds: float
    cpu_seconds: float
    anonymous_bytes: int
    """peak of RssAnon of the process itself, sampled; pages of mapped files do not count"""
    resident_bytes: int
    """peak of all resident memory"""


def run_command(command: list[str]) -> Usage:
    """Run a command to its end; the benchmark ends if it fails."""
    start = time.monotonic()
    process = subprocess.Popen(command)
    peak = done = 0
    while not done:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(INTERVAL)
        done, status, usage = os.wait4(process.pid, os.WNOHANG)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"failed: {command}")
    cpu = usage.ru_utime + usage.ru_stime
    return Usage(time.monotonic() - start, cpu, peak, usage.ru_maxrss * 1024)


def anonymous_bytes(pid: int | str) -> int:
    """The anonymous memory of a process; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")]
    return sum(found)
