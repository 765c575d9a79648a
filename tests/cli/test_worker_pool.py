"""Parallel batches: threads and forked worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import RegardError
from regard.inference.worker_pool import WorkerDied, WorkerPool, _cgroup_cores, map_in_threads
from regard.tasks import Translator
from regard.training.prepare_data import COPYING_PROCESS
from tests.cli.commands import environment, write

forked = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
pytestmark = pytest.mark.filterwarnings(  # pytest has threads; commands do not, as tested below
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
Map = Callable[[Callable[[int], Any], range], list[Any]]


def in_threads(work: Callable[[int], Any], items: range) -> list[Any]:
    return map_in_threads(work, items, 3)


def in_processes(work: Callable[[int], Any], items: range) -> list[Any]:
    pool = WorkerPool(work, 3)
    try:
        return pool.map(items)
    finally:
        pool.end()


both = pytest.mark.parametrize("map_items", [in_threads, pytest.param(in_processes, marks=forked)])


@both
def test_each_worker_uses_one_core_and_inference_mode(map_items: Map) -> None:
    usual = torch.get_num_threads()
    assert map_items(lambda item: (item, torch.get_num_threads()), range(7)) == [
        (n, 1) for n in range(7)
    ]
    assert map_items(lambda item: torch.is_inference_mode_enabled(), range(2)) == [True, True]
    assert map_items(abs, range(0)) == []
    assert torch.get_num_threads() == usual


@both
def test_an_error_for_one_item_is_raised(map_items: Map) -> None:
    def work(item: int) -> None:
        if item == 2:
            raise RegardError("no")

    with pytest.raises(RegardError, match="no"):
        map_items(work, range(5))


@forked
def test_workers_inherit_the_state_of_the_process_and_survive_an_error() -> None:
    known = {number: str(number) for number in range(3)}
    pool = WorkerPool(known.__getitem__, 2)
    with pytest.raises(KeyError):
        pool.map([0, 5, 1])
    assert pool.map([2, 1, 0]) == ["2", "1", "0"]
    pool.end()


@forked
def test_free_workers_take_the_next_item_and_cpu_time_is_counted() -> None:
    def work(item: float) -> int:
        end = time.process_time() + item
        while time.process_time() < end:
            pass
        return os.getpid()

    pool = WorkerPool(work, 2)
    long, *short = pool.map([1.0, 0.02, 0.02, 0.02])
    assert {long, *short} == {*pool.workers.values()}
    assert long not in short
    assert 1.06 <= pool.cpu_seconds < 2
    pool.end()


@forked
def test_after_an_error_no_further_item_is_started() -> None:
    def work(item: int) -> None:
        if item == 0:
            raise RegardError("no")
        time.sleep(0.5)

    pool = WorkerPool(work, 2)
    start = time.monotonic()
    with pytest.raises(RegardError, match="no"):
        pool.map(range(40))
    assert time.monotonic() - start < 5  # not 10
    pool.end()


class TwoFacts(Exception):  # noqa: N818
    """An exception that pickle can write but not read."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


@forked
def test_an_error_has_the_traceback_of_the_worker_even_if_it_cannot_be_pickled() -> None:
    def the_culprit(item: str) -> Any:
        match item:
            case "index":
                return [][1]
            case "read_error":
                raise TwoFacts("a", "b")
            case "result":
                return lambda: None

    pool: WorkerPool[str, Any] = WorkerPool(the_culprit, 1)
    for item, kind in {
        "index": IndexError,
        "read_error": RuntimeError,
        "result": Exception,
    }.items():
        with pytest.raises(kind) as error:
            pool.map([item])
        assert "in _handle" in error.value.__notes__[0]
        assert item == "result" or "the_culprit" in error.value.__notes__[0]
    pool.end()


