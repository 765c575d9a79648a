"""The logit lens and the DecoderLens agree with networks of fewer layers, in float64."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from regard.inspection.logit_lens import decoder_lens, logit_lens
from regard.inspection.teacher_forcing import check_supported, force
from regard.tasks import Translator

TEXT, TRANSLATION = "The dog was tired.", "Der Hund war müde."


@pytest.fixture(scope="module", params=["post", "pre"])
def model(make_run: Callable[..., Path], request: pytest.FixtureRequest) -> Translator:
    run = make_run(
        decoding={"max_length": 8}, model={"output_bias": True, "norm_order": request.param}
    )
    model = Translator.load(run, "cpu")
    model.network.double()
    model.engine.packed = None  # it is float32
    return model


@torch.inference_mode()
def shortened(
    model: Translator, batch: tuple[torch.Tensor, ...], stack: str, layers: int
) -> torch.Tensor:
    """[target, V]: the probabilities of a network with fewer layers."""
    network = check_supported(model)
    module = network.encoder if stack == "encoder" else network.decoder
    whole = module.layers
    cross = network.decoder.cross_attention_kv
    if stack == "decoder":  # with as many keys and values as layers
        network.decoder.cross_attention_kv = lambda encoder_output: cross(encoder_output)[:layers]  # type: ignore[method-assign]
    module.layers = nn.ModuleList(whole[:layers])
    try:
        logits = network(*batch)
    finally:
        module.layers = whole
        network.decoder.__dict__.pop("cross_attention_kv", None)
    probabilities: torch.Tensor = logits[0].softmax(-1)
    return probabilities


def test_each_depth_is_a_network_with_fewer_layers(model: Translator) -> None:
    forced = force(model, TEXT, TRANSLATION)
    for stack, lens in (
        ("decoder", logit_lens(model, TEXT, TRANSLATION)),
        ("encoder", decoder_lens(model, TEXT, TRANSLATION)),
    ):
        assert lens.depths == ["embedding", "layer 1", "layer 2"]
        for depth in range(3):
            expected = shortened(model, forced.batch(model), stack, depth)
            ids = [token.id for token in forced.outputs]
            of_outputs = expected[range(len(ids)), ids].numpy()
            np.testing.assert_allclose(lens.probabilities[depth], of_outputs, rtol=1e-6)
            best = [row[0].token.id for row in lens.candidates[depth]]
            assert best == expected.argmax(-1).tolist()


def test_the_last_depth_is_the_model(model: Translator) -> None:
    lens = decoder_lens(model, TEXT)
    assert lens.translations[-1] == model.translate([TEXT], beam=1)[0]
    assert len(lens.translations) == 3
    assert model.translate([TEXT], beam=1)[0] == lens.translations[-1]  # the layers are back


def test_a_token_settles_where_it_stays_the_best(model: Translator) -> None:
    lens = logit_lens(model, TEXT)
    best = [[row[0].token.id for row in rows] for rows in lens.candidates]
    for position, (token, depth) in enumerate(zip(lens.outputs, lens.settled, strict=True)):
        assert all(row[position] == token.id for row in best[depth:])
        assert depth == 0 or best[depth - 1][position] != token.id


def test_a_notebook_shows_a_table(model: Translator) -> None:
    lens = logit_lens(model, TEXT, TRANSLATION)
    html = lens._repr_html_()
    assert html.count("<tr>") == 1 + 3
    assert "layer 2" in html
    assert lens.to_json()["probabilities"]["shape"] == [3, len(lens.outputs)]
