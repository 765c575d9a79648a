"""One optimizer step, compared with the same step written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from regard.data.batching import Batch
from regard.recipe import TrainingConfig, make_recipe
from regard.training.train_step import StepScalars, TrainStep


class SquaredError(nn.Module):
    """A loss with one weight per input feature: the sum over the rows of (w · source - label)²."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25]))

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        return ((source.float() @ self.weight - labels[:, 0]) ** 2).sum()


def batch(rows: list[list[int]], labels: list[int]) -> Batch:
    source = torch.tensor(rows)
    return Batch(source, source, torch.tensor(labels)[:, None])


BATCHES = [batch([[1, 2], [3, 1]], [4, 2]), batch([[2, 2]], [1])]


def training(**changes: Any) -> TrainingConfig:
    sections = {"data": {"train": {"pairs": "x"}}, "training": changes}
    return make_recipe(sections, "test").training


def step_of(**changes: Any) -> tuple[SquaredError, TrainStep]:
    loss_fn = SquaredError()
    optimizer = optim.SGD(loss_fn.parameters(), lr=1.0)
    return loss_fn, TrainStep(loss_fn, optimizer, training(**changes), torch.device("cpu"))


def gradient(loss_fn: SquaredError) -> Tensor:
    """The gradient of the mean over all rows of BATCHES, at the present weights."""
    total = sum(loss_fn(one.source, one.target, one.labels) for one in BATCHES) / 3
    assert isinstance(total, Tensor)
    (found,) = torch.autograd.grad(total, [loss_fn.weight])
    return found


def test_micro_batches_give_the_gradient_of_the_whole_batch() -> None:
    loss_fn, step = step_of(clip_norm=None)
    expected = loss_fn.weight.detach() - 0.1 * gradient(loss_fn)
    losses = [float(loss_fn(one.source, one.target, one.labels).detach()) for one in BATCHES]
    assert float(step(BATCHES, StepScalars(1 / 3, 0.1))) == pytest.approx(sum(losses) / 3)
    torch.testing.assert_close(loss_fn.weight.detach(), expected)


@pytest.mark.parametrize("clip_norm", [0.5, 1e6])
def test_gradients_are_clipped_before_the_optimizer_step(clip_norm: float) -> None:
    loss_fn, step = step_of(clip_norm=clip_norm)
    before, full = loss_fn.weight.detach().clone(), gradient(loss_fn)
    step(BATCHES, StepScalars(1 / 3, 0.1))
    change = (before - loss_fn.weight.detach()) / 0.1
    torch.testing.assert_close(change, full * min(1.0, clip_norm / float(full.norm())))


def test_gradients_of_one_step_are_gone_in_the_next() -> None:
    loss_fn, step = step_of(clip_norm=None)
    step(BATCHES, StepScalars(1 / 3, 0.1))
    assert loss_fn.weight.grad is None
    expected = loss_fn.weight.detach() - 0.01 * gradient(loss_fn)
    step(BATCHES, StepScalars(1 / 3, 0.01))
    torch.testing.assert_close(loss_fn.weight.detach(), expected)


def test_the_moving_average_moves_towards_the_new_weights() -> None:
    loss_fn, step = step_of(clip_norm=None)
    mean = torch.tensor([10.0, 20.0])
    step.ema = [mean], [loss_fn.weight]
    step(BATCHES, StepScalars(1 / 3, 0.1, 0.25))
    expected = 0.75 * torch.tensor([10.0, 20.0]) + 0.25 * loss_fn.weight.detach()
    torch.testing.assert_close(mean, expected)


def test_a_failure_is_in_the_middle_of_an_update_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    _, step = step_of(clip_norm=None)

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(step.optimizer, "step", fail)
    with pytest.raises(MemoryError):
        step(BATCHES, StepScalars(1 / 3, 0.1))
    assert step.updating
    _, step = step_of(clip_norm=None)
    step(BATCHES, StepScalars(1 / 3, 0.1))
    assert not step.updating
