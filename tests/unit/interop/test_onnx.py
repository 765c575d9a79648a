"""ONNX: encoder and decoder step in onnxruntime, with any batch, beams and lengths."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import config

from regard.errors import RegardError
from regard.interop.convert import export_model
from regard.tasks import Translator

for name in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(name, reason="needs pip install 'regard[exchange]'")

from regard.interop.onnx import session  # noqa: E402

MakeRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """torch exports with symbols in the place of sizes, which are no int to the checker of shapes."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


def test_a_search_over_the_graphs_finds_the_same(make_run: MakeRun, tmp_path: Path) -> None:
    """A batch norm, which others cannot hold, goes along; so do two beams side by side that change places."""
    run, out = make_run(model={"norm": "batch", "norm_order": "pre"}), tmp_path / "out"
    assert "proved" in export_model(run, "onnx", out)[0]
    model = Translator.load(run, "cpu")
    marks = json.loads((out / "config.json").read_text())
    encoder, decoder = session(out / "encoder.onnx"), session(out / "decoder.onnx")
    (ids,) = model.tokenizer.source.encode(["The dog is tired."])
    memory = encoder.run(None, {"source": np.array([[*ids, marks["end"]]])})
    feed = dict(zip(("memory_keys", "memory_values", "real"), memory, strict=True))
    shape = marks["layers"], 1, 2, marks["heads"], 0
    feed["keys"] = np.zeros((*shape, marks["d_k"]), np.float32)
    feed["values"] = np.zeros((*shape, marks["d_v"]), np.float32)
    tokens, said = np.full((1, 2), marks["start"]), []
    for _ in range(6):
        logits, keys, values = decoder.run(None, {"tokens": tokens, **feed})
        np.testing.assert_array_equal(logits[:, 0], logits[:, 1])
        feed["keys"], feed["values"] = keys[:, :, [1, 0]], values[:, :, [1, 0]]
        logits[..., marks["never"]] = -np.inf
        tokens = logits.argmax(-1)
        said.append(int(tokens[0, 0]))
    ((ours,),) = model.search(["The dog is tired."], beam=1)
    until = said.index(marks["end"]) if marks["end"] in said else len(said)
    assert ours.tokens[:until] == model.tokenizer.target.pieces(said[:until])


def test_what_does_not_fit_is_refused_by_name(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"the ONNX export cannot hold model\.position: rotary"):
        export_model(make_run(model={"position": "rotary"}), "onnx", tmp_path / "out")
