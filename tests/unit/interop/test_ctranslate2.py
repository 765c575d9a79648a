"""CTranslate2 gives the same log-probabilities and the same translations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from regard.demo.grammar import generate
from regard.errors import RegardError
from regard.interop import ctranslate2 as exchange
from regard.interop.convert import export_model
from regard.recipe import LengthNormalization
from regard.tasks import Translator

ctranslate2 = pytest.importorskip("ctranslate2", reason="needs pip install 'regard[exchange]'")

MakeRun = Callable[..., Path]

SHAPES: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "before": {
        "norm_order": "pre",
        "norm": "rms",
        "activation": "swiglu",
        "position": "learned",
    },
    "untied": {"norm_order": "pre", "tie_output": False, "activation": "gelu"}
    | {"attention": {"bias": True}, "encoder_layers": 3},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_it_translates_the_same(make_run: MakeRun, tmp_path: Path, shape: dict[str, Any]) -> None:
    run, out = make_run(model={**shape, "output_bias": True}), tmp_path / "out"
    assert "proved" in export_model(run, "ctranslate2", out)[0]
    model = Translator.load(run, "cpu")
    options = json.loads((out / "translate.json").read_text())
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(out / "source.spm"))
    texts = [pair.source for pair in generate("test", 20)]
    sources = [pieces.encode(text, out_type=str) for text in texts]
    theirs = ctranslate2.Translator(str(out), intra_threads=1)
    limit = min(map(len, sources)) + model.recipe.decoding.extra_length
    # With one beam, with several when length is no matter, and in its own manner both must find the same.
    ways: list[tuple[int, float, LengthNormalization]] = [(1, 0.0, "paper"), (3, 0.0, "paper")]
    ways.append((3, 1.0, "ctranslate2"))
    lengths = set()
    for beam, alpha, manner in ways:
        options |= {"beam_size": beam, "length_penalty": alpha, "max_decoding_length": limit}
        said = theirs.translate_batch(sources, **options)
        found = model.search(texts, beam=beam, alpha=alpha, manner=manner)
        for (ours,), result in zip(found, said, strict=True):
            if ours.finished and max(len(ours.tokens), len(result.hypotheses[0])) < limit:
                assert ours.tokens == result.hypotheses[0]
                lengths.add(len(ours.tokens))
            elif beam == 1:
                assert ours.tokens[:limit] == result.hypotheses[0]
    assert len(lengths) > 1, f"a test of little: {lengths}"


def test_int8_is_small_and_harms_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(model={"d_model": 64, "d_ff": 128})
    before = Translator.load(run, "cpu").translate(["The dog is tired."])
    export_model(run, "ctranslate2", tmp_path / "whole")
    proof, cost, search, _ = export_model(run, "ctranslate2-int8", tmp_path / "small")
    assert "proved" in proof
    assert "--manner ctranslate2" in search
    mean, most = (float(word) for word in cost.replace(",", "").split() if word[0].isdigit())
    assert 0 < mean < most < 5
    assert Translator.load(run, "cpu").translate(["The dog is tired."]) == before
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("whole", "small")]
    positions = 2 * 1024 * 64 * 4  # the tables of positions stay as they are
    assert sizes[1] - positions < 0.35 * (sizes[0] - positions)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"norm": "batch"}, r"model\.norm: batch \(only layer or rms\)"),
        ({"position": "relative"}, r"model\.position: relative"),
        (
            {"attention": {"weighting": "relu", "score": "dot_product"}},
            "unscaled .*weighting: relu",
        ),
        ({"d_k": 4}, r"model\.d_k: 4 \(only width / heads, 8\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    make_run: MakeRun, tmp_path: Path, model: dict[str, Any], named: str
) -> None:
    with pytest.raises(RegardError, match=f"CTranslate2 cannot hold .*{named}"):
        export_model(make_run(model=model), "ctranslate2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mismatch_names_its_layer(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(model={"encoder_layers": 3})
    second = Translator.load(run, "cpu").network.encoder.layers[1].feed_forward.inner.weight  # type: ignore[union-attr, index]
    right = exchange._linear

    def wrong(spec: Any, *maps: Any) -> None:
        right(spec, *maps)
        if maps[0].weight.shape == second.shape and maps[0].weight.equal(second):
            spec.weight[0] += 1.0

    monkeypatch.setattr(exchange, "_linear", wrong)
    with pytest.raises(RegardError, match=r"encoder layer 2 differs by .*nothing was written"):
        export_model(run, "ctranslate2", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
