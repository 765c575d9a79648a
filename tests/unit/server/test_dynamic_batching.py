"""The queue: requests that arrive together share a batch, and cancelled ones leave the queue."""

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from regard.inference.worker_pool import BACKGROUND_NICE, in_background
from regard.server.dynamic_batching import CONSTRAINED_COST, Batcher, SearchOptions, Speed, is_small
from regard.server.prometheus import Metrics
from regard.server.schemas import RequestRefused, Settings
from regard.tasks import Translation
from tests.unit.server.client import UppercaseModel, until

DEFAULT_OPTIONS = SearchOptions()


def make_batcher(model: UppercaseModel, **settings: Any) -> Batcher:
    return Batcher(model, Settings(**settings), Metrics().of_model("model"))


async def translate(
    batcher: Batcher, *texts: str, options: SearchOptions = DEFAULT_OPTIONS
) -> list[str]:
    tokens = list(map(len, texts))
    with batcher.submit(texts, tokens, options) as futures:
        return [best.text for best, *_ in await asyncio.gather(*futures)]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_requests_that_arrive_together_share_a_batch() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model, batch_delay=0.05)
        results = await asyncio.gather(*(translate(batcher, f"a{i}", f"b{i}") for i in range(20)))
        assert results == [[f"A{i}", f"B{i}"] for i in range(20)]
        assert [len(batch) for batch in model.batches] == [40]
        assert model.threads.isdisjoint({threading.get_ident()})

    run(test())


def test_requests_that_arrive_during_a_batch_form_the_next_one() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model)
        model.may_continue.clear()
        first = asyncio.create_task(translate(batcher, "first"))
        await until(lambda: len(model.batches) == 1)
        others = [asyncio.create_task(translate(batcher, f"{number}x")) for number in range(9)]
        await until(lambda: batcher.queued == 9)
        model.may_continue.set()
        assert await first == ["FIRST"]
        assert [await other for other in others] == [[f"{number}X"] for number in range(9)]
        assert [len(batch) for batch in model.batches] == [1, 9]
        assert len(model.threads) == 1

    run(test())


def test_only_equal_options_share_a_batch() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model, batch_delay=0.05)
        some = [
            SearchOptions(5),
            SearchOptions(2),
            SearchOptions(5),
            SearchOptions(5, 0.6),
            SearchOptions(2),
        ]
        await asyncio.gather(*(translate(batcher, "x", options=options) for options in some))
        assert model.options == [SearchOptions(5), SearchOptions(2), SearchOptions(5, 0.6)]
        assert [len(batch) for batch in model.batches] == [2, 2, 1]

    run(test())


def test_sentences_with_terms_have_batches_of_their_own() -> None:
    """The sentences of others would have to wait for them, and they take longer, so a batch has fewer of them."""

    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model, batch_delay=0.05, max_batch_cost=160)
        texts, terms = ["aaaaa", "bbbbb", "ccccc", "ddddd", "eeeee"], [["X"], [], ["Y"], [], ["Z"]]
        with batcher.submit(texts, [5] * 5, DEFAULT_OPTIONS, terms) as futures:
            other = asyncio.create_task(translate(batcher, "other"))
            found = [best.text for best, *_ in await asyncio.gather(*futures)]
        assert found == [text.upper() for text in texts]
        assert await other == ["OTHER"]
        assert model.batches == [["bbbbb", "other", "ddddd"], ["aaaaa", "ccccc", "eeeee"]]
        assert model.constraints == [None, [["X"], ["Y"], ["Z"]]]
        assert 3 * 5 * CONSTRAINED_COST <= 160 < 5 * 5 * CONSTRAINED_COST
        with batcher.submit(["aaaaa"] * 5, [5] * 5, DEFAULT_OPTIONS, [["X"]] * 5) as futures:
            await asyncio.gather(*futures)
        assert [len(batch) for batch in model.batches[2:]] == [4, 1]
        assert batcher.queued == 0

    run(test())


