"""The rules for noise in pairs: each finds its kind of noise, and none of them finds anything in clean pairs."""

import inspect
import re
from collections import Counter
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from regard.data import quality
from regard.data.misalignment import PairSample, viterbi
from regard.data.pairs import Pair
from regard.data.quality import (
    QUALITY_RULES,
    Misaligned,
    RuleSet,
    make_rules,
    survey,
    threshold_names,
)
from regard.data.text_features import (
    HAN,
    MAX_WORDS,
    STEM,
    KeyCounter,
    PairBatch,
    TextBatch,
    batches,
    character_table,
)
from regard.demo.corpus import generate
from regard.errors import RegardError

CLEAN = list(generate("train", 2_000))
FRENCH = "Le petit chien traverse la rue parce qu'il est très fatigué aujourd'hui."


@pytest.fixture(scope="module")
def facts() -> quality.CorpusFacts:
    test = {"test": [Pair("The end, my only friend!", "x")]}
    return survey(CLEAN, ("en", "de"), test)


def found(pairs: list[Pair], facts: quality.CorpusFacts, **settings: Any) -> dict[str, list[int]]:
    """The numbers of the pairs that each rule finds."""
    rules = RuleSet(make_rules(**settings), facts)
    marks: dict[str, list[int]] = {}
    for batch in batches(pairs):
        for name, mask in rules.apply(batch):
            if mask.any():
                marks.setdefault(name, []).extend((np.flatnonzero(mask) + batch.start).tolist())
    return marks


DOG = Pair(
    "The dog sees the cat near the old house.", "Der Hund sieht die Katze bei dem alten Haus."
)

NOISE = [
    ("empty", DOG._replace(target=" \u00a0")),
    ("no_text", DOG._replace(source="-- … --")),
    ("encoding", DOG._replace(target="Die MÃ¤nner sehen das alte Haus in der Stadt.")),
    ("encoding", DOG._replace(target="â€žJaâ€œ, sagte der Mann zu der Frau im Haus.")),
    ("encoding", DOG._replace(target="Die M\ufffdnner sehen das alte Haus in der Stadt.")),
    ("encoding", DOG._replace(target="Die M?nner sehen das alte Haus in der Stadt.")),
    ("encoding", DOG._replace(target="æ—¥æœ¬èªž Katze Haus Hund und die alte Frau")),
    ("control_characters", DOG._replace(source="The dog\x07 sees the cat near the house.")),
    ("control_characters", DOG._replace(source="The dog\tsees the cat near the house.")),
    ("control_characters", DOG._replace(source="The dog\u2028sees the cat near the house.")),
    ("html", DOG._replace(target="Der Hund<br/>sieht die Katze bei dem Haus.")),
    ("html", DOG._replace(target="Der Hund&nbsp;sieht die Katze bei dem Haus.")),
    ("length", Pair("The dog " * 150, "Der Hund " * 150)),
    ("ratio", DOG._replace(target="Der Hund.")),
    ("copy", DOG._replace(target=DOG.source)),
    ("copy", DOG._replace(target=DOG.source.upper())),
    ("copy", DOG._replace(target="Der dog sees the cat near the old house.")),
    ("script", DOG._replace(target="Собака видит кошку у старого дома.")),
    ("swapped", Pair(DOG.target, DOG.source)),
    ("untranslated", DOG._replace(target="The woman is too tired and the street was too wide.")),
    ("language", DOG._replace(target=FRENCH)),
    ("language", DOG._replace(target=f"{DOG.target} {FRENCH}")),
    ("numbers", Pair("The dog sees 12 cats.", "Der Hund sieht 21 Katzen.")),
    ("placeholders", Pair("The dog sees {name} today.", "Der Hund sieht {nome} heute.")),
    ("placeholders", Pair("See www.example.org for the dog.", "Siehe www.example.com zum Hund.")),
    ("overlap", Pair("The end my only friend.", "Das Ende, mein einziger Freund.")),
    ("all_caps", Pair(DOG.source.upper(), DOG.target.upper())),
    (
        "several_sentences",
        Pair("The dog sleeps. The cat runs.", "Der Hund schläft. Die Katze rennt."),
    ),
]


@pytest.mark.parametrize(("rule", "pair"), NOISE)
def test_each_rule_finds_its_noise(rule: str, pair: Pair, facts: quality.CorpusFacts) -> None:
    skip = [] if rule == "language" else ["language"]
    assert rule in found([pair], facts, skip=skip)


def test_two_sides_in_one_language_are_not_swapped(facts: quality.CorpusFacts) -> None:
    """Only if each side looks like the other one are they swapped."""
    german = "Die Frau ist zu müde, und die Straße war zu breit."
    assert "swapped" not in found([DOG._replace(source=german)], facts, skip=["language"])
    english = "The woman is too tired and the street was too wide."
    assert "swapped" not in found([DOG._replace(target=english)], facts, skip=["language"])


