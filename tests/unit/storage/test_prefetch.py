"""Items made in another thread: the same items, in order, and no thread left behind."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from regard.storage.prefetch import ahead, portions

Way = Callable[[Iterable[Any], int], Iterator[Any]]
BOTH = pytest.mark.parametrize("way", [ahead, portions])


def wait_until(holds: Callable[[], bool]) -> bool:
    """Whether it comes true within a time no machine needs."""
    end = time.monotonic() + 10
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


@settings(max_examples=50)
@given(items=st.lists(st.integers()), depth=st.integers(1, 5))
def test_ahead_gives_the_same_items_in_order(items: list[int], depth: int) -> None:
    assert list(ahead(items, depth)) == items


@settings(max_examples=50)
@given(items=st.lists(st.none() | st.text()), most=st.integers(1, 5))
def test_portions_hold_the_same_items_in_order(items: list[str | None], most: int) -> None:
    lists = list(portions(items, most))
    assert [item for portion in lists for item in portion] == items
    assert all(1 <= len(portion) <= most for portion in lists)


def test_a_portion_holds_all_that_was_there() -> None:
    go, done = threading.Event(), threading.Event()

    def maker() -> Iterator[int]:
        yield 1
        go.wait(10)
        yield from (2, 3, 4)
        done.set()

    making = portions(maker(), 9)
    assert next(making) == [1]
    go.set()
    assert done.wait(10)
    assert next(making) == [2, 3, 4]


@BOTH
def test_items_before_an_error_come_first_and_then_the_error_itself(way: Way) -> None:
    failure = ValueError("line 3 is broken")

    def maker() -> Iterator[int]:
        yield 1
        yield 2
        raise failure

    got: list[Any] = []

    def take() -> None:
        for item in way(maker(), 8):
            got.extend(item if isinstance(item, list) else [item])

    with pytest.raises(ValueError, match="line 3 is broken") as caught:
        take()
    assert got == [1, 2]
    assert caught.value is failure


@BOTH
def test_closing_early_stops_the_thread(way: Way) -> None:
    threads: list[threading.Thread] = []
    made = 0

    def maker() -> Iterator[int]:
        nonlocal made
        threads.append(threading.current_thread())
        while True:
            made += 1
            yield made

    making: Any = way(maker(), 2)
    next(making)
    making.close()
    (thread,) = threads
    assert thread is not threading.current_thread()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert made <= 6  # at most: two portions of 2, one in hand, one on the way


@BOTH
def test_the_thread_ends_with_the_items(way: Way) -> None:
    threads: list[threading.Thread] = []

    def maker() -> Iterator[int]:
        threads.append(threading.current_thread())
        yield 1

    list(way(maker(), 2))
    threads[0].join(timeout=10)
    assert not threads[0].is_alive()


def test_ahead_makes_as_many_as_it_may_and_no_more() -> None:
    made = 0

    def maker() -> Iterator[int]:
        nonlocal made
        for number in range(100):
            made = number + 1
            yield number

    making = ahead(maker(), 3)
    assert next(making) == 0
    assert wait_until(lambda: made == 5)  # one taken, three waiting, one in the maker's hand
    time.sleep(0.25)
    assert made == 5
    making.close()
