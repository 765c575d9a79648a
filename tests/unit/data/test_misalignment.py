"""The word-by-word translation model; tests/unit/data/test_quality.py has what it finds in a corpus."""

import random
from math import log

import numpy as np
import pytest

from regard.data.misalignment import (
    HashIndex,
    Lexicon,
    LikelihoodRatio,
    WordIds,
    _side_log_odds,
    _strongest,
)
from regard.data.pairs import Pair
from regard.data.quality import RuleSet, Unrelated, make_rules, survey
from regard.data.text_features import Hashes, Mask, PairBatch, Words
from regard.demo.corpus import generate


def hashes(*numbers: int) -> Hashes:
    """Hashes that differ in their leading bits."""
    return np.array(numbers, np.uint64) << np.uint64(64 - HashIndex.bits)


def test_hashes_are_found_by_their_ids() -> None:
    index = HashIndex(hashes(7, 3, 5))
    assert index.find(hashes(5, 7, 4, 3)).tolist() == [2, 0, -1, 1]
    assert index.find(hashes(7) + np.uint64(1)).tolist() == [-1]  # the same leading bits


def test_words_of_one_side_have_odds() -> None:
    """Half an occurrence is added to each count; odds of more than e^4 count as e^4, rare words not at all."""
    texts = {1: (9, 1), 2: (1, 9), 3: (2, 0), 4: (0, 1000)}  # word: occurrences in sources, targets
    source, target = (
        hashes(*(word for word, counts in texts.items() for _ in range(counts[side])))
        for side in (0, 1)
    )
    index, odds = _side_log_odds(
        Words(source, np.array([len(source)])), Words(target, np.array([len(target)]))
    )
    found = index.find(hashes(1, 2, 4, 3))
    assert odds[found[:3]] == pytest.approx([log(1.5 / 9.5), log(9.5 / 1.5), 4.0])
    assert found[3] == -1


def test_the_best_translation_is_in_the_same_pair() -> None:
    """Two pairs and one without words: the strong translation of the first word is in the other pair."""
    table = np.array([[51, 255], [102, 204]], np.uint8)
    sources = WordIds(np.array([0, 1, 1]), np.array([2, 0, 1]))
    targets = WordIds(np.array([0, 0, 1]), np.array([1, 0, 2]))
    rows = 2 * sources.ids
    best = _strongest(table.ravel(), rows, sources.counts, targets.ids, targets.counts)
    assert best.tolist() == [51, 102, 204]


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
