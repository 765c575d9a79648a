"""Packed rows have the same loss and gradients as padded ones, and contain every pair."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from regard.data.batching import (
    Batch,
    PackedSize,
    collate,
    pack,
    pack_evenly,
    packed_size,
    plan_packed,
)
from regard.data.special_tokens import BOS, EOS, PAD
from regard.data.token_dataset import TokenDataset
from regard.nn import loss
from regard.nn.architectures import ARCHITECTURES
from regard.nn.dropout import Dropout, attach_dropout_seeds, keep_mask
from regard.nn.loss import Seq2SeqLoss, chunk_loss
from regard.recipe import Recipe, make_recipe
from regard.training.cuda_graph import CUDAGraphStep, DistributedCUDAGraphStep
from regard.training.distributed import FlatGradients, ProcessGroup
from regard.training.optimizers import OPTIMIZERS
from regard.training.train_step import StepScalars, TrainStep

VOCABULARY = 50
few = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)
lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=60)


def dataset_of(pairs: list[tuple[int, int]], seed: int = 0) -> TokenDataset:
    """A dataset of pairs with these lengths."""
    source, target = (np.array(side, dtype=np.int32) for side in zip(*pairs, strict=True))
    total = int(source.sum() + target.sum())
    ids = np.random.default_rng(seed).integers(6, VOCABULARY, total).astype(np.int32)
    starts = np.cumsum(source) - source
    columns = {"source_starts": starts, "source_lengths": source, "target_lengths": target}
    target_starts = np.cumsum(target) - target + source.sum()
    return cast(
        TokenDataset,
        SimpleNamespace(ids=ids, has_trees=False, target_starts=target_starts, **columns),
    )


def recipe_of(**model: Any) -> Recipe:
    small = {"preset": "tiny", "d_model": 32, "heads": 4, "d_ff": 48, "encoder_layers": 2}
    model = {**small, "decoder_layers": 2, "dropout": 0.0, **model}
    sections = {"data": {"train": {"pairs": "x"}}, "training": {"batching": "packed"}}
    return make_recipe({**sections, "model": model}, "test")


def loss_fn_of(recipe: Recipe) -> Seq2SeqLoss:
    torch.manual_seed(0)
    network = ARCHITECTURES["transformer"](recipe.model, VOCABULARY, VOCABULARY)
    return Seq2SeqLoss(cast(Any, network), recipe.training)


@given(lengths, st.integers(1, 200), st.integers(0, 3))
def test_every_pair_is_in_one_batch_and_fits(
    pairs: list[tuple[int, int]], tokens: int, epoch: int
) -> None:
    dataset = dataset_of(pairs)
    space = packed_size(dataset.source_lengths, dataset.target_lengths, tokens)
    plan = plan_packed(dataset.source_lengths, dataset.target_lengths, space, 1, epoch)
    assert sorted(np.concatenate(plan)) == list(range(len(pairs)))
    for rows in plan:
        batch = pack(dataset, rows, space)
        assert batch.source.shape == (1, space.source)
        assert batch.target.shape == batch.labels.shape == (1, space.target)
        assert int((batch.source == EOS).sum()) == int((batch.target == BOS).sum()) == len(rows)
        assert batch.tokens == int(dataset.target_lengths[rows].sum()) + len(rows)


@given(
    lengths,
    st.integers(20, 300),
    st.integers(1, 4),
    st.sampled_from([1, 60]),
    st.sampled_from([1, 2, 4]),
)
def test_a_batch_is_divided_into_rows_of_similar_size(
    pairs: list[tuple[int, int]], tokens: int, parallel: int, least: int, micro_batches: int
) -> None:
    """A multiple of the rows that are computed at the same time; with two micro-batches they are half as large."""
    dataset, rows = dataset_of(pairs), np.arange(len(pairs))
    batches = pack_evenly(dataset, rows, tokens, parallel, least, micro_batches)
    assert sum(int((batch.source == EOS).sum()) for batch in batches) == len(pairs)
    sides = dataset.source_lengths, dataset.target_lengths
    total = max(int(side.sum()) + len(pairs) for side in sides)
    together = max(1, min(parallel, total // least))
    expected = math.ceil(total / (tokens * together)) * together * micro_batches
    assert len(batches) == min(expected, len(pairs))


def test_realistic_lengths_fill_the_rows() -> None:
    """95% of the positions are tokens, not padding, even if source and target differ in length."""
    random = np.random.default_rng(1)
    source = random.gamma(4, 2, 20_000).astype(int) + 1
    target = np.maximum(1, (source * random.normal(1.2, 0.25, 20_000)).astype(int))
    dataset = dataset_of(list(zip(source.tolist(), target.tolist(), strict=True)))
    space = packed_size(dataset.source_lengths, dataset.target_lengths, 8192)
    plan = plan_packed(dataset.source_lengths, dataset.target_lengths, space, 1, 0)
    words = dataset.source_lengths.sum() + dataset.target_lengths.sum() + 2 * len(source)
    assert words / (len(plan) * sum(space)) > 0.95


@settings(max_examples=4)
@given(few, st.sampled_from(["post", "pre"]), st.sampled_from([None, 2]))
@pytest.mark.parametrize("position", ["sinusoidal", "rotary"])
def test_loss_and_gradients_equal_those_of_padded_rows(
    position: str, pairs: list[tuple[int, int]], norm_order: str, groups: int | None
) -> None:
    dataset, rows = dataset_of(pairs), np.arange(len(pairs))
    space = PackedSize(100, 90)
    attention = {"key_value_heads": groups, "bias": groups is not None}
    recipe = recipe_of(norm_order=norm_order, attention=attention, position=position)
    loss_fn = loss_fn_of(recipe).double()
    found = [
        gradients(loss_fn, batch) for batch in (collate(dataset, rows), pack(dataset, rows, space))
    ]
    for padded, packed in zip(*found, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-9, atol=1e-9)


def gradients(loss_fn: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
    position_info = () if batch.position_info is None else (batch.position_info,)
    loss = loss_fn(batch.source, batch.target, batch.labels, *position_info)
    return loss, *torch.autograd.grad(loss, list(loss_fn.parameters()))


@pytest.mark.parametrize("key", ["rdrop", "simcut"])
def test_packed_rows_run_twice(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CUTOFF", 0.0)
    dataset = dataset_of([(5, 7), (3, 2), (9, 8)])
    space = packed_size(dataset.source_lengths, dataset.target_lengths, 40)
    recipe = recipe_of()
    twice = recipe.model_copy(update={"training": recipe.training.model_copy(update={key: 5.0})})
    plain, repeated = (loss_fn_of(one).double() for one in (recipe, twice))
    batch = pack(dataset, np.arange(3), space)
    # Without dropout and cutoff both passes are equal, so their comparison adds nothing.
    for one, other in zip(gradients(plain, batch), gradients(repeated, batch), strict=True):
        torch.testing.assert_close(one, other)


def test_a_teacher_reads_packed_rows_like_padded_ones() -> None:
    dataset = dataset_of([(5, 7), (3, 2), (9, 8)])
    space = packed_size(dataset.source_lengths, dataset.target_lengths, 40)
    loss_fn, teacher = (loss_fn_of(recipe_of(**size)).double() for size in ({}, {"d_ff": 24}))
    loss_fn.teachers = (teacher.network.eval(),)
    plain = gradients(loss_fn_of(recipe_of()).double(), pack(dataset, np.arange(3), space))
    padded = gradients(loss_fn, collate(dataset, np.arange(3)))
    packed = gradients(loss_fn, pack(dataset, np.arange(3), space))
    assert abs(packed[0] - plain[0]) > 1e-3
    for one, other in zip(padded, packed, strict=True):
        torch.testing.assert_close(one, other)
    assert not any(name.startswith("teacher") for name, _ in loss_fn.named_parameters())
    inputs = [getattr(collate(dataset, np.arange(3)), name) for name in BATCH_FIELDS]
    without = loss_fn_of(recipe_of()).double().eval()
    assert torch.equal(loss_fn.eval()(*inputs), without(*inputs)), "no teacher in validation"


BATCH_FIELDS = ("source", "target", "labels")


@pytest.mark.parametrize(("rdrop", "simcut"), [(0.0, 0.0), (3.0, 0.0), (0.0, 3.0)])
def test_the_loss_for_the_compiler_equals_the_eager_one(
    rdrop: float, simcut: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(12 if rdrop or simcut else 6, 11, dtype=torch.float64)
    labels = torch.tensor([1, 7, PAD, 3, 10, PAD])
    weights = 0.1, rdrop, simcut
    plain = chunk_loss(logits.clone(), labels, *weights, True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for one, other in zip(plain, chunk_loss(logits, labels, *weights, True), strict=True):
        torch.testing.assert_close(one, other)


@given(st.floats(0.05, 0.9), st.integers(-(2**31), 2**31 - 1))
def test_hashed_dropout_keeps_the_expected_fraction(p: float, seed: int) -> None:
    mask = keep_mask(torch.Size([40, 500]), p, torch.tensor([seed], dtype=torch.int32))
    spread = (p * (1 - p) / 20_000) ** 0.5
    assert abs(float(mask.double().mean()) - (1 - p)) < 6 * spread


def test_hashed_dropout_keeps_the_mean_and_differs_from_site_to_site() -> None:
    layers = [Dropout(0.3), Dropout(0.3)]
    seeds = attach_dropout_seeds(layers, torch.device("cpu"))
    torch.manual_seed(0)
    seeds.random_()
    first, second = (layer(torch.ones(300, 300)) for layer in layers)
    assert float(first.mean()) == pytest.approx(1, abs=0.01)
    assert first.unique().tolist() == pytest.approx([0, 1 / 0.7])
    both = (first == 0) & (second == 0)
    assert float(both.double().mean()) == pytest.approx(0.09, abs=0.005)
    again = layers[0](torch.ones(300, 300))
    assert torch.equal(first, again)
    assert torch.equal(layers[0].eval()(torch.ones(3)), torch.ones(3))


def test_packed_and_padded_training_have_the_same_loss_curve() -> None:
    """The same batches, packed into one row or padded in parts, give the same losses in float64."""
    dataset = dataset_of([(3, 4), (7, 5), (2, 2), (6, 9), (4, 4), (8, 8)] * 4)
    recipe = recipe_of(encoder_layers=1, decoder_layers=1)
    space = packed_size(dataset.source_lengths, dataset.target_lengths, 60)
    curves = []
    for packed in (True, False):
        loss_fn = loss_fn_of(recipe).double()
        optimizer = OPTIMIZERS["adam"](loss_fn, recipe.training)
        train_step = TrainStep(loss_fn, optimizer, recipe.training, torch.device("cpu"))
        curve = []
        for epoch in range(35):
            for rows in plan_packed(
                dataset.source_lengths, dataset.target_lengths, space, 1, epoch
            ):
                halves = [part for part in (rows[::2], rows[1::2]) if len(part)]
                parts = (
                    [pack(dataset, rows, space)]
                    if packed
                    else [collate(dataset, h) for h in halves]
                )
                tokens = sum(part.tokens for part in parts)
                curve.append(float(train_step(parts, StepScalars(1 / tokens, 3e-3))))
        curves.append(curve)
    assert len(curves[0]) > 60
    assert curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")  # from torch, about its own compiler
@pytest.mark.parametrize(
    ("position", "key"),
    [
        *((name, None) for name in ("sinusoidal", "rotary")),
        ("rotary", "simcut"),
        ("rotary", "teacher"),
    ],
)
def test_cuda_graph_steps_equal_eager_steps(
    position: str, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without dropout and cutoff the losses are equal up to rounding."""
    monkeypatch.setattr(loss, "CUTOFF", 0.0)
    dataset = dataset_of([(7, 9), (12, 5), (3, 3), (20, 22)] * 60)
    recipe = recipe_of(position=position)
    if key == "simcut":
        training = recipe.training.model_copy(update={"simcut": 3.0})
        recipe = recipe.model_copy(update={"training": training})
    device = torch.device("cuda")
    space = packed_size(
        dataset.source_lengths, dataset.target_lengths, 1024
    )  # longer than the initial position table
    plan = plan_packed(dataset.source_lengths, dataset.target_lengths, space, 1, 0)
    losses = []
    for cuda_graph in (False, True):
        loss_fn = loss_fn_of(recipe).to(device)
        if key == "teacher":
            loss_fn.teachers = (loss_fn_of(recipe).network.to(device).eval(),)
        optimizer = torch.optim.Adam(
            loss_fn.parameters(),
            lr=torch.tensor(1e-3, device=device),
            fused=True,
            capturable=True,
        )
        train_step: Any = TrainStep(loss_fn, optimizer, recipe.training, device)
        train_step = CUDAGraphStep(train_step, loss_fn.network) if cuda_graph else train_step
        losses.append(
            [
                float(train_step([pack(dataset, rows, space)], StepScalars(1 / 1000, 1e-3)))
                for rows in plan * 3
            ]
        )
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")  # from torch, about its own compiler
def test_distributed_cuda_graph_steps_equal_eager_steps(tmp_path: Path) -> None:
    """A group of one process: two graphs, an all-reduce between them, and 0 to 2 packed rows in a step."""
    device, recipe = torch.device("cuda"), recipe_of(position="rotary")
    dataset = dataset_of([(7, 9), (12, 5), (3, 3), (20, 22)] * 60)
    space = packed_size(dataset.source_lengths, dataset.target_lengths, 1024)
    plan = plan_packed(dataset.source_lengths, dataset.target_lengths, space, 1, 0)
    rows = [pack(dataset, one, space) for one in plan]
    steps = [[], rows[:1], rows[1:2], rows[:1], rows[:1], rows[:2], [], rows[1:2], rows[:2]] * 2
    address = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    try:
        losses = []
        for cuda_graph in (False, True):
            loss_fn = loss_fn_of(recipe).to(device)
            parameters = list(loss_fn.parameters())
            optimizer = OPTIMIZERS["adam"](loss_fn, recipe.training)
            gradients = FlatGradients(parameters, ProcessGroup(0, 1, device))
            train_step: Any = TrainStep(loss_fn, optimizer, recipe.training, device, gradients)
            if cuda_graph:
                train_step = DistributedCUDAGraphStep(train_step, loss_fn.network)
            scalars = StepScalars(1 / 1000, 1e-3)
            losses.append([float(train_step(batches, scalars)) for batches in steps])
    finally:
        torch.distributed.destroy_process_group()
    assert losses[0][0] == 0
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
