"""Who works on batches: threads, and processes that were forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import RegardError
from regard.fast import Crew, at_once
from regard.model import Translator

forked = pytest.mark.skipif(not Crew.possible, reason="processes are forked on Linux only")
Way = Callable[[Callable[[int], Any], range], list[Any]]


def in_threads(work: Callable[[int], Any], parts: range) -> list[Any]:
    return at_once(work, parts, 3)


def in_processes(work: Callable[[int], Any], parts: range) -> list[Any]:
    crew = Crew(work, 3)
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
    crew = Crew(known.__getitem__, 2)
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

    crew = Crew(work, 2)
    long, *short = crew.map([0.5, 0.02, 0.02, 0.02])
    assert long not in short
    assert len({*short}) == 1
    assert crew.cpu_seconds == pytest.approx(0.56, rel=0.2)
    crew.end()


@forked
def test_a_process_that_is_killed_is_told_in_one_line_and_the_others_end() -> None:
    def work(part: int) -> int:
        if part == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        return os.getpid()

    crew = Crew(work, 2)
    processes = list(crew.workers.values())
    with pytest.raises(RegardError, match=r"ended from outside.*fewer --threads"):
        crew.map([0, 1, 2, 3])
    assert not crew.workers
    assert not any(process.is_alive() for process in processes)


ALONE = """
import os, time
from regard.fast import Crew
def work(part):
    print(os.getpid(), flush=True)
    time.sleep(0.3)
crew = Crew(work, 2)
while True:
    crew.map([1, 2])
"""


@forked
def test_no_process_outlives_the_one_it_works_for(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ALONE], stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        workers = [int(main.stdout.readline()) for _ in range(2)]
        main.kill()
    end = time.monotonic() + 20
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < end, f"{workers} still run"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return ["the dog sees a cat", "a cat", "", "the old dog", "a dog sleeps", "the cat sees"]


@forked
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beam": 1},
        {"beam": 4, "nbest": 3},
        {"beam": 4, "groups": 2},
        {"no_repeat": 2, "max_length": 5},
        {"mbr": 4},
        {"constraints": [["Hund"], [], [], ["ein", "Hund"], [], []]},
        {"coverage": 0.2},
    ],
    ids=str,
)
def test_every_search_is_the_same_in_processes(
    finished_run: Path, texts: list[str], options: dict[str, Any]
) -> None:
    model = Translator.load(finished_run, "cpu", "int8", threads=2)
    threads = model.search(texts, **options)
    model.threads = 2  # however many cores there are
    model.work_in_processes()
    assert model.crew is not None
    assert model.search(texts, **options) == threads
    assert (model.crew.cpu_seconds > 0) is ("coverage" not in options)  # that one is watched
    model.freeze()  # other weights: the processes have the old ones
    assert model.crew is None
