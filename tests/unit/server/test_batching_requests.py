"""Requests that arrive together are translated together; those that leave, leave the queue."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from regard.server.batching import Batcher, Options, RequestRefused
from regard.server.metrics import Metrics
from regard.server.settings import Settings
from regard.tasks import Translation


class Upper:
    """A model that writes in capitals, and remembers what it was given. It can be made to wait."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.options: list[Options] = []
        self.threads: set[int] = set()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def search(
        self, texts: Sequence[str], *, beam: int | None, alpha: float | None, nbest: int
    ) -> list[list[Translation]]:
        self.batches.append(list(texts))
        self.options.append(Options(beam, alpha, nbest))
        self.threads.add(threading.get_ident())
        assert self.may_go_on.wait(20)
        if "bad" in texts:
            raise ValueError("bad")
        ends = [""] + [f" {rank}" for rank in range(1, nbest)]
        return [
            [Translation(text.upper() + end, 0.0, 0.0, [text], [0.0], True) for end in ends]
            for text in texts
        ]


def make(model: Upper, **settings: Any) -> Batcher:
    return Batcher(model, Settings(**settings), Metrics())


async def translate(batcher: Batcher, *texts: str, options: Options = Options()) -> list[str]:  # noqa: B008
    with batcher.queued(texts, options) as answers:
        return [best.text for best, *_ in await asyncio.gather(*answers)]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.001)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_what_arrives_together_is_one_batch() -> None:
    async def test() -> None:
        model = Upper()
        batcher = make(model, batch_wait=0.05)
        found = await asyncio.gather(*(translate(batcher, f"a{i}", f"b{i}") for i in range(20)))
        assert found == [[f"A{i}", f"B{i}"] for i in range(20)]
        assert [len(batch) for batch in model.batches] == [40]
        assert model.threads.isdisjoint({threading.get_ident()})

    run(test())


def test_what_arrives_during_a_batch_is_the_next_one() -> None:
    async def test() -> None:
        model = Upper()
        batcher = make(model)
        model.may_go_on.clear()
        first = asyncio.create_task(translate(batcher, "first"))
        await until(lambda: len(model.batches) == 1)
        others = [asyncio.create_task(translate(batcher, f"{number}x")) for number in range(9)]
        await until(lambda: batcher.waiting == 9)
        model.may_go_on.set()
        assert await first == ["FIRST"]
        assert [await other for other in others] == [[f"{number}X"] for number in range(9)]
        assert [len(batch) for batch in model.batches] == [1, 9]
        assert len(model.threads) == 1

    run(test())


def test_only_equal_options_share_a_batch() -> None:
    async def test() -> None:
        model = Upper()
        batcher = make(model, batch_wait=0.05)
        some = [Options(5), Options(2), Options(5), Options(5, 0.6), Options(2)]
        await asyncio.gather(*(translate(batcher, "x", options=options) for options in some))
        assert model.options == [Options(5), Options(2), Options(5, 0.6)]
        assert [len(batch) for batch in model.batches] == [2, 2, 1]

    run(test())


def test_a_batch_keeps_to_its_budget_and_a_short_request_does_not_wait_for_a_long_one() -> None:
    async def test() -> None:
        model = Upper()
        batcher = make(model, batch_wait=0.05, batch_characters=40)
        long = asyncio.create_task(translate(batcher, *["0123456789"] * 12))
        await asyncio.sleep(0)
        short = asyncio.create_task(translate(batcher, "abcdefghij"))
        giant = asyncio.create_task(translate(batcher, "x" * 100))
        assert await short == ["ABCDEFGHIJ"]
        assert "abcdefghij" in model.batches[0]
        assert len(await long) == 12
        assert await giant == ["X" * 100]  # a sentence beyond the budget goes alone
        assert all(sum(map(len, batch)) <= 40 or len(batch) == 1 for batch in model.batches)

    run(test())


def test_who_goes_away_leaves_the_queue() -> None:
    async def test() -> None:
        model = Upper()
        batcher = make(model)
        model.may_go_on.clear()
        first = asyncio.create_task(translate(batcher, "in work"))
        await until(lambda: len(model.batches) == 1)
        leaving = asyncio.create_task(translate(batcher, *["gone"] * 100))
        staying = asyncio.create_task(translate(batcher, "here"))
        await until(lambda: batcher.waiting == 101)
        leaving.cancel()
        await until(lambda: batcher.waiting == 1)
        first.cancel()  # what is in work cannot be stopped; its answer goes nowhere
        model.may_go_on.set()
        assert await staying == ["HERE"]
        assert model.batches == [["in work"], ["here"]]

    run(test())


def test_a_full_queue_refuses_and_one_request_can_be_too_large() -> None:
    async def test() -> None:
        model = Upper()
        batcher = make(model, queue_sentences=3)
        with pytest.raises(RequestRefused, match="4 sentences in one request") as refused:
            await translate(batcher, *"abcd")
        assert refused.value.status == 413
        model.may_go_on.clear()
        first = asyncio.create_task(translate(batcher, "in work"))
        await until(lambda: len(model.batches) == 1)
        waiting = asyncio.create_task(translate(batcher, *"ab"))
        await until(lambda: batcher.waiting == 2)
        with pytest.raises(RequestRefused) as refused:
            await translate(batcher, *"cd")
        assert refused.value.status == 429
        model.may_go_on.set()
        assert await first == ["IN WORK"]
        assert await waiting == ["A", "B"]
        assert await translate(batcher, *"cde") == ["C", "D", "E"]

    run(test())


def test_an_error_is_the_answer_of_its_own_sentence_only() -> None:
    async def test() -> None:
        batcher = make(Upper(), batch_wait=0.05)
        jobs = [translate(batcher, text) for text in ("good", "bad", "fine")]
        good, bad, fine = await asyncio.gather(*jobs, return_exceptions=True)
        assert (good, fine) == (["GOOD"], ["FINE"])
        assert isinstance(bad, ValueError)

    run(test())


def test_the_end_finishes_what_is_there_and_refuses_the_rest() -> None:
    async def test() -> None:
        model = Upper()
        batcher = make(model, batch_characters=4)
        jobs = [asyncio.create_task(translate(batcher, f"ab{number}")) for number in range(5)]
        await asyncio.sleep(0)
        ending = asyncio.create_task(batcher.finish())
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused) as refused:
            await translate(batcher, "late")
        assert refused.value.status == 503
        await ending
        assert [await job for job in jobs] == [[f"AB{number}"] for number in range(5)]

    run(test())


def test_other_work_is_done_by_the_thread_of_the_model_and_counts() -> None:
    async def test() -> None:
        model = Upper()
        batcher = make(model, queue_sentences=1)
        await translate(batcher, "x")
        model.may_go_on.clear()
        calling = asyncio.create_task(
            batcher.call(lambda: (model.may_go_on.wait(10), threading.get_ident())[1])
        )
        await until(lambda: batcher.waiting == 1)
        with pytest.raises(RequestRefused):
            await translate(batcher, "y")
        model.may_go_on.set()
        assert {await calling} == model.threads
        assert batcher.waiting == 0

    run(test())


def test_nothing_to_translate_is_translated_at_once() -> None:
    async def test() -> None:
        model = Upper()
        assert await translate(make(model)) == []
        assert model.batches == []

    run(test())
