"""Each optimizer against its update rule in NumPy; each learning-rate schedule against its formula.

Muon: orthogonalization against the singular value decomposition, the update against torch.optim.Muon.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn, optim

from regard.errors import RegardError
from regard.nn.transformer import Transformer
from regard.recipe import Recipe, TrainingConfig
from regard.training.distributed import ProcessGroup
from regard.training.fine_tuning import freeze_weights
from regard.training.optimizers import (
    COEFFICIENTS,
    ITERATIONS,
    OPTIMIZERS,
    Muon,
    layer_matrices,
    learning_rate,
    orthogonalize,
    set_learning_rate,
    trained_parameters,
)
from regard.training.sharding import shards

Array = npt.NDArray[np.float64]
SmallRecipe = Callable[..., Recipe]
STEPS, RATE = 5, 0.1
INITIAL = np.array([3.0, -2.0, 0.5])
CURVES = np.array([1.0, 4.0, 0.3])
"""f(x) = sum of c x^2 / 2, so the gradient is c x"""


def by_torch(name: str, training: TrainingConfig) -> list[Array]:
    x = nn.Parameter(torch.tensor(INITIAL))
    optimizer = OPTIMIZERS[name](nn.ParameterList([x]), training)
    found = []
    for _ in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATE
        optimizer.zero_grad()
        torch.autograd.backward((torch.tensor(CURVES) * x.square() / 2).sum())
        optimizer.step()
        found.append(x.detach().numpy().copy())
    return found


def adam(decay: float, decoupled: bool) -> Iterator[Array]:
    x, first, second = INITIAL, np.zeros(3), np.zeros(3)
    for t in range(1, STEPS + 1):
        g = CURVES * x + (0 if decoupled else decay * x)
        first, second = 0.9 * first + 0.1 * g, 0.98 * second + 0.02 * g**2
        corrected = first / (1 - 0.9**t), second / (1 - 0.98**t)
        shrunk = x * (1 - RATE * decay) if decoupled else x
        x = shrunk - RATE * corrected[0] / (np.sqrt(corrected[1]) + 1e-9)
        yield x


def sgd(momentum: float, decay: float) -> Iterator[Array]:
    x, velocity = INITIAL, np.zeros(3)
    for _ in range(STEPS):
        velocity = momentum * velocity + CURVES * x + decay * x
        x = x - RATE * velocity
        yield x


def adagrad(decay: float) -> Iterator[Array]:
    x, squares = INITIAL, np.zeros(3)
    for _ in range(STEPS):
        g = CURVES * x + decay * x
        squares = squares + g**2
        x = x - RATE * g / (np.sqrt(squares) + 1e-10)
        yield x


def rmsprop(decay: float) -> Iterator[Array]:
    x, squares = INITIAL, np.zeros(3)
    for _ in range(STEPS):
        g = CURVES * x + decay * x
        squares = 0.99 * squares + 0.01 * g**2
        x = x - RATE * g / (np.sqrt(squares) + 1e-8)
        yield x


@pytest.mark.parametrize(
    ("name", "decay", "rule"),
    [
        ("adam", 0.0, lambda: adam(0.0, False)),
        ("adam", 0.2, lambda: adam(0.2, False)),
        ("adamw", 0.2, lambda: adam(0.2, True)),
        ("sgd", 0.0, lambda: sgd(0.0, 0.0)),
        ("sgd", 0.2, lambda: sgd(0.0, 0.2)),
        ("momentum", 0.0, lambda: sgd(0.9, 0.0)),
        ("momentum", 0.2, lambda: sgd(0.9, 0.2)),
        ("adagrad", 0.0, lambda: adagrad(0.0)),
        ("adagrad", 0.2, lambda: adagrad(0.2)),
        ("rmsprop", 0.0, lambda: rmsprop(0.0)),
        ("rmsprop", 0.2, lambda: rmsprop(0.2)),
    ],
)
def test_optimizer_follows_its_rule(
    small_recipe: SmallRecipe, name: str, decay: float, rule: Callable[[], Iterator[Array]]
) -> None:
    training = small_recipe(training={"optimizer": name, "weight_decay": decay}).training
    np.testing.assert_allclose(by_torch(name, training), list(rule()), rtol=1e-12, atol=1e-12)


def test_adam_reads_betas_and_epsilon_of_the_recipe(small_recipe: SmallRecipe) -> None:
    training = small_recipe(training={"betas": [0.8, 0.95], "epsilon": 1e-6}).training
    built = OPTIMIZERS["adam"](nn.ParameterList([torch.zeros(1)]), training)
    assert built.defaults["betas"] == (0.8, 0.95)
    assert built.defaults["eps"] == 1e-6


def test_sgd_fits_a_line_as_computed_by_hand(small_recipe: SmallRecipe) -> None:
    x = torch.arange(5, dtype=torch.float64)
    y = 2 * x + 1
    w, b = (nn.Parameter(torch.zeros((), dtype=torch.float64)) for _ in range(2))
    optimizer: optim.Optimizer = OPTIMIZERS["sgd"](
        nn.ParameterList([w, b]), small_recipe().training
    )
    optimizer.param_groups[0]["lr"] = 0.01
    printed = []
    for step in range(81):
        optimizer.zero_grad()
        loss = (w * x + b - y).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        if step % 20 == 0:
            printed.append(f"{w.item():.2f} {b.item():.2f} {loss.item():.3f}")
    assert printed == [
        "0.28 0.10 33.000",
        "1.98 0.73 0.123",
        "2.07 0.79 0.015",
        "2.06 0.82 0.012",
        "2.06 0.84 0.009",
    ]


# ---------------------------------------------------------------------------------------------
# Muon

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


def test_all_other_weights_may_be_frozen(small_recipe: SmallRecipe) -> None:
    """As with ``--freeze all-but-self_attention``: nothing is left for AdamW."""
    recipe = small_recipe(training={"optimizer": "muon"})
    network = Transformer(recipe.model, 20, 20)
    freeze_weights(network, ["all-but-self_attention"])
    trained = trained_parameters(network)
    assert {*trained} < {*layer_matrices(network)}
    muon = OPTIMIZERS["muon"](network, recipe.training)
    before = [weight.clone() for weight in trained]
    set_learning_rate(muon, 0.1)
    for weight in trained:
        weight.grad = torch.randn_like(weight)
    muon.step()
    assert not any(torch.equal(*pair) for pair in zip(trained, before, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("frozen", ["norms", "all-but-self_attention"])
def test_on_a_gpu_a_step_can_be_captured_whatever_is_frozen(
    small_recipe: SmallRecipe, frozen: str
) -> None:
    """A CUDA graph reads the learning rate of both optimizers from the device."""
    recipe = small_recipe(training={"optimizer": "muon"})
    network = Transformer(recipe.model, 20, 20).to("cuda")
    freeze_weights(network, [frozen])
    matrices, others = OPTIMIZERS["muon"](network, recipe.training).param_groups
    assert [group["lr"].device.type for group in (matrices, others)] == ["cuda", "cuda"]
    assert others["capturable"]


def test_sharding_is_refused(small_recipe: SmallRecipe) -> None:
    recipe = small_recipe(training={"optimizer": "muon", "sharding": "full_shard"})
    network: Any = Transformer(recipe.model, 20, 20)
    group = ProcessGroup(0, 2, torch.device("cpu"), local_size=2)
    with pytest.raises(
        RegardError, match=r"does not support training\.optimizer: muon; use no_shard"
    ):
        shards(recipe, network, group)


# ---------------------------------------------------------------------------------------------
# Learning rate schedules


@pytest.fixture
def training(small_recipe: SmallRecipe) -> Callable[..., TrainingConfig]:
    def make(**section: Any) -> TrainingConfig:
        return small_recipe(training=section).training

    return make


@pytest.mark.parametrize("step", [1, 2, 399, 3999, 4000, 4001, 16_000, 100_000])
def test_noam_schedule_follows_the_formula_of_the_paper(
    training: Callable[..., TrainingConfig], step: int
) -> None:
    expected = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
    assert learning_rate(step, training(), 512) == pytest.approx(expected, rel=1e-12)
    doubled = learning_rate(step, training(learning_rate=2.0), 512)
    assert doubled == pytest.approx(2 * expected, rel=1e-12)


def test_noam_schedule_peaks_at_the_end_of_warmup(training: Callable[..., TrainingConfig]) -> None:
    rates = [learning_rate(step, training(), 512) for step in range(1, 12_001)]
    assert rates.index(max(rates)) + 1 == 4000
    assert max(rates) == pytest.approx(6.9877e-4, rel=1e-4)


def test_noam_schedule_without_warmup_only_decays(training: Callable[..., TrainingConfig]) -> None:
    for step in (1, 4, 100):
        rate = learning_rate(step, training(warmup=0), 64)
        assert rate == pytest.approx(1 / math.sqrt(64 * step), rel=1e-12)


def test_cosine_rises_to_the_learning_rate_and_ends_at_zero(
    training: Callable[..., TrainingConfig],
) -> None:
    section = training(schedule="cosine", learning_rate=0.4, warmup=100, steps=1100)
    found = {step: learning_rate(step, section, 512) for step in (1, 50, 100, 350, 600, 1100)}
    quarter = 0.4 * (1 + math.sqrt(0.5)) / 2
    expected = {1: 0.004, 50: 0.2, 100: 0.4, 350: quarter, 600: 0.2, 1100: 0.0}
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_cosine_stays_at_zero_after_the_last_step(training: Callable[..., TrainingConfig]) -> None:
    section = training(schedule="cosine", learning_rate=0.4, warmup=10, steps=100)
    assert learning_rate(150, section, 512) == pytest.approx(0, abs=1e-12)


def test_constant_warms_up_and_stays(training: Callable[..., TrainingConfig]) -> None:
    section = training(schedule="constant", learning_rate=0.5, warmup=10)
    assert learning_rate(1, section, 512) == pytest.approx(0.05)
    assert learning_rate(10, section, 512) == learning_rate(9999, section, 512) == 0.5
    assert learning_rate(1, training(schedule="constant", learning_rate=0.5, warmup=0), 512) == 0.5


@given(
    schedule=st.sampled_from(["noam", "constant", "cosine"]),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 100),
)
def test_no_learning_rate_is_negative_and_the_first_is_positive(
    small_recipe: SmallRecipe, schedule: str, warmup: int, steps: int
) -> None:
    # Copied, not validated: a recipe with a warmup longer than its steps would be refused.
    section = small_recipe(training={"schedule": schedule}).training.model_copy(
        update={"warmup": warmup, "steps": steps + 1}
    )
    rates = [learning_rate(step, section, 16) for step in range(1, steps + 2)]
    assert min(rates) >= 0
    assert rates[0] > 0