def test_a_cancelled_request_with_terms_leaves_the_queue() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model)
        model.may_continue.clear()
        first = asyncio.create_task(translate(batcher, "running"))
        await until(lambda: len(model.batches) == 1)
        with batcher.submit(["a", "b"], [1, 1], DEFAULT_OPTIONS, [["X"], []]):
            assert batcher.queued == 2
        assert batcher.queued == 0
        model.may_continue.set()
        assert await first == ["RUNNING"]

    run(test())


def test_the_fastest_of_the_last_batches_is_the_speed_for_a_while() -> None:
    clock = [0.0]
    speed = Speed(60.0, now=lambda: clock[0])
    assert speed.seconds(1000) == 0.0
    for seconds in (4, 2, 8):
        speed.add(100, seconds)
    assert speed.seconds(1000) == 20.0
    clock[0] = 59.0
    speed.add(100, 10)
    assert speed.seconds(1000) == 20.0
    clock[0] = 61.0
    assert speed.seconds(1000) == 100.0
    clock[0] = 120.0
    assert speed.seconds(1000) == 0.0


def test_a_request_that_cannot_be_finished_in_time_is_refused_early() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model, timeout=2.0, max_batch_cost=100)
        texts = ["x" * 20] * 25
        model.may_continue.clear()
        job = asyncio.create_task(translate(batcher, *texts[:5]))
        await until(lambda: len(model.batches) == 1)
        await asyncio.sleep(1)
        model.may_continue.set()
        await job  # 100 tokens in a second
        with pytest.raises(
            RequestRefused, match="would take about 5 seconds: at most 2"
        ) as refused:
            await translate(batcher, *texts)
        assert refused.value.status == 413
        assert batcher.queued == 0
        model.may_continue.clear()
        jobs = [asyncio.create_task(translate(batcher, *texts[:3])) for _ in range(3)]
        await until(lambda: len(model.batches) == 2)
        assert batcher.queued == 4  # the first five of nine are being translated
        reason = (
            "would take about 3 seconds, because other requests are waiting: at most 2 are allowed"
        )
        with pytest.raises(RequestRefused, match=reason) as refused:
            await translate(batcher, *texts[:9])
        assert (refused.value.status, refused.value.retry_after) == (503, 1)
        small = asyncio.create_task(translate(batcher, "small"))  # its turn comes soon
        await until(lambda: batcher.queued == 5)
        model.may_continue.set()
        assert await small == ["SMALL"]
        await asyncio.gather(*jobs)
        # The last batches were fast, so the same request is accepted now.
        assert len(await translate(batcher, *texts)) == 25

    run(test())


def test_a_batch_stays_within_its_budget_and_a_short_request_does_not_wait_for_a_long_one() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model, batch_delay=0.05, max_batch_cost=40)
        long = asyncio.create_task(translate(batcher, *["0123456789"] * 12))
        await asyncio.sleep(0)
        short = asyncio.create_task(translate(batcher, "abcdefghij"))
        oversized = asyncio.create_task(translate(batcher, "x" * 100))
        assert await short == ["ABCDEFGHIJ"]
        assert "abcdefghij" in model.batches[0]
        assert len(await long) == 12
        assert await oversized == ["X" * 100]  # a sentence over the budget gets a batch of its own
        assert all(sum(map(len, batch)) <= 40 or len(batch) == 1 for batch in model.batches)

    run(test())


def test_a_cancelled_request_leaves_the_queue() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model)
        model.may_continue.clear()
        first = asyncio.create_task(translate(batcher, "running"))
        await until(lambda: len(model.batches) == 1)
        leaving = asyncio.create_task(translate(batcher, *["leaving"] * 100))
        staying = asyncio.create_task(translate(batcher, "here"))
        await until(lambda: batcher.queued == 101)
        leaving.cancel()
        await until(lambda: batcher.queued == 1)
        first.cancel()  # the running search is stopped
        await until(lambda: len(model.batches) == 2)
        model.may_continue.set()
        assert await staying == ["HERE"]
        assert model.batches == [["running"], ["here"]]

    run(test())


