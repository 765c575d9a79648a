"""Augmentation: what it does to a pair, how often, and that it is a function of seed, copy and pair."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, strategies as st

from regard.data.augmentation import (
    Augmenter,
    in_capitals,
    title_case,
    with_typos,
    without_final_punctuation,
)
from regard.data.pairs import ContextPair, Pair, TaggedPair, context_of, tags_of
from regard.data.recasing import upper_case
from regard.errors import RegardError
from regard.recipe import AugmentConfig, make_recipe

PAIRS = [Pair(f"This is sentence number {n}.", f"Das ist der Satz Nummer {n}.") for n in range(400)]


def augmented(copy: int = 0, seed: int = 1, **fractions: float) -> list[Pair]:
    return [*map(Augmenter(AugmentConfig(**fractions), seed, copy, copies=10), PAIRS)]


def test_title_case_is_on_both_sides_and_capitals_are_lost_in_the_source() -> None:
    texts = [Pair(f"Peter has {n} Cats.", f"Peter hat {n} Katzen.") for n in range(200)]
    augment = Augmenter(AugmentConfig(upper=0.5, title=0.499), 1, 0, copies=10)
    kinds = Counter[str]()
    for pair, changed in zip(texts, map(augment, texts), strict=True):
        expected = {
            pair: "unchanged",
            Pair(pair.source.capitalize(), pair.target): "recased",
            Pair(title_case(pair.source), title_case(pair.target)): "title",
        }
        kinds[expected[changed]] += 1
    assert kinds["recased"] > 80
    assert kinds["title"] > 80


def test_what_is_learned_from_a_source_in_capitals() -> None:
    # The recased source, as in translation; the target is upper-cased after it.
    long = Pair("Peter sees {name} in Rome. He waits.", "Peter sieht {name} in Rom. Er wartet.")
    assert in_capitals(*long) == ("Peter sees {name} in rome. He waits.", long.target)
    # Too short to be recased in translation.
    assert in_capitals("Cancel", "Abbrechen") == ("CANCEL", "ABBRECHEN")
    # No capitals in the source.
    assert in_capitals("我很好。", "I am fine.") == ("我很好。", "I am fine.")
    assert in_capitals("使用 Usb", "Use USB") == ("使用 Usb", "Use USB")


def test_context_stays() -> None:
    augment = Augmenter(AugmentConfig(upper=0.999), 1, 0, 1)
    pair = ContextPair.with_context(
        TaggedPair.from_pair(Pair("Hello there, Tom", "Hallo, Tom"), ("2de",)), ("Before.",)
    )
    changed = augment(pair)
    assert changed[:2] == ("Hello there, tom", "Hallo, Tom")
    assert (tags_of(changed), context_of(changed)) == (("2de",), ("Before.",))


def test_typos_and_punctuation_are_only_in_the_source() -> None:
    for pair, changed in zip(PAIRS, augmented(typos=0.999), strict=True):
        assert changed.target == pair.target
        assert changed.source != pair.source or "sentennce" in changed.source
        assert sum(map(str.__ne__, changed.source.split(), pair.source.split())) <= 1
    for pair, changed in zip(PAIRS, augmented(no_final_punctuation=0.999), strict=True):
        assert changed == Pair(pair.source.removesuffix("."), pair.target)


def test_each_pair_is_changed_equally_often_over_the_copies() -> None:
    counts = Counter[int]()
    for copy in range(10):
        for number, pair in enumerate(augmented(copy, title=0.1)):
            counts[number] += pair.source.istitle()
    assert {*counts.values()} == {1}
    # In every copy about a tenth of the pairs is changed, never the same ones.
    assert 20 <= sum(pair.source.istitle() for pair in augmented(3, title=0.1)) <= 60


def test_it_depends_on_the_seed_the_copy_and_the_pair_alone() -> None:
    def everything(copy: int, seed: int = 1) -> list[Pair]:
        return augmented(copy, seed, upper=0.2, title=0.2, typos=0.3, no_final_punctuation=0.3)

    assert everything(2) == everything(2)
    assert everything(2) != everything(3)
    assert everything(2) != everything(2, seed=2)
    config = AugmentConfig(upper=0.2, title=0.2, typos=0.3, no_final_punctuation=0.3)
    augment = Augmenter(config, 1, 2, copies=10)
    assert [*map(augment, reversed(PAIRS))][::-1] == everything(2)


def test_tags_stay() -> None:
    augment = Augmenter(AugmentConfig(upper=0.999), 1, 0, 1)
    changed = augment(TaggedPair.from_pair(Pair("a", "b"), ("2de",)))
    assert changed == TaggedPair.from_pair(Pair("A", "B"), ("2de",))


@pytest.mark.parametrize(
    ("text", "upper", "title", "bare"),
    [
        ("Don't stop, {name}!", "DON'T STOP, {name}!", "Don't Stop, {name}!", "Don't stop, {name}"),
        ("see https://a.org/b now", "SEE https://a.org/b NOW", "See https://a.org/b Now", None),
        ("die Straße …", "DIE STRASSE …", "Die Straße …", "die Straße"),
        ("Vraiment ?", "VRAIMENT ?", "Vraiment ?", "Vraiment"),
        ("我很好。", "我很好。", "我很好。", "我很好"),
        ("...", "...", "...", "..."),
        ("", "", "", ""),
    ],
)
def test_the_changes(text: str, upper: str, title: str, bare: str | None) -> None:
    assert upper_case(text) == upper
    assert title_case(text) == title
    assert without_final_punctuation(text) == (text if bare is None else bare)


@given(st.text(max_size=60), st.integers(0, 100))
def test_typos_keep_the_number_of_words_and_short_words(text: str, seed: int) -> None:
    changed = with_typos(text, Random(seed))
    assert len(changed.split()) == len(text.split())
    if all(len(word) < 4 for word in text.split()):
        assert changed == text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"training": {"augment": {"upper": 0.6, "title": 0.6}}}, "their sum must be at most 1"),
        ({"training": {"augment": {"lower": 0.6}}}, "unknown key training.augment.lower"),
        ({"training": {"subword_copies": 3}}, "training.subword_sampling or training.augment"),
        (
            {"task": "tagging", "training": {"augment": {"upper": 0.1}}},
            "training.augment needs task: translation",
        ),
    ],
)
def test_a_wrong_section_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(RegardError, match=problem):
        make_recipe({"data": {"train": {"pairs": "x.tsv"}}, **changes}, "test")


def test_a_typo_swaps_deletes_doubles_or_replaces_a_letter() -> None:
    seen = {with_typos("abcd", Random(seed)) for seed in range(200)}
    assert seen == {
        *("acbd", "abdc"),  # swapped
        *("acd", "abd"),  # deleted
        *("abbcd", "abccd"),  # doubled
        *("aacd", "abbd"),  # replaced by the letter before
    }
