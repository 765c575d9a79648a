"""Items made in another thread while the ones before are in use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

Item = TypeVar("Item")


class End(Exception):  # noqa: N818
    """Marks the end of the items in the queue, where an error may also stand."""


def ahead(items: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """The same items, up to ``depth`` of them made before they are asked for."""
    with _making(items, depth) as made:
        while True:
            item = made.get()
            if isinstance(item, End):
                return
            if isinstance(item, BaseException):
                raise item
            yield item


def portions(items: Iterable[Item], most: int) -> Iterator[list[Item]]:
    """The same items in lists: each holds all that were there when it was asked for, at least one."""
    with _making(items, most) as made:
        waiting: list[Item | BaseException] = []
        while True:
            waiting.append(made.get())
            while len(waiting) < most and not made.empty():
                waiting.append(made.get())
            last = waiting[-1]
            ready = [item for item in waiting if not isinstance(item, BaseException)]
            if ready:
                yield ready
            if isinstance(last, End):
                return
            if isinstance(last, BaseException):
                raise last
            waiting = []


@contextmanager
def _making(items: Iterable[Item], depth: int) -> Iterator[queue.Queue[Item | BaseException]]:
    """A queue that a thread fills with the items, then with End, or with the error that stopped it."""
    made: queue.Queue[Item | BaseException] = queue.Queue(depth)
    over = threading.Event()

    def put(item: Item | BaseException) -> None:
        while not over.is_set():
            with suppress(queue.Full):
                made.put(item, timeout=0.1)
                return

    def work() -> None:
        try:
            for item in items:
                put(item)
                if over.is_set():
                    return
            put(End())
        except BaseException as error:  # raised again in the thread that asks
            put(error)

    # A daemon: one that waits for a person to type must not keep the program from ending.
    threading.Thread(target=work, daemon=True).start()
    try:
        yield made
    finally:
        over.set()
