"""Tags before sources: in recipes, files, vocabularies and stores; and a server of several languages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from regard.cli.evaluate import _test_pairs
from regard.data.batching import pad_sources
from regard.data.corpus import fingerprint, read_pairs, train_pairs
from regard.data.pairs import Pair, TaggedPair, tags_of
from regard.data.special_tokens import SPECIAL_TOKENS
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.interop.convert import export_model
from regard.nn.network import named_weights
from regard.recipe import (
    CleaningConfig,
    DataConfig,
    Recipe,
    TokenizerConfig as Section,
    make_recipe,
)
from regard.server.app import create_app
from regard.storage.run_dir import RunDir
from regard.tasks import Translator, build_network
from regard.training.distillation import distill

TRAIN = {
    "source": ["t.en", "t.en", "t.de"],
    "target": ["t.de", "t.fr", "t.en"],
    "to": ["de", "fr", "en"],
    "tag": [None, None, "bt"],
}


def make(folder: Path | str = ".", **sections: dict[str, Any]) -> Recipe:
    model = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "heads": 2, "d_ff": 16}
    data = {"root": str(folder), "train": TRAIN, **sections.pop("data", {})}
    values = {
        "data": data,
        "tokenizer": {"vocab_size": 340},
        "model": model,
        "decoding": {"extra_length": 4, "beam": 2},
    }
    values["evaluation"] = {"metrics": ["wer", "per"]}
    return make_recipe({**values, **sections}, "test")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, lines in {
        "t.en": ["a dog", "OK", "a <2de> cat"],
        "t.de": ["ein Hund", "OK", "eine Katze"],
        "t.fr": ["un chien", "OK", "un chat"],
    }.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def run(files: Path) -> Path:
    """Untrained."""
    made, recipe = RunDir(files / "run"), make(files)
    made.folder.mkdir()
    made.write_recipe(recipe)
    pairs = lambda: train_pairs(recipe.data)  # noqa: E731
    tokenizer = Tokenizer.train(recipe.tokenizer, pairs, tags=recipe.data.tags)
    tokenizer.save(made.folder)
    torch.manual_seed(1)
    network = build_network(recipe, tokenizer)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    made.write_weights(named_weights(network))
    return made.folder


def test_each_file_has_its_tags(files: Path) -> None:
    data = make(files).data
    pairs = list(read_pairs(data.train, data))
    assert [tags_of(pair) for pair in pairs] == [("2de",)] * 3 + [("2fr",)] * 3 + [
        ("2en", "bt")
    ] * 3
    assert pairs[3][:2] == ("a dog", "un chien")  # the text is as it stands
    assert data.tags == ["2de", "2en", "2fr", "bt"]
    assert data.targets == ["de", "fr", "en"]
    assert data.language_pairs == [("en", "de"), ("en", "fr"), ("de", "en")]
    one = make(files, data={"train": {"source": "t.en", "target": "t.de", "to": "de"}}).data
    assert [tags_of(pair) for pair in read_pairs(one.train, one)] == [("2de",)] * 3
    other = one.train.model_copy(update={"to": ("fr",)})
    assert fingerprint(one.train, one) != fingerprint(other, one)


@pytest.mark.parametrize(
    ("train", "named"),
    [
        ({"source": "t.en", "target": "t.de.gz"}, True),
        ({"source": "a.en", "target": "german", "to": "de"}, True),
        ({"pairs": "t.tsv"}, False),
        ({"pairs": "t.tsv", "to": "de"}, False),
        ({"source": "source.txt", "target": "target.txt"}, False),
    ],
)
def test_whether_all_languages_have_names(train: dict[str, str], named: bool) -> None:
    assert DataConfig.model_validate({"train": train}).named is named


def test_a_tag_is_an_entry_that_no_text_is_cut_into(run: Path) -> None:
    vocabulary = RunDir(run).tokenizer(RunDir(run).recipe()).source
    assert vocabulary.tags == {"2de": 5, "2en": 6, "2fr": 7, "bt": 8}
    assert vocabulary.num_special_tokens == 9
    (ids,) = vocabulary.encode(["<2de> a <bt> dog"])
    assert min(ids) >= vocabulary.num_special_tokens
    assert vocabulary.decode([[5, *ids, 8]]) == ["<2de> a <bt> dog"]
    assert vocabulary.prepend_tags([20], ("2fr", "bt")) == [7, 8, 20]
    assert {5, 6, 7, 8} <= set(vocabulary.suppressed_tokens)
    with pytest.raises(RegardError, match="no tag <2xx>; known tags: <2de>"):
        vocabulary.prepend_tags([20], ("2xx",))


def test_the_same_text_to_two_languages_is_no_repeat(tmp_path: Path, run: Path) -> None:
    tokenizer = RunDir(run).tokenizer(RunDir(run).recipe())
    pairs = [TaggedPair.from_pair(Pair("OK", "OK"), (tag,)) for tag in ("2de", "2fr", "2de")]
    counts = write_dataset(tmp_path / "a", pairs, tokenizer, CleaningConfig())
    assert (counts.kept, counts.duplicates) == (2, 1)
    store = TokenDataset(tmp_path / "a")
    assert pad_sources(store, np.arange(2))[:, 0].tolist() == [5, 7]
    assert store.source_lengths[0] == store.target_lengths[0] + 1


def test_only_the_source_vocabulary_has_tags(files: Path) -> None:
    data = make(files).data
    section = Section(vocab_size=320, shared=False, kind="bpe")
    tokenizer = Tokenizer.train(section, lambda: train_pairs(data), tags=data.tags)
    assert len(tokenizer.source.tags) == 4
    assert tokenizer.target.tags == {}
    assert tokenizer.target.num_special_tokens == len(SPECIAL_TOKENS)


def test_a_language_for_all_texts_or_for_each(run: Path) -> None:
    model = Translator.load(run, "cpu")
    texts = ["a dog", "OK"]
    german, french = (model.translate(texts, to=code) for code in ("de", "fr"))
    assert german != french
    assert model.with_target_language("fr").translate(texts) == french
    assert model.translate(texts, to=["de", "fr"]) == [german[0], french[1]]
    assert model.with_target_language("fr").trace("a dog").translation == french[0]
    assert model.language is None
    for wrong in (None, "xx", ["de", None]):
        with pytest.raises(RegardError, match="this model translates to de, fr, en"):
            model.translate(texts, to=wrong)
    with pytest.raises(RegardError, match="language xx"):
        model.with_target_language("xx")


def test_a_model_of_one_language_takes_no_other(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    with pytest.raises(
        RegardError, match="language de: this model translates to one language only, so"
    ):
        model.translate(["ein Hund"], to="de")
    assert model.with_target_language(None).translate(["ein Hund"]) == model.translate(["ein Hund"])


def test_each_language_is_scored_apart(run: Path, files: Path) -> None:
    model = Translator.load(run, "cpu")
    pairs = list(train_pairs(model.recipe.data))
    results = model.evaluate(pairs)
    assert [result.name for result in results[::2]] == ["WER to de", "WER to fr", "WER to en"]
    alone = model.evaluate([pair for pair in pairs if tags_of(pair) == ("2fr",)])
    assert [result.value for result in alone] == [result.value for result in results[2:4]]
    assert [result.name for result in model.evaluate(pairs, quick=True)] == ["WER"]


def test_what_has_no_pairs_to_score_is_refused(run: Path, files: Path) -> None:
    model = Translator.load(run, "cpu")
    with pytest.raises(RegardError, match="nothing to score: there are no lines"):
        model.evaluate([])
    german = {"source": "t.en", "target": "t.de", "to": "de"}
    model.recipe = make(files, data={"test": german})
    with pytest.raises(RegardError, match="language xx: this model translates to de, fr, en"):
        _test_pairs(model, {}, "xx")
    with pytest.raises(RegardError, match=r"data\.test has no pairs to fr"):
        _test_pairs(model, {}, "fr")
    assert len(_test_pairs(model, {}, "de")) == 3


def test_pairs_turned_round_are_back_translations(run: Path, files: Path, tmp_path: Path) -> None:
    model = Translator.load(run, "cpu").with_target_language("en")
    output = tmp_path / "back.jsonl"
    assert distill(model, output, files / "t.de", back_translation=True, beam=1) == 3
    texts = make(tmp_path, data={"train": {"pairs": "back.jsonl", "tag": "bt"}}).data
    found = list(read_pairs(texts.train, texts))
    lines = (files / "t.de").read_text().splitlines()
    assert [pair.target for pair in found] == lines
    assert [pair.source for pair in found] == model.translate(lines, beam=1)
    assert {tags_of(pair) for pair in found} == {("bt",)}
    # Without a file: the sources that were learned from for this language.
    assert distill(model, output, beam=1) == 3


def test_formats_that_know_no_tags_refuse(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"does not support data.train.to: de, fr, en"):
        export_model(run, "ctranslate2", tmp_path / "out")


# A server


def ask(client: TestClient, **asked: Any) -> Any:
    return client.post("/translate", json={"q": "a dog", **asked})


def test_a_server_of_several_languages(run: Path) -> None:
    model = Translator.load(run, "cpu")
    with TestClient(create_app(model), base_url="http://localhost") as client:
        languages = {one["code"]: one["targets"] for one in client.get("/languages").json()}
        assert languages == {"en": ["de", "fr"], "de": ["en"], "fr": []}
        for target in ("de", "fr"):
            (wanted,) = model.translate(["a dog"], to=target)
            answer = ask(client, source="en", target=target).json()
            assert answer["translatedText"] == wanted
            html = ask(client, source="en", target=target, q="<b>a</b> dog", format="html")
            assert html.status_code == 200
        auto = ask(client, source="auto", target="en").json()
        assert auto["detectedLanguage"] == {"confidence": 100.0, "language": "de"}
        refused = ask(client, source="de", target="fr")
        assert refused.status_code == 400
        assert "en to de, en to fr, de to en" in refused.json()["error"]
        assert client.post("/v1/trace", json={"q": "a dog"}).status_code == 200
        detected = client.post("/detect", json={"q": "a dog"}).json()
        assert [one["language"] for one in detected] == ["en", "de"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": {**TRAIN, "to": ["de", "fr"]}}, "to has 2 values for 3 file"),
        ({"train": {**TRAIN, "to": ["de", "fr", "e n"]}}, "data.train.to"),
        ({"train": {**TRAIN, "tag": "mask"}}, "<mask> is a special token of the vocabulary"),
        ({"valid": {"pairs": "v.tsv"}}, "data.valid.to is missing; allowed: de, fr, en"),
        ({"valid": {"pairs": "v.tsv", "to": "cs"}}, "<2cs> does not occur in data.train"),
        ({"train": {"text": "t", "to": "de"}}, "to needs source and target, or pairs"),
    ],
)
def test_refusals(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        make(data=data)


def test_tags_are_for_translation_only() -> None:
    with pytest.raises(RegardError, match=r"data.train.to needs task: translation, not tagging"):
        make(task="tagging", evaluation={"metrics": ["accuracy"]})  # type: ignore[arg-type]
