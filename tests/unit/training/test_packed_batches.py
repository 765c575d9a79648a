"""Packed rows: the same loss and gradients as one text to a row, and nothing lost on the way into them."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from regard.data.batching import Batch, Room, collate, pack, plan_packed, room
from regard.data.dataset import TokenDataset
from regard.data.special_tokens import BOS, EOS, PAD
from regard.nn.architectures import ARCHITECTURES
from regard.nn.dropout import Dropout, kept, seeded
from regard.nn.loss import Seq2SeqLoss, portion_loss
from regard.recipe import Recipe, make_recipe
from regard.training.optimizers import OPTIMIZERS
from regard.training.train_step import CUDAGraphStep, Numbers, TrainStep

VOCABULARY = 50
few = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=8)
lengths = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=60)


def store_of(pairs: list[tuple[int, int]], seed: int = 0) -> TokenDataset:
    """DataFiles of these lengths, as they stand on disk."""
    source, target = (np.array(side, dtype=np.int32) for side in zip(*pairs, strict=True))
    total = int(source.sum() + target.sum())
    ids = np.random.default_rng(seed).integers(6, VOCABULARY, total).astype(np.int32)
    starts = np.cumsum(source) - source
    facts = {"source_starts": starts, "source_lengths": source, "target_lengths": target}
    later = np.cumsum(target) - target + source.sum()
    return cast(TokenDataset, SimpleNamespace(ids=ids, trees=False, target_starts=later, **facts))


def recipe_of(**model: Any) -> Recipe:
    small = {"preset": "tiny", "d_model": 32, "heads": 4, "d_ff": 48, "encoder_layers": 2}
    model = {**small, "decoder_layers": 2, "dropout": 0.0, **model}
    sections = {"data": {"train": {"pairs": "x"}}, "training": {"batching": "packed"}}
    return make_recipe({**sections, "model": model}, "test")


def objective_of(recipe: Recipe) -> Seq2SeqLoss:
    torch.manual_seed(0)
    network = ARCHITECTURES["transformer"](recipe.model, VOCABULARY, VOCABULARY)
    return Seq2SeqLoss(cast(Any, network), recipe.training)


@given(lengths, st.integers(1, 200), st.integers(0, 3))
def test_every_pair_stands_in_one_batch_that_has_room_for_it(
    pairs: list[tuple[int, int]], tokens: int, epoch: int
) -> None:
    store = store_of(pairs)
    space = room(store.source_lengths, store.target_lengths, tokens)
    plan = plan_packed(store.source_lengths, store.target_lengths, space, 1, epoch)
    assert sorted(np.concatenate(plan)) == list(range(len(pairs)))
    for rows in plan:
        batch = pack(store, rows, space)
        assert batch.source.shape == (1, space.source)
        assert batch.target.shape == batch.labels.shape == (1, space.target)
        assert int((batch.source == EOS).sum()) == int((batch.target == BOS).sum()) == len(rows)
        assert batch.tokens == int(store.target_lengths[rows].sum()) + len(rows)


def test_real_lengths_fill_the_rows() -> None:
    """95% of the positions that a GPU computes are words, on both sides, where the sides differ in length."""
    random = np.random.default_rng(1)
    source = random.gamma(4, 2, 20_000).astype(int) + 1
    target = np.maximum(1, (source * random.normal(1.2, 0.25, 20_000)).astype(int))
    store = store_of(list(zip(source.tolist(), target.tolist(), strict=True)))
    space = room(store.source_lengths, store.target_lengths, 8192)
    plan = plan_packed(store.source_lengths, store.target_lengths, space, 1, 0)
    words = store.source_lengths.sum() + store.target_lengths.sum() + 2 * len(source)
    assert words / (len(plan) * sum(space)) > 0.95


@settings(max_examples=4)
@given(few, st.sampled_from(["after", "before"]), st.sampled_from([None, 2]))
@pytest.mark.parametrize("position", ["sinusoidal", "rotary"])
def test_the_loss_and_its_gradients_are_those_of_padded_rows(
    position: str, pairs: list[tuple[int, int]], place: str, groups: int | None
) -> None:
    store, rows = store_of(pairs), np.arange(len(pairs))
    space = Room(100, 90)
    attention = {"key_value_heads": groups, "bias": groups is not None}
    recipe = recipe_of(norm_order=place, attention=attention, position=position)
    objective = objective_of(recipe).double()
    found = [
        gradients(objective, batch) for batch in (collate(store, rows), pack(store, rows, space))
    ]
    for padded, packed in zip(*found, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-9, atol=1e-9)


def gradients(objective: nn.Module, batch: Batch) -> tuple[torch.Tensor, ...]:
    places = () if batch.position_info is None else (batch.position_info,)
    loss = objective(batch.source, batch.target, batch.labels, *places)
    return loss, *torch.autograd.grad(loss, list(objective.parameters()))


def test_two_passes_of_a_packed_row_are_two_rows() -> None:
    store = store_of([(5, 7), (3, 2), (9, 8)])
    space = room(store.source_lengths, store.target_lengths, 40)
    recipe = recipe_of()
    twice = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"rdrop": 5.0})}
    )
    plain, agreeing = (objective_of(one).double() for one in (recipe, twice))
    batch = pack(store, np.arange(3), space)
    # Without dropout both passes say the same: nothing is added.
    for one, other in zip(gradients(plain, batch), gradients(agreeing, batch), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rdrop", [0.0, 3.0])
def test_the_loss_for_a_compiler_is_the_loss(rdrop: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(12 if rdrop else 6, 11, dtype=torch.float64)
    wanted = torch.tensor([1, 7, PAD, 3, 10, PAD])
    plain = portion_loss(logits.clone(), wanted, 0.1, rdrop, True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for one, other in zip(plain, portion_loss(logits, wanted, 0.1, rdrop, True), strict=True):
        torch.testing.assert_close(one, other)


@given(st.floats(0.05, 0.9), st.integers(-(2**31), 2**31 - 1))
def test_hashed_dropout_keeps_the_share_it_should(p: float, seed: int) -> None:
    stays = kept(torch.Size([40, 500]), p, torch.tensor([seed], dtype=torch.int32))
    spread = (p * (1 - p) / 20_000) ** 0.5
    assert abs(float(stays.double().mean()) - (1 - p)) < 6 * spread


def test_hashed_dropout_keeps_the_mean_and_differs_from_site_to_site() -> None:
    layers = [Dropout(0.3), Dropout(0.3)]
    seeds = seeded(layers, torch.device("cpu"))
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


def test_the_curves_of_packed_and_padded_learning_are_one() -> None:
    """The same batches, packed into one row or padded in parts: in float64 no step tells them apart."""
    store = store_of([(3, 4), (7, 5), (2, 2), (6, 9), (4, 4), (8, 8)] * 4)
    recipe = recipe_of(encoder_layers=1, decoder_layers=1)
    space = room(store.source_lengths, store.target_lengths, 60)
    curves = []
    for packs in (True, False):
        objective = objective_of(recipe).double()
        optimizer = OPTIMIZERS["adam"](objective.parameters(), recipe.training)
        update = TrainStep(objective, optimizer, recipe.training, torch.device("cpu"))
        curve = []
        for epoch in range(35):
            for rows in plan_packed(store.source_lengths, store.target_lengths, space, 1, epoch):
                halves = [part for part in (rows[::2], rows[1::2]) if len(part)]
                parts = [pack(store, rows, space)] if packs else [collate(store, h) for h in halves]
                tokens = sum(part.tokens for part in parts)
                curve.append(float(update(parts, Numbers(1 / tokens, 3e-3))))
        curves.append(curve)
    assert len(curves[0]) > 60
    assert curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")  # of torch, about what its own compiler does
@pytest.mark.parametrize("position", ["sinusoidal", "rotary"])
def test_recorded_updates_are_the_plain_ones(position: str) -> None:
    """Without dropout the same weights come out, step after step, but for the number format."""
    store = store_of([(7, 9), (12, 5), (3, 3), (20, 22)] * 60)
    recipe = recipe_of(position=position)
    device = torch.device("cuda")
    space = room(store.source_lengths, store.target_lengths, 1024)  # beyond the first table
    plan = plan_packed(store.source_lengths, store.target_lengths, space, 1, 0)
    losses = []
    for records in (False, True):
        objective = objective_of(recipe).to(device)
        optimizer = torch.optim.Adam(
            objective.parameters(),
            lr=torch.tensor(1e-3, device=device),
            fused=True,
            capturable=True,
        )
        update: Any = TrainStep(objective, optimizer, recipe.training, device)
        update = CUDAGraphStep(update, objective.network) if records else update
        losses.append(
            [
                float(update([pack(store, rows, space)], Numbers(1 / 1000, 1e-3)))
                for rows in plan * 3
            ]
        )
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
