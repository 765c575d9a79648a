"""ONNX: encoder and decoder step in onnxruntime, with any batch, beams and lengths."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from jaxtyping import config as jaxtyping_config

from regard.errors import RegardError
from regard.interop.convert import export_model
from regard.tasks import Translator

for name in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(name, reason="needs pip install 'regard[interop]'")

from regard.interop.onnx import session  # noqa: E402

MakeRun = Callable[..., Path]


@pytest.fixture(autouse=True)
def unchecked() -> Iterator[None]:
    """torch.export uses symbolic sizes, which the shape checker does not take for int."""
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", False)


def test_greedy_search_over_the_graphs_finds_the_same(make_run: MakeRun, tmp_path: Path) -> None:
    """With batch norm, which other formats do not support, and with two beams that change places."""
    run, out = make_run(model={"norm": "batch", "norm_order": "pre"}), tmp_path / "out"
    assert "verified" in export_model(run, "onnx", out)[0]
    model = Translator.load(run, "cpu")
    config = json.loads((out / "config.json").read_text())
    encoder, decoder = session(out / "encoder.onnx"), session(out / "decoder.onnx")
    (ids,) = model.tokenizer.source.encode(["The dog is tired."])
    encoded = encoder.run(None, {"source": np.array([[*ids, config["eos_token_id"]]])})
    feed = dict(zip(("cross_keys", "cross_values", "source_mask"), encoded, strict=True))
    shape = config["layers"], 1, 2, config["heads"], 0
    feed["keys"] = np.zeros((*shape, config["d_k"]), np.float32)
    feed["values"] = np.zeros((*shape, config["d_v"]), np.float32)
    tokens, outputs = np.full((1, 2), config["bos_token_id"]), []
    for _ in range(6):
        logits, keys, values = decoder.run(None, {"tokens": tokens, **feed})
        np.testing.assert_array_equal(logits[:, 0], logits[:, 1])
        feed["keys"], feed["values"] = keys[:, :, [1, 0]], values[:, :, [1, 0]]
        logits[..., config["suppressed_token_ids"]] = -np.inf
        tokens = logits.argmax(-1)
        outputs.append(int(tokens[0, 0]))
    ((ours,),) = model.search(["The dog is tired."], beam=1)
    length = (
        outputs.index(config["eos_token_id"]) if config["eos_token_id"] in outputs else len(outputs)
    )
    assert ours.tokens[:length] == model.tokenizer.target.pieces(outputs[:length])


def test_unsupported_choices_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(
        RegardError, match=r"the ONNX export does not support model\.position: rotary"
    ):
        export_model(make_run(model={"position": "rotary"}), "onnx", tmp_path / "out")
