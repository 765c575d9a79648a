"""Batches worked on side by side. On a CPU two batches on one core each are done sooner than one after the other on
both: the products of a step are too small to be shared out, and most of the rest is not shared out at all.

There are two kinds of workers. Threads serve everywhere, but share Python's lock: after each operation one may have to
wait for another. Processes (``Crew``) do not wait for each other, but are only for who may be forked: a program that
has no threads of its own, such as a command.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from regard.errors import RegardError

Part = TypeVar("Part")
Result = TypeVar("Result")


def cores() -> int:
    """Those this process may use; OMP_NUM_THREADS goes before."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked):
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def at_once(work: Callable[[Part], Result], parts: Sequence[Part], threads: int) -> list[Result]:
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


class Crew(Generic[Part, Result]):
    """Processes that stay, each on one core, for one kind of work.

    They are forked from this one: what the work needs they have, nothing is read, packed or held in memory twice. Parts
    and results go through pipes. They end when this process does, however it ends: then nothing holds their pipes.
    """

    possible = sys.platform == "linux"
    """elsewhere a fork is not to be trusted, or there is none"""

    def __init__(self, work: Callable[[Part], Result], count: int) -> None:
        context = multiprocessing.get_context("fork")
        self.cpu_seconds = 0.0
        """what their work has taken so far"""
        self.workers: dict[Connection, Any] = {}
        """each process by our end of its pipe"""
        self.lock = threading.Lock()
        with warnings.catch_warnings():
            # Python warns of threads, which might hold a lock that the fork then waits for. Those of torch's
            # products hold none between products, and a fork on one core has no use for them.
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(count):
                ours, theirs = context.Pipe()
                given = (theirs, [*self.workers, ours], work)
                process = context.Process(target=_serve, args=given, daemon=True)
                process.start()
                theirs.close()
                self.workers[ours] = process

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
        assert self.workers, "it has ended"
        found: dict[int, Done] = {}
        busy: dict[Connection, int] = {}
        free, waiting = list(self.workers), iter(range(len(parts)))
        while len(found) < len(parts):
            for worker, number in zip(free, waiting, strict=False):
                _give(worker, parts[number])
                busy[worker] = number
            free = [worker for worker in wait(list(busy)) if isinstance(worker, Connection)]
            for worker in free:
                found[busy.pop(worker)] = _take(worker)
        return [found[number] for number in range(len(parts))]

    def end(self) -> None:
        for worker, process in self.workers.items():
            worker.close()
            process.terminate()
            process.join()
        self.workers = {}


class Done(NamedTuple):
    result: Any
    error: Exception | None
    cpu_seconds: float


def _give(worker: Connection, part: Any) -> None:
    try:
        worker.send(part)
    except OSError as error:
        raise _lost() from error


def _take(worker: Connection) -> Done:
    try:
        done: Done = worker.recv()
    except (EOFError, OSError) as error:
        raise _lost() from error
    return done


def _lost() -> RegardError:
    return RegardError(
        "a process that translated was ended from outside, perhaps for want of memory; "
        "fewer --threads take less"
    )


def _serve(parts: Connection, forked: Sequence[Connection], work: Callable[[Part], Result]) -> None:
    """What a process of a crew does."""
    for other in forked:  # held by it, no pipe would ever end
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that we work for
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):  # there is nobody any more to work for
        while True:
            part = parts.recv()
            before = time.process_time()
            result, error = None, None
            try:
                with torch.inference_mode():
                    result = work(part)
            except Exception as wrong:
                error = wrong
            parts.send(Done(result, error, time.process_time() - before))
