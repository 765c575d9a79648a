"""Who works on batches: threads, and processes that were forked."""

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
from regard.inference import map_in_threads
from regard.inference.worker_pool import WorkerDied, WorkerPool, _allotted
from regard.tasks import Translator

forked = pytest.mark.skipif(not WorkerPool.possible, reason="processes are forked on Linux only")
Way = Callable[[Callable[[int], Any], range], list[Any]]


def in_threads(work: Callable[[int], Any], parts: range) -> list[Any]:
    return map_in_threads(work, parts, 3)


def in_processes(work: Callable[[int], Any], parts: range) -> list[Any]:
    crew = WorkerPool(work, 3)
    try:
        return crew.map(parts)
    finally:
        crew.end()


both = pytest.mark.parametrize("way", [in_threads, pytest.param(in_processes, marks=forked)])


@both
def test_work_goes_on_side_by_side_each_on_one_core(way: Way) -> None:
    usual = torch.get_num_threads()
    assert way(lambda part: (part, torch.get_num_threads()), range(7)) == [(n, 1) for n in range(7)]
    assert way(lambda part: torch.is_inference_mode_enabled(), range(2)) == [True, True]
    assert way(abs, range(0)) == []
    assert torch.get_num_threads() == usual


@both
def test_an_error_in_one_part_is_raised(way: Way) -> None:
    def work(part: int) -> None:
        if part == 2:
            raise RegardError("no")

    with pytest.raises(RegardError, match="no"):
        way(work, range(5))


@forked
def test_a_crew_has_what_its_work_needs_and_goes_on_after_an_error() -> None:
    known = {number: str(number) for number in range(3)}
    crew = WorkerPool(known.__getitem__, 2)
    with pytest.raises(KeyError):
        crew.map([0, 5, 1])
    assert crew.map([2, 1, 0]) == ["2", "1", "0"]
    crew.end()


@forked
def test_work_of_uneven_length_is_shared_out_and_its_time_counted() -> None:
    def work(part: float) -> int:
        end = time.process_time() + part
        while time.process_time() < end:
            pass
        return os.getpid()

    crew = WorkerPool(work, 2)
    long, *short = crew.map([1.0, 0.02, 0.02, 0.02])
    assert {long, *short} == {*crew.workers.values()}
    assert long not in short
    assert 1.06 <= crew.cpu_seconds < 2
    crew.end()


@forked
def test_after_an_error_nothing_more_is_begun() -> None:
    def work(part: int) -> None:
        if part == 0:
            raise RegardError("no")
        time.sleep(0.5)

    crew = WorkerPool(work, 2)
    start = time.monotonic()
    with pytest.raises(RegardError, match="no"):
        crew.map(range(40))
    assert time.monotonic() - start < 5  # not 10
    crew.end()


class TwoFacts(Exception):  # noqa: N818
    """Cannot be read back from what pickle writes."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


@forked
def test_an_error_tells_where_it_happened_even_one_that_cannot_travel() -> None:
    def the_culprit(part: str) -> Any:
        match part:
            case "index":
                return [][1]
            case "read_error":
                raise TwoFacts("a", "b")
            case "result":
                return lambda: None

    crew: WorkerPool[str, Any] = WorkerPool(the_culprit, 1)
    for part, kind in {
        "index": IndexError,
        "read_error": RuntimeError,
        "result": Exception,
    }.items():
        with pytest.raises(kind) as error:
            crew.map([part])
        assert "_work_on" in error.value.__notes__[0]
        assert part == "result" or "the_culprit" in error.value.__notes__[0]
    crew.end()


@forked
def test_a_stopped_process_is_no_reason_to_wait_for_ever() -> None:
    crew: WorkerPool[int, int] = WorkerPool(abs, 2)
    stopped, killed = crew.workers.values()
    os.kill(stopped, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        crew.map([1, 2, 3])


@forked
def test_tensors_travel_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/" + "x" * 200)  # no socket fits in there
    crew: WorkerPool[Any, Any] = WorkerPool(lambda part: part * 2, 2)
    threads = threading.active_count()
    (found,) = crew.map([torch.arange(3)])
    assert found.tolist() == [0, 2, 4]
    assert threading.active_count() == threads
    crew.end()


def test_a_container_has_no_more_cores_than_it_is_given(tmp_path: Path) -> None:
    for text, wanted in {
        "max 100000": None,
        "150000 100000": 2,
        "20000 100000": 0,
        "": None,
    }.items():
        (tmp_path / "cpu.max").write_text(text)
        assert _allotted(tmp_path / "cpu.max") == wanted
    assert _allotted(tmp_path / "none") is None


@forked
def test_when_a_process_is_killed_the_others_end() -> None:
    def work(part: int) -> int:
        if part == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return os.getpid()

    crew = WorkerPool(work, 2)
    processes = list(crew.workers.values())
    with pytest.raises(WorkerDied, match="ended from outside, perhaps for want of memory"):
        crew.map([0, 1, 2, 3])
    with pytest.raises(WorkerDied, match="have ended"):
        crew.map([0])
    for process in processes:
        with pytest.raises(ProcessLookupError):  # there is not even a zombie
            os.kill(process, 0)


ALONE = """
import os, time
from regard.inference.worker_pool import WorkerPool
def work(part):
    print(os.getpid(), flush=True)
    time.sleep(0.3)
crew = WorkerPool(work, 2)
while True:
    crew.map([1, 2])
"""


@forked
def test_no_process_outlives_the_one_it_works_for() -> None:
    with subprocess.Popen([sys.executable, "-c", ALONE], stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        workers = [int(main.stdout.readline()) for _ in range(2)]
        main.kill()
    end = time.monotonic() + 20
    while any(map(_runs, workers)):
        assert time.monotonic() < end, f"{workers} still run"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # where nobody asks what became of it


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


@forked
def test_every_search_is_the_same_in_processes(finished_run: Path, texts: list[str]) -> None:
    model = Translator.load(finished_run, "cpu", "int8")
    model.threads = 2  # however many available_cores there are
    threads = [model.search(texts, **options) for options in SEARCHES]
    model.start_worker_pool()
    assert model.crew is not None
    for options, wanted in zip(SEARCHES, threads, strict=True):
        before = model.crew.cpu_seconds
        assert model.search(texts, **options) == wanted, options
        assert model.crew.cpu_seconds > before, options
    model.freeze()  # other weights: the processes have the old ones
    assert model.crew is None


@forked
def test_when_a_process_is_lost_threads_go_on(
    finished_run: Path, texts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = Translator.load(finished_run, "cpu")
    model.threads = 2
    threads = model.search(texts)
    model.start_worker_pool()
    assert model.crew is not None
    for process in model.crew.workers.values():
        os.kill(process, signal.SIGKILL)
    assert model.search(texts) == threads
    assert "from now on threads translate" in caplog.text
    assert model.crew is None


@forked
def test_where_no_process_can_be_had_threads_do(
    finished_run: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Translator.load(finished_run, "cpu")
    model.threads, forks = 2, iter([os.fork])

    def fork() -> int:
        return next(forks, _refused)()

    monkeypatch.setattr(os, "fork", fork)
    model.start_worker_pool()
    assert model.crew is None
    assert len(model.search(texts)) == len(texts)


def _refused() -> int:
    raise BlockingIOError("Resource temporarily unavailable")
