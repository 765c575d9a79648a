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


@pytest.mark.parametrize(
    ("source", "target", "share", "same"),
    [
        ("Ein Hund läuft.", "A dog runs.", 0.0, False),
        ("the black dgo runs", "The black dog runs", 9 / 13, True),
        ("東京に行く", "東京へ行く", 0.0, False),
        ("", "A dog", 0.0, False),
        ("same text", "Same  text", 1.0, True),
    ],
)
def test_one_language_is_recognized_by_shared_trigrams(
    source: str, target: str, share: float, same: bool
) -> None:
    corpus = collect_statistics([Pair(source, target)])
    assert corpus.shared_trigrams == pytest.approx(share)
    assert corpus.is_one_language == same
