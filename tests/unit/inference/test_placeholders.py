"""Placeholders: which words replace them, and that all placeholders come back."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard.data.protected_spans import ProtectedSpans
from regard.data.special_tokens import BOS, EOS
from regard.inference.placeholders import (
    TRIES,
    Substitution,
    copied_words,
    name_like_words,
    substitutions,
)
from regard.tasks import Translator

PLACEHOLDERS = ProtectedSpans(("placeholders",))
WORDS = ["London", "Park", "Rugby", "Texas", "Jenga"]


@pytest.fixture(scope="module")
def model(make_run: Callable[..., Path]) -> Translator:
    return Translator.load(make_run(decoding={"extra_length": 6}), device="cpu")


# Texts


def test_each_placeholder_has_a_word_of_its_own_and_every_try_another() -> None:
    found = list(substitutions("{a} sees %s and {a}", WORDS, PLACEHOLDERS))
    assert len(found) == TRIES
    assert found[0].text == "London sees Park and London"
    assert found[0].placeholders == {"London": "{a}", "Park": "%s"}
    assert found[0].times == {"London": 2, "Park": 1}
    assert found[3].text == "Texas sees Jenga and Texas"


def test_a_word_that_may_be_said_anyway_stands_in_for_nothing() -> None:
    text = "%s is in the park"
    found = list(substitutions(text, WORDS, PLACEHOLDERS, ["New London", "Rugby spielen"]))
    assert [one.text for one in found] == ["Texas is in the park", "Jenga is in the park"]


@pytest.mark.parametrize(
    "text", ["a dog", "a <b>dog</b>", "un%s", "%s {a} {b} {c} {d} {e}"]
)  # none; part of words; more than there are words
def test_what_cannot_be_stood_in_for_is_left_alone(text: str) -> None:
    assert list(substitutions(text, WORDS, PLACEHOLDERS)) == []


def test_the_placeholder_comes_back_where_the_word_stands_alone() -> None:
    one = Substitution("", {"Park": r"\1{x}", "London": "%s"}, {"Park": 1, "London": 1})
    assert one.restore("Parks im Park, London.") == r"Parks im \1{x}, %s."
    assert [one.restore_token(piece) for piece in ("▁Park", "Park", "▁Parks", "▁im")] == [
        "▁\\1{x}",
        "\\1{x}",
        "▁Parks",
        "▁im",
    ]


# The model


def test_words_that_stand_in_are_those_the_model_copies_best(model: Translator) -> None:
    target = model.tokenizer.target
    found = copied_words(model.network, model.tokenizer, [], model.device)
    every = name_like_words(target)
    assert set(found) <= set(every)
    assert all(len(ids) == 1 for ids in target.encode(every))
    opens = torch.tensor(target.word_boundaries()[0])
    opens[EOS] = True
    sure: dict[str, float] = {}
    for word in every:
        ids, (said,) = model.tokenizer.source.encode([word])[0], target.encode([word])[0]
        with torch.no_grad():
            shares = model.network(torch.tensor([[*ids, EOS]]), torch.tensor([[BOS, said]]))[0]
        first, then = shares.double().softmax(-1)
        sure[word] = float(first[said] * then[opens].sum())
    assert found == sorted(every, key=sure.__getitem__, reverse=True)[: 2 * TRIES]


def test_what_comes_back_is_verified_and_the_rest_goes_the_other_way(
    model: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["the dog sees %s", "a cat", "{a} and {b} and 12 and %s", "a <b>dog</b>", ""]
    protect = ["placeholders", "numbers"]
    found = model.search(texts, protect=protect)
    protected = ProtectedSpans(protect)
    decoding = model.decoding_for({"protect": protect})
    tried = model._with_substitutes(texts, [()] * 5, [()] * 5, [None] * 5, decoding, 1)
    assert tried, "with these weights some come back right"
    assert set(tried) <= {0, 2}
    for row, (generated,) in tried.items():
        one = generated.translation
        assert found[row][0].text == one.text
        assert protected.mismatches(texts[row], one.text) == []
        assert len(one.tokens) == len(one.token_log_probabilities) - one.finished
    monkeypatch.setattr(Translator, "_with_substitutes", lambda *_: {})
    alone = model.search(texts, protect=protect)
    assert all(found[row][0].text == alone[row][0].text for row in range(5) if row not in tried)


def test_terms_are_said_beside_stand_ins(model: Translator) -> None:
    terms = [["Hut", model._substitutes(None)[0]], ["Haus"]]
    found = model.search(["the dog sees %s", "%s"], constraints=terms, protect=["placeholders"])
    for (one,), wanted in zip(found, terms, strict=True):
        assert all(term in one.text for term in wanted)
        assert "%s" in one.text


def test_it_makes_no_difference_how_many_are_looked_at_together(
    model: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = copied_words(model.network, model.tokenizer, [], model.device)
    monkeypatch.setattr("regard.inference.placeholders.WORDS_PER_BATCH", 3)
    assert copied_words(model.network, model.tokenizer, [], model.device) == whole


def test_better_weights_choose_anew(model: Translator) -> None:
    assert model._substitutes(None)
    assert model.placeholder_substitutes
    model.freeze()
    assert model.placeholder_substitutes is None


def test_names_are_title_cased_words_of_three_letters_or_more() -> None:
    pieces = ["▁Ann", "▁Al", "▁anna", "▁An2", "Berlin", "▁Ann", "▁Two"]

    def encode(words: list[str]) -> list[list[int]]:
        return [[1, 2] if word == "Two" else [1] for word in words]  # not one token in a text

    vocabulary = SimpleNamespace(
        size=len(pieces),
        pieces=lambda ids: [pieces[i] for i in ids],
        encode=encode,
        decode=lambda ids: ["Ann", "Berlin", "Two"],
    )
    assert name_like_words(cast(Any, vocabulary)) == ["Ann", "Berlin"]


def test_a_word_may_end_with_the_text(model: Translator) -> None:
    """A network that ends the text after one of the words, and continues all others with a letter."""
    target = model.tokenizer.target
    ending = name_like_words(target)[-1]
    ((said,),) = target.encode([ending])
    letter = next(i for i, inside in enumerate(target.word_boundaries()[0]) if not inside)

    def network(sources: Tensor, outputs: Tensor) -> Tensor:
        logits = torch.zeros(*outputs.shape, target.size)
        for row, token in enumerate(outputs[:, 1].tolist()):
            logits[row, 1, EOS if token == said else letter] = 100.0
        return logits

    assert copied_words(cast(Any, network), model.tokenizer, [], model.device)[0] == ending
