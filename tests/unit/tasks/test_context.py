"""Models that also read the sentences before: data.context."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.data.cleaning import clean_and_encode
from regard.data.corpus import read_pairs
from regard.data.pairs import ContextPair, Pair, context_of, previous_sentences, tags_of
from regard.data.special_tokens import EOS
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.recipe import CleaningConfig, DataConfig, DataFiles, Recipe, make_recipe
from regard.tasks import Translator

WORDS = [Pair("the dog was tired it cat", "der Hund war müde er Katze")] * 3


def test_previous_sentences_stay_in_their_document() -> None:
    lines = ["a", "b", "c", " ", "d", "e"]
    assert previous_sentences(lines, 2) == [(), ("a",), ("a", "b"), ("b", "c"), (), ("d",)]
    assert previous_sentences(lines[2:], 2, before=["", "a", "b"])[0] == ("a", "b")
    assert previous_sentences(lines, 0) == [()] * 6


def test_pairs_are_read_with_their_context(tmp_path: Path) -> None:
    (tmp_path / "x.en").write_text("a\nb\n\nc\n")
    (tmp_path / "x.de").write_text("A\nB\n\nC\n")
    files = DataFiles(source=("x.en",), target=("x.de",), to=("de",))
    pairs = list(read_pairs(files, DataConfig(root=str(tmp_path), train=files, context=1)))
    assert [pair[:2] for pair in pairs] == [("a", "A"), ("b", "B"), ("c", "C")]
    assert list(map(context_of, pairs)) == [(), ("a",), ()]
    assert {tags_of(pair) for pair in pairs} == {("2de",)}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    recipe = make_recipe(
        {"data": {"train": {"pairs": "x"}}, "tokenizer": {"kind": "word", "vocab_size": 30}}, "test"
    )
    return Tokenizer.train(recipe.tokenizer, lambda: WORDS)


def test_context_is_before_the_source_and_ends_with_eos(tokenizer: Tokenizer) -> None:
    pairs = [
        ContextPair.with_context(Pair("it was tired", "er war müde"), context)
        for context in ((), ("the dog",), ("the cat",), ("the cat",))
    ]
    counts: Counter[str] = Counter()
    clean = CleaningConfig(max_tokens=6, max_ratio=1.1)
    rows = list(clean_and_encode(pairs, tokenizer, clean, counts))
    (text, dog) = tokenizer.source.encode(["it was tired", "the dog"])
    assert [row.source for row in rows][:2] == [text, [*dog, EOS, *text]]
    assert counts["duplicates"] == 1, "the same pair in the same context"
    assert counts["ratio"] == 0, "the context does not count"
    short = CleaningConfig(max_tokens=5)
    assert len(list(clean_and_encode(pairs, tokenizer, short, counts))) == 1


def test_a_model_reads_the_last_sentences(
    make_run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Translator.load(make_run(data={"train": {"pairs": "pairs.tsv"}, "context": 1}))
    (dog, text) = model.encode(["The dog sleeps.", "It is tired."])
    request = model.generate(["It is tired."], context=[["No.", "The dog sleeps."]])[0][0].request
    assert request.source == [*dog, EOS, *text]
    assert model.generate(["It is tired."], context=[[]])[0][0].request.source == text
    with pytest.raises(RegardError, match="2 contexts for 1 texts: expected one per text"):
        model.translate(["It is tired."], context=[[], []])
    options: dict[str, object] = {}
    monkeypatch.setattr(model, "translate", lambda texts, **given: options.update(given))
    pairs = [ContextPair.with_context(Pair("b", "B"), ("a",))]
    model.predict_pairs(pairs)
    assert options.pop("context") == [("a",)]
    monkeypatch.setattr(model, "generate", lambda texts, **given: options.update(given) or [])
    assert model.calibrate_confidence(pairs) is None
    assert options["context"] == [("a",)]


def test_context_is_refused_where_it_has_no_effect(finished_run: Path) -> None:
    model = Translator.load(finished_run)
    with pytest.raises(RegardError, match="this model was trained without"):
        model.translate(["a dog"], context=[["ein Hund"]])
    with pytest.raises(RegardError, match=r"data\.context: 1 needs task: translation, not"):
        _recipe({"task": "tagging", "data": {"train": {"conllu": "x"}, "context": 1}})
    with pytest.raises(
        RegardError, match=r"data\.context cannot be combined with model\.position: tree"
    ):
        _recipe(
            {
                "data": {"train": {"pairs": "x"}, "context": 1},
                "model": {"architecture": "decoder_only"},
            }
        )


def _recipe(values: dict[str, object]) -> Recipe:
    return make_recipe(values, "test")
