"""Commands in processes of their own that start in milliseconds: forked from this one, which has imported torch.

Only for a program without threads, such as ``python -m tests.faults``: a fork copies one thread.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

TIMEOUT = 300.0
SOURCES = Path(__file__).parents[2] / "src"


def preload() -> None:
    """Import what the commands import, and let no library start a thread."""
    ours = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # weights are compared exactly
    os.environ.update({**ours, "COLUMNS": "120", "PYTHONPATH": str(SOURCES)})
    os.environ.pop("REGARD_DATA", None)
    from regard.cli.main import limit_library_threads, limit_onednn_cache

    limit_library_threads()
    limit_onednn_cache()
    import torch

    import regard.server.supervisor
    import regard.training.distillation
    import regard.training.run  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # imports torch's compiler
    assert threads() == 1, f"{threads()} threads: a fork would not be safe"


def threads() -> int:
    """The number of threads of this process."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


@dataclass
class Process:
    """A running command, the leader of its own session."""

    id: int
    output: Path
    """standard output and standard error"""
    status: int | None = None
    """exit status, or minus the number of the signal that ended it"""
    started: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        if not self.output.is_file():
            return ""
        return self.output.read_text(encoding="utf-8", errors="replace")

    @property
    def last_line(self) -> str:
        return self.text.strip().rpartition("\n")[2]

    def poll(self) -> int | None:
        if self.status is None:
            process, status = os.waitpid(self.id, os.WNOHANG)
            if process:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def wait(self, seconds: float = TIMEOUT) -> int:
        """The exit status; a command that takes too long is a failure."""
        end = time.monotonic() + seconds
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                self.kill_all()
                raise AssertionError(f"no end after {seconds:.0f} seconds:\n{self.text}")
            time.sleep(0.005)
        return status

    def send(self, number: signal.Signals) -> None:
        """SIGKILL goes to all processes of its session, as when memory runs out or the machine is switched off."""
        if number == signal.SIGKILL:
            self.kill_all()
        elif self.poll() is None:
            os.kill(self.id, number)

    def kill_all(self) -> None:
        for process in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def members(self, other_sessions: bool = False) -> list[int]:
        """The living processes of its session, or also those of other sessions that work in its folder."""
        found, folder = [], str(self.output.parent.resolve())
        for entry in filter(str.isdigit, (path.name for path in Path("/proc").iterdir())):
            try:
                state, _, _, session = _stat(int(entry))[:4]
                ours = session == str(self.id)
                if other_sessions and not ours:
                    ours = str(Path(f"/proc/{entry}/cwd").readlink()) == folder
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if ours and state not in "ZX":
                found.append(int(entry))
        return found

    def assert_nothing_left(self, seconds: float = 30.0) -> None:
        """None of its processes outlives it."""
        end = time.monotonic() + seconds
        while left := self.members(other_sessions=True):
            if time.monotonic() > end:
                self.kill_all()
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                raise AssertionError(f"{len(left)} processes outlive the command")
            time.sleep(0.01)


def _stat(process: int) -> list[str]:
    """State, parent, group, session and so on of a process."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def start(
    arguments: list[str], cwd: Path, before: Callable[[], None] | None = None, output: str = ".out"
) -> Process:
    """Start ``regard`` with some arguments; ``before`` is called in the new process."""
    file = cwd / output
    if file.is_file():
        file.unlink()
    process = os.fork()
    if process:
        return Process(process, file)
    _run(arguments, cwd, before, file)
    return None


def _run(
    arguments: list[str], cwd: Path, before: Callable[[], None] | None, output: Path
) -> NoReturn:
    """The new process."""
    status = 70
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            )
        os.chdir(cwd)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1)
        sys.argv = ["regard", *arguments]
        if before is not None:
            before()
        from regard.cli.main import main

        main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(bool(error.code))
    except KeyboardInterrupt:  # Python's own handling of Ctrl-C
        traceback.print_exc()
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


def start_program(arguments: list[str], cwd: Path, environment: Mapping[str, str]) -> Process:
    """Start another program, such as torchrun."""
    output = cwd / ".out"
    with output.open("wb") as file:
        process = subprocess.Popen(
            arguments,
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    process.returncode = 0  # it is waited for here, not by subprocess
    return Process(process.pid, output)


def limit_file_size(size: int) -> None:
    """Files of this process cannot grow beyond this size."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
