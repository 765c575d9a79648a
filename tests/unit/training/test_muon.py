"""Muon: orthogonalization against the singular value decomposition, the update against torch.optim.Muon."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn, optim

from regard.errors import RegardError
from regard.nn.transformer import Transformer
from regard.recipe import Recipe
from regard.training.distributed import ProcessGroup
from regard.training.muon import COEFFICIENTS, ITERATIONS, Muon, orthogonalize
from regard.training.optimizers_and_schedules import OPTIMIZERS, layer_matrices
from regard.training.sharding import shards

SmallRecipe = Callable[..., Recipe]
SHAPES = ((8, 8), (16, 8), (8, 24))


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 12),
    count=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_orthogonalization_changes_only_the_singular_values(
    rows: int, columns: int, count: int, seed: int
) -> None:
    matrices = np.random.default_rng(seed).standard_normal((count, rows, columns))
    found = orthogonalize(torch.tensor(matrices), torch.float64).numpy()
    a, b, c = COEFFICIENTS
    for matrix, result in zip(matrices, found, strict=True):
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        s = s / np.sqrt((s**2).sum())
        for _ in range(ITERATIONS):
            s = a * s + b * s**3 + c * s**5
        np.testing.assert_allclose(result, u @ np.diag(s) @ v, atol=1e-10)


def test_all_directions_become_about_equally_large() -> None:
    singular_values = torch.logspace(-1.5, 0, 16, dtype=torch.float64)
    left, right = (torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64))[0] for _ in range(2))
    result = orthogonalize((left * singular_values @ right)[None], torch.float64)
    assert torch.linalg.svdvals(result[0]).min() > 0.65
    assert torch.linalg.svdvals(result[0]).max() < 1.25


def test_a_gradient_of_zeros_changes_nothing() -> None:
    assert not orthogonalize(torch.zeros(2, 4, 3), torch.float32).any()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_matrices_are_updated_as_by_torch(weight_decay: float) -> None:
    initial = [torch.randn(shape) for shape in (*SHAPES, SHAPES[0])]
    gradients = [[torch.randn_like(matrix) for matrix in initial] for _ in range(4)]
    ours, theirs = ([nn.Parameter(matrix.clone()) for matrix in initial] for _ in range(2))
    rest = optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.01)
    muon = Muon(ours, rest, weight_decay, torch.bfloat16)
    reference = optim.Muon(
        theirs, lr=0.01, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    for step in gradients:
        for matrices in (ours, theirs):
            for matrix, gradient in zip(matrices, step, strict=True):
                matrix.grad = gradient.clone()
        muon.step()
        reference.step()  # type: ignore[no-untyped-call]
    for matrix, expected in zip(ours, theirs, strict=True):
        # An update has a root mean square of lr x 0.2; both compute it in bf16, whose rounding differs.
        assert (matrix - expected).square().mean().sqrt() < 0.02 * 4 * 0.01 * 0.2


def test_the_other_weights_are_updated_by_adamw(small_recipe: SmallRecipe) -> None:
    section = {"optimizer": "muon", "weight_decay": 0.1, "learning_rate": 0.01}
    training = small_recipe(training=section).training
    linear, table = nn.Linear(3, 4), nn.Embedding(5, 3)
    network = nn.ModuleDict({"layers": nn.ModuleList([linear]), "embedding": table})
    embedding = nn.Parameter(table.weight.detach().clone())
    bias = nn.Parameter(linear.bias.detach().clone())
    muon = OPTIMIZERS["muon"](network, training)
    adamw = optim.AdamW(
        [embedding, bias],
        lr=0.01,
        betas=training.betas,
        eps=training.epsilon,
        weight_decay=0.1,
        fused=True,
    )
    for _ in range(3):
        for parameter in network.parameters():
            parameter.grad = torch.randn_like(parameter)
        embedding.grad = table.weight.grad
        bias.grad = linear.bias.grad
        muon.step()
        adamw.step()
    assert torch.equal(table.weight, embedding)
    assert torch.equal(linear.bias, bias)


def test_embeddings_norms_biases_and_frozen_weights_are_not_orthogonalized(
    small_recipe: SmallRecipe,
) -> None:
    recipe = small_recipe(training={"optimizer": "muon"})
    network = Transformer(recipe.model, 20, 20)
    names: dict[Tensor, str] = {weight: name for name, weight in network.named_parameters()}
    layers = recipe.model.encoder_layers + recipe.model.decoder_layers
    frozen = next(iter(layer_matrices(network)))
    frozen.requires_grad_(False)
    muon = OPTIMIZERS["muon"](network, recipe.training)
    assert isinstance(muon, Muon)
    matrices = [names[one] for group in muon.by_shape.values() for one in group]
    # Query, key, value and output of each attention, two matrices of each feed-forward layer.
    expected = 6 * layers + 4 * recipe.model.decoder_layers
    assert len(matrices) == expected - 1
    assert names[frozen] not in matrices
    assert not [name for name in matrices if "embedding" in name or "norm" in name]
    trained = sum(len(group["params"]) for group in muon.param_groups)
    assert trained == len(names) - 1


def test_sharding_is_refused(small_recipe: SmallRecipe) -> None:
    recipe = small_recipe(training={"optimizer": "muon", "sharding": "full_shard"})
    network: Any = Transformer(recipe.model, 20, 20)
    group = ProcessGroup(0, 2, torch.device("cpu"), local_size=2)
    with pytest.raises(
        RegardError, match=r"does not support training\.optimizer: muon; use no_shard"
    ):
        shards(recipe, network, group)
