"""What the automatic configuration knows about the pairs."""

import pytest

from regard.data.pairs import Pair
from regard.recipe import TokenizerConfig
from regard.training.corpus_statistics import CorpusStatistics, SideStatistics, collect_statistics


def test_tokens_are_estimated_from_characters_and_ideographs() -> None:
    side = SideStatistics()
    for text in ("犬猫a", "dog", " "):
        side.add(text)
    assert (side.texts, side.characters, side.ideographs) == (2, 4, 2)
    corpus = CorpusStatistics(2, side, side)
    characters = TokenizerConfig(kind="char", vocab_size=1000)
    assert corpus.tokens_per_target(4.0, characters) == (4 + 2 + 2) / 2 + 1
    subwords = TokenizerConfig(kind="unigram", vocab_size=1000)
    expected = (4 / 4.0 + 2 / 1.3) / 2 + 1
    assert corpus.tokens_per_target(4.0, subwords) == pytest.approx(expected)


@pytest.mark.parametrize(("letter", "longest"), [("a", 20), ("犬", 6)])
def test_single_words_are_spelled_unless_they_are_long(letter: str, longest: int) -> None:
    for length, kind in ((longest, "char"), (longest + 1, None)):
        side = SideStatistics()
        for number in range(30):
            side.add(letter * (length - 1) + chr(ord(letter) + number % 20))
        assert side.tokenizer_kind == kind


ENGLISH = ["A dog runs in the park.", "Two men are in the street.", "The woman reads in a park."]
GERMAN = ["Ein Hund läuft im Park.", "Zwei Männer auf der Straße.", "Die Frau liest im Park."]
CHINESE = ["狗在公园里跑。", "两个男人在街上。", "女人在公园里看书。"]


@pytest.mark.parametrize(
    ("sources", "targets", "same"),
    [
        (ENGLISH, GERMAN, False),
        (ENGLISH, CHINESE, False),
        ([text.upper() for text in ENGLISH], ENGLISH, True),
        (["A dgo runs in the park.", *ENGLISH[1:]], ENGLISH, True),
        (ENGLISH[1:] + ENGLISH[:1], ENGLISH, True),  # a dialogue
        (CHINESE[1:] + CHINESE[:1], CHINESE, True),
        (["", "", ""], ENGLISH, False),
    ],
)
def test_one_language_is_recognized_by_trigrams(
    sources: list[str], targets: list[str], same: bool
) -> None:
    pairs = [Pair(source, target) for source, target in zip(sources, targets, strict=True)]
    assert collect_statistics(pairs).is_one_language == same


def test_similarity_is_the_cosine_of_trigram_counts() -> None:
    corpus = collect_statistics([Pair("abcd", "bcde"), Pair("a b c", "xyz")])
    # Sources: abc twice, bcd; targets: bcd, cde, xyz.
    assert corpus.similarity == pytest.approx(1 / (5 * 3) ** 0.5)
