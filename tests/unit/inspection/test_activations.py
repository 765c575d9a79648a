"""Activations and embeddings agree with the network itself and with independent formulas, in float64."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.errors import RegardError
from regard.inspection.activations import (
    activations,
    architecture_json,
    embeddings,
    parameters_by_part,
)
from regard.inspection.teacher_forcing import check_supported, force
from regard.tasks import Translator

TEXT, TRANSLATION = "The dog was tired.", "Der Hund war müde."


@pytest.fixture(scope="module", params=["post", "pre"])
def model(make_run: Callable[..., Path], request: pytest.FixtureRequest) -> Translator:
    run = make_run(
        decoding={"max_length": 8}, model={"output_bias": True, "norm_order": request.param}
    )
    return Translator.load(run, "cpu")


def test_the_last_state_gives_the_logits(model: Translator) -> None:
    network, forced = check_supported(model), force(model, TEXT, TRANSLATION)
    found = activations(model, TEXT, TRANSLATION)
    last = torch.from_numpy(found.decoder.stream[-1])
    with torch.inference_mode():
        ids = [
            torch.tensor([[token.id for token in side]]) for side in (forced.source, forced.inputs)
        ]
        expected = network(*ids)[0]
        norm = network.decoder.norm(last[None], torch.ones(1, len(last), dtype=torch.bool))
        assert torch.allclose(network.project(norm)[0], expected, atol=1e-4)


def test_stages_follow_the_formulas(model: Translator) -> None:
    """The embedding, and the first feed-forward network, computed in numpy."""
    network, found = check_supported(model), activations(model, TEXT, TRANSLATION)
    weights = {name: one.detach().double().numpy() for name, one in network.named_parameters()}
    ids = [token.id for token in found.source]
    width = model.recipe.model.d_model
    embedded = weights["encoder.embedding.weight"][ids] * width**0.5
    angle = np.arange(len(ids))[:, None] / 10000 ** (np.arange(0, width, 2) / width)
    table = np.stack([np.sin(angle), np.cos(angle)], axis=2).reshape(len(ids), width)
    assert np.allclose(found.encoder.stream[0], embedded + table, atol=1e-5)
    name = "encoder.layers.0.feed_forward"
    x = found.encoder.stream[1].astype(np.float64)
    if model.recipe.model.norm_order == "pre":
        x = _layer_norm(
            x,
            weights[f"{name}_residual.norm.weight"],
            weights[f"{name}_residual.norm.bias"],
        )
    hidden = np.maximum(x @ weights[f"{name}.inner.weight"].T + weights[f"{name}.inner.bias"], 0)
    assert np.allclose(found.encoder.hidden[0], hidden, atol=1e-4)
    changes = found.changes("decoder")
    assert changes.shape == (len(found.decoder.stages) - 1, len(found.inputs))
    assert "0.cross_attention" in found._repr_html_()


def _layer_norm(
    x: np.ndarray[tuple[int, ...], np.dtype[np.float64]], gain: object, bias: object
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    centred = x - x.mean(1, keepdims=True)
    normed: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = (
        centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5) * gain + bias
    )
    return normed


def test_all_weights_belong_to_a_part(model: Translator) -> None:
    network = check_supported(model)
    parts = parameters_by_part(network)
    assert sum(parts.values()) == sum(one.numel() for one in network.parameters())
    assert {"encoder.embedding", "encoder.0.attention", "decoder.0.cross_attention"} <= {*parts}


def test_neighbours_and_map(model: Translator) -> None:
    found = embeddings(model, "target")
    id = model.tokenizer.target.encode(["Hund"])[0][0]
    near = found.neighbours(id, 4)
    vectors = found.vectors.astype(np.float64)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    assert [one.cosine for one in near] == sorted((one.cosine for one in near), reverse=True)
    assert near[0].cosine == pytest.approx(unit[near[0].token.id] @ unit[id], abs=1e-5)
    assert id not in [one.token.id for one in near]
    tokens, points, shares = found.map([id])
    chosen = vectors[[token.id for token in tokens]]
    left, values, _ = np.linalg.svd(chosen - chosen.mean(0), full_matrices=False)
    assert np.allclose(np.abs(points), np.abs(left[:, :2] * values[:2]), atol=1e-4)
    assert shares == pytest.approx(list(values[:2] ** 2 / (values**2).sum()))
    assert id in [token.id for token in tokens]
    shown = found._repr_html_()
    assert shown.count("<circle") == len(found.map()[0])
    assert f"{shares[0]:.1%}" in shown


def test_the_page_gets_all_tokens(model: Translator) -> None:
    forced = force(model, TEXT, TRANSLATION)
    json = architecture_json(model, forced)
    assert json["encoder"]["stream"]["shape"][1] == len(forced.source)
    assert json["decoder"]["hidden"]["shape"][1:] == [len(forced.inputs), json["d_ff"]]
    assert {*json["embeddings"]["source"]["neighbours"]} == {
        str(token.id) for token in forced.source[:-1]
    }


def test_what_is_not_supported_is_refused(model: Translator, make_run: Callable[..., Path]) -> None:
    with pytest.raises(RegardError, match="side left: must be source or target"):
        embeddings(model, "left")
    at_once = Translator.load(make_run(model={"architecture": "non_autoregressive"}), "cpu")
    with pytest.raises(RegardError, match="architecture non_autoregressive"):
        activations(at_once, TEXT)
