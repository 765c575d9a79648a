"""benchmarks/baselines.py measures the right values where they are known."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.scripts import load_script


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/baselines.py")


def shift_by(distance: int) -> Callable[[Tensor], Tensor]:
    """A layer in which each output is the input ``distance`` positions before."""
    return lambda x: torch.nn.functional.pad(x, (0, 0, distance, 0))[:, : x.shape[1]]


@pytest.mark.parametrize(("distance", "length", "layers"), [(1, 9, 8), (2, 9, 4), (8, 9, 1)])
def test_the_path_of_a_shift(
    distance: int, length: int, layers: int, benchmark: ModuleType
) -> None:
    def reached(count: int) -> bool:
        first = torch.ones(1, 1, 16, requires_grad=True)
        x = torch.cat([first, torch.ones(1, length - 1, 16)], dim=1)
        return bool(benchmark.influences(first, shift_by(distance * count)(x)[:, -1]))

    assert reached(layers)
    assert not reached(layers - 1)

    def make(number: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x + shift_by(distance)(x)

    assert benchmark.layers_to_interact(make, length) == layers


def test_tokens_that_never_interact_are_an_error(benchmark: ModuleType) -> None:
    with pytest.raises(AssertionError, match="no number works"):
        benchmark.layers_to_interact(lambda number: lambda x: 2 * x, 8)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("self-attention", {8: 1, 40: 1}),
        ("convolution", {8: 7, 40: 39}),  # a window of 3 reaches 1 to each side
        ("convolution, dilated", {9: 2, 10: 3, 27: 3, 28: 4}),  # powers of 3
        ("window attention", {9: 1, 10: 2, 40: 5}),  # a window of 8
    ],
)
def test_the_path_through_layers(kind: str, layers: dict[int, int], benchmark: ModuleType) -> None:
    torch.manual_seed(1)
    make = benchmark.LAYERS[kind]
    assert {length: benchmark.layers_to_interact(make, length) for length in layers} == layers


def test_the_path_through_a_recurrence(benchmark: ModuleType) -> None:
    assert [benchmark.steps_to_interact(length) for length in (2, 8, 21)] == [1, 7, 20]


def test_the_longest_chain_of_operations(benchmark: ModuleType) -> None:
    x = torch.ones(2, requires_grad=True)
    # The graph begins with the accumulation of the gradient of x.
    assert benchmark.longest_chain(x * 2) == 2
    assert benchmark.longest_chain(x * 2 + (x * 3).sin().cos()) == 5


def test_the_exponents_of_the_work(benchmark: ModuleType) -> None:
    small, large = benchmark.Size(64, 8, 4), benchmark.Size(128, 8, 4)
    work = {
        kind: [benchmark.operations(make(size)) for size in (small, large)]
        for kind, make in benchmark.WORK.items()
    }
    # Two operations for each product. Scores and sums; four gates from word and state; a and b of each tap.
    assert work["self-attention"] == [2 * 2 * 64 * 64 * 8, 2 * 2 * 128 * 128 * 8]
    assert work["recurrent"] == [2 * 64 * 4 * 2 * 8 * 8, 2 * 128 * 4 * 2 * 8 * 8]
    assert work["convolution"] == [2 * 64 * 4 * 2 * 8 * 8, 2 * 128 * 4 * 2 * 8 * 8]
    # Blocks of 32 queries, each with the 40 keys around it.
    assert work["window attention"] == [2 * 2 * 64 * 40 * 8, 2 * 2 * 128 * 40 * 8]
    assert benchmark.growth_exponent([1, 2, 4], [3, 12, 48]) == pytest.approx(2)
