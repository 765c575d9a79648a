"""Prefetching: a thread produces items while the consumer works on earlier ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EndOfItems(Exception):  # noqa: N818
    """Marks the end in the queue. An exception, so that the queue holds items and exceptions only."""


def prefetch(items: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """The same items, with up to ``depth`` of them produced in advance by a thread."""
    producer = _Producer(items, depth)
    try:
        while True:
            item = producer.queue.get()
            if isinstance(item, EndOfItems):
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        producer.stop()
        producer.thread.join()  # otherwise it might free tensors while the interpreter shuts down


def available_items(items: Iterable[Item], max_items: int) -> Iterator[list[Item]]:
    """The same items in lists of 1 to ``max_items``: whatever is available when a list is requested."""
    producer = _Producer(items, max_items)
    try:
        while True:
            batch = [producer.queue.get()]
            while len(batch) < max_items and not producer.queue.empty():
                batch.append(producer.queue.get())
            ready_items = [item for item in batch if not isinstance(item, BaseException)]
            if ready_items:
                yield ready_items
            if isinstance(batch[-1], EndOfItems):
                return
            if isinstance(batch[-1], BaseException):
                raise batch[-1]
    finally:
        producer.stop()  # not joined: the thread may be blocked on terminal input


class _Producer(Generic[Item]):
    """A thread that fills a queue with the items, followed by EndOfItems or the exception that was raised."""

    def __init__(self, items: Iterable[Item], depth: int) -> None:
        self.items = items
        self.queue: queue.Queue[Item | BaseException] = queue.Queue(depth)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()

    def _run(self) -> None:
        try:
            for item in self.items:
                self._put(item)
                if self.stopped.is_set():
                    return
            self._put(EndOfItems())
        except BaseException as error:  # raised again in the consumer's thread
            self._put(error)

    def _put(self, item: Item | BaseException) -> None:
        while not self.stopped.is_set():
            with suppress(queue.Full):
                self.queue.put(item, timeout=0.1)
                return
