"""Minimum Bayes risk: chrF of each with each against sacreBLEU, and what is chosen."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sacrebleu.metrics.chrf import CHRF

from regard.metrics.mbr import mbr_rank, pairwise_chrf
from regard.tasks import Translator

TEXTS = st.lists(st.text("ab c.ä", max_size=12), min_size=1, max_size=6)


@settings(max_examples=60)
@given(texts=TEXTS)
def test_chrf_of_each_with_each_is_sacrebleus(texts: list[str]) -> None:
    theirs = CHRF()
    wanted = [[theirs.sentence_score(one, [other]).score for other in texts] for one in texts]
    assert pairwise_chrf(texts) * 100 == pytest.approx(np.array(wanted), abs=1e-9)


def test_what_comes_often_counts_often() -> None:
    samples = ["a dog", "a dog", "a dot", "the cat", "a dog"]
    (best, mean), *others = mbr_rank(samples)
    assert (best, len(others)) == (0, 2)
    each = pairwise_chrf(samples)
    assert mean == pytest.approx(each[0].mean())
    assert [place for place, _ in others] == [2, 3]


def test_the_sample_with_the_least_risk_is_given(make_run: Callable[..., Path]) -> None:
    model = Translator.load(make_run(), device="cpu")
    texts = ["the dog sees a cat", "", "no"]
    found = model.search(texts, mbr=8, nbest=3, temperature=2.0)
    samples = model.search(texts, nbest=8, temperature=2.0)
    first = [one.text for one in samples[0]]
    best = mbr_rank(first)[:3]
    assert [(one.text, one.score) for one in found[0]] == [(first[i], mean) for i, mean in best]
    assert found[1][0].text == ""
    assert model.search(texts, mbr=8, nbest=3, temperature=2.0) == found


def test_what_is_drawn_for_a_text_does_not_depend_on_those_before_it(
    make_run: Callable[..., Path],
) -> None:
    """Lines on standard input come as they like: all at once, or one after another."""
    model = Translator.load(make_run(), device="cpu")
    texts = ["the dog sees a cat", "no", "a dog", "no"]

    def of(some: list[str]) -> tuple[list[list[str]], list[list[str]]]:
        least_risk = model.search(some, mbr=4, nbest=4, temperature=2.0)
        return [[s.text for s in each] for each in least_risk], [
            s.tokens for (s,) in model.search(some, temperature=1.0)
        ]

    together, sampled = of(texts)
    for row, text in enumerate(texts[:3]):
        assert of([text]) == ([together[row]], [sampled[row]])
    assert together[3] == together[1]


def test_samples_of_a_text_are_the_same_however_many_work_and_never_repeat_in_step(
    make_run: Callable[..., Path],
) -> None:
    run, texts = make_run(), ["a dog"] * 24
    found = [
        [
            one.tokens
            for (one,) in Translator.load(run, "cpu", threads=threads).search(
                texts, temperature=1.0
            )
        ]
        for threads in (1, 2, 3)
    ]
    assert found[0] == found[1] == found[2]
    assert found[0][:12] != found[0][12:]
    other = Translator.load(run, "cpu").search(texts, temperature=1.0, seed=2)
    assert [one.tokens for (one,) in other] != found[0]
