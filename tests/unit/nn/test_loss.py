"""Cross-entropy with label smoothing against its sum written out in float64."""

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.nn import functional as F

from regard.data.special_tokens import PAD
from regard.nn import loss as module
from regard.nn.loss import LABEL_SMOOTHINGS

CONVENTIONS = tuple(LABEL_SMOOTHINGS)


def cross_entropy(
    logits: Tensor, labels: Tensor, epsilon: float = 0.0, over: str = "all"
) -> Tensor:
    """The loss of given logits: the projection is the identity."""
    identity = torch.eye(logits.shape[-1], dtype=logits.dtype)
    return module.cross_entropy(logits, identity, labels, epsilon, over)


def written_out(logits: Tensor, labels: Tensor, epsilon: float, over: str) -> float:
    """- sum over positions and classes of q log p, one term at a time."""
    total = 0.0
    for row, label in zip(logits.flatten(0, 1).tolist(), labels.flatten().tolist(), strict=True):
        if label == PAD:
            continue
        classes = len(row)
        largest = max(row)
        log_sum = largest + math.log(sum(math.exp(value - largest) for value in row))
        for k, value in enumerate(row):
            if over == "others":
                q = 1 - epsilon if k == label else epsilon / (classes - 1)
            else:
                q = (1 - epsilon if k == label else 0) + epsilon / classes
            total -= q * (value - log_sum)
    return total


def example(seed: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(3, 5, classes, generator=generator)
    return logits, torch.randint(0, classes, (3, 5), generator=generator)  # including PAD


@given(
    over=st.sampled_from(CONVENTIONS),
    epsilon=st.floats(0, 0.8),
    classes=st.integers(8, 40),
    seed=st.integers(0, 1000),
)
def test_loss_is_the_written_out_sum(over: str, epsilon: float, classes: int, seed: int) -> None:
    logits, labels = example(seed, classes)
    found = cross_entropy(logits, labels, epsilon, over).item()
    assert found == pytest.approx(written_out(logits, labels, epsilon, over), rel=1e-5, abs=1e-5)


def test_over_all_is_torchs_label_smoothing() -> None:
    logits, labels = example(1, 30)
    non_pad = labels != PAD
    torchs = F.cross_entropy(logits[non_pad], labels[non_pad], label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(cross_entropy(logits, labels, 0.1, "all"), torchs)


@given(epsilon=st.floats(0.01, 0.8), classes=st.integers(8, 1000))
def test_the_two_conventions_are_one_family(epsilon: float, classes: int) -> None:
    wider = epsilon * classes / (classes - 1)
    assert LABEL_SMOOTHINGS["others"](epsilon, classes) == pytest.approx(wider, rel=1e-14)
    # The correct class then keeps 1 - epsilon.
    assert 1 - wider + wider / classes == pytest.approx(1 - epsilon, abs=1e-12)
    assert LABEL_SMOOTHINGS["all"](epsilon, classes) == epsilon


def test_without_smoothing_it_is_the_log_probability_of_the_label() -> None:
    logits, labels = torch.zeros(1, 2, 8), torch.tensor([[5, 6]])
    for over in CONVENTIONS:
        assert cross_entropy(logits, labels, 0.0, over).item() == pytest.approx(2 * math.log(8))


@pytest.mark.parametrize("over", CONVENTIONS)
def test_padding_has_no_loss_and_no_gradient(over: str) -> None:
    logits, labels = example(2, 20)
    labels[0, 2:] = labels[2] = PAD
    logits.requires_grad_()
    loss = cross_entropy(logits, labels, 0.1, over)
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert not logits.grad[labels == PAD].any()
    assert bool(logits.grad[labels != PAD].any(dim=-1).all())
    with torch.no_grad():
        other = logits.clone()
        other[labels == PAD] = 1e4
        assert torch.equal(cross_entropy(other, labels, 0.1, over), loss)


def test_a_batch_of_padding_alone_has_no_loss() -> None:
    logits, _ = example(3, 20)
    assert cross_entropy(logits, torch.full((3, 5), PAD), 0.1).item() == 0


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits, labels = example(4, 20)
    half = logits.bfloat16()
    loss = cross_entropy(half, labels, 0.1)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, cross_entropy(half.float(), labels, 0.1))


@pytest.mark.parametrize("over", ["all", "others"])
def test_any_smoothing_a_recipe_allows_can_be_computed(over: str) -> None:
    logits, labels = example(5, 8)
    found = cross_entropy(logits, labels, 0.5, over).item()
    assert found == pytest.approx(written_out(logits, labels, 0.5, over), rel=1e-5)


@pytest.mark.parametrize("max_logits", [1, 64, 10**6])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_loss_and_gradients_are_torchs_with_any_chunk_size(
    monkeypatch: pytest.MonkeyPatch, max_logits: int, epsilon: float
) -> None:
    monkeypatch.setitem(module.MAX_LOGITS, "cpu", max_logits)
    generator = torch.Generator().manual_seed(6)
    states = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    projection = torch.randn(20, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 20, (3, 5), generator=generator)
    torchs = F.cross_entropy(
        (states @ projection.T).flatten(0, 1),
        labels.flatten(),
        ignore_index=PAD,
        label_smoothing=epsilon,
        reduction="sum",
    )
    found = module.cross_entropy(states, projection, labels, epsilon)
    torch.testing.assert_close(found, torchs)
    for mine, theirs in zip(
        torch.autograd.grad(found / 3, [states, projection]),
        torch.autograd.grad(torchs / 3, [states, projection]),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)