def test_a_batch_has_few_long_sentences() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model, batch_delay=0.05)
        await translate(batcher, *["x" * 600] * 3, *["y" * 20] * 300)
        sizes = [(batch.count("x" * 600), batch.count("y" * 20)) for batch in model.batches]
        assert max(long for long, _ in sizes) == 1
        assert max(short for _, short in sizes) > 50
        assert sum(long for long, _ in sizes) == 3

    run(test())


def test_a_search_whose_clients_have_left_stops_and_the_others_are_searched_again() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model, batch_delay=0.05)
        model.may_continue.clear()
        long = asyncio.create_task(translate(batcher, "x" * 100))
        short = asyncio.create_task(translate(batcher, "short"))
        alone = asyncio.create_task(translate(batcher, "a"))
        await until(lambda: len(model.batches) == 1)
        alone.cancel()  # a small part of the work: the search continues
        await asyncio.sleep(0.02)
        assert not model.interrupt.is_set()
        long.cancel()
        await until(lambda: len(model.batches) == 2)
        model.may_continue.set()
        assert await short == ["SHORT"]
        assert model.batches[1:] == [["short"]]
        assert not model.interrupt.is_set()

    run(test())


def test_a_cancelled_call_stops_its_search() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model)
        model.may_continue.clear()
        options = DEFAULT_OPTIONS.arguments()
        calling = asyncio.create_task(batcher.call(lambda: model.search(["call"], **options)))
        await until(lambda: len(model.batches) == 1)
        calling.cancel()
        next_one = asyncio.create_task(translate(batcher, "next"))
        await until(lambda: len(model.batches) == 2)  # the model thread is free again
        model.may_continue.set()
        assert await next_one == ["NEXT"]

    run(test())


def test_a_full_queue_and_an_oversized_request_are_refused() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model, max_queued_sentences=3)
        with pytest.raises(RequestRefused, match="4 sentences in one request") as refused:
            await translate(batcher, *"abcd")
        assert refused.value.status == 413
        model.may_continue.clear()
        first = asyncio.create_task(translate(batcher, "running"))
        await until(lambda: len(model.batches) == 1)
        waiting = asyncio.create_task(translate(batcher, *"ab"))
        await until(lambda: batcher.queued == 2)
        with pytest.raises(RequestRefused) as refused:
            await translate(batcher, *"cd")
        assert refused.value.status == 429
        model.may_continue.set()
        assert await first == ["RUNNING"]
        assert await waiting == ["A", "B"]
        assert await translate(batcher, *"cde") == ["C", "D", "E"]

    run(test())


def test_an_error_fails_only_its_own_sentence() -> None:
    async def test() -> None:
        batcher = make_batcher(UppercaseModel(), batch_delay=0.05)
        jobs = [translate(batcher, text) for text in ("good", "bad", "fine")]
        good, bad, fine = await asyncio.gather(*jobs, return_exceptions=True)
        assert (good, fine) == (["GOOD"], ["FINE"])
        assert isinstance(bad, ValueError)

    run(test())


def test_drain_finishes_the_queue_and_refuses_new_requests() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model, max_batch_cost=4)
        jobs = [asyncio.create_task(translate(batcher, f"ab{number}")) for number in range(5)]
        await asyncio.sleep(0)
        ending = asyncio.create_task(batcher.drain())
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused) as refused:
            await translate(batcher, "late")
        assert refused.value.status == 503
        await ending
        assert [await job for job in jobs] == [[f"AB{number}"] for number in range(5)]

    run(test())


def test_calls_run_in_the_model_thread_and_count_as_queued() -> None:
    async def test() -> None:
        model = UppercaseModel()
        batcher = make_batcher(model, max_queued_sentences=1)
        await translate(batcher, "x")
        model.may_continue.clear()
        calling = asyncio.create_task(
            batcher.call(lambda: (model.may_continue.wait(10), threading.get_ident())[1])
        )
        await until(lambda: batcher.queued == 1)
        with pytest.raises(RequestRefused):
            await translate(batcher, "y")
        model.may_continue.set()
        assert {await calling} == model.threads
        assert batcher.queued == 0

    run(test())


