"""Parallel batches on a CPU, in threads or in worker processes.

Two batches on one core each finish sooner than the same two batches one after the other on both cores: the products of
a decoding step are too small to split, and most of the other work cannot be split at all.

- Threads (``map_in_threads``) work in every program, but share Python's interpreter lock, so they may wait for each
  other after every operation.
- Worker processes (``WorkerPool``) do not wait for each other. They are forked, so they share the packed weights with
  this process. A fork copies only the thread that calls it, and a lock that another thread holds stays locked in the
  copy for ever. For that reason a process forks only if it has one thread, as counted by the kernel. Commands have
  one: ``cli/main.py`` lets the libraries start none, and models are loaded ``on_one_core``.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from regard.errors import RegardError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor
    from multiprocessing.connection import Connection

Item = TypeVar("Item")
Result = TypeVar("Result")

# ---------------------------------------------------------------------------------------------
# CPU cores


def available_cores() -> int:
    """Number of cores that this process may use: OMP_NUM_THREADS if set, else by CPU affinity and cgroup quota."""
    variable = os.environ.get("OMP_NUM_THREADS", "")
    if variable.isdigit() and int(variable):
        return int(variable)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(cores, _cgroup_cores(Path("/sys/fs/cgroup/cpu.max")) or cores))


def _cgroup_cores(file: Path) -> int | None:
    """The CPU quota of a container on Linux, in cores; None if there is no quota."""
    try:
        quota, period = file.read_text().split()
        return round(int(quota) / int(period))
    except (OSError, ValueError):  # no container, or "max"
        return None


# ---------------------------------------------------------------------------------------------
# Threads


@contextmanager
def on_one_core() -> Iterator[None]:
    """Let torch use one core in the with-block, so that it starts no threads that would forbid a fork later."""
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def count_threads() -> int | None:
    """The number of threads of this process, those of libraries included; None: unknown."""
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir())
    except OSError:  # not Linux
        return None


def map_in_threads(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    threads: int,
    stop: Callable[[], object] | None = None,
) -> list[Result]:
    """The results of a function for each item, in order. Each thread uses one core.

    If the calling thread has low priority, so have these threads. stop: called if this call is interrupted, so that
    the running calls of ``function`` return early; this call then waits for them.
    """

    def call(item: Item) -> Result:
        with _inference_mode():
            return function(item)

    pool = _thread_pool(threads, in_background())
    futures = [pool.submit(call, item) for item in items]
    try:
        return [future.result() for future in futures]
    except BaseException:
        running = [future for future in futures if not future.cancel()]
        if stop is not None:
            from concurrent.futures import wait

            stop()
            wait(running)
        raise


def _inference_mode() -> AbstractContextManager[object]:
    """torch's inference mode, unless this process works without torch."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.inference_mode()


@cache
def _thread_pool(threads: int, background: bool) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    torch = sys.modules.get("torch")
    usual = torch and torch.get_num_threads()
    prepare = _use_one_core_in_background if background else _use_one_core
    pool = ThreadPoolExecutor(threads, "regard-decoding", initializer=prepare)
    barrier = threading.Barrier(threads)
    for future in [pool.submit(barrier.wait) for _ in range(threads)]:  # until all have started
        future.result()
    if torch:
        torch.set_num_threads(usual)  # the value set last is the default of every later thread
    return pool


def _use_one_core() -> None:
    if torch := sys.modules.get("torch"):
        torch.get_num_threads()  # the first call in a thread would reset what is set below
        torch.set_num_threads(1)


def _use_one_core_in_background() -> None:
    _use_one_core()
    lower_priority()


BACKGROUND_NICE = 5
"""how much lower the priority of background work is; in competition it gets about a quarter of the time, so that it
also makes progress on a machine that is busy with other things"""

_thread = threading.local()


def lower_priority() -> None:
    """Give the calling thread low priority: its searches use the time that others leave."""
    _thread.background = True
    if sys.platform == "linux":  # elsewhere priorities belong to processes
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), usual + BACKGROUND_NICE)


def in_background() -> bool:
    """Whether the calling thread has low priority."""
    return getattr(_thread, "background", False)


# ---------------------------------------------------------------------------------------------
# Worker processes


class SharedFlag:
    """A flag in memory that forked processes share; it has the methods of ``threading.Event`` except ``wait``."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 1)

    def set(self) -> None:
        self._memory[0] = 1

    def clear(self) -> None:
        self._memory[0] = 0

    def is_set(self) -> bool:
        return self._memory[0] != 0

    @property
    def address(self) -> int:
        """The address of its byte, for native code: not 0 if it is set."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


class WorkerDied(RegardError):  # noqa: N818
    """A worker process has ended, and the item it worked on is lost."""


class Outcome(NamedTuple):
    """What a worker sends back for one item: a result or an error."""

    result: Any
    error: BaseException | None
    cpu_seconds: float


