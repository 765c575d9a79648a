"""One optimizer step, compared with the same step written out."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from regard.data.batching import Batch, pack_evenly
from regard.recipe import TrainingConfig, make_recipe
from regard.training.cpu_kernels import attach_cpu_kernels, has_cpu_kernels
from regard.training.optimizers import OPTIMIZERS
from regard.training.train_step import (
    StepScalars,
    ThreadedTrainStep,
    TrainStep,
    num_threads,
    parallel_rows,
)
from tests.unit.training.test_packed_batches import dataset_of, loss_fn_of, recipe_of


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


# ---------------------------------------------------------------------------------------------
# Several micro-batches at the same time


@pytest.fixture
def two_threads() -> Iterator[None]:
    with num_threads(2):
        yield


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_threads_give_the_gradient_of_all_micro_batches(count: int) -> None:
    parts = [batch([[1 + number, 2], [3, number]], [4, 2]) for number in range(count)]
    results = []
    for kind in (TrainStep, ThreadedTrainStep):
        loss_fn = SquaredError()
        optimizer = optim.SGD(loss_fn.parameters(), lr=1.0)
        step = kind(loss_fn, optimizer, training(), torch.device("cpu"))
        losses = [float(step(parts, StepScalars(1 / 10, 0.1))) for _ in range(2)]
        results.append(torch.cat([loss_fn.weight.detach(), torch.tensor(losses)]))
    torch.testing.assert_close(results[1], results[0])
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_a_thread_is_raised_and_changes_no_weight() -> None:
    loss_fn = SquaredError()
    optimizer = optim.SGD(loss_fn.parameters(), lr=1.0)
    step = ThreadedTrainStep(loss_fn, optimizer, training(), torch.device("cpu"))
    before = loss_fn.weight.detach().clone()
    wrong = batch([[1, 2, 3]], [1])  # one feature too many
    with pytest.raises(RuntimeError, match="size"):
        step([*BATCHES, wrong], StepScalars(1 / 4, 0.1))
    assert torch.equal(loss_fn.weight, before)
    assert not step.updating
    assert torch.get_num_threads() == 2
    step(BATCHES, StepScalars(1 / 3, 0.1))
    assert not torch.equal(loss_fn.weight, before)


@pytest.mark.usefixtures("two_threads")
def test_an_error_does_not_keep_the_tensors_of_the_failed_step() -> None:
    """The memory must be free when a batch that did not fit is split: without waiting for the garbage collector."""
    alive: list[weakref.ref[Tensor]] = []

    class RememberedLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
            activations = source.float() * 1.0
            alive.append(weakref.ref(activations))
            return ((activations @ self.weight - labels[:, 0]) ** 2).sum()

    loss_fn = RememberedLoss()
    optimizer = optim.SGD(loss_fn.parameters(), lr=1.0)
    step = ThreadedTrainStep(loss_fn, optimizer, training(), torch.device("cpu"))
    gc.disable()
    try:
        with suppress(RuntimeError):  # pytest.raises would keep the error
            step([*BATCHES, batch([[1, 2, 3]], [1])], StepScalars(1 / 4, 0.1))
            pytest.fail("one feature too many was accepted")
        assert len(alive) == 3
        assert not [reference for reference in alive if reference() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("threads", "workers"), [(1, 1), (2, 2), (4, 4), (5, 4), (6, 3), (8, 4), (9, 3), (16, 4)]
)
def test_workers_share_the_threads_with_few_left_over(
    threads: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    with num_threads(threads):
        assert parallel_rows() == workers


def packed_steps(
    threads: int, precision: str, dropout: float, **settings: Any
) -> tuple[list[float], list[Tensor]]:
    """The losses and the final weights of some steps of a packed Transformer with the native kernels."""
    pairs = [(1 + number % 13, 1 + number % 7) for number in range(60)]
    dataset, recipe = dataset_of(pairs), recipe_of(dropout=dropout)
    options = recipe.training.model_copy(update={"precision": precision, **settings})
    loss_fn = loss_fn_of(recipe.model_copy(update={"training": options}))
    attach_cpu_kernels(loss_fn)
    with num_threads(threads):
        step = ThreadedTrainStep(
            loss_fn, OPTIMIZERS["adam"](loss_fn, options), options, torch.device("cpu")
        )
        losses = []
        for number in range(6):
            torch.manual_seed(number)
            parts = pack_evenly(dataset, np.arange(60), 4_096, parallel=4)
            assert len(parts) == 4
            losses.append(float(step(parts, StepScalars(1 / 200, 0.003))))
    return losses, [parameter.detach().clone() for parameter in loss_fn.parameters()]


@pytest.mark.skipif(not has_cpu_kernels(), reason="no native library")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_packed_rows_in_threads_learn_like_rows_one_after_the_other(precision: str) -> None:
    losses = [packed_steps(threads, precision, 0.0)[0] for threads in (1, 2, 4)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2 if precision == "bf16" else 1e-5)
    assert losses[2] == pytest.approx(losses[0], rel=1e-2 if precision == "bf16" else 1e-5)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.skipif(not has_cpu_kernels(), reason="no native library")
@pytest.mark.parametrize(
    "settings", [{}, {"rdrop": 2.0}, {"simcut": 2.0}, {"word_dropout": 0.2}], ids=str
)
def test_random_numbers_do_not_depend_on_which_thread_is_first(settings: dict[str, Any]) -> None:
    """Bit for bit the same weights in three runs, with every kind of dropout."""
    runs = [packed_steps(3, "fp32", 0.3, **settings) for _ in range(3)]
    for losses, weights in runs[1:]:
        assert losses == runs[0][0]
        assert all(map(torch.equal, weights, runs[0][1]))
    assert runs[0][0] != packed_steps(3, "fp32", 0.0, **settings)[0]
