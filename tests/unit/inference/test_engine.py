"""The engine: a search can be stopped between two steps."""

import sys
from pathlib import Path

import pytest

from regard.inference.engine import SearchInterrupted
from regard.inference.worker_pool import WorkerPool
from regard.tasks import Translator


@pytest.mark.parametrize("workers", [False, True])
@pytest.mark.parametrize("beam", [1, 3])
def test_an_interrupted_search_stops(finished_run: Path, workers: bool, beam: int) -> None:
    if workers and sys.platform != "linux":
        pytest.skip("worker processes need fork, which only Linux has")
    model = Translator.load(finished_run, "cpu", threads=2)
    if workers:
        model.engine.pool = WorkerPool(model.engine.generate_batch, 2)
    texts = ["ein Hund", "a dog", "ein Hund a dog"]
    before = model.translate(texts, beam=beam)
    model.interrupt.set()
    with pytest.raises(SearchInterrupted):
        model.translate(texts, beam=beam)
    model.interrupt.clear()
    assert model.translate(texts, beam=beam) == before
    model.engine.stop_workers()
