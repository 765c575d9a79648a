"""Glossaries: finding their terms in a text, and reading their files."""

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from regard.data.glossary import Glossary
from regard.data.words import fold_case, is_word_character, whole_word_pattern
from regard.errors import RegardError


def test_glossary_terms_are_found_as_whole_words() -> None:
    glossary = Glossary(
        {"dog": "Hund", "hot dog": "Wurst", "May": "Mai", "狗": "Hund", "C++": "C++"}
    )
    assert glossary.target_terms("A Dog may bark.") == ["Hund"]
    assert glossary.target_terms("dogs, bulldog, dog_house") == []
    assert glossary.target_terms("A hot\u00a0 dog in May") == ["Wurst", "Mai"]
    assert glossary.target_terms("A hot dog for the dog") == ["Wurst", "Hund"]
    assert glossary.target_terms("一只狗叫") == ["Hund"]
    assert glossary.target_terms("C++ or C+++") == ["C++"]
    assert Glossary({"𠮷": "Glück"}).target_terms("一𠮷一") == ["Glück"]
    for term in ("", " dog"):
        with pytest.raises(RegardError, match="must not be empty or begin or end with a space"):
            Glossary({term: "Hund"})


@given(
    term=st.text("aAİß日. ", min_size=1, max_size=4).filter(lambda term: term == term.strip()),
    text=st.text("aAiIİıßẞ日. \t", max_size=12),
    ignore_case=st.booleans(),
)
def test_whole_words_are_found_as_by_one_regular_expression(
    term: str, text: str, ignore_case: bool
) -> None:
    before = r"(?<![^\W日])" if is_word_character(term[0]) else ""
    after = r"(?![^\W日])" if is_word_character(term[-1]) else ""
    blanks = r"\s+".join(map(re.escape, term.split()))
    pattern = re.compile(before + blanks + after, re.IGNORECASE if ignore_case else 0)
    found, expected = whole_word_pattern(term, ignore_case).finditer(text), pattern.finditer(text)
    assert [one.span() for one in found] == [one.span() for one in expected]
    assert whole_word_pattern(term, ignore_case).sub(lambda _: "#", text) == pattern.sub("#", text)
    lower = term == term.lower()
    terms = ["x"] if whole_word_pattern(term, lower).search(text) else []
    assert Glossary({term: "x"}).target_terms(text) == terms


def test_a_large_glossary_is_fast() -> None:
    start = time.process_time()
    glossary = Glossary({f"term{number} of many": f"Wort{number}" for number in range(2_000)})
    for number in range(50):
        assert glossary.target_terms(f"A Term{number}  of many.") == [f"Wort{number}"]
    assert time.process_time() - start < 2  # trying every term took 20 seconds


def test_characters_that_differ_only_in_case_are_equal_when_folded() -> None:
    characters = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    cased = "".join(
        character
        for character in characters
        if not character.lower() == character.upper() == character
    )
    for character in cased[::20]:
        assert {fold_case(same) for same in re.findall(character, cased, re.IGNORECASE)} == {
            fold_case(character)
        }


def test_a_bad_glossary_line_is_reported_with_its_line_number(tmp_path: Path) -> None:
    path = tmp_path / "terms.tsv"
    for lines, message in [
        ("dog\tHund\n\ncat Katze\n", ":3: a line must be source term, tab, target term"),
        ("dog\tHund\tx\n", ":1: a line must be"),
        ("dog\tHund\ndog\tKöter\n", ":2: 'dog' is translated as 'Köter' here and as 'Hund' before"),
    ]:
        path.write_text(lines, encoding="utf-8")
        with pytest.raises(RegardError, match=re.escape(str(path) + message)):
            Glossary.read(path)
    path.write_text("\ufeffdog\tHund\r\n\r\ndog\tHund\n", encoding="utf-8")
    assert Glossary.read(path).terms == {"dog": "Hund"}
