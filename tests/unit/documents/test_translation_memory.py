"""Exact and fuzzy matches of a translation memory."""

from pathlib import Path

import pytest

from regard.data.pairs import Pair
from regard.documents.translation_memory import Match, TranslationMemory, similarity
from regard.errors import RegardError
from tests.unit.documents import samples

PAIRS = [
    Pair("The dog was too tired.", "Der Hund war zu müde."),
    Pair("The cat was hungry.", "Die Katze war hungrig."),
    Pair("The cat was hungry.", "Die Katze hatte Hunger."),
    Pair("The cat was hungry.", "Die Katze hatte Hunger."),
    Pair("", "nothing"),
]
MEMORY = TranslationMemory(PAIRS)


def test_an_exact_match_ignores_only_whitespace() -> None:
    assert MEMORY.exact(" The dog\nwas too tired. ") == Match(1.0, *PAIRS[0])
    assert MEMORY.exact("the dog was too tired.") is None
    assert len(MEMORY) == 2


def test_the_most_frequent_translation_is_taken() -> None:
    match = MEMORY.exact("The cat was hungry.")
    assert match is not None
    assert match.target == "Die Katze hatte Hunger."


def test_a_fuzzy_match_has_the_similarity_in_words() -> None:
    match = MEMORY.best("The dog was very tired.", 0.75)
    assert match is not None
    assert match.score == pytest.approx(5 / 6)
    assert match[1:] == PAIRS[0]
    assert MEMORY.best("The dog was very tired.", 0.9) is None
    assert MEMORY.best("Something else.", 0.5) is None
    folded = MEMORY.best("the dog was too tired.", 0.75)
    assert folded is not None
    assert folded.score == 0.99, "not exact"
    assert MEMORY.best("", 0.0) is None


def test_similarity_is_the_edit_distance_over_the_longer_text() -> None:
    assert similarity(list("abcd"), list("abxd")) == 0.75
    assert similarity(list("ab"), list("abcd")) == 0.5
    assert similarity([], ["a"]) == 0


def test_the_best_of_many_is_found() -> None:
    words = [
        "the",
        "a",
        "dog",
        "cat",
        "was",
        "is",
        "not",
        "tired",
        "hungry",
        "here",
        "there",
        "and",
        "or",
    ]
    pairs = [Pair(" ".join(words[i % 13] for i in range(n, n + 8)), str(n)) for n in range(13)]
    many = TranslationMemory(pairs * 50 + [Pair("the dog sees a very big unusual house", "x")])
    match = many.best("the dog sees a very big unusual castle", 0.75)
    assert match is not None
    assert (match.score, match.target) == (0.875, "x")


def test_a_tmx_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "tm.tmx").write_text(samples.TMX)
    memory = TranslationMemory.read(tmp_path / "tm.tmx", ("en", "de"))
    assert memory.exact("Yes.") == Match(1.0, "Yes.", "Ja.")
    with pytest.raises(RegardError, match=r"--memory none\.tmx: no such file"):
        TranslationMemory.read(Path("none.tmx"), None)
