"""Constraints and protected spans in translations: guaranteed by the search, and refused where they cannot be."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from regard.data.protected_spans import ProtectedSpans
from regard.data.special_tokens import BOS, EOS
from regard.data.words import whole_word_pattern
from regard.errors import RegardError
from regard.tasks import Translator
from regard.tasks.translation_requests import phrase_of


@pytest.fixture(scope="module")
def model(make_run: Callable[..., Path]) -> Translator:
    return Translator.load(make_run(decoding={"extra_length": 6}), device="cpu")


def test_a_word_ends_before_eos_and_begins_after_bos(model: Translator) -> None:
    boundaries = model.engine.network_decoder.boundaries
    assert bool(boundaries.begins_word[EOS])
    assert bool(boundaries.ends_word[BOS])
    inside = model.tokenizer.target.word_boundaries()
    assert not all(inside[0])
    assert not all(inside[1])


# Guarantees, for a network with random weights

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
def test_every_term_occurs_in_the_translation_as_a_whole_word(
    model: Translator, terms: list[list[str]], options: dict[str, Any]
) -> None:
    texts = ["the dog", "a cat sees the old house .", "no"][: len(terms)]
    for found, required in zip(
        model.search(texts, constraints=terms, **options), terms, strict=True
    ):
        for one in found:
            assert all(whole_word_pattern(term).search(one.text) for term in required), (
                one.text,
                required,
            )


@settings(max_examples=6)
@given(
    parts=st.lists(
        st.sampled_from(["{n}", "%s", "%(a)d", "<b>", "</b>", "https://a.b/c", "the dog", "12"]),
        max_size=5,
    )
)
def test_placeholders_occur_as_often_as_in_the_source(model: Translator, parts: list[str]) -> None:
    text = " ".join(["a", *parts])
    (translation,) = model.translate([text], protect=["placeholders", "numbers"])
    spans = {part for part in parts if part != "the dog"}
    assert all(
        len(whole_word_pattern(part).findall(translation)) >= parts.count(part) for part in spans
    )


def test_texts_without_constraints_are_not_affected_by_others(model: Translator) -> None:
    texts = ["the dog", "a cat sees the house", "the old man"]
    some = model.translate(texts, constraints=[[], ["Hut"], []])
    assert [some[0], some[2]] == [model.translate([text])[0] for text in (texts[0], texts[2])]


def test_a_term_is_surrounded_by_word_boundaries(model: Translator) -> None:
    phrase = phrase_of("Hund", model.tokenizer.target)
    assert phrase is not None
    assert all(one.boundary_after for one in phrase.tokenizations)
    assert [one.boundary_before for one in phrase.tokenizations] == [False, True]
    (occurrence,) = ProtectedSpans(("placeholders",)).occurrences("a word</b>, more").values()
    assert occurrence == (1, True, False)
    tag = phrase_of("</b>", model.tokenizer.target, *occurrence)
    assert tag is not None
    assert [(one.boundary_before, one.boundary_after) for one in tag.tokenizations] == [
        (False, True)
    ] * 2


# Refusals


def test_a_term_that_the_tokenizer_cannot_spell_is_refused(make_run: Callable[..., Path]) -> None:
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
        ({"constraints": [["a"], ["b"]]}, "2 constraints for 1 texts: expected one list of terms per text"),
        ({"constraints": ["ab"]}, "expected one list of terms per text"),
        ({"constraints": [["a"]], "mbr": 4}, "constraints [[a]]: sampling cannot guarantee constraints"),
        ({"protect": ["numbers"], "mbr": 4}, "decoding: mbr draws samples, so it cannot be combined with protect"),
        ({"constraints": [["a"]], "beam_groups": 5}, "beam_groups 5: cannot be combined with constraints"),
        ({"protect": ["numbers"], "beam_groups": 5}, "decoding: protect cannot be combined with beam_groups"),
        ({"protect": ["names"]}, "decoding.protect.0: 'names' must be 'placeholders' or 'numbers'"),
        ({"beam_groups": 2}, "beam_groups 2 must divide beam 5"),
        ({"mbr": 3, "beam": 2}, "beam 2, mbr 3: mbr turns on sampling, which uses no beam; set only one of the two"),
        ({"bea": 3}, "unknown key decoding.bea; did you mean beam?"),
        ({"no_repeat_ngram": -1}, "decoding.no_repeat_ngram: -1 must be"),
    ],
)  # fmt: skip
def test_conflicting_options_are_refused(
    model: Translator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegardError, match=re.escape(message)):
        model.translate(["a"], **options)


def test_a_non_autoregressive_model_refuses_options_without_effect(
    make_run: Callable[..., Path],
) -> None:
    model = Translator.load(make_run(model={"architecture": "non_autoregressive"}), device="cpu")
    for options in (
        {"no_repeat_ngram": 2},
        {"protect": ["numbers"]},
        {"mbr": 3},
        {"constraints": [["a"]]},
    ):
        with pytest.raises(RegardError, match="a non-autoregressive model"):
            model.translate(["a"], **options)


def test_a_decoder_only_model_has_no_coverage_penalty(make_run: Callable[..., Path]) -> None:
    model = Translator.load(
        make_run(model={"architecture": "decoder_only", "encoder_layers": 6}), device="cpu"
    )
    with pytest.raises(
        RegardError,
        match=r"coverage_penalty: this model has no cross-attention to source tokens",
    ):
        model.translate(["a"], coverage_penalty=0.2)
    assert len(model.search(["a dog"], beam_groups=5, nbest=5)[0]) >= 1
