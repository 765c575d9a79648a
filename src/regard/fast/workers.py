"""Batches worked on side by side. On a CPU two batches on one core each are done sooner than one after the other on
both: the products of a step are too small to be shared out, and most of the rest is not shared out at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

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

    return list(_workers(threads).map(quietly, parts))


@cache
def _workers(count: int) -> ThreadPoolExecutor:
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
