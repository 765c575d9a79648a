"""Attributions agree with their definitions, computed in float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.errors import RegardError
from regard.inspection import attribution
from regard.inspection.attribution import METHODS, Attribution, Method, alti, attribute, follow
from regard.inspection.hooks import Floats, observe
from regard.inspection.teacher_forcing import ForcedTranslation, check_supported, find_word, force
from regard.tasks import Translator

TEXT, TRANSLATION = "The dog was tired.", "Der Hund war müde."


@pytest.fixture(scope="module", params=["post", "pre"])
def model(make_run: Callable[..., Path], request: pytest.FixtureRequest) -> Translator:
    run = make_run(
        decoding={"max_length": 8}, model={"norm_order": request.param, "tie_embeddings": True}
    )
    model = Translator.load(run, "cpu")
    model.network.double()
    model.engine.packed = None  # it is float32
    return model


@pytest.fixture(scope="module")
def found(model: Translator) -> Attribution:
    return attribute(model, TEXT, "war", "ist", TRANSLATION)


class Function:
    """The difference of the two logits, as a function of embeddings that are scaled or replaced."""

    def __init__(self, model: Translator, found: Attribution) -> None:
        self.model, self.network = model, check_supported(model)
        forced = force(model, TEXT, TRANSLATION)
        self.source, inputs = forced.batch(model)
        self.inputs = inputs[:, : found.position + 1]
        self.ids = found.token.id, found.foil.id
        self.words = [*forced.source_words]
        self.words += [
            [self.source.shape[1] + one for one in word]
            for word in forced.input_words
            if word[0] <= found.position
        ]

    @torch.no_grad()
    def __call__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """change: of [source and decoder token, d]"""
        network = self.network
        source = network.encoder.embedding(self.source)
        target = network.decoder.embedding(self.inputs)
        both = change(torch.cat([source, target], dim=1)[0].clone())[None]
        embedded = iter((both[:, : source.shape[1]], both[:, source.shape[1] :]))
        handle = network.encoder.embedding.register_forward_hook(lambda *_: next(embedded))
        try:
            logits = network(self.source, self.inputs)[0, -1]
        finally:
            handle.remove()
        return float(logits[self.ids[0]] - logits[self.ids[1]])


def test_the_difference_is_that_of_the_logits(model: Translator, found: Attribution) -> None:
    value = Function(model, found)(lambda both: both)
    assert found.difference == pytest.approx(value, rel=1e-9)
    assert found.token.text.startswith("▁w")
    assert found.source_words[:2] == ["The", "dog"]
    assert found.target_words == ["Der", "Hund"]
    assert set(found.scores) == set(METHODS)


def test_gradient_x_input_is_the_derivative_of_scaling_a_word(
    model: Translator, found: Attribution
) -> None:
    function = Function(model, found)
    for word, score in zip(function.words, found.scores["gradient_x_input"], strict=True):

        def scale(both: torch.Tensor, by: float, word: list[int] = word) -> torch.Tensor:
            both[word] *= 1 + by
            return both

        change = function(lambda both: scale(both, 1e-5)) - function(
            lambda both: scale(both, -1e-5)
        )
        assert score == pytest.approx(change / 2e-5, rel=1e-4, abs=1e-6)


def neutral(model: Translator, both: torch.Tensor, positions: list[int]) -> torch.Tensor:
    weight = check_supported(model).encoder.embedding.weight
    both[positions] = weight.mean(0) * weight.shape[1] ** 0.5
    return both


def test_integrated_gradients_are_complete(model: Translator, found: Attribution) -> None:
    function = Function(model, found)
    ordinary = [position for word in function.words for position in word]
    total = function(lambda both: both) - function(lambda both: neutral(model, both, ordinary))
    assert found.scores["integrated_gradients"].sum() == pytest.approx(total, rel=0.01)
    assert found.completeness <= 0.01


def test_the_error_of_a_sum_near_zero_is_relative_to_the_sizes_of_the_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shares of 3 and -3 that should cancel: an error of 0.0001 is no reason to take more steps."""
    difference = object.__new__(attribution._Difference)
    difference.neutral, difference.__dict__["value"] = (), 0.5
    steps: list[int] = []
    monkeypatch.setattr(difference, "at", lambda: torch.tensor([0.5]))

    def integrate(count: int) -> Floats:
        steps.append(count)
        return np.array([3.0, -2.9999], dtype=np.float64)

    monkeypatch.setattr(difference, "_integrate", integrate)
    _, error = difference.integrated_gradients()
    assert error == pytest.approx(0.0001 / 0.059999)
    assert steps == [attribution.FIRST_STEPS]


def test_occlusion_replaces_a_word(model: Translator, found: Attribution) -> None:
    function = Function(model, found)
    for word, score in zip(function.words, found.scores["occlusion"], strict=True):
        without = function(partial(neutral, model, positions=word))
        assert score == pytest.approx(found.difference - without, rel=1e-5, abs=1e-6)


