"""CTranslate2 gives the same log-probabilities and the same translations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from regard.demo.corpus import generate
from regard.errors import RegardError
from regard.interop import ctranslate2 as export
from regard.interop.convert import export_model
from regard.tasks import Translator

ctranslate2 = pytest.importorskip("ctranslate2", reason="needs pip install 'regard[interop]'")

MakeRun = Callable[..., Path]

SHAPES: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "pre-norm": {
        "norm_order": "pre",
        "norm": "rms",
        "activation": "swiglu",
        "position": "learned",
    },
    "untied": {"norm_order": "pre", "tie_output": False, "activation": "gelu"}
    | {"attention": {"bias": True}, "encoder_layers": 3},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_translations_are_the_same(
    make_run: MakeRun, tmp_path: Path, shape: dict[str, Any]
) -> None:
    run, out = make_run(model={**shape, "output_bias": True}), tmp_path / "out"
    assert "verified" in export_model(run, "ctranslate2", out)[0]
    model = Translator.load(run, "cpu")
    options = json.loads((out / "translate.json").read_text())
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(out / "source.spm"))
    texts = [pair.source for pair in generate("test", 20)]
    sources = [pieces.encode(text, out_type=str) for text in texts]
    theirs = ctranslate2.Translator(str(out), intra_threads=1)
    limit = min(map(len, sources)) + model.recipe.decoding.extra_length
    # Greedy search, beam search without a length penalty, and beam search with theirs.
    cases = [(1, 0.0, "gnmt"), (3, 0.0, "gnmt"), (3, 1.0, "ctranslate2")]
    lengths = set()
    for beam, penalty, rule in cases:
        options |= {"beam_size": beam, "length_penalty": penalty, "max_decoding_length": limit}
        results = theirs.translate_batch(sources, **options)
        found = model.search(texts, beam=beam, length_penalty=penalty, length_normalization=rule)
        for (ours,), result in zip(found, results, strict=True):
            if ours.finished and max(len(ours.tokens), len(result.hypotheses[0])) < limit:
                assert ours.tokens == result.hypotheses[0]
                lengths.add(len(ours.tokens))
            elif beam == 1:
                assert ours.tokens[:limit] == result.hypotheses[0]
    assert len(lengths) > 1, f"the translations hardly differ: {lengths}"


def test_int8_is_small_and_leaves_the_model_unchanged(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(model={"d_model": 64, "d_ff": 128})
    before = Translator.load(run, "cpu").translate(["The dog is tired."])
    export_model(run, "ctranslate2", tmp_path / "whole")
    verification, error, note, _ = export_model(run, "ctranslate2-int8", tmp_path / "small")
    assert "verified" in verification
    assert "--length-normalization ctranslate2" in note
    mean, largest = (float(word) for word in error.replace(",", "").split() if word[0].isdigit())
    assert 0 < mean < largest < 5
    assert Translator.load(run, "cpu").translate(["The dog is tired."]) == before
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("whole", "small")]
    positions = 2 * 1024 * 64 * 4  # position tables are not quantized
    assert sizes[1] - positions < 0.35 * (sizes[0] - positions)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"norm": "batch"}, r"model\.norm: batch \(only layer or rms\)"),
        ({"position": "relative"}, r"model\.position: relative"),
        (
            {"attention": {"weighting": "relu", "score": "dot_product"}},
            "dot_product .*weighting: relu",
        ),
        ({"d_k": 4}, r"model\.d_k: 4 \(must be d_model / heads, 8\)"),
    ],
)
def test_unsupported_choices_are_named(
    make_run: MakeRun, tmp_path: Path, model: dict[str, Any], named: str
) -> None:
    with pytest.raises(RegardError, match=f"CTranslate2 does not support .*{named}"):
        export_model(make_run(model=model), "ctranslate2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mismatch_names_the_layer(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(model={"encoder_layers": 3})
    second = Translator.load(run, "cpu").network.encoder.layers[1].feed_forward.inner.weight  # type: ignore[union-attr, index]
    original = export._linear

    def wrong(spec: Any, *maps: Any) -> None:
        original(spec, *maps)
        if maps[0].weight.shape == second.shape and maps[0].weight.equal(second):
            spec.weight[0] += 1.0

    monkeypatch.setattr(export, "_linear", wrong)
    with pytest.raises(RegardError, match=r"encoder layer 2 differs by .*nothing was written"):
        export_model(run, "ctranslate2", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
