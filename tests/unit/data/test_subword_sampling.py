"""DataFiles cut at random: deterministic, complete, and the same pairs in every copy."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from regard.data import subword_sampling as drawing_module
from regard.data.batching import sources, targets
from regard.data.corpus import Pair
from regard.data.dataset import TokenDataset, write_dataset
from regard.data.subword_sampling import (
    SUBWORD_SAMPLERS,
    SamplingTokenizer,
    SamplingVocabulary,
    UnigramSampler,
)
from regard.data.tokenizer import Tokenizer
from regard.demo.grammar import generate
from regard.errors import RegardError
from regard.recipe import Cleaning, Recipe, Tokenizer as Section, TokenizerKind, make_recipe
from regard.storage.run_dir import RunDir
from regard.training import prepare as module
from regard.training.checkpoint import checkpoint_files, load_checkpoint
from regard.training.prepare import open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.run import train

PAIRS = list(generate("train", 300))
TEXTS = [pair.source for pair in PAIRS]
KINDS: dict[TokenizerKind, float] = {"bpe": 0.3, "unigram": 0.05}


@pytest.fixture(scope="module")
def tokenizers() -> dict[TokenizerKind, Tokenizer]:
    sections = {kind: Section(kind=kind, size=700) for kind in KINDS}
    return {kind: Tokenizer.train(section, lambda: PAIRS) for kind, section in sections.items()}


Tokenizers = dict[TokenizerKind, Tokenizer]


@pytest.mark.parametrize("kind", KINDS)
def test_a_drawn_cut_is_of_the_same_text(tokenizers: Tokenizers, kind: TokenizerKind) -> None:
    vocabulary = tokenizers[kind].source
    texts = [*TEXTS, "", " ", "a  b ", "\u2581 \u2585 日本 ñ", "Straße" * 50]
    drawing = SamplingVocabulary(vocabulary, kind, KINDS[kind], [1])
    drawn = drawing.encode(texts)
    assert vocabulary.decode(drawn) == texts
    assert sum(a != b for a, b in zip(drawn, vocabulary.encode(texts), strict=True)) > 100


@given(text=st.text(alphabet="abe ntsEI.日"))
def test_without_chance_bpe_is_sentencepieces(tokenizers: Tokenizers, text: str) -> None:
    vocabulary = tokenizers["bpe"].source
    assert SamplingVocabulary(vocabulary, "bpe", 0.0, [1]).encode([text]) == vocabulary.encode(
        [text]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(tokenizers: Tokenizers, kind: TokenizerKind) -> None:
    one, same, other = (
        SamplingTokenizer.of(tokenizers[kind], kind, KINDS[kind], seed)
        for seed in ((1, 2), (1, 2), (1, 3))
    )
    first = one.source.encode(TEXTS)
    assert same.source.encode(TEXTS) == first
    assert other.source.encode(TEXTS) != first
    assert one.source.encode(TEXTS) != first  # the next draw
    assert one.target.encode(TEXTS) != first


@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_the_corpus_and_draws_stay_the_same(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch, kind: TokenizerKind
) -> None:
    """Where no blanks are set, every sentence is a word of its own."""
    texts = [text.replace(" ", "") for text in TEXTS]
    vocabulary = tokenizers[kind].source
    free = SamplingVocabulary(vocabulary, kind, KINDS[kind], [1]).encode(texts)
    monkeypatch.setattr(drawing_module, "WORDS_REMEMBERED", 5)
    monkeypatch.setattr(drawing_module, "LATTICES_KEPT", 5)
    bound = SamplingVocabulary(vocabulary, kind, KINDS[kind], [1])
    assert bound.encode(texts) == free
    assert len(bound._drawn) == 5
    if isinstance(bound._draw, UnigramSampler):
        assert bound._draw._lattice.cache_info().currsize <= 5


def test_the_same_in_every_process(tokenizers: Tokenizers) -> None:
    """MultiwordToken down once: it may depend on no process, no version of Python, no hash."""
    vocabulary = tokenizers["bpe"].source
    drawing = SamplingVocabulary(vocabulary, "bpe", 0.5, [1])
    letters = drawing.encode(["the the the the the"])[0]
    assert " ".join(vocabulary.pieces(letters)) == "▁th e ▁ t h e ▁t h e ▁the ▁the"


def test_bpe_leaves_joins_out_with_the_probability_given(tokenizers: Tokenizers) -> None:
    """Of "the": ▁t, he and what they become; each way to cut it, as often as sentencepiece's rule has it."""
    vocabulary = tokenizers["bpe"].source
    counts = [
        sum(map(len, SamplingVocabulary(vocabulary, "bpe", alpha, [1]).encode(TEXTS)))
        for alpha in (0.0, 0.1, 0.5, 1.0)
    ]
    assert counts[0] == sum(map(len, vocabulary.encode(TEXTS)))
    assert counts == sorted(set(counts))
    assert counts[-1] == sum(map(len, TEXTS)) + len(TEXTS)  # letters, and a blank before each text


