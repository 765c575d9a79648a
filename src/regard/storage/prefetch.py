"""Items made in another thread while the ones before are in use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")


class End(Exception):  # noqa: N818
    """Marks the end of the items in the queue, where an error may also stand."""


def ahead(items: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """The same items, up to ``depth`` of them made before they are asked for."""
    maker = _Maker(items, depth)
    try:
        while True:
            item = maker.made.get()
            if isinstance(item, End):
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        maker.stop()
        maker.thread.join()  # or it might free tensors while the program already ends


def portions(items: Iterable[Item], most: int) -> Iterator[list[Item]]:
    """The same items in lists: each holds all that were there when it was asked for, at least one."""
    maker = _Maker(items, most)
    try:
        while True:
            waiting = [maker.made.get()]
            while len(waiting) < most and not maker.made.empty():
                waiting.append(maker.made.get())
            ready = [item for item in waiting if not isinstance(item, BaseException)]
            if ready:
                yield ready
            if isinstance(waiting[-1], End):
                return
            if isinstance(waiting[-1], BaseException):
                raise waiting[-1]
    finally:
        maker.stop()  # not joined: it may be waiting for a person to type


class _Maker(Generic[Item]):
    """A thread that fills a queue with the items, then with End, or with the error that stopped it."""

    def __init__(self, items: Iterable[Item], depth: int) -> None:
        self.items = items
        self.made: queue.Queue[Item | BaseException] = queue.Queue(depth)
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.over.set()

    def _work(self) -> None:
        try:
            for item in self.items:
                self._put(item)
                if self.over.is_set():
                    return
            self._put(End())
        except BaseException as error:  # raised again in the thread that asks
            self._put(error)

    def _put(self, item: Item | BaseException) -> None:
        while not self.over.is_set():
            with suppress(queue.Full):
                self.made.put(item, timeout=0.1)
                return
