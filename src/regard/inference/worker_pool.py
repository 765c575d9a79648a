"""Batches worked on side by side. On a CPU two batches on one core each are done sooner than one after the other on
both: the products of a step are too small to be shared out, and most of the rest is not shared out at all.

There are two kinds of workers. Threads serve everywhere, but share Python's lock: after each operation one may have to
wait for another. Processes (``WorkerPool``) do not wait for each other, but are only for who may be forked: a program that
has no threads of its own, such as a command.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from regard.errors import RegardError

Part = TypeVar("Part")
Result = TypeVar("Result")


def available_cores() -> int:
    """Those this process may use; OMP_NUM_THREADS goes before."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked):
        return int(asked)
    there = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(there, _allotted(Path("/sys/fs/cgroup/cpu.max")) or there))


def _allotted(file: Path) -> int | None:
    """How many available_cores' time a container has, where Linux says so; None: as much as there is."""
    try:
        time_of_all, period = file.read_text().split()
        return round(int(time_of_all) / int(period))
    except (OSError, ValueError):  # no container, or "max"
        return None


def map_in_threads(
    work: Callable[[Part], Result], parts: Sequence[Part], threads: int
) -> list[Result]:
    """The work on each part, in their order, so many at a time, each on one core."""

    def quietly(part: Part) -> Result:
        with torch.inference_mode():
            return work(part)

    return list(_threads(threads).map(quietly, parts))


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    usual = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, "regard-search", initializer=_alone)
    here = threading.Barrier(count)
    for done in [pool.submit(here.wait) for _ in range(count)]:  # so that all have begun
        done.result()
    torch.set_num_threads(usual)  # what the last of them set would hold for every thread to come
    return pool


def _alone() -> None:
    torch.get_num_threads()  # a thread's first question would undo what comes next
    torch.set_num_threads(1)


class WorkerDied(RegardError):  # noqa: N818
    """A process of a crew is gone, and with it what it worked on."""


class WorkerPool(Generic[Part, Result]):
    """Processes that stay, each on one core, for one kind of work.

    They are forked from this one: what the work needs they have, nothing is read, packed or held in memory twice. Parts
    and results go through pipes. When this process ends, in whatever way, so do they, after the part they have.
    """

    possible = sys.platform == "linux"
    """elsewhere a fork is not to be trusted, or there is none"""

    def __init__(self, work: Callable[[Part], Result], count: int) -> None:
        self.cpu_seconds = 0.0
        """what their work has taken so far"""
        self.workers: dict[Connection, int] = {}
        """the number of each process by our end of its pipe"""
        self.end = weakref.finalize(self, _end, self.workers, os.getpid())
        self.lock = threading.Lock()
        try:
            for _ in range(count):
                self._fork(work)
        except OSError:
            self.end()
            raise

    def _fork(self, work: Callable[[Part], Result]) -> None:
        ours, theirs = Pipe()
        with warnings.catch_warnings():
            # Python warns of threads, which might hold a lock that the fork then waits for. Those of torch's
            # products hold none between products, and a fork on one core has no use for them.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process:
            theirs.close()
            self.workers[ours] = process
            return
        try:
            for other in (*self.workers, ours):  # held by a fork, no pipe would ever end
                other.close()
            _work_on(theirs, work)
        finally:
            os._exit(0)  # nothing of what this process was is to be tidied up by its fork

    def map(self, parts: Sequence[Part]) -> list[Result]:
        """The work on each part, in their order; whoever is free takes the next."""
        with self.lock:
            try:
                found = self._all(parts)
            except BaseException:
                self.end()  # what they still work on would be the answer to the next question
                raise
            self.cpu_seconds += sum(done.cpu_seconds for done in found)
        for done in found:
            if done.error is not None:
                raise done.error
        return [done.result for done in found]

    def _all(self, parts: Sequence[Part]) -> list[Done]:
        """What came of the parts, or of those that were begun before one of them failed."""
        if not self.workers:
            raise WorkerDied("the processes that translate have ended")
        found: dict[int, Done] = {}
        busy: dict[Connection, int] = {}
        free, waiting = list(self.workers), iter(range(len(parts)))
        while True:
            for worker, number in zip(free, waiting, strict=False):
                _give(worker, parts[number])
                busy[worker] = number
            if not busy:
                return [found[number] for number in sorted(found)]
            free = [worker for worker in wait(list(busy)) if isinstance(worker, Connection)]
            for worker in free:
                done = found[busy.pop(worker)] = _take(worker)
                if done.error is not None:
                    waiting = iter(())


class Done(NamedTuple):
    result: Any
    error: BaseException | None
    cpu_seconds: float


def _end(workers: dict[Connection, int], owner: int) -> None:
    if os.getpid() != owner:  # a fork that tidies up what it inherited
        return
    for worker, process in workers.items():
        worker.close()
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)  # one that is stopped would not hear anything less
            os.waitpid(process, 0)
    workers.clear()


def _give(worker: Connection, part: Any) -> None:
    # By value, and apart from sending: left to itself a connection gives tensors away as shared memory.
    data = pickle.dumps(part)
    try:
        worker.send_bytes(data)
    except OSError as error:
        raise _lost() from error


def _take(worker: Connection) -> Done:
    try:
        data = worker.recv_bytes()
    except (EOFError, OSError) as error:
        raise _lost() from error
    done: Done = pickle.loads(data)
    return done


def _lost() -> WorkerDied:
    return WorkerDied(
        "a process that translated was ended from outside, perhaps for want of memory"
    )


def _work_on(parts: Connection, work: Callable[[Part], Result]) -> None:
    """What a process of a crew does, until there is nobody any more to work for."""
    for one in (signal.SIGINT, signal.SIGTERM):  # meant for the one that we work for
        signal.signal(one, signal.SIG_IGN)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            part = pickle.loads(parts.recv_bytes())
            before = time.process_time()
            try:
                with torch.inference_mode():
                    result = work(part)
                data = pickle.dumps(Done(result, None, time.process_time() - before))
            except BaseException as wrong:
                data = pickle.dumps(Done(None, _told(wrong), time.process_time() - before))
            parts.send_bytes(data)


def _told(error: BaseException) -> BaseException:
    """An error as it can go through a pipe, with where it happened unless it speaks to a person."""
    if not isinstance(error, RegardError):
        error.add_note("In a process of its own:\n" + traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        other = RuntimeError(f"{type(error).__name__}: {error}")
        other.add_note(traceback.format_exc())
        return other
    return error
