"""Prefetching: the same items, in order, and no thread left behind."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from regard.data.prefetch import available_items, prefetch

Prefetcher = Callable[[Iterable[Any], int], Iterator[Any]]
BOTH = pytest.mark.parametrize("fetch", [prefetch, available_items])


def wait_until(condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds, for at most ten seconds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@settings(max_examples=50)
@given(items=st.lists(st.integers()), depth=st.integers(1, 5))
def test_prefetch_yields_the_same_items_in_order(items: list[int], depth: int) -> None:
    assert list(prefetch(items, depth)) == items


@settings(max_examples=50)
@given(items=st.lists(st.none() | st.text()), max_items=st.integers(1, 5))
def test_available_items_yields_the_same_items_in_order(
    items: list[str | None], max_items: int
) -> None:
    lists = list(available_items(items, max_items))
    assert [item for taken in lists for item in taken] == items
    assert all(1 <= len(taken) <= max_items for taken in lists)


def test_a_list_holds_everything_available() -> None:
    go, done = threading.Event(), threading.Event()

    def produce() -> Iterator[int]:
        yield 1
        go.wait(10)
        yield from (2, 3, 4)
        done.set()

    items = available_items(produce(), 9)
    assert next(items) == [1]
    go.set()
    assert done.wait(10)
    assert next(items) == [2, 3, 4]


@BOTH
def test_items_before_an_error_are_yielded_and_then_it_is_raised(fetch: Prefetcher) -> None:
    failure = ValueError("line 3 is broken")

    def produce() -> Iterator[int]:
        yield 1
        yield 2
        raise failure

    got: list[Any] = []

    def take() -> None:
        for item in fetch(produce(), 8):
            got.extend(item if isinstance(item, list) else [item])

    with pytest.raises(ValueError, match="line 3 is broken") as caught:
        take()
    assert got == [1, 2]
    assert caught.value is failure


@BOTH
def test_closing_early_stops_the_thread(fetch: Prefetcher) -> None:
    threads: list[threading.Thread] = []
    made = 0

    def produce() -> Iterator[int]:
        nonlocal made
        threads.append(threading.current_thread())
        while True:
            made += 1
            yield made

    items: Any = fetch(produce(), 2)
    next(items)
    items.close()
    (thread,) = threads
    assert thread is not threading.current_thread()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert made <= 6  # at most: two lists of 2, one held by the producer, one being produced


@BOTH
def test_the_thread_ends_after_the_last_item(fetch: Prefetcher) -> None:
    threads: list[threading.Thread] = []

    def produce() -> Iterator[int]:
        threads.append(threading.current_thread())
        yield 1

    list(fetch(produce(), 2))
    threads[0].join(timeout=10)
    assert not threads[0].is_alive()


def test_prefetch_produces_at_most_depth_items_in_advance() -> None:
    made = 0

    def produce() -> Iterator[int]:
        nonlocal made
        for number in range(100):
            made = number + 1
            yield number

    items = prefetch(produce(), 3)
    assert next(items) == 0
    assert wait_until(lambda: made == 5)  # one taken, three queued, one held by the producer
    time.sleep(0.25)
    assert made == 5
    items.close()
