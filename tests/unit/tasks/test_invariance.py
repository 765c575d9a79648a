"""A translation in fp32 depends on nothing but its text and the run; the exceptions of int8 are bounded."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from regard.data.pairs import Pair
from regard.inference import network_decoder
from regard.inference.worker_pool import WorkerPool
from regard.recipe import Precision
from regard.tasks import Translator

pytestmark = pytest.mark.filterwarnings(  # pytest has threads
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
RUNS: dict[str, dict[str, Any]] = {
    "packed": {"model": {"norm_order": "pre", "position": "rotary"}},
    "post-norm, words": {"tokenizer": {"kind": "word", "vocab_size": 200}},
    "not packed": {"model": {"position": "relative", "norm": "batch"}},
}
TEXTS = 16


@pytest.fixture(scope="module")
def texts(pairs: list[Pair]) -> list[str]:
    """Texts of many lengths, one of them blank and two of them equal."""
    sources = [pair.source for pair in pairs]
    few = [" ".join(sources[number : number + 1 + number % 3]) for number in range(TEXTS - 2)]
    return [*few, "", few[0]]


@pytest.fixture(scope="module", params=RUNS)
def folder(request: pytest.FixtureRequest, make_run: Callable[..., Path]) -> Path:
    return make_run(**RUNS[request.param])


def load(folder: Path, precision: Precision = "fp32") -> Translator:
    return Translator.load(folder, "cpu", precision)


def translate(model: Translator, texts: list[str], sizes: list[int], **options: Any) -> list[str]:
    """Translate in calls of these sizes, repeated until all texts are done."""
    found: list[str] = []
    while len(found) < len(texts):
        size = sizes[len(found) % len(sizes)]
        found += model.translate(texts[len(found) : len(found) + size], **options)
    return found


def test_fp32_is_the_same_whatever_the_batch_order_and_threads(
    folder: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder)
    model.engine.threads = 1
    options: dict[str, Any] = {"beam": 3, "max_length": 8}
    expected = dict(zip(texts, model.translate(texts, **options), strict=True))
    assert len({*expected.values()}) > 4

    @settings(max_examples=3)
    @given(
        st.permutations(range(TEXTS)),
        st.lists(st.integers(1, TEXTS), min_size=1, max_size=3),
        st.integers(1, 3),
        st.sampled_from([64, 4096]),
    )
    def check(order: list[int], sizes: list[int], threads: int, tokens: int) -> None:
        some = [texts[number] for number in order]
        model.engine.threads = threads
        monkeypatch.setattr(network_decoder, "CPU_TOKENS", tokens)
        assert translate(model, some, sizes, **options) == [expected[one] for one in some]

    check()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_workers_give_the_same_as_threads(
    make_run: Callable[..., Path],
    texts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
) -> None:
    monkeypatch.setattr(WorkerPool, "is_safe", lambda: True)  # other tests have started threads
    model = load(make_run(**RUNS["packed"]), precision)
    model.engine.threads = 2
    expected = model.translate(texts)
    model.start_workers()
    try:
        assert model.engine.pool is not None
        assert model.translate(texts) == expected
    finally:
        model.engine.stop_workers()


def test_int8_depends_on_the_number_of_texts_only_where_the_cache_is_bfloat16(
    make_run: Callable[..., Path], texts: list[str]
) -> None:
    """Greedy search: never. Beam search: only between calls of up to three texts (not blank) and larger ones."""
    model = load(make_run(**RUNS["packed"]), "int8")
    draw = random.Random(1)
    shuffled = draw.sample(texts, len(texts))
    for options, few, many in (
        ({"beam": 1, "max_length": 8}, [1, 3], [9]),
        ({"beam": 4, "max_length": 8}, [5, 6], [16]),
    ):
        expected = dict(zip(texts, translate(model, texts, many, **options), strict=True))
        found = translate(model, shuffled, few, **options)
        assert found == [expected[text] for text in shuffled], options
    # A random model has many translations of almost the same score, so the scores are compared.
    together = [best.score for best, *_ in model.search(texts, beam=4, max_length=8)]
    alone = [model.search([text], beam=4, max_length=8)[0][0].score for text in texts]
    assert alone == pytest.approx(together, rel=0.05)