class WorkerPool(Generic[Item, Result]):
    """Worker processes that apply one function to items, each on one core.

    They are forked from this process, so they have everything that the function needs: nothing is loaded, packed or
    kept in memory twice. Items and results travel through pipes.

    When this process ends, for whatever reason, the kernel kills the workers at once. Where the kernel has no such
    option, they end after their current item. SIGTERM also ends a worker after its current item. SIGINT does not: a
    terminal sends it to all processes, and this one handles it.

    nice: how much lower than usual the priority of the workers is.
    """

    @staticmethod
    def is_safe() -> bool:
        """Whether this process may fork: on Linux, with a single thread. Elsewhere libraries do not survive a fork."""
        return sys.platform == "linux" and count_threads() == 1

    def __init__(self, function: Callable[[Item], Result], count: int, nice: int = 0) -> None:
        self.cpu_seconds = 0.0
        """CPU time of the workers so far"""
        self.workers: dict[Connection, int] = {}
        """process id of each worker, by our end of its pipe"""
        self.end = weakref.finalize(self, _kill_all, self.workers, os.getpid())
        """ends the workers; called at exit or when the pool is garbage-collected, if not before"""
        self.lock = threading.Lock()
        try:
            for _ in range(count):
                self._fork(function, nice)
        except OSError:
            self.end()
            raise

    def _fork(self, function: Callable[[Item], Result], nice: int) -> None:
        from multiprocessing import Pipe

        parent_end, child_end = Pipe()
        parent, die_with_parent = os.getpid(), death_signal()
        process = os.fork()
        if process:
            child_end.close()
            self.workers[parent_end] = process
            return
        try:
            die_with_parent()
            os.nice(nice)
            for connection in (
                *self.workers,
                parent_end,
            ):  # a pipe closes only when no process holds it
                connection.close()
            _worker_loop(child_end, function, parent)
        finally:
            os._exit(0)  # skip the exit handlers of the parent process

    def map(self, items: Sequence[Item]) -> list[Result]:
        """The results for all items, in order. Each free worker takes the next item.

        If the function raises an error for an item, no further items are started, and the error is raised here.
        """
        with self.lock:
            try:
                outcomes = self._outcomes(items)
            except BaseException:
                self.end()  # results still on their way would be taken for those of the next call
                raise
            self.cpu_seconds += sum(outcome.cpu_seconds for outcome in outcomes)
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
        return [outcome.result for outcome in outcomes]

    def _outcomes(self, items: Sequence[Item]) -> list[Outcome]:
        """The outcomes of all items, or of those that were started before one failed."""
        from multiprocessing.connection import Connection, wait

        if not self.workers:
            raise WorkerDied("the worker processes have ended")
        outcomes: dict[int, Outcome] = {}
        busy: dict[Connection, int] = {}
        idle, waiting = list(self.workers), iter(range(len(items)))
        while True:
            for worker, number in zip(idle, waiting, strict=False):
                _send(worker, items[number])
                busy[worker] = number
            if not busy:
                return [outcomes[number] for number in sorted(outcomes)]
            idle = [worker for worker in wait(list(busy)) if isinstance(worker, Connection)]
            for worker in idle:
                outcome = outcomes[busy.pop(worker)] = _receive(worker)
                if outcome.error is not None:
                    waiting = iter(())


def _kill_all(workers: dict[Connection, int], owner: int) -> None:
    if os.getpid() != owner:  # a fork that cleans up what it inherited
        return
    for worker, process in workers.items():
        worker.close()
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)  # a stopped process ignores weaker signals
            os.waitpid(process, 0)
    workers.clear()


def _send(worker: Connection, item: Any) -> None:
    import pickle

    # Pickled here, because Connection.send would pass tensors through shared memory.
    data = pickle.dumps(item)
    try:
        worker.send_bytes(data)
    except OSError as error:
        raise _worker_died() from error


def _receive(worker: Connection) -> Outcome:
    import pickle

    try:
        data = worker.recv_bytes()
    except (EOFError, OSError) as error:
        raise _worker_died() from error
    outcome: Outcome = pickle.loads(data)
    return outcome


def _worker_died() -> WorkerDied:
    return WorkerDied("a worker process was killed, possibly because memory ran out")


PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that a process gets when its parent dies."""


def death_signal(number: signal.Signals = signal.SIGKILL) -> Callable[[], object]:
    """A function to call in a fork, so that the kernel sends it a signal when this process dies, whatever it is doing.

    It does nothing where there is no prctl, and in a thread other than the main one: the kernel would send the signal
    when that thread ends.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    try:
        prctl = ctypes.CDLL(
            None
        ).prctl  # looked up here, because a fork should do as little as possible
    except (OSError, AttributeError):
        return lambda: None
    return lambda: prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def _worker_loop(pipe: Connection, function: Callable[[Item], Result], parent: int) -> None:
    """The main loop of a worker: handle items until the pipe is closed, ``parent`` has died, or SIGTERM arrives."""
    busy, terminated = False, False

    def terminate(number: int, frame: object) -> None:
        nonlocal terminated
        terminated = True
        if not busy:  # the loop is waiting for an item
            os._exit(0)

    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _use_one_core()
    items = 0
    with suppress(EOFError, OSError):
        while not terminated and os.getppid() == parent:
            data = pipe.recv_bytes()
            busy = True
            pipe.send_bytes(_handle(data, function))
            items += 1
            if items % TRIM_ITEMS == 0:
                release_free_memory()
            busy = False


TRIM_ITEMS = 50
"""items after which a worker releases memory: batches of many shapes leave gaps, and its memory would grow slowly"""


def release_free_memory() -> None:
    """Return the free memory of glibc's heap to the system; nothing happens with other C libraries."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _handle(data: bytes, function: Callable[[Item], Result]) -> bytes:
    """The outcome of one item; both are pickled."""
    import pickle

    item = pickle.loads(data)
    start = time.process_time()
    try:
        with _inference_mode():
            result = function(item)
        return pickle.dumps(Outcome(result, None, time.process_time() - start))
    except BaseException as error:
        return pickle.dumps(Outcome(None, _portable(error), time.process_time() - start))


def _portable(error: BaseException) -> BaseException:
    """An error that can be pickled, with the worker's traceback as a note unless it is meant for the user."""
    import pickle
    import traceback

    if not isinstance(error, RegardError):
        error.add_note("In a worker process:\n" + traceback.format_exc())
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        substitute.add_note(traceback.format_exc())
        return substitute
    return error
