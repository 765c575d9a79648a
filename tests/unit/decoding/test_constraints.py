"""Glossaries and what is kept: found in the source, guaranteed and verified in the translation."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from regard.inference.guiding import phrase_of

from regard.data.glossary import Glossary
from regard.data.protected_spans import ProtectedSpans
from regard.data.words import as_words, caseless, joins
from regard.errors import RegardError
from regard.tasks import Translator

EVERYTHING = ProtectedSpans(("placeholders", "numbers"))


@pytest.fixture(scope="module")
def model(make_run: Callable[..., Path]) -> Translator:
    return Translator.load(make_run(search={"extra_length": 6}), device="cpu")


# Finding


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Hello {name}, you owe {0:.2f}.", ["{name}", "{0:.2f}"]),
        ("a ${dir} and {{ user.name }} and {}", ["${dir}", "{{ user.name }}", "{}"]),
        ("%s of %(n)d, %1$s, %5.2f and %@", ["%s", "%(n)d", "%1$s", "%5.2f", "%@"]),
        ("50% of them, 100 %sure", ["50", "100"]),
        ('a <b>word</b>, <br/> and <a href="x y">z</a>', ["<b>", "</b>", "<br/>", '<a href="x y">', "</a>"]),
        ("3 < 4 and 5 > 2", ["3", "4", "5", "2"]),
        ("see https://a.example/b?c=1, or www.b.example.", ["https://a.example/b?c=1", "www.b.example"]),
        ("write to a.b+c@d.example!", ["a.b+c@d.example"]),
        ("at 12:30 on 1/2/2024: 1,000.50 of 3", ["12:30", "1/2/2024", "1,000.50", "3"]),
        ("the B2B of 3D and x2", []),
        ("&nbsp; R&D", ["&nbsp;"]),
    ],
)  # fmt: skip
def test_what_is_to_be_kept_is_found_whole(text: str, found: list[str]) -> None:
    assert list(EVERYTHING.find(text)) == found


def test_what_was_lost_is_told_with_its_counts() -> None:
    kept = ProtectedSpans(("placeholders",))
    assert kept.lost("%s and %s, 3", "%s und vier") == ["%s occurs 2 time(s), in the translation 1"]
    assert kept.lost("a", "{b}") == ["{b} occurs 0 time(s), in the translation 1"]
    assert kept.lost("{b} <i>", "<i> {b}") == []
    assert ProtectedSpans(()).lost("%s", "") == []


def test_a_glossary_finds_terms_as_words() -> None:
    glossary = Glossary(
        {"dog": "Hund", "hot dog": "Wurst", "May": "Mai", "狗": "Hund", "C++": "C++"}
    )
    assert glossary.asked_by("A Dog may bark.") == ["Hund"]
    assert glossary.asked_by("dogs, bulldog, dog_house") == []
    assert glossary.asked_by("A hot\u00a0 dog in May") == ["Wurst", "Mai"]
    assert glossary.asked_by("A hot dog for the dog") == ["Wurst", "Hund"]
    assert glossary.asked_by("一只狗叫") == ["Hund"]
    assert glossary.asked_by("C++ or C+++") == ["C++"]
    assert Glossary({"𠮷": "Glück"}).asked_by("一𠮷一") == ["Glück"]
    for term in ("", " dog"):
        with pytest.raises(RegardError, match="is no term"):
            Glossary({term: "Hund"})


@given(
    term=st.text("aAİß日. ", min_size=1, max_size=4).filter(lambda term: term == term.strip()),
    text=st.text("aAiIİıßẞ日. \t", max_size=12),
    any_case=st.booleans(),
)
def test_words_are_found_as_by_one_pattern(term: str, text: str, any_case: bool) -> None:
    before = r"(?<![^\W日])" if joins(term[0]) else ""
    after = r"(?![^\W日])" if joins(term[-1]) else ""
    blanks = r"\s+".join(map(re.escape, term.split()))
    pattern = re.compile(before + blanks + after, re.IGNORECASE if any_case else 0)
    found, wanted = as_words(term, any_case).finditer(text), pattern.finditer(text)
    assert [one.span() for one in found] == [one.span() for one in wanted]
    assert as_words(term, any_case).sub(lambda _: "#", text) == pattern.sub("#", text)
    lower = term == term.lower()
    wanted_of_it = ["x"] if as_words(term, lower).search(text) else []
    assert Glossary({term: "x"}).asked_by(text) == wanted_of_it


def test_a_glossary_of_many_terms_takes_little_time() -> None:
    start = time.process_time()
    glossary = Glossary({f"term{number} of many": f"Wort{number}" for number in range(2_000)})
    for number in range(50):
        assert glossary.asked_by(f"A Term{number}  of many.") == [f"Wort{number}"]
    assert time.process_time() - start < 2  # it took 20 seconds


def test_signs_that_are_one_whatever_their_case_are_one_caseless() -> None:
    signs = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    cased = "".join(sign for sign in signs if not sign.lower() == sign.upper() == sign)
    for sign in cased[::20]:
        assert {caseless(same) for same in re.findall(sign, cased, re.IGNORECASE)} == {
            caseless(sign)
        }


def test_a_glossary_with_a_bad_line_is_refused_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "terms.tsv"
    for lines, message in [
        ("dog\tHund\n\ncat Katze\n", ":3: a line is source term, tab, target term"),
        ("dog\tHund\tx\n", ":1: a line is"),
        ("dog\tHund\ndog\tKöter\n", ":2: 'dog' is 'Köter' here and 'Hund' before"),
    ]:
        path.write_text(lines, encoding="utf-8")
        with pytest.raises(RegardError, match=re.escape(str(path) + message)):
            Glossary.read(path)
    path.write_text("\ufeffdog\tHund\r\n\r\ndog\tHund\n", encoding="utf-8")
    assert Glossary.read(path).terms == {"dog": "Hund"}


# Guaranteeing, with a real network whose weights are random

WORD = st.text(st.sampled_from("abcHundäß"), min_size=1, max_size=5)
TERM = st.lists(WORD, min_size=1, max_size=2).map(" ".join) | st.sampled_from(
    ["{name}", "%s", "C++", "狗", "a-b", "</b>", "3"]
)


@settings(max_examples=8)
@given(
    terms=st.lists(st.lists(TERM, max_size=3), min_size=1, max_size=3),
    options=st.sampled_from(
        [{}, {"beam": 1, "constrained_beam": 1}, {"no_repeat_ngram": 2}, {"nbest": 3}]
    ),
)
def test_every_term_stands_in_the_translation_as_words(
    model: Translator, terms: list[list[str]], options: dict[str, Any]
) -> None:
    texts = ["the dog", "a cat sees the old house .", "no"][: len(terms)]
    for found, wanted in zip(model.search(texts, constraints=terms, **options), terms, strict=True):
        for one in found:
            assert all(as_words(term).search(one.text) for term in wanted), (one.text, wanted)


@settings(max_examples=6)
@given(
    parts=st.lists(
        st.sampled_from(["{n}", "%s", "%(a)d", "<b>", "</b>", "https://a.b/c", "the dog", "12"]),
        max_size=5,
    )
)
def test_placeholders_are_there_as_often_as_in_the_source(
    model: Translator, parts: list[str]
) -> None:
    text = " ".join(["a", *parts])
    (said,) = model.translate([text], keep=["placeholders", "numbers"])
    kept = {part for part in parts if part != "the dog"}
    assert all(len(as_words(part).findall(said)) >= parts.count(part) for part in kept)


def test_texts_without_terms_are_translated_as_ever(model: Translator) -> None:
    texts = ["the dog", "a cat sees the house", "the old man"]
    some = model.translate(texts, constraints=[[], ["Hut"], []])
    assert [some[0], some[2]] == [model.translate([text])[0] for text in (texts[0], texts[2])]


def test_a_term_is_not_part_of_a_longer_word(model: Translator) -> None:
    phrase = phrase_of("Hund", model.tokenizer.target)
    assert phrase is not None
    assert all(one.before_border for one in phrase.spellings)
    assert [one.after_border for one in phrase.spellings] == [False, True]
    (how,) = ProtectedSpans(("placeholders",)).occurrences("a word</b>, more").values()
    assert how == (1, True, False)
    tag = phrase_of("</b>", model.tokenizer.target, *how)
    assert tag is not None
    assert [(one.after_border, one.before_border) for one in tag.spellings] == [(False, True)] * 2


# Refusing


def test_what_cannot_be_guaranteed_is_refused(make_run: Callable[..., Path]) -> None:
    words = Translator.load(make_run(tokenizer={"kind": "word", "vocab_size": 300}), device="cpu")
    with pytest.raises(RegardError, match="'Quark' cannot be guaranteed: this model's tokenizer"):
        words.translate(["the dog"], constraints=[["Quark"]])
    assert phrase_of("%s", words.tokenizer.target) is None
    lower = Translator.load(
        make_run(tokenizer={"vocab_size": 420, "normalize": "lower"}), device="cpu"
    )
    with pytest.raises(RegardError, match="'Hund' cannot be guaranteed"):
        lower.translate(["the dog"], constraints=[["Hund"]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"constraints": [["a"], ["b"]]}, "2 constraints for 1 texts: give a list of terms for each"),
        ({"constraints": ["ab"]}, "give a list of terms for each"),
        ({"constraints": [["a"]], "mbr": 4}, "mbr draws samples"),
        ({"keep": ["numbers"], "mbr": 4}, "search: mbr draws samples; it does not go with keep"),
        ({"constraints": [["a"]], "beam_groups": 5}, "groups 5: with constraints there are no groups"),
        ({"keep": ["numbers"], "beam_groups": 5}, "keep does not go with groups"),
        ({"keep": ["names"]}, "search.protect.0: 'names' must be 'placeholders' or 'numbers'"),
        ({"beam_groups": 2}, "groups 2 must divide beam 5"),
        ({"mbr": 3, "beam": 2}, "beam 2, mbr 3: mbr draws samples; give one"),
        ({"bea": 3}, "unknown key search.bea; did you mean beam?"),
        ({"no_repeat_ngram": -1}, "search.no_repeat_ngram: -1 must be"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    model: Translator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegardError, match=re.escape(message)):
        model.translate(["a"], **options)


def test_a_parallel_model_refuses_what_it_cannot_do(make_run: Callable[..., Path]) -> None:
    parallel = Translator.load(make_run(model={"architecture": "non_autoregressive"}), device="cpu")
    for options in (
        {"no_repeat_ngram": 2},
        {"keep": ["numbers"]},
        {"mbr": 3},
        {"constraints": [["a"]]},
    ):
        with pytest.raises(RegardError, match="this model says all words at once"):
            parallel.translate(["a"], **options)


def test_a_decoder_alone_has_no_coverage(make_run: Callable[..., Path]) -> None:
    alone = Translator.load(
        make_run(model={"architecture": "decoder_only", "encoder_layers": 6}), device="cpu"
    )
    with pytest.raises(RegardError, match=r"coverage 0\.2: this model does not look at the words"):
        alone.translate(["a"], coverage=0.2)
    assert len(alone.search(["a dog"], groups=5, nbest=5)[0]) >= 1