@pytest.mark.parametrize(
    ("character", "script"),
    [
        ("a", "LATIN"),
        ("Ａ", "LATIN"),  # full width
        ("ж", "CYRILLIC"),
        ("한", "HANGUL"),
        ("ﾡ", "HANGUL"),  # half width
        ("犬", HAN),
        ("ひ", HAN),
        ("カ", HAN),
        ("!", "none"),
    ],
)
def test_the_script_of_a_character(character: str, script: str) -> None:
    table = character_table()
    assert table.names[table.scripts[ord(character)]] == script


def test_every_rule_has_an_example() -> None:
    counting = {"duplicate", "near_duplicate", "repeated_source", "repeated_target", "many_targets"}
    assert {rule for rule, _ in NOISE} | counting | {"misaligned", "unrelated"} == {*QUALITY_RULES}


@pytest.mark.parametrize(
    "pair",
    [
        DOG,
        Pair("It's 3:30 and 1,000 dogs sleep.", "Es ist 3.30 Uhr, und 1.000 Hunde schlafen."),
        Pair("She said “yes” – no fun…", "Sie sagte „ja“ – kein Spaß“…"),
        Pair("<b>Save</b> {count} files to %s", "{count} Dateien auf %s <b>sichern</b>"),
        Pair(
            "Why? See https://x.org/?a=b about the dog.",
            "Wieso? Siehe https://x.org/?a=b zum Hund.",
        ),
        Pair("Hi.", "Grüß Gott!"),
        Pair("The café – naïve, Ångström, façade", "Das Café – naiv, Ångström, Fassade"),
    ],
)
def test_clean_pairs_pass(pair: Pair, facts: quality.CorpusFacts) -> None:
    reports = {name for name, kind in QUALITY_RULES.items() if not kind.rejects}
    assert {*found([pair], facts)} <= reports


def test_clean_corpora_pass(facts: quality.CorpusFacts) -> None:
    lost = found(CLEAN, facts, skip=["duplicate", "near_duplicate", "language"])
    rejected = {one for name, marks in lost.items() if QUALITY_RULES[name].rejects for one in marks}
    assert len(rejected) < 0.01 * len(CLEAN)


def test_only_later_duplicates_are_found(facts: quality.CorpusFacts) -> None:
    pairs = [DOG, Pair("The Dog sees the cat near the old house", f"{DOG.target[:-1]}!"), DOG]
    marks = found(pairs, facts)
    assert (marks["duplicate"], marks["near_duplicate"]) == ([2], [1])
    # A pair that is rejected for another reason is no original.
    damaged = DOG._replace(source="The dog\x07 sees the cat near the old house.")
    assert "near_duplicate" not in found([damaged, DOG], facts)


def test_repeated_sources_and_targets_are_reported(facts: quality.CorpusFacts) -> None:
    pairs = [Pair("Go away!", f"Geh {number} mal weg!") for number in range(30)]
    marks = found(pairs, facts, settings=["many_targets.max_targets=25"], skip=["language"])
    assert (len(marks["repeated_source"]), marks["many_targets"]) == (29, [25, 26, 27, 28, 29])
    assert "repeated_target" not in marks
    pairs = [Pair(f"Go {number} times away!", "Geh weg!") for number in range(30)]
    assert len(found(pairs, facts, skip=["language"])["repeated_target"]) == 29


@pytest.mark.parametrize("shift", [1, -1, 2])
def test_a_misaligned_stretch_is_found_exactly(shift: int, facts: quality.CorpusFacts) -> None:
    pairs = list(CLEAN[:600])
    for number in range(200, 300):
        pairs[number] = Pair(CLEAN[number].source, CLEAN[number + shift].target)
    rules = RuleSet(make_rules(), facts)
    for batch in batches(pairs):
        for _ in rules.apply(batch):
            pass
    rule = rules.rules["misaligned"]
    assert isinstance(rule, Misaligned)
    (stretch,) = rule.stretches
    assert stretch.shift == -shift  # the target of source n is on line n - shift
    assert abs(stretch.first - 201) <= 2
    assert abs(stretch.last - 300) <= 2


def test_rules_that_cannot_be_applied_say_why() -> None:
    rules = RuleSet(make_rules(), survey([DOG] * 10))
    assert "at least 500 pairs" in rules.skipped["misaligned"]
    assert "--languages" in rules.skipped["language"]
    assert "--test" in rules.skipped["overlap"]


@pytest.mark.parametrize(
    ("settings", "skip", "message"),
    [
        (["ration.max=3"], [], "unknown rule ration; rules: empty, no_text"),
        (["ratio.max=3"], [], "one of the keys: ratio.max_ratio, ratio.min_characters"),
        (["ratio.max_ratio=x"], [], "must be a number"),
        (["html.keep_matching=1"], [], "must be true or false"),
        ([], ["copies"], "--skip copies: unknown rule copies"),
    ],
)
def test_wrong_thresholds_are_refused(settings: list[str], skip: list[str], message: str) -> None:
    with pytest.raises(RegardError, match=re.escape(message)):
        make_rules(settings, skip)


def test_thresholds_can_be_set(facts: quality.CorpusFacts) -> None:
    pair = DOG._replace(target="Der Hund sieht.")
    assert "ratio" not in found([pair], facts)
    assert "ratio" in found([pair], facts, settings=["ratio.max_ratio=2"])
    both = Pair("<b>The</b> dog", "<b>Der</b> Hund")
    assert "html" in found([both], facts, settings=["html.keep_matching=false"])


