"""Subword sampling: deterministic, lossless, and with the same pairs in every copy."""

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from regard.data import subword_sampling
from regard.data.batching import pad_sources, pad_targets
from regard.data.pairs import Pair
from regard.data.subword_sampling import (
    SUBWORD_SAMPLERS,
    SamplingTokenizer,
    SamplingVocabulary,
    UnigramSampler,
    subword_samplers,
)
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.data.tokenizer import Tokenizer, Vocabulary
from regard.demo.corpus import generate
from regard.errors import RegardError
from regard.recipe import CleaningConfig, Recipe, TokenizerConfig as Section, make_recipe
from regard.storage.run_dir import RunDir
from regard.training import prepare_data as module
from regard.training.checkpoint import checkpoint_files, load_checkpoint
from regard.training.prepare_data import open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.run import train

PAIRS = list(generate("train", 300))
TEXTS = [pair.source for pair in PAIRS]
KINDS: dict[str, float] = {"bpe": 0.3, "unigram": 0.05}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    sections = {kind: Section(kind=kind, vocab_size=700) for kind in KINDS}
    return {kind: Tokenizer.train(section, lambda: PAIRS) for kind, section in sections.items()}


Tokenizers = dict[str, Tokenizer]


def sampling_vocabulary(vocabulary: Vocabulary, kind: str, alpha: float) -> SamplingVocabulary:
    return SamplingVocabulary(vocabulary, SUBWORD_SAMPLERS[kind](vocabulary, alpha), [1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_sampler_gives_the_same_samples(tokenizers: Tokenizers, kind: str) -> None:
    """All copies use it, and both sides, for its cache."""
    base = tokenizers[kind]
    shared = subword_samplers(base, kind, KINDS[kind])
    assert shared[0] is shared[1]
    for seed in ((1, 0), (1, 1)):
        one = SamplingTokenizer.wrap(base, shared, seed)
        other = SamplingTokenizer.wrap(base, subword_samplers(base, kind, KINDS[kind]), seed)
        for side in ("source", "target"):
            assert getattr(one, side).encode(TEXTS) == getattr(other, side).encode(TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampled_segmentation_decodes_to_the_same_text(tokenizers: Tokenizers, kind: str) -> None:
    vocabulary = tokenizers[kind].source
    texts = [*TEXTS, "", " ", "a  b ", "\u2581 \u2585 日本 ñ", "Straße" * 50]
    sampled = sampling_vocabulary(vocabulary, kind, KINDS[kind]).encode(texts)
    assert vocabulary.decode(sampled) == texts
    assert sum(a != b for a, b in zip(sampled, vocabulary.encode(texts), strict=True)) > 100


@given(text=st.text(alphabet="abe ntsEI.日"))
def test_bpe_without_dropout_equals_sentencepiece(tokenizers: Tokenizers, text: str) -> None:
    vocabulary = tokenizers["bpe"].source
    assert sampling_vocabulary(vocabulary, "bpe", 0.0).encode([text]) == vocabulary.encode([text])


@pytest.mark.parametrize("kind", KINDS)
def test_samples_depend_on_the_seed(tokenizers: Tokenizers, kind: str) -> None:
    one, same, other = (
        SamplingTokenizer.wrap(
            tokenizers[kind], subword_samplers(tokenizers[kind], kind, KINDS[kind]), seed
        )
        for seed in ((1, 2), (1, 2), (1, 3))
    )
    first = one.source.encode(TEXTS)
    assert same.source.encode(TEXTS) == first
    assert other.source.encode(TEXTS) != first
    assert one.source.encode(TEXTS) != first  # the next sample
    assert one.target.encode(TEXTS) != first


@pytest.mark.parametrize("kind", KINDS)
def test_the_caches_are_bounded_and_do_not_change_the_samples(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In scripts without spaces, every sentence is one word."""
    texts = [text.replace(" ", "") for text in TEXTS]
    vocabulary = tokenizers[kind].source
    unbounded = sampling_vocabulary(vocabulary, kind, KINDS[kind]).encode(texts)
    monkeypatch.setattr(subword_sampling, "MAX_CACHED_WORDS", 5)
    monkeypatch.setattr(subword_sampling, "MAX_CACHED_LATTICES", 5)
    bounded = sampling_vocabulary(vocabulary, kind, KINDS[kind])
    assert bounded.encode(texts) == unbounded
    assert len(bounded._samples) == 5
    if isinstance(bounded._sampler, UnigramSampler):
        assert bounded._sampler._cached_lattice.cache_info().currsize <= 5


def test_the_same_in_every_process(tokenizers: Tokenizers) -> None:
    """A recorded sample: it must not depend on the process, the version of Python, or the hash seed."""
    vocabulary = tokenizers["bpe"].source
    sampling = sampling_vocabulary(vocabulary, "bpe", 0.5)
    ids = sampling.encode(["the the the the the"])[0]
    assert " ".join(vocabulary.pieces(ids)) == "▁th e ▁ t h e ▁t h e ▁the ▁the"


def test_a_higher_dropout_gives_more_tokens(tokenizers: Tokenizers) -> None:
    """From SentencePiece's own segmentation without dropout to single characters with dropout 1."""
    vocabulary = tokenizers["bpe"].source
    counts = [
        sum(map(len, sampling_vocabulary(vocabulary, "bpe", alpha).encode(TEXTS)))
        for alpha in (0.0, 0.1, 0.5, 1.0)
    ]
    assert counts[0] == sum(map(len, vocabulary.encode(TEXTS)))
    assert counts == sorted(set(counts))
    assert counts[-1] == sum(map(len, TEXTS)) + len(
        TEXTS
    )  # characters, and a space before each text


@pytest.mark.parametrize(("kind", "alpha"), [("bpe", 0.3), ("unigram", 0.1)])
def test_segmentations_are_as_frequent_as_sentencepieces(
    tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch, kind: str, alpha: float
) -> None:
    count, vocabulary, word = 4000, tokenizers[kind].source, "children"
    monkeypatch.setattr(subword_sampling, "MAX_SAMPLES_PER_WORD", count)
    ours = Counter(map(tuple, sampling_vocabulary(vocabulary, kind, alpha).encode([word] * count)))
    theirs = Counter(
        tuple(vocabulary._processor.encode(f" {word}", enable_sampling=True, alpha=alpha))
        for _ in range(count)
    )
    assert len(ours) > 3
    for ids in {*ours, *theirs}:
        share = (ours[ids] + theirs[ids]) / (2 * count)
        error = (2 * share * (1 - share) / count) ** 0.5
        assert abs(ours[ids] - theirs[ids]) / count < 5 * error, vocabulary.pieces(ids)


def test_unigram_samples_in_proportion_to_probability_to_the_power_of_alpha(
    tokenizers: Tokenizers,
) -> None:
    """Kudo (2018): P(segmentation) is proportional to (product of the pieces' probabilities) ** alpha."""
    vocabulary, alpha, word = tokenizers["unigram"].source, 0.5, "▁children"
    pieces, scores = vocabulary.piece_scores(), {}
    for breaks in range(2 ** (len(word) - 1)):
        splits = [n for n in range(1, len(word)) if breaks >> (n - 1) & 1]
        segments = [word[a:b] for a, b in zip([0, *splits], [*splits, None], strict=True)]
        if all(piece in pieces for piece in segments):
            key = tuple(pieces[piece][0] for piece in segments)
            scores[key] = alpha * sum(pieces[piece][1] for piece in segments)
    powers = np.exp(np.array(list(scores.values())))
    count, rng, sample = 20_000, Random(1), SUBWORD_SAMPLERS["unigram"](vocabulary, alpha)
    drawn = Counter(sample(word, rng) for _ in range(count))
    assert len(scores) > 2
    assert set(drawn) <= set(scores)
    for ids, share in zip(scores, powers / powers.sum(), strict=True):
        assert drawn[ids] / count == pytest.approx(share, abs=5 * (0.25 / count) ** 0.5)


def test_cleaning_does_not_depend_on_the_samples(tmp_path: Path, tokenizers: Tokenizers) -> None:
    base = tokenizers["bpe"]
    lengths = [max(map(len, both)) for both in zip(*_encoded(base), strict=True)]
    max_tokens = sorted(lengths)[len(lengths) // 2]
    pairs = [*PAIRS, *PAIRS[:7], Pair("", "x")]
    clean = CleaningConfig(max_tokens=max_tokens)
    counts = write_dataset(tmp_path / "base", pairs, base, clean)
    sampling = SamplingTokenizer.wrap(base, subword_samplers(base, "bpe", 0.5), (1,))
    assert write_dataset(tmp_path / "sampled", pairs, sampling, clean) == counts
    assert counts.too_long > 0
    one, other = TokenDataset(tmp_path / "base"), TokenDataset(tmp_path / "sampled")
    assert max(other.source_lengths.max(), other.target_lengths.max()) <= max_tokens
    fell_back = 0
    for row in range(len(one)):
        ids, sampled = (
            [side(dataset, np.array([row]))[0].tolist() for side in (pad_sources, pad_targets)]
            for dataset in (one, other)
        )
        assert base.source.decode(ids) == base.source.decode(sampled)  # the vocabulary is shared
        fell_back += ids == sampled
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
    reporter = ProgressReporter(run, enabled=False)
    prepare(run, recipe, reporter)
    reporter.close()
    return run, recipe


def test_copies_are_the_same_from_one_process_or_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"subword_sampling": 0.2, "subword_copies": 3, "seed": 5}
    run, recipe = prepared_run(tmp_path / "one", **options)
    prepared = open_prepared(run, recipe)
    datasets = [prepared.dataset_for_epoch(epoch) for epoch in range(7)]
    assert datasets == [prepared.copies[n % 3] for n in range(7)]
    assert {len(dataset) for dataset in datasets} == {len(prepared.train)}
    totals = [int(dataset.source_lengths.sum()) for dataset in prepared.copies]
    assert len(set(totals)) == 3
    assert min(totals) > int(prepared.train.source_lengths.sum())
    other, _ = prepared_run(tmp_path / "other", **{**options, "seed": 6})
    monkeypatch.setattr(module, "SAMPLED_PAIRS_PER_PROCESS", 300)
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    again, _ = prepared_run(tmp_path / "two", **options)
    for number in range(3):
        name = f"train-{number:03d}.arrow"
        assert (run.data / name).read_bytes() == (again.data / name).read_bytes()
        assert (run.data / name).read_bytes() != (other.data / name).read_bytes()


def test_a_failing_process_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, recipe = prepared_run(tmp_path / "one", subword_sampling=0.2, subword_copies=2)
    monkeypatch.setattr(module, "SAMPLED_PAIRS_PER_PROCESS", 100)
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    monkeypatch.setattr(module, "_write_copies", lambda *arguments: None)  # here, not in the other
    (run.folder / "tokenizer.model").unlink()
    with pytest.raises(
        RegardError, match=r"writing a copy of the data failed: .*tokenizer is missing"
    ):
        module.write_sampled_copies(run, recipe, 300)


def test_without_sampling_every_epoch_uses_the_same_dataset(tmp_path: Path) -> None:
    run, recipe = prepared_run(tmp_path / "one")
    prepared = open_prepared(run, recipe)
    assert prepared.dataset_for_epoch(0) is prepared.dataset_for_epoch(9) is prepared.train
    assert not list(run.data.glob("train-*"))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"training": {"subword_sampling": 0.1}, "tokenizer": {"kind": "word"}},
            "needs tokenizer.kind: unigram or bpe, not word",
        ),
        ({"training": {"rdrop": 1}, "model": {"dropout": 0.0}}, "rdrop needs dropout"),
        ({"training": {"rdrop": 1, "simcut": 1}}, "rdrop and training.simcut both compare"),
        (
            {"training": {"simcut": 1}, "model": {"architecture": "non_autoregressive"}},
            "simcut compares two passes over the same input",
        ),
        (
            {"training": {"rdrop": 1}, "model": {"architecture": "non_autoregressive"}},
            "rdrop compares two passes over the same input",
        ),
        (
            {"training": {"word_dropout": 0.1}, "model": {"architecture": "non_autoregressive"}},
            "word_dropout does not support architecture: non_autoregressive",
        ),
    ],
)
def test_incompatible_options_are_refused(
    sections: dict[str, dict[str, object]], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        make_recipe({"data": {"train": {"pairs": "p.tsv"}}, **sections}, "test")


def test_a_resumed_run_uses_the_same_samples(tmp_path: Path) -> None:
    """Over several epochs, with every random feature switched on."""
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
            values["decoding"] = {"beam": 1, "extra_length": 2}
            train(make_recipe(values, "test"), folder / "run")
        files = checkpoint_files(folder / "run" / "checkpoints")
        state, groups = load_checkpoint(files[-1])
        assert state.epoch >= 2
        weights.append(groups)
    assert weights[0].keys() == weights[1].keys()
    for group in ("model", "ema"):
        for key, tensor in weights[0][group].items():
            assert torch.equal(tensor, weights[1][group][key]), key
