"""The benchmark of non-autoregressive translation."""

from collections.abc import Callable
from pathlib import Path

from tests.scripts import load_script


def test_the_benchmark_uses_the_given_number_of_threads(make_run: Callable[..., Path]) -> None:
    benchmark = load_script("benchmarks/non_autoregressive.py")
    run = make_run(model={"architecture": "non_autoregressive"})
    models = benchmark.Models("cpu", threads=1)
    models.translate(benchmark.System("one iteration", run, {"iterations": 1}), ["a dog"])
    assert models.loaded[run].threads == 1