# ---------------------------------------------------------------------------------------------
# Building blocks


FEW = settings(max_examples=30)
TEXTS = st.lists(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30), max_size=8
)


@FEW
@given(TEXTS)
def test_words_are_those_of_a_plain_implementation(texts: list[str]) -> None:
    """Equal words have equal hashes, and different ones different hashes."""
    table = character_table()
    unspaced = table.classes & 32 > 0
    letters = table.classes & 1 > 0
    expected = []
    for text in texts:
        words: list[str] = []
        previous = -1
        for character in text:
            code = (
                ord(character)
                if ord(character) < 0x10000
                else 0x10000 + (0x20000 <= ord(character) < 0x32400)
            )
            joins = (
                previous >= 0
                and letters[previous]
                and not unspaced[code]
                and not unspaced[previous]
            )
            if letters[code]:
                words = (
                    [*words[:-1], words[-1] + chr(table.lower[code])]
                    if joins
                    else [*words, chr(table.lower[code])]
                )
            previous = code
        expected.append([word[:STEM] for word in words[:MAX_WORDS]])
    found_words = TextBatch(texts).words
    assert found_words.counts.tolist() == list(map(len, expected))
    flat = [word for words in expected for word in words]
    assert len({*zip(flat, found_words.hashes.tolist(), strict=True)}) == len({*flat})
    assert len({*found_words.hashes.tolist()}) == len({*flat})


@FEW
@given(TEXTS)
def test_keys_are_equal_only_for_equal_texts(texts: list[str]) -> None:
    batch = TextBatch(texts)
    bmp = [all(ord(one) < 0x10000 for one in text) for text in texts]
    for (a, x, m), (b, y, n) in product(
        zip(texts, batch.keys.tolist(), bmp, strict=True), repeat=2
    ):
        if m and n:
            assert (a == b) == (x == y)


@FEW
@given(st.lists(st.lists(st.integers(0, 20), max_size=30), max_size=12))
def test_keys_are_counted(parts: list[list[int]]) -> None:
    counter, expected = KeyCounter(), Counter[int]()
    for part in parts:
        before = counter.add(np.array(part, np.uint64)).tolist()
        for key, count in zip(part, before, strict=True):
            assert count == expected[key]
            expected[key] += 1
    assert len(counter) >= len(expected)
    if parts:
        keys = np.arange(30, dtype=np.uint64)
        assert counter.contains(keys).tolist() == [int(key) in expected for key in keys]


@FEW
@given(
    st.lists(st.lists(st.integers(0, 8), min_size=3, max_size=3), min_size=1, max_size=5),
    st.sampled_from([0.0, 1.0, 2.5]),
)
def test_viterbi_finds_the_best_path(scores: list[list[int]], cost: float) -> None:
    array = np.array(scores, np.float64)

    def total(path: tuple[int, ...]) -> float:
        full = (0, *path, 0)
        changes = sum(a != b for a, b in pairwise(full))
        return sum(float(array[step, state]) for step, state in enumerate(path)) - cost * changes

    best = max(map(total, product(range(3), repeat=len(scores))))
    assert total(tuple(viterbi(array, cost).tolist())) == pytest.approx(best)


@FEW
@given(st.integers(0, 2_000), st.integers(1, 300))
def test_a_sample_is_spread_over_the_stream(count: int, chunk: int) -> None:
    sample = PairSample(size=50)
    sample.read((Pair(str(number), "") for number in range(count)), chunk)
    numbers = [int(pair.source) for pair in sample.pairs]
    assert len(numbers) == count if count < 100 else 50 <= len(numbers) < 100
    assert len({b - a for a, b in pairwise(numbers)}) <= 1


def test_the_size_of_batches_does_not_matter(facts: quality.CorpusFacts) -> None:
    pairs = [pair for pair in [*CLEAN[:300], *(noise for _, noise in NOISE)] for _ in range(2)]

    def rejected(size: int) -> list[bool]:
        rules = RuleSet(make_rules(skip=["misaligned", "language"]), facts)
        all_ = []
        for batch in batches(pairs, size):
            for _ in rules.apply(batch, reports=False):
                pass
            all_ += batch.rejected.tolist()
        return all_

    assert rejected(7) == rejected(100_000)


def test_an_empty_batch_is_no_problem(facts: quality.CorpusFacts) -> None:
    rules = RuleSet(make_rules(), facts)
    for pairs in ([], [Pair("", "")], [Pair("x", "")]):
        for _, marks in rules.apply(PairBatch(pairs)):
            assert len(marks) == len(pairs)


@pytest.mark.parametrize("name", QUALITY_RULES)
def test_every_number_of_a_rule_is_a_threshold_that_can_be_set(name: str) -> None:
    kind = QUALITY_RULES[name]
    types = inspect.get_annotations(kind)
    numbers = [key for key, one in types.items() if one in ("bool", "int", "float")]
    assert threshold_names(kind) == numbers
