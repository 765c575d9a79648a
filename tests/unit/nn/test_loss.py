"""Smoothed cross-entropy against its sum written out in float64."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

from regard.data.special_tokens import PAD
from regard.nn import loss as module
from regard.nn.loss import LABEL_SMOOTHINGS
from regard.recipe import Smoothing

CONVENTIONS: tuple[Smoothing, ...] = get_args(Smoothing)


def cross_entropy(
    logits: Tensor, wanted: Tensor, epsilon: float = 0.0, over: Smoothing = "all"
) -> Tensor:
    """The loss of given logits: states that a projection by the identity leaves as they are."""
    identity = torch.eye(logits.shape[-1], dtype=logits.dtype)
    return module.cross_entropy(logits, identity, wanted, epsilon, over)


def written_out(logits: Tensor, wanted: Tensor, epsilon: float, over: Smoothing) -> float:
    """- sum over positions and classes of q log p, one number at a time."""
    total = 0.0
    for row, right in zip(logits.flatten(0, 1).tolist(), wanted.flatten().tolist(), strict=True):
        if right == PAD:
            continue
        classes = len(row)
        largest = max(row)
        log_sum = largest + math.log(sum(math.exp(value - largest) for value in row))
        for k, value in enumerate(row):
            if over == "others":
                q = 1 - epsilon if k == right else epsilon / (classes - 1)
            else:
                q = (1 - epsilon if k == right else 0) + epsilon / classes
            total -= q * (value - log_sum)
    return total


def example(seed: int, classes: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, 5, classes, generator=numbers)
    return logits, torch.randint(0, classes, (3, 5), generator=numbers)  # PAD among them


@given(
    over=st.sampled_from(CONVENTIONS),
    epsilon=st.floats(0, 0.8),
    classes=st.integers(8, 40),
    seed=st.integers(0, 1000),
)
def test_loss_is_the_written_out_sum(
    over: Smoothing, epsilon: float, classes: int, seed: int
) -> None:
    logits, wanted = example(seed, classes)
    found = cross_entropy(logits, wanted, epsilon, over).item()
    assert found == pytest.approx(written_out(logits, wanted, epsilon, over), rel=1e-5, abs=1e-5)


def test_over_all_is_torchs_label_smoothing() -> None:
    logits, wanted = example(1, 30)
    real = wanted != PAD
    torchs = F.cross_entropy(logits[real], wanted[real], label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(cross_entropy(logits, wanted, 0.1, "all"), torchs)


@given(epsilon=st.floats(0.01, 0.8), classes=st.integers(8, 1000))
def test_the_two_conventions_are_one_family(epsilon: float, classes: int) -> None:
    wider = epsilon * classes / (classes - 1)
    assert LABEL_SMOOTHINGS["others"](epsilon, classes) == pytest.approx(wider, rel=1e-14)
    # The right class then keeps 1 - epsilon, as the notes have it.
    assert 1 - wider + wider / classes == pytest.approx(1 - epsilon, abs=1e-12)
    assert LABEL_SMOOTHINGS["all"](epsilon, classes) == epsilon


def test_without_smoothing_it_is_the_log_probability_of_the_right_word() -> None:
    logits, wanted = torch.zeros(1, 2, 8), torch.tensor([[5, 6]])
    for over in CONVENTIONS:
        assert cross_entropy(logits, wanted, 0.0, over).item() == pytest.approx(2 * math.log(8))


@pytest.mark.parametrize("over", CONVENTIONS)
def test_padding_counts_nothing(over: Smoothing) -> None:
    logits, wanted = example(2, 20)
    wanted[0, 2:] = wanted[2] = PAD
    logits.requires_grad_()
    loss = cross_entropy(logits, wanted, 0.1, over)
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert not logits.grad[wanted == PAD].any()
    assert bool(logits.grad[wanted != PAD].any(dim=-1).all())
    with torch.no_grad():
        other = logits.clone()
        other[wanted == PAD] = 1e4
        assert torch.equal(cross_entropy(other, wanted, 0.1, over), loss)


def test_a_batch_of_padding_alone_has_no_loss() -> None:
    logits, _ = example(3, 20)
    assert cross_entropy(logits, torch.full((3, 5), PAD), 0.1).item() == 0


def test_half_precision_is_summed_in_single() -> None:
    logits, wanted = example(4, 20)
    half = logits.bfloat16()
    loss = cross_entropy(half, wanted, 0.1)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, cross_entropy(half.float(), wanted, 0.1))


@pytest.mark.parametrize("over", ["all", "others"])
def test_any_smoothing_a_recipe_allows_can_be_computed(over: Smoothing) -> None:
    logits, wanted = example(5, 8)
    found = cross_entropy(logits, wanted, 0.5, over).item()
    assert found == pytest.approx(written_out(logits, wanted, 0.5, over), rel=1e-5)


@pytest.mark.parametrize("at_once", [1, 64, 10**6])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_loss_and_gradients_are_torchs_however_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, at_once: int, epsilon: float
) -> None:
    monkeypatch.setitem(module.LOGITS_AT_ONCE, "cpu", at_once)
    numbers = torch.Generator().manual_seed(6)
    states = torch.randn(3, 5, 7, generator=numbers, dtype=torch.float64, requires_grad=True)
    projection = torch.randn(20, 7, generator=numbers, dtype=torch.float64, requires_grad=True)
    wanted = torch.randint(0, 20, (3, 5), generator=numbers)
    torchs = F.cross_entropy(
        (states @ projection.T).flatten(0, 1),
        wanted.flatten(),
        ignore_index=PAD,
        label_smoothing=epsilon,
        reduction="sum",
    )
    found = module.cross_entropy(states, projection, wanted, epsilon)
    torch.testing.assert_close(found, torchs)
    for mine, theirs in zip(
        torch.autograd.grad(found / 3, [states, projection]),
        torch.autograd.grad(torchs / 3, [states, projection]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