@pytest.mark.parametrize(("kind", "length_penalty"), [("bpe", 0.3), ("unigram", 0.1)])
def test_each_cut_comes_as_often_as_from_sentencepiece(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch, kind: TokenizerKind, alpha: float
) -> None:
    count, vocabulary, word = 4000, tokenizers[kind].source, "children"
    monkeypatch.setattr(drawing_module, "DRAWS_OF_A_WORD", count)
    ours = Counter(
        map(tuple, SamplingVocabulary(vocabulary, kind, alpha, [1]).encode([word] * count))
    )
    theirs = Counter(
        tuple(vocabulary._processor.encode(f" {word}", enable_sampling=True, alpha=alpha))
        for _ in range(count)
    )
    assert len(ours) > 3
    for cut in {*ours, *theirs}:
        share = (ours[cut] + theirs[cut]) / (2 * count)
        error = (2 * share * (1 - share) / count) ** 0.5
        assert abs(ours[cut] - theirs[cut]) / count < 5 * error, vocabulary.pieces(cut)


def test_unigram_draws_each_cut_as_often_as_its_power_says(tokenizers: Tokenizers) -> None:
    """Kudo (2018): P(cut) is proportional to (product of the pieces' probabilities) ** alpha."""
    vocabulary, alpha, word = tokenizers["unigram"].source, 0.5, "▁children"
    pieces, scores = vocabulary.scores(), {}
    for breaks in range(2 ** (len(word) - 1)):
        places = [n for n in range(1, len(word)) if breaks >> (n - 1) & 1]
        cut = [word[a:b] for a, b in zip([0, *places], [*places, None], strict=True)]
        if all(piece in pieces for piece in cut):
            key = tuple(pieces[piece][0] for piece in cut)
            scores[key] = alpha * sum(pieces[piece][1] for piece in cut)
    powers = np.exp(np.array(list(scores.values())))
    count, random, draw = 20_000, Random(1), SUBWORD_SAMPLERS["unigram"](vocabulary, alpha)
    drawn = Counter(draw(word, random) for _ in range(count))
    assert len(scores) > 2
    assert set(drawn) <= set(scores)
    for ids, share in zip(scores, powers / powers.sum(), strict=True):
        assert drawn[ids] / count == pytest.approx(share, abs=5 * (0.25 / count) ** 0.5)


def test_what_is_kept_does_not_depend_on_the_draw(tmp_path: Path, tokenizers: Tokenizers) -> None:
    plain = tokenizers["bpe"]
    lengths = [max(map(len, both)) for both in zip(*_encoded(plain), strict=True)]
    most = sorted(lengths)[len(lengths) // 2]
    pairs = [*PAIRS, *PAIRS[:7], Pair("", "x")]
    clean = Cleaning(max_tokens=most)
    counts = write_dataset(tmp_path / "plain", pairs, plain, clean)
    drawing = SamplingTokenizer.of(plain, "bpe", 0.5, (1,))
    assert write_dataset(tmp_path / "drawn", pairs, drawing, clean) == counts
    assert counts.too_long > 0
    one, other = TokenDataset(tmp_path / "plain"), TokenDataset(tmp_path / "drawn")
    assert max(other.source_lengths.max(), other.target_lengths.max()) <= most
    fell_back = 0
    for row in range(len(one)):
        mine, drawn = (
            [side(store, np.array([row]))[0].tolist() for side in (sources, targets)]
            for store in (one, other)
        )
        assert plain.source.decode(mine) == plain.source.decode(drawn)  # it is shared
        fell_back += mine == drawn
    assert 0 < fell_back < len(one)


def _encoded(tokenizer: Tokenizer) -> tuple[list[list[int]], list[list[int]]]:
    return tokenizer.source.encode(TEXTS), tokenizer.target.encode([p.target for p in PAIRS])


def _values(folder: Path, training: dict[str, Any]) -> dict[str, Any]:
    lines = "".join(f"{pair.source}\t{pair.target}\n" for pair in PAIRS)
    (folder / "pairs.tsv").write_text(lines, encoding="utf-8")
    return {
        "data": {"root": str(folder), "train": {"pairs": "pairs.tsv"}, "hold_out": 0.1},
        "tokenizer": {"kind": "bpe", "vocab_size": 500},
        "training": training,
    }


def prepared_run(folder: Path, **training: float) -> tuple[RunDir, Recipe]:
    folder.mkdir()
    run, recipe = RunDir(folder / "run"), make_recipe(_values(folder, training), "test")
    run.folder.mkdir()
    run.write_recipe(recipe)
    report = ProgressReporter(run, speaks=False)
    prepare(run, recipe, report)
    report.end()
    return run, recipe


def test_copies_are_the_same_from_one_process_or_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"subword_sampling": 0.2, "subword_copies": 3, "seed": 5}
    run, recipe = prepared_run(tmp_path / "one", **options)
    prepared = open_prepared(run, recipe)
    stores = [prepared.of_epoch(epoch) for epoch in range(7)]
    assert stores == [prepared.copies[n % 3] for n in range(7)]
    assert {len(store) for store in stores} == {len(prepared.train)}
    totals = [int(store.source_lengths.sum()) for store in prepared.copies]
    assert len(set(totals)) == 3
    assert min(totals) > int(prepared.train.source_lengths.sum())
    other, _ = prepared_run(tmp_path / "other", **{**options, "seed": 6})
    monkeypatch.setattr(module, "PAIRS_WORTH_A_PROCESS", 300)
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    again, _ = prepared_run(tmp_path / "two", **options)
    for number in range(3):
        name = f"train-{number:03d}.arrow"
        assert (run.data / name).read_bytes() == (again.data / name).read_bytes()
        assert (run.data / name).read_bytes() != (other.data / name).read_bytes()


