"""How fast a device trains, measured in about a second, so that a model can be chosen for it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from regard.data.batching import Batch, pack_equal
from regard.inference.worker_pool import on_one_core
from regard.nn.architectures import ARCHITECTURES
from regard.nn.loss import Seq2SeqLoss
from regard.recipe import Recipe, make_recipe
from regard.training.cpu_kernels import (
    attach_cpu_kernels,
    fastest_cpu_precision,
    has_cpu_kernels,
)
from regard.training.optimizers_and_schedules import OPTIMIZERS
from regard.training.train_step import StepScalars, ThreadedTrainStep, TrainStep, parallel_rows


@dataclass(frozen=True)
class DeviceSpeed:
    """How fast a device trains, estimated in about a second."""

    device: str
    """cpu or cuda"""
    reference: float
    """target tokens per second with the model of cost 1, ``REFERENCE_MODELS``"""
    name: str = ""
    """for example “2 CPU cores” or “NVIDIA H200”"""
    batching: Literal["padded", "packed"] = "padded"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """how it trains fastest"""
    spare_cores: int = 0
    """cores of a CPU beyond the first that one process trains with"""

    def tokens_per_second(self, cost: float) -> float:
        """Target tokens per second for a model of this cost relative to the reference model."""
        return self.reference / cost

    def describe(self) -> str:
        model = REFERENCE_MODELS[self.device]
        return f"{self.name}: about {self.reference:,.0f} tokens/s with {model}"


def fastest_batches(
    device: torch.device,
) -> tuple[Literal["padded", "packed"], Literal["auto", "fp32", "bf16"]]:
    """The values of ``training.batching`` and ``training.precision`` with which a Transformer trains fastest."""
    if device.type == "cuda":
        return "packed", "auto"
    return ("packed" if has_cpu_kernels() else "padded"), fastest_cpu_precision()


REFERENCE_MODELS = {"cpu": "the preset tiny", "cuda": "3+3 layers of width 512"}
"""The models that costs are relative to."""
H200_MATMUL, H200_REFERENCE = 7.0e14, 1.08e6
"""Operations per second of a large bf16 product, and tokens per second of the reference model in batches of 4,096
tokens (``python benchmarks/autoconfig_experiments.py --speeds``). Another GPU is estimated from its own product."""

PARALLEL_EFFICIENCY = 0.67
"""Speed of several processes relative to the sum of their speeds when each trains alone: tiny, two processes on two
cores of an AMD EPYC, batches of 1,024 tokens."""


def measure_device(device: torch.device) -> DeviceSpeed:
    """The speed of a device: on a CPU from a few steps of ``tiny``, on a GPU from a large matrix product.

    With several processes, it is the speed of all of them together.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    together = processes * PARALLEL_EFFICIENCY if processes > 1 else 1.0
    if device.type == "cuda":
        speed = H200_REFERENCE * matmul_speed(device) / H200_MATMUL
        name = f"{processes} x " * (processes > 1) + torch.cuda.get_device_name(device)
        return DeviceSpeed("cuda", together * speed, name, *fastest_batches(device))
    rows, seconds = parallel_rows() if processes == 1 else 1, math.inf
    tokens = 1_000 * rows
    batching, precision = fastest_batches(device)
    values: dict[str, Any] = {"data": {"train": {"pairs": "x"}}, "model": {"preset": "tiny"}}
    values["training"] = {"precision": precision, "batching": batching}
    step = _random_step(make_recipe(values, "speed"), tokens, vocab_size=6_000, rows=rows)
    for _ in range(4):
        start = time.perf_counter()
        step()
        seconds = min(seconds, time.perf_counter() - start)
    cores = torch.get_num_threads()
    name = f"{processes * cores} CPU core{'s' * (processes * cores > 1)}"
    name += f" in {processes} processes" * (processes > 1)
    spare = cores - 1 if processes == 1 else 0
    return DeviceSpeed("cpu", together * tokens / seconds, name, batching, precision, spare)


SENTENCE_TOKENS = 25
"""of the random sentences that a speed is measured with"""


def _random_step(
    recipe: Recipe, tokens: int, vocab_size: int, rows: int = 1
) -> Callable[[], object]:
    """A training step on a CPU with this many random source tokens and as many target tokens.

    rows: packed rows that are computed at the same time.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ARCHITECTURES["transformer"](recipe.model, vocab_size, vocab_size)
        ids = torch.randint(10, vocab_size, (tokens // SENTENCE_TOKENS, SENTENCE_TOKENS))
    loss_fn = Seq2SeqLoss(network, recipe.training)
    optimizer = OPTIMIZERS[recipe.training.optimizer](network, recipe.training)
    options = loss_fn, optimizer, recipe.training, torch.device("cpu")
    batches, train_step = [Batch(ids, ids, ids)], TrainStep(*options)
    if recipe.training.batching == "packed" and has_cpu_kernels():
        attach_cpu_kernels(loss_fn)
        batches = [pack_equal(row) for row in ids.chunk(rows)]
        train_step = ThreadedTrainStep(*options) if rows > 1 else TrainStep(*options)

    def step() -> None:
        with torch.random.fork_rng(devices=[]):
            train_step(batches, StepScalars(1 / ids.numel(), 1e-4))

    return step


class CoreSpeed(NamedTuple):
    """How long one core takes for a training step of a recipe."""

    seconds_per_token: float
    """for a source token and a target token"""
    seconds_per_step: float
    """whatever the number of tokens: the update of the weights, and the calls of the layers"""


def measure_core(recipe: Recipe) -> CoreSpeed:
    """Time two steps of different size on one core, in CPU seconds: as long as on an idle machine."""
    with on_one_core():
        steps = [
            _random_step(recipe, tokens, recipe.tokenizer.vocab_size) for tokens in CORE_TOKENS
        ]
        # In turns, so that a busy moment of the machine slows down both; the first turn warms up.
        turns = [[_cpu_seconds(step) for step in steps] for _ in range(5)][1:]
    small, large = (min(times) for times in zip(*turns, strict=True))
    if small >= large:  # noise: at least the time of the large step is known
        return CoreSpeed(large / CORE_TOKENS[1], 0.0)
    per_token = (large - small) / (CORE_TOKENS[1] - CORE_TOKENS[0])
    return CoreSpeed(per_token, max(0.0, small - per_token * CORE_TOKENS[0]))


def _cpu_seconds(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return time.process_time() - start


CORE_TOKENS = (500, 2_000)
"""target tokens of the two steps"""


def matmul_speed(device: torch.device) -> float:
    """Operations per second of one large matrix product, as the device's peak speed."""
    gpu = device.type == "cuda"
    size = 8192 if gpu else 1024
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(10):
            torch.mm(x, x)
        if gpu:
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - start) / 10)
    return 2 * size**3 / min(seconds[1:])
