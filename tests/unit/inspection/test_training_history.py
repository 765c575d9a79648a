"""The training history shows what training itself computes."""

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn.functional import cross_entropy

from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inspection.training_history import PastCheckpoints, training_history
from regard.nn.loss import smoothed_target
from regard.tasks import Translator


def unpack(packed: dict[str, Any]) -> npt.NDArray[np.float64]:
    data = base64.b64decode(packed["data"])
    if packed["format"] == "uint8":
        roots = np.frombuffer(data, np.uint8).reshape(packed["shape"]) / 255
        return np.asarray(roots**2 * packed["max"])
    return np.frombuffer(data, "<f4").reshape(packed["shape"]).astype(float)


def test_positions_are_those_of_the_paper(finished_run: Path) -> None:
    history = training_history(Translator.load(finished_run, "cpu"))["positions"]
    encoding = unpack(history["map"])
    for position in (0, 1, 40):
        for i in range(8):
            angle = position / 10000 ** (2 * i / 16)
            expected = [math.sin(angle), math.cos(angle)]
            np.testing.assert_allclose(encoding[position, 2 * i : 2 * i + 2], expected, atol=1e-6)
    for name in ("min", "mean", "max"):
        products = dict(zip(history["distances"], history[name], strict=True))
        for distance in (-63, -5, 0, 5):
            product = sum(math.cos(distance / 10000 ** (2 * i / 16)) for i in range(8))
            assert products[distance] == pytest.approx(product, abs=1e-5)


def test_the_learning_rate_is_that_of_the_recipe(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    history, training = training_history(model)["schedule"], model.recipe.training
    assert history["kind"] == training.schedule
    assert (history["steps"][0], history["steps"][-1]) == (1, training.steps)
    top = max(zip(history["learning_rates"], history["steps"], strict=True))
    assert top[1] == training.warmup


@pytest.mark.parametrize("classes", [2, 5, 60])
@pytest.mark.parametrize("over", ["all", "others"])
def test_the_smoothed_target_minimises_the_loss(over: str, classes: int) -> None:
    correct, other = smoothed_target(0.1, classes, over)
    assert correct + (classes - 1) * other == pytest.approx(1)
    if over == "others":
        assert correct == pytest.approx(0.9)
    else:  # PyTorch uses this convention: its loss has zero gradient at its own target
        target = torch.full((1, classes), other)
        target[0, 1] = correct
        logits = target.log().requires_grad_()
        loss: torch.Tensor = cross_entropy(logits, torch.tensor([1]), label_smoothing=0.1)
        loss.backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        assert logits.grad.abs().max() < 1e-7


def test_curves_are_the_log(trained_run: Path) -> None:
    history = training_history(Translator.load(trained_run, "cpu"))["curves"]
    assert history == {
        "finished": True,
        "steps": 4,
        "metric": "bleu",
        "train": [
            {"step": 1, "loss": 9.0, "learning_rate": 0.1},
            {"step": 2, "loss": 2.0, "learning_rate": 0.2},
        ],
        "valid": [
            {"step": 2, "loss": 2.5, "score": 50.0, "best": True},
            {"step": 4, "loss": 2.6, "score": 40.0, "best": False},
        ],
    }


def test_alignment_at_the_last_checkpoint_is_that_of_the_model(trained_run: Path) -> None:
    model = Translator.load(trained_run, "cpu")
    traced = model.trace("ein Hund", checkpoints=True)
    assert traced.history is not None
    first, last = traced.history["alignments"]
    assert (first["step"], last["step"]) == (2, 4)
    np.testing.assert_allclose(
        unpack(last["cross_attention"]), traced.cross_attention.mean(1, keepdims=True), atol=0.004
    )
    np.testing.assert_allclose(last["probabilities"], traced.probabilities, rtol=1e-5)
    uniform = 1 / len(traced.source)  # with zero weights, attention is uniform
    np.testing.assert_allclose(unpack(first["cross_attention"]), uniform, atol=0.004)


def test_a_bundle_has_no_checkpoints(finished_run: Path) -> None:
    model = Translator.load(finished_run, "cpu")
    history = training_history(model)
    assert history["checkpoints"] == []
    assert history["curves"]["train"] == []
    with pytest.raises(RegardError, match="the run has no checkpoints"):
        model.trace("ein Hund", checkpoints=True)
    with pytest.raises(RegardError, match="no checkpoint of step 7"):
        PastCheckpoints(model).alignment(7, Request([5]), [5, 2])


def test_a_notebook_shows_a_trace_in_a_frame(finished_run: Path) -> None:
    html = Translator.load(finished_run, "cpu").trace("ein Hund")._repr_html_()
    assert html.startswith('<iframe sandbox="allow-scripts" srcdoc="&lt;!doctype html&gt;')
    assert html.count("<") == 2