def test_a_process_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, recipe = prepared_run(tmp_path / "one", sampling=0.2, copies=2)
    monkeypatch.setattr(module, "PAIRS_WORTH_A_PROCESS", 100)
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    monkeypatch.setattr(module, "_write", lambda *arguments: None)  # here, not in the other
    (run.folder / "tokenizer.model").unlink()
    with pytest.raises(RegardError, match=r"a copy .* was not made: .*tokenizer is missing"):
        module.write_copies(run, recipe, 300)


def test_without_sampling_every_epoch_reads_the_plain_store(tmp_path: Path) -> None:
    run, recipe = prepared_run(tmp_path / "one")
    prepared = open_prepared(run, recipe)
    assert prepared.of_epoch(0) is prepared.of_epoch(9) is prepared.train
    assert not list(run.data.glob("train-*"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"subword_sampling": 0.1}, "tokenizer": {"kind": "word"}},
            "words knows one way",
        ),
        ({"training": {"rdrop": 1}, "model": {"dropout": 0.0}}, "rdrop without any dropout"),
        (
            {"training": {"rdrop": 1}, "model": {"architecture": "non_autoregressive"}},
            "ask another one",
        ),
        (
            {"training": {"word_dropout": 0.1}, "model": {"architecture": "non_autoregressive"}},
            "word_dropout is for the tasks tag, classify and translate",
        ),
    ],
)
def test_refusals(sections: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        make_recipe({"data": {"train": {"pairs": "p.tsv"}}, **sections}, "test")


def test_a_training_that_goes_on_learns_from_the_same_draws(tmp_path: Path) -> None:
    """Over several epochs, with all that is drawn at random at work."""
    model = {"preset": "tiny", "encoder_layers": 1, "decoder_layers": 1, "d_model": 16}
    weights = []
    for name, stops in (("at_once", [9]), ("in_two", [4, 9])):
        folder = tmp_path / name
        folder.mkdir()
        for steps in stops:
            training: dict[str, Any] = {
                "subword_sampling": 0.2,
                "subword_copies": 2,
                "rdrop": 2.0,
                "word_dropout": 0.1,
            }
            training |= {"target_word_dropout": 0.1, "ema": 0.9, "average": "none"}
            training |= {"steps": steps, "tokens_per_batch": 4096, "validate_sentences": 2}
            values = _values(folder, training) | {"model": {**model, "d_ff": 16}}
            train(make_recipe(values, "test"), folder / "run")
        files = checkpoint_files(folder / "run" / "checkpoints")
        progress, groups = load_checkpoint(files[-1])
        assert progress.epoch >= 2
        weights.append(groups)
    assert weights[0].keys() == weights[1].keys()
    for group in ("model", "average"):
        for key, tensor in weights[0][group].items():
            assert torch.equal(tensor, weights[1][group][key]), key
