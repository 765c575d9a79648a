"""The likelihood-ratio test for unrelated pairs, on a corpus from the demo's grammar."""

import random

import numpy as np
import pytest

from regard.data.ibm_model1 import Lexicon
from regard.data.likelihood_ratio import LikelihoodRatio
from regard.data.pairs import Pair
from regard.data.quality import RuleSet, Unrelated, make_rules, survey
from regard.data.text_features import Mask, PairBatch
from regard.demo.corpus import generate

CLEAN = list(generate("train", 4_000))


def planted(share: float) -> tuple[list[Pair], Mask]:
    """The corpus with some targets exchanged, and where they are."""
    draw = random.Random(1)
    rows = draw.sample(range(len(CLEAN)), round(share * len(CLEAN)))
    pairs = list(CLEAN)
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        pairs[row] = Pair(CLEAN[row].source, CLEAN[other].target)
    marks = np.zeros(len(pairs), np.bool_)
    marks[rows] = True
    return pairs, marks


def rejected(pairs: list[Pair], *settings: str) -> Mask:
    rule = RuleSet(make_rules(settings), survey(pairs)).rules["unrelated"]
    assert isinstance(rule, Unrelated)
    return rule.find(PairBatch(pairs))


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_targets_of_other_sources_are_found(share: float) -> None:
    pairs, wrong = planted(share)
    marks = rejected(pairs)
    assert marks[wrong].mean() > 0.9
    assert marks[~wrong].mean() < 0.01
    assert (marks == rejected(pairs)).all()


def test_a_clean_corpus_loses_nothing() -> None:
    assert rejected(CLEAN).mean() < 0.001


def test_thresholds() -> None:
    pairs, _ = planted(0.1)
    default, strict, precise = (
        rejected(pairs, *settings).sum()
        for settings in ((), ["unrelated.max_log_odds=-15"], ["unrelated.min_precision=1.1"])
    )
    assert 0 < strict < default
    assert 0 < precise < default


def test_a_pair_is_judged_by_a_table_that_was_learned_without_it() -> None:
    # Words that occur only in this wrong pair would otherwise be translations of each other.
    wrong = Pair("Quokka wombat numbat bilby.", "Schraube Mutter Dübel Nagel.")
    pairs = [*CLEAN, *[wrong] * 8]
    lexicon = Lexicon(pairs)
    batch = PairBatch([wrong])
    words = lexicon.encode(batch)
    assert words.sources.counts.tolist() == words.targets.counts.tolist() == [4]
    assert lexicon.scores(words).tolist() == [0]
    seen = words._replace(folds=1 - words.folds)
    assert lexicon.scores(seen)[0] > 0.1


def test_log_odds_are_of_translations_against_shuffled_pairs() -> None:
    test = LikelihoodRatio(Lexicon(CLEAN), CLEAN)
    assert (test.aligned > 0).mean() > 0.99
    assert (test.shuffled < 0).mean() > 0.9
    np.testing.assert_allclose(test.log_odds(PairBatch(CLEAN)), test.aligned)
    assert test.log_odds(PairBatch([Pair("", "")])).shape == (1,)
    assert test.log_odds(PairBatch([])).shape == (0,)


@pytest.mark.parametrize(
    "pairs",
    [
        CLEAN[:1_000] * 3,
        [Pair(pair.source, "Unbekannt") for pair in CLEAN],
        [Pair("我们" * (1 + n % 4), "we " * (1 + n % 4)) for n in range(600)],
    ],
    ids=["three copies", "one target", "few pairs"],
)
def test_pairs_that_shuffling_does_not_change_are_not_unrelated(pairs: list[Pair]) -> None:
    assert rejected(pairs).mean() < 0.002