@forked
def test_a_stopped_worker_does_not_block_the_pool() -> None:
    pool: WorkerPool[int, int] = WorkerPool(abs, 2)
    stopped, killed = pool.workers.values()
    os.kill(stopped, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        pool.map([1, 2, 3])


@forked
def test_tensors_are_sent_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/" + "x" * 200)  # too long for the path of a socket
    pool: WorkerPool[Any, Any] = WorkerPool(lambda item: item * 2, 2)
    threads = threading.active_count()
    (found,) = pool.map([torch.arange(3)])
    assert found.tolist() == [0, 2, 4]
    assert threading.active_count() == threads
    pool.end()


def test_the_cpu_quota_of_a_container_limits_the_cores(tmp_path: Path) -> None:
    for text, cores in {
        "max 100000": None,
        "150000 100000": 2,
        "20000 100000": 0,
        "": None,
    }.items():
        (tmp_path / "cpu.max").write_text(text)
        assert _cgroup_cores(tmp_path / "cpu.max") == cores
    assert _cgroup_cores(tmp_path / "none") is None


@forked
def test_when_a_worker_is_killed_the_others_end() -> None:
    def work(item: int) -> int:
        if item == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return os.getpid()

    pool = WorkerPool(work, 2)
    processes = list(pool.workers.values())
    with pytest.raises(
        WorkerDied, match="a worker process was killed, possibly because memory ran out"
    ):
        pool.map([0, 1, 2, 3])
    with pytest.raises(WorkerDied, match="worker processes have ended"):
        pool.map([0])
    for process in processes:
        with pytest.raises(ProcessLookupError):  # not even a zombie is left
            os.kill(process, 0)


ALONE = """
import os, sys, time
from regard.inference.worker_pool import WorkerPool
def sleep(item):
    os.write(1, b"%d\\n" % os.getpid())  # at once: workers share the pipe
    time.sleep(item)
def compute(item):
    os.write(1, b"%d\\n" % os.getpid())  # at once: workers share the pipe
    end = time.monotonic() + item
    while time.monotonic() < end:
        pass
pool = WorkerPool(globals()[sys.argv[1]], 2)
while True:
    pool.map([float(sys.argv[2])] * 2)
"""


@forked
@pytest.mark.parametrize("work", [("sleep", "0.3"), ("sleep", "600"), ("compute", "600")])
def test_no_worker_outlives_the_main_process(work: tuple[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ALONE, *work], stdout=subprocess.PIPE, text=True
    ) as main:
        try:
            assert main.stdout is not None
            workers = [int(main.stdout.readline()) for _ in range(2)]
        finally:
            main.kill()
    assert_end(workers)


def assert_end(workers: list[int]) -> None:
    """Check that the processes end within 5 seconds; none of them is left behind if they do not."""
    end = time.monotonic() + 5
    while any(map(_runs, workers)) and time.monotonic() < end:
        time.sleep(0.05)
    left = list(filter(_runs, workers))
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert left == []


SLOW_TRANSLATE = """
import os, sys, time
from regard.cli.main import limit_library_threads, main
limit_library_threads()
from regard.inference.engine import Engine
def slow(self, batch):
    os.write(1, b"%d\\n" % os.getpid())  # at once: workers share the pipe
    time.sleep(600)
Engine.generate_batch = slow
sys.argv[:] = ["regard", "translate", sys.argv[1], "--threads", "2", "--input", sys.argv[2]]
main()
"""


@forked
def test_no_worker_outlives_a_killed_translation(finished_run: Path, tmp_path: Path) -> None:
    write(tmp_path / "in.txt", ["the dog sees a cat", "a cat"] * 500)
    command = [sys.executable, "-c", SLOW_TRANSLATE, str(finished_run), str(tmp_path / "in.txt")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as main:
        try:
            assert main.stdout is not None
            worker = int(main.stdout.readline())
            assert worker != main.pid
        finally:
            main.kill()
    assert_end([worker])


@forked
def test_sigterm_ends_an_idle_worker_and_a_busy_one_after_its_item() -> None:
    def work(seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()

    pool = WorkerPool(work, 1)
    (process,) = pool.workers.values()
    threading.Timer(0.3, os.kill, (process, signal.SIGTERM)).start()
    assert pool.map([1.0]) == [process]  # nothing of it is lost
    assert os.waitpid(process, 0) == (process, 0)
    with pytest.raises(WorkerDied):
        pool.map([0.0])
    pool = WorkerPool(work, 1)
    assert pool.map([0.0]) == [*pool.workers.values()]
    (process,) = pool.workers.values()
    time.sleep(0.2)
    os.kill(process, signal.SIGTERM)
    assert os.waitpid(process, 0) == (process, 0)
    pool.end()


@forked
def test_a_worker_ignores_the_interrupt_of_the_terminal() -> None:
    pool: WorkerPool[int, int] = WorkerPool(abs, 1)
    (process,) = pool.workers.values()
    assert pool.map([-1]) == [1]
    os.kill(process, signal.SIGINT)
    assert pool.map([-2]) == [2]
    pool.end()


@forked
def test_workers_outlive_the_thread_that_started_them() -> None:
    pools: list[WorkerPool[int, int]] = []
    thread = threading.Thread(target=lambda: pools.append(WorkerPool(abs, 2)))
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert pools[0].map([-1, -2, -3]) == [1, 2, 3]
    pools[0].end()


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie that nobody waits for


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return ["the dog sees a cat", "a cat", "", "the old dog", "a dog sleeps", "the cat sees"]


SEARCHES: list[dict[str, Any]] = [
    {},
    {"beam": 1},
    {"beam": 4, "nbest": 3},
    {"beam": 4, "beam_groups": 2},
    {"no_repeat_ngram": 2, "max_length": 5},
    {"mbr": 4},
    {"constraints": [["Hund"], [], [], ["ein", "Hund"], [], []]},
]


@pytest.fixture
def allow_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process fork although other tests have started threads."""
    monkeypatch.setattr(WorkerPool, "is_safe", lambda: True)


COUNTED = """
import os, sys
usual = os.fork
def fork():
    print("threads", len(os.listdir("/proc/self/task")), file=sys.stderr)
    return usual()
os.fork = fork
from regard.cli.main import main
main()
"""


@forked
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_command_has_one_thread_when_it_forks(
    finished_run: Path, tmp_path: Path, precision: str
) -> None:
    """Two cores are used, and no variable keeps the libraries from starting threads."""
    write(tmp_path / "in.txt", ["the dog sees a cat", "a cat"])
    options = ["--threads", "2", "--precision", precision, "--input", str(tmp_path / "in.txt")]
    without = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "JE_ARROW_MALLOC_CONF")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", COUNTED, "translate", str(finished_run), *options],
        env={name: value for name, value in environment().items() if name not in without},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("threads 1\n") == 2 == done.stderr.count("threads ")
    assert len(done.stdout.splitlines()) == 2


def test_a_process_with_other_threads_does_not_fork(
    finished_run: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", _refused)
    model = Translator.load(finished_run, "cpu")
    model.engine.threads = 2
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not WorkerPool.is_safe()
        model.start_workers()
    finally:
        stop.set()
        thread.join()
    assert model.engine.pool is None
    assert len(model.search(texts)) == len(texts)


def test_loading_starts_no_threads_and_keeps_their_number(finished_run: Path) -> None:
    usual = torch.get_num_threads()
    Translator.load(finished_run, "cpu", "int8")
    assert torch.get_num_threads() == usual


@forked
@pytest.mark.usefixtures("allow_fork")
def test_every_decoding_method_gives_the_same_result_in_workers(
    finished_run: Path, texts: list[str]
) -> None:
    model = Translator.load(finished_run, "cpu", "int8")
    model.engine.threads = 2  # whatever the number of cores
    threads = [model.search(texts, **options) for options in SEARCHES]
    model.start_workers()
    assert model.engine.pool is not None
    for options, expected in zip(SEARCHES, threads, strict=True):
        before = model.engine.pool.cpu_seconds
        assert model.search(texts, **options) == expected, options
        assert model.engine.pool.cpu_seconds > before, options
    model.freeze()  # new weights: the workers have the old ones
    assert model.engine.pool is None


@forked
@pytest.mark.usefixtures("allow_fork")
def test_when_a_worker_dies_threads_are_used(
    finished_run: Path, texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = Translator.load(finished_run, "cpu")
    model.engine.threads = 2
    threads = model.search(texts)
    model.start_workers()
    assert model.engine.pool is not None
    for process in model.engine.pool.workers.values():
        os.kill(process, signal.SIGKILL)
    assert model.search(texts) == threads
    assert "using threads from now on" in caplog.text
    assert model.engine.pool is None


@forked
@pytest.mark.usefixtures("allow_fork")
def test_where_no_process_can_be_started_threads_are_used(
    finished_run: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Translator.load(finished_run, "cpu")
    model.engine.threads, forks = 2, iter([os.fork])

    def fork() -> int:
        return next(forks, _refused)()

    monkeypatch.setattr(os, "fork", fork)
    model.start_workers()
    assert model.engine.pool is None
    assert len(model.search(texts)) == len(texts)


def _refused() -> int:
    raise BlockingIOError("Resource temporarily unavailable")


COPYING = """
import subprocess, sys
process = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
print(process.pid, flush=True)
process.wait()
"""


def test_no_process_that_writes_a_copy_of_the_data_outlives_training() -> None:
    program, _, _ = COPYING_PROCESS.partition("from regard")
    with subprocess.Popen(
        [sys.executable, "-c", COPYING, f"{program}\nimport time; time.sleep(600)"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as main:
        try:
            assert main.stdout is not None
            process = int(main.stdout.readline())
            time.sleep(0.5)
            assert _runs(process)
        finally:
            main.kill()
    assert_end([process])