def test_an_admitted_request_may_use_the_model_after_the_shutdown_began() -> None:
    async def test() -> None:
        batcher = make_batcher(UppercaseModel(), max_queued_sentences=1)
        with batcher.admit():
            with pytest.raises(RequestRefused, match="the queue is full"):
                await batcher.call(lambda: 1)
            assert await batcher.run(lambda: 2) == 2
            batcher.closed = True
            assert await batcher.run(lambda: 3) == 3
        with pytest.raises(RequestRefused, match="shutting down"), batcher.admit():
            pass
        assert batcher.queued == 0

    run(test())


def test_an_empty_request_returns_at_once() -> None:
    async def test() -> None:
        model = UppercaseModel()
        assert await translate(make_batcher(model)) == []
        assert model.batches == []

    run(test())


@pytest.mark.parametrize(
    ("tokens", "beam", "small"),
    [
        ([40, 40], 4, True),
        ([41], 1, False),
        ([20] * 12, 4, True),
        ([20] * 13, 4, False),
        ([30], 35, False),
    ],
)
def test_small_requests_are_short_and_cheap(tokens: list[int], beam: int, small: bool) -> None:
    assert is_small(tokens, beam) is small


class SlowForLargeModel(UppercaseModel):
    """Blocks only for long texts. Records the priority of each search."""

    def __init__(self) -> None:
        super().__init__()
        self.priorities: dict[str, int] = {}

    def search(self, texts: Sequence[str], **options: Any) -> list[list[Translation]]:
        thread = threading.get_native_id()
        self.priorities[texts[0][:5]] = os.getpriority(os.PRIO_PROCESS, thread)
        assert in_background() is (len(texts[0]) == 200)
        if len(texts[0]) == 200:
            return super().search(texts, **options)
        return UppercaseModel().search(texts, **options)


def test_small_requests_and_calls_do_not_wait_for_large_ones() -> None:
    async def test() -> None:
        model = SlowForLargeModel()
        batcher = Batcher(model, Settings(), Metrics().of_model("model"), concurrent=True)
        model.may_continue.clear()
        large = asyncio.create_task(translate(batcher, "x" * 200))
        await until(lambda: len(model.batches) == 1)
        assert await translate(batcher, "small") == ["SMALL"]
        assert await batcher.call(lambda: "call") == "call"
        assert not large.done()
        model.may_continue.set()
        assert await large == ["X" * 200]
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        if sys.platform == "linux":
            assert model.priorities == {"xxxxx": min(19, usual + BACKGROUND_NICE), "small": usual}
        batcher.close()

    run(test())


def test_a_stopped_search_does_not_fail_others() -> None:
    """The interrupt flag stops all searches of a model; those that somebody waits for begin again."""

    async def test() -> None:
        model = UppercaseModel()
        batcher = Batcher(model, Settings(), Metrics().of_model("model"), concurrent=True)
        model.may_continue.clear()
        large = asyncio.create_task(translate(batcher, "x" * 200))
        small = asyncio.create_task(translate(batcher, "small"))
        options: dict[str, Any] = {"beam": None, "length_penalty": None, "nbest": 1}
        call = asyncio.create_task(batcher.call(lambda: model.search(["call"], **options)))
        await until(lambda: len(model.batches) == 3)
        large.cancel()
        # Both others are stopped too, or the flag is cleared before they see it.
        await until(lambda: large.done() and not model.interrupt.is_set())
        model.may_continue.set()
        assert await small == ["SMALL"]
        assert (await call)[0][0].text == "CALL"
        assert not model.interrupt.is_set()

    run(test())


def test_the_usual_delay_is_short() -> None:
    """A request waits for others to come, but not so long that its client would notice."""
    assert 0.001 <= Settings().batch_delay <= 0.02
