"""The lenses of a file, and what the page says about a model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from regard.data.corpus import EXAMPLES, example_sources
from regard.data.pairs import tags_of
from regard.errors import RegardError
from regard.inspection import attribution, page_data
from regard.inspection.html_page import page
from regard.inspection.page_data import (
    examples_of,
    lenses_for,
    model_info,
    test_scores as scores,
    validation_sample,
)
from regard.recipe import Recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

TEXT = "The dog was tired."


@pytest.fixture(scope="module")
def model(make_run: Callable[..., Path]) -> Translator:
    return Translator.load(make_run(decoding={"max_length": 4}), "cpu")


def test_a_trace_with_lenses(model: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "MOST_STEPS", 16)
    trace = model.trace(TEXT, lenses=True)
    assert trace.lenses is not None
    outputs = trace.lenses.logit_lens.outputs
    assert [one.position for one in trace.lenses.attributions] == list(range(len(outputs)))
    assert trace.lenses.decoder_lens.translations[-1] == model.translate([TEXT], beam=1)[0]
    assert trace.lenses.patching is None
    assert "integrated_gradients" in page(trace)
    assert model.trace(TEXT).lenses is None


def test_lenses_are_printed_as_text(model: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "MOST_STEPS", 16)
    lenses = model.trace(TEXT, lenses=True).lenses
    assert lenses is not None
    titles = str(lenses).split("\n\n")[::2]
    assert [title.rpartition(" (")[2] for title in titles] == [
        "logit lens):",
        "DecoderLens):",
        "integrated gradients):",
    ]
    table = str(lenses.logit_lens).splitlines()
    assert table[0].split() == ["output", "embedding", "layer", "1", "layer", "2"]
    assert len(table) == 1 + len(lenses.logit_lens.outputs)
    last = lenses.logit_lens.candidates[-1][0][0].token.text
    assert table[1].split()[-1] == last
    one = lenses.attributions[0]
    largest = max(zip(map(float, one.scores["occlusion"]), one.words, strict=True))
    assert one.strongest_words("occlusion", 1) == [(largest[1], largest[0])]
    assert f"{one.token.text} and not {one.foil.text}" in str(one).splitlines()[0]
    assert len(str(one).splitlines()) == 2 + len(one.words)


def test_attributions_of_a_large_model_are_left_out(
    model: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_data, "ATTRIBUTION_WORK", 1)
    assert lenses_for(model, TEXT, [9, 10]).attributions == []


def test_two_sentences_must_be_comparable(model: Translator) -> None:
    with pytest.raises(RegardError, match="same translation"):
        model.trace(TEXT, against=TEXT)


def test_other_networks_are_refused_before_anything_is_computed(
    make_run: Callable[..., Path],
) -> None:
    run = make_run(model={"architecture": "decoder_only", "encoder_layers": 6})
    with pytest.raises(RegardError, match="lenses need an autoregressive encoder-decoder"):
        Translator.load(run, "cpu").trace(TEXT, lenses=True)


def test_the_examples_come_from_the_data(
    model: Translator, small_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    sources = ["short", "A sentence of a good length.", "Another sentence of that length."]
    (tmp_path / "my.en").write_text("\n".join([*sources, sources[1]]) + "\n", encoding="utf-8")
    (tmp_path / "my.de").write_text("x\n" * 4, encoding="utf-8")
    files = {"source": "my.en", "target": "my.de"}
    model.recipe = small_recipe(data={"root": str(tmp_path), "train": files})
    info = model_info(model, "my")
    assert info["examples"] == sources[1:]
    assert info["languages"] == {"source": "English", "target": "German"}
    assert (info["name"], info["scores"]) == ("my", [])


def test_scores_come_from_the_card(tmp_path: Path) -> None:
    assert scores(None) == []
    assert scores(RunDir(tmp_path)) == []
    run = RunDir(tmp_path)
    run.recipe_file.write_text("{}")
    run.card_file.write_text(
        '{"test": [{"name": "BLEU", "value": 42.71}, {"name": "x", "value": 1}]}'
    )
    assert scores(run) == ["BLEU 42.7"]


def test_examples_are_distinct_sentences_of_medium_length(
    tmp_path: Path, small_recipe: Callable[..., Recipe]
) -> None:
    lines = [f"This is sentence number {number}.\tx" for number in (1, 1, 2, 3, 4, 5)]
    (tmp_path / "test.tsv").write_text("\n".join(["short\tx", *lines]) + "\n")
    data = {"root": str(tmp_path), "train": {"pairs": "none.tsv"}, "languages": ["en", "de"]}
    assert example_sources(small_recipe(data=data)) == []
    recipe = small_recipe(data={**data, "test": {"pairs": "test.tsv"}})
    found = [f"This is sentence number {n}." for n in range(1, EXAMPLES + 1)]
    assert example_sources(recipe) == examples_of(None, recipe) == found
    run = RunDir(tmp_path)
    assert examples_of(run, recipe) == found
    run.recipe_file.write_text("{}")
    run.card_file.write_text('{"examples": ["A sentence of the card."]}')
    assert examples_of(run, recipe) == ["A sentence of the card."]
    run.card_file.write_text('{"examples": []}')
    assert examples_of(run, recipe) == found


# Pairs for the ablation of heads


def test_the_sample_is_spread_over_the_validation_data(
    make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["x" * 401 + "\tlong", *(f"a {number}\tb {number}" for number in range(9))]
    (tmp_path / "valid.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = {"pairs": str(tmp_path / "valid.tsv")}
    model = Translator.load(make_run(data={"train": files, "valid": files}), "cpu")
    assert [pair.source for pair in validation_sample(model)] == [f"a {i}" for i in range(9)]
    monkeypatch.setattr(page_data, "SAMPLE", 3)
    assert validation_sample(model) == [("a 0", "b 0"), ("a 3", "b 3"), ("a 6", "b 6")]
    monkeypatch.setattr(page_data, "SAMPLE_CHARACTERS", 2)
    with pytest.raises(RegardError, match="no pair that heads can be measured on"):
        validation_sample(model)


def test_the_sample_of_a_multilingual_model_is_in_its_language(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    languages = ["de", "fr"]
    paths = [str(tmp_path / f"{language}.tsv") for language in languages]
    for path, language in zip(paths, languages, strict=True):
        Path(path).write_text(f"a\t{language}\n", encoding="utf-8")
    files = {"pairs": paths, "to": languages}
    model = Translator.load(make_run(data={"train": files, "valid": files}), "cpu")
    (pair,) = validation_sample(model.with_target_language("fr"))
    assert (*pair, tags_of(pair)) == ("a", "fr", ("2fr",))