def test_rollout_follows_attention_through_the_layers(
    model: Translator, found: Attribution
) -> None:
    forced = force(model, TEXT, TRANSLATION)
    inputs = [token.id for token in forced.inputs[: found.position + 1]]
    with torch.inference_mode():
        weights = observe(model, forced.request, inputs).weights
    mean = {site: one.mean(1).astype(float) for site, one in weights.items()}
    S, T = len(forced.source), len(inputs)
    # One graph of all nodes: [source, decoder input], layer by layer.
    state = np.eye(S + T)
    for layer in mean["encoder"]:
        step = np.eye(S + T)
        step[:S, :S] = (layer + np.eye(S)) / 2
        state = step @ state
    for own, cross in zip(mean["decoder"], mean["cross_attention"], strict=True):
        step = np.eye(S + T)
        step[S:, S:] = (own + np.eye(T)) / 2
        state = step @ state
        step = np.eye(S + T)
        step[S:, S:] /= 2
        step[S:, :S] = cross / 2
        state = step @ state
    expected = [state[-1][word].sum() for word in Function(model, found).words]
    np.testing.assert_allclose(found.scores["attention_rollout"], expected, rtol=1e-4)


def test_alti_shares_sum_to_one_and_find_the_only_contribution(model: Translator) -> None:
    forced = force(model, TEXT, TRANSLATION)
    rows = alti(model, forced)
    assert rows is not None
    np.testing.assert_allclose(rows.sum(1), 1, atol=1e-9)
    assert (rows >= 0).all()
    # The decoder is causal.
    assert not np.triu(rows[:, len(forced.source) :], 1).any()
    # If attention layers write nothing, each position consists of its own token alone.
    network = check_supported(model)
    outputs = [one.output for some in network.attentions().values() for one in some]
    saved = [{name: value.clone() for name, value in one.state_dict().items()} for one in outputs]
    with torch.no_grad():
        for one in outputs:
            for parameter in one.parameters():
                parameter.zero_()
    silent = alti(model, forced)
    for one, state in zip(outputs, saved, strict=True):
        one.load_state_dict(state)
    assert silent is not None
    np.testing.assert_allclose(
        silent[:, len(forced.source) :], np.eye(len(forced.inputs)), atol=1e-9
    )


def test_alti_needs_layer_norm(make_run: Callable[..., Path]) -> None:
    model = Translator.load(
        make_run(decoding={"max_length": 8}, model={"norm": "rms", "norm_order": "post"}), "cpu"
    )
    assert alti(model, force(model, TEXT, TRANSLATION)) is None
    assert "alti" not in attribute(model, TEXT, "war", "ist", TRANSLATION).scores


def test_no_share_is_negative_by_rounding() -> None:
    shares = np.full((1, 10), 0.1)
    shares[0, 0] += 1e-15
    assert (follow([np.eye(10)], [np.eye(1)], [shares]) >= 0).all()


def test_follow_passes_on_what_cross_attention_leaves() -> None:
    found = follow([np.eye(2)], [np.eye(1)], [np.array([[0.25, 0.5]])])
    np.testing.assert_allclose(found, [[0.25, 0.5, 0.25]])


def test_agreement_is_spearmans_correlation_of_sizes(found: Attribution) -> None:
    scores: dict[Method, Floats] = {
        "gradient_x_input": np.array([0.1, -4.0, 0.5], np.float32),
        "occlusion": np.array([1.0, 3.0, 2.0], np.float32),
        "attention": np.array([3.0, 1.0, 2.0], np.float32),
    }
    agreement = replace(found, scores=scores).agreement()
    assert agreement["gradient_x_input", "occlusion"] == pytest.approx(1)
    assert agreement["gradient_x_input", "attention"] == pytest.approx(-1)
    ties = replace(found, scores={**scores, "occlusion": np.ones(3, np.float32)}).agreement()
    assert ties["gradient_x_input", "occlusion"] == 0
    empty = {name: np.zeros(0, np.float32) for name in scores}
    assert set(replace(found, scores=empty).agreement().values()) == {0.0}


def test_the_foil(model: Translator) -> None:
    forced = force(model, TEXT, TRANSLATION)
    second = attribute(model, TEXT, "Hund", None, TRANSLATION, ["occlusion"])
    with torch.inference_mode():
        logits = model.network(*forced.batch(model))[0, find_word(forced, "Hund")]
        logits[second.token.id] = -torch.inf
    assert second.foil.id == int(logits.argmax())
    # Words that begin with the same tokens differ later.
    longer = attribute(model, TEXT, "Hund", "Hunde", TRANSLATION + " Nein.", ["occlusion"])
    assert longer.foil.id != longer.token.id
    with pytest.raises(RegardError, match="is the generated token"):
        attribute(model, TEXT, "Hund", "Hund war", TRANSLATION)
    with pytest.raises(RegardError, match="method 'magic': must be one of"):
        attribute(model, TEXT, "Hund", None, TRANSLATION, ["magic"])  # type: ignore[list-item]


def test_json_and_notebook(found: Attribution) -> None:
    json = found.to_json()
    assert len(json["scores"]["occlusion"]) == len(json["source_words"]) + len(json["target_words"])
    assert len(json["agreement"]) == 15
    assert "and not" in found._repr_html_()


def test_the_network_is_unchanged(model: Translator, found: Attribution) -> None:
    network = check_supported(model)
    assert not network.encoder.embedding._forward_hooks
    assert isinstance(force(model, TEXT), ForcedTranslation)
