"""The speed and the cost of training: this device, measured in about a second, and any number of GPUs, predicted.

``measure_device`` times a few training steps, so that ``autoconfig`` can choose a model for the device.

``estimate`` predicts step time, memory per GPU, duration and cost on any number of GPUs, without any of them. A step of
one process is matrix products, memory traffic and a fixed time per layer; then the update of the weights and the
exchange of gradients. Padded batches, and so all sharded models, are neither compiled nor captured, and have constants
of their own. The constants were fitted to measurements on one H200 (docs/training.md, ``regard bench train``). Other
GPUs and networks are scaled by their data sheets, so those figures are estimates. For CPUs, the step of the recipe is
timed on one core of this machine, and the exchange is estimated.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch

from regard.data.batching import Batch, pack_equal
from regard.errors import RegardError
from regard.inference.worker_pool import available_cores, on_one_core
from regard.nn.architectures import ARCHITECTURES
from regard.nn.loss import Seq2SeqLoss
from regard.recipe import PACKED_CHUNKS, ModelConfig, Recipe, make_recipe
from regard.training.cpu_kernels import attach_cpu_kernels, fastest_batches, has_cpu_kernels
from regard.training.data_loader import can_pack
from regard.training.optimizers import OPTIMIZERS
from regard.training.out_of_memory import available_memory
from regard.training.planner import duration
from regard.training.train_step import StepScalars, ThreadedTrainStep, TrainStep, parallel_rows

# ---------------------------------------------------------------------------------------------
# The speed of this device

REFERENCE_MODELS = {"cpu": "the preset tiny", "cuda": "3+3 layers of width 512"}
"""The models that costs are relative to."""
H200_MATMUL, H200_REFERENCE = 7.0e14, 1.08e6
"""Operations per second of a large bf16 product, and tokens per second of the reference model in batches of 4,096
tokens (``python benchmarks/autoconfig_experiments.py --speeds``). Another GPU is estimated from its own product."""

PARALLEL_EFFICIENCY = 0.67
"""Speed of several processes relative to the sum of their speeds when each trains alone: tiny, two processes on two
cores of an AMD EPYC, batches of 1,024 tokens."""


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


class CoreSpeed(NamedTuple):
    """How long one core takes for a training step of a recipe."""

    seconds_per_token: float
    """for a source token and a target token"""
    seconds_per_step: float
    """whatever the number of tokens: the update of the weights, and the calls of the layers"""


CORE_TOKENS = (500, 2_000)
"""target tokens of the two steps"""


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


# ---------------------------------------------------------------------------------------------
# Devices and training data of the cost model

LATENCY_SECONDS = 20e-6
"""of one message between processes (assumed)"""
LAYER_SECONDS = 0.22e-3
"""fixed time of a layer in a step, forward and backward (fitted)"""
TRAFFIC_BYTES = 409
"""memory traffic of a step for each number in the output of a layer (fitted)"""
ACTIVATION_BYTES, FIXED_BYTES = 42, 0.37e9
"""memory for each number in the output of a layer, and of any process (fitted)"""
PADDED_LAYER_SECONDS = 5.08e-3
"""the least time of a layer of padded batches, in which the CPU starts its kernels (fitted to tiny)"""
PADDED_TRAFFIC_BYTES, PADDED_ACTIVATION_BYTES = 1_310, 56
"""``TRAFFIC_BYTES`` and ``ACTIVATION_BYTES`` of padded batches (fitted: benchmarks/scale.json, largest)"""
CHECKPOINTED_BYTES, CHECKPOINTED_PASSES = 2, 4 / 3
"""with activation checkpointing: memory for each number (fitted), and work, as the forward pass is computed twice"""
STATE_BYTES, UPDATE_BYTES, CHECKPOINT_BYTES = 16, 28, 12
"""for each parameter, with Adam: memory; traffic of an update; size of a checkpoint"""
PREPARED_PAIRS = 25_000
"""pairs prepared per second by one process (measured: benchmarks/cards/multi30k-all.json)"""
DISK_BYTES = 0.5e9
"""bytes of a checkpoint written per second (assumed)"""


class Accelerator(NamedTuple):
    """What a step time depends on."""

    matmul: float
    """floating-point operations per second of a large bf16 matrix product"""
    bandwidth: float
    """bytes per second from memory"""
    memory: float
    link: float
    """bytes per second to another GPU of the same node"""
    network: float = 50e9
    """bytes per second between nodes, for each GPU: 400 Gb/s (assumed)"""
    per_node: int = 8
    """GPUs of a node"""


ACCELERATORS = {
    "h200": Accelerator(7.9e14, 4.8e12, 141e9, 450e9),
    "h100": Accelerator(7.9e14, 3.35e12, 80e9, 450e9),
    "a100": Accelerator(2.5e14, 2.0e12, 80e9, 300e9),
}
"""The matrix product of the H200 was measured; the others are 80% of the data sheet, as it is there."""


CPU = "cpu"
"""the kind of an accelerator that is a core of this machine"""
LOOPBACK_BYTES, ETHERNET_BYTES = 1.1e9, 1.25e9
"""bytes per second between processes of a machine through gloo (measured: benchmarks/scale.json), and between
machines: 10 Gb/s (assumed)"""
DEFAULT_MEMORY = 4e9
"""bytes of memory of a core, if it is not known"""


def core_as_accelerator() -> Accelerator:
    """A core of this machine, with its part of the free memory. Its speed is measured (``measure_core``)."""
    cores = available_cores()
    memory = (available_memory() or DEFAULT_MEMORY * cores) / cores
    return Accelerator(math.nan, math.nan, memory, LOOPBACK_BYTES, ETHERNET_BYTES / cores, cores)


class CorpusSize(NamedTuple):
    """Training data, and how often they are read."""

    name: str
    pairs: float
    tokens: float
    """target tokens of one epoch"""
    epochs: int


CORPORA = (
    CorpusSize("WMT14 English-German", 4.5e6, 1.3e8, 19),
    CorpusSize("300 M pairs", 3e8, 8.7e9, 1),
    CorpusSize("10^10 tokens", 3.4e8, 1e10, 1),
)
"""29 target tokens a pair are assumed. 19 epochs of WMT14 are the paper's 100,000 steps of 25,000 tokens."""


# ---------------------------------------------------------------------------------------------
# One step


@dataclass(frozen=True)
class ModelSize:
    """What the cost of a Transformer depends on."""

    parameters: int
    encoder: int
    """parameters that each source token is multiplied with"""
    decoder: int
    """parameters that each target token is multiplied with, the output projection included"""
    layers: int
    d_model: int

    @classmethod
    def of(cls, model: ModelConfig, vocab_size: int) -> ModelSize:
        d, feed_forward = model.d_model, 2 * model.d_model * model.d_ff
        attention = 2 * model.heads * (model.d_k + model.d_v) * d
        encoder = model.encoder_layers * (attention + feed_forward)
        decoder = model.decoder_layers * (2 * attention + feed_forward)
        tables = 1 + (not model.tie_embeddings) + (not model.tie_output)
        return cls(
            encoder + decoder + tables * vocab_size * d,
            encoder,
            decoder + vocab_size * d,
            model.encoder_layers + model.decoder_layers,
            d,
        )

    def elements(self, tokens: float) -> float:
        """Numbers in the outputs of all layers, for this many source and target tokens."""
        return tokens * self.layers * self.d_model


class StepOptions(NamedTuple):
    """How a recipe computes a step."""

    packed: bool = True
    """whether batches are packed, unless the model is sharded"""
    padded_chunks: int = 1
    """the parts of a batch that is padded"""
    accumulate: int = 1
    checkpointing: bool = False
    """activation checkpointing"""
    sharding: str = "auto"

    @classmethod
    def of(cls, recipe: Recipe) -> StepOptions:
        training = recipe.training
        return cls(
            can_pack(recipe),
            PACKED_CHUNKS if training.batching == "packed" else 1,
            training.accumulate,
            training.activation_checkpointing,
            training.sharding,
        )

    def shards(self, gpus: int, states: float, memory: float) -> bool:
        """Whether this many GPUs share weights, gradients and moments of ``states`` bytes."""
        chosen = self.sharding == "full_shard" or states > 0.5 * memory
        return gpus > 1 and chosen and self.sharding != "no_shard"


@dataclass(frozen=True)
class StepCost:
    """One training step on several GPUs."""

    gpus: int
    tokens_per_gpu: float
    sharded: bool
    packed: bool
    compute: float
    """seconds of the forward and backward pass"""
    update: float
    exchange: float
    """seconds in which gradients, or shards, are exchanged; counted in full, although computation hides a part"""
    memory: float
    """bytes per GPU"""

    @property
    def seconds(self) -> float:
        return self.compute + self.update + self.exchange

    @property
    def tokens_per_second(self) -> float:
        """target tokens, of all GPUs together"""
        return self.gpus * self.tokens_per_gpu / self.seconds


def step_cost(
    size: ModelSize,
    gpu: Accelerator,
    gpus: int,
    batch_tokens: int,
    core: CoreSpeed | None = None,
    options: StepOptions = StepOptions(),  # noqa: B008, it is immutable
) -> StepCost:
    """The cost of a step with this many target tokens, and as many source tokens, in all its batches together.

    core: the measured speed of a core, if the step is computed by cores.
    """
    tokens = batch_tokens / gpus
    elements = size.elements(tokens)
    states = STATE_BYTES * size.parameters
    sharded = options.shards(gpus, states, gpu.memory)
    packed = options.packed and not sharded
    parts = gpus if sharded else 1
    passes = CHECKPOINTED_PASSES if options.checkpointing else 1.0
    micro_batches = options.accumulate * (1 if packed else options.padded_chunks)
    each = ACTIVATION_BYTES if packed else PADDED_ACTIVATION_BYTES
    each = CHECKPOINTED_BYTES if options.checkpointing else each
    activations = FIXED_BYTES + each * elements / micro_batches
    if core is None:
        traffic = TRAFFIC_BYTES if packed else PADDED_TRAFFIC_BYTES
        operations = 6 * tokens * (size.encoder + size.decoder)
        compute = passes * (operations / gpu.matmul + elements * traffic / gpu.bandwidth)
        layers = size.layers * micro_batches
        if packed:
            compute += layers * LAYER_SECONDS
        else:
            compute = max(compute, passes * layers * PADDED_LAYER_SECONDS)
        update = UPDATE_BYTES * size.parameters / parts / gpu.bandwidth
    else:
        compute, update = tokens * core.seconds_per_token, core.seconds_per_step
    # An all-reduce sends everything twice; sharding gathers the weights twice and scatters the gradients, each time.
    volume = (3 * micro_batches if sharded else 2) * 4 * size.parameters
    return StepCost(
        gpus,
        tokens,
        sharded,
        packed,
        compute,
        update,
        exchange_seconds(volume, gpus, gpu),
        states / parts + activations,
    )


def exchange_seconds(volume: float, gpus: int, gpu: Accelerator) -> float:
    """The time to send this many bytes in a ring within each node, and a part for each GPU between the nodes."""
    local = min(gpus, gpu.per_node)
    nodes = -(-gpus // gpu.per_node)
    seconds = volume * (local - 1) / local / gpu.link
    seconds += volume / local * (nodes - 1) / nodes / gpu.network
    return seconds + 2 * LATENCY_SECONDS * (local - 1 + nodes - 1)


# ---------------------------------------------------------------------------------------------
# A whole training


class TrainingCost(NamedTuple):
    """The duration of a training run, without validation and test."""

    preparing: float
    training: float
    saving: float

    @property
    def seconds(self) -> float:
        return sum(self)


def training_cost(
    step: StepCost, corpus: CorpusSize, recipe: Recipe, size: ModelSize, batch_tokens: int
) -> TrainingCost:
    steps = corpus.tokens * corpus.epochs / batch_tokens
    saved = steps / recipe.training.checkpoint_every
    return TrainingCost(
        corpus.pairs / PREPARED_PAIRS,
        steps * step.seconds,
        saved * CHECKPOINT_BYTES * size.parameters / DISK_BYTES,
    )


def estimate(recipe: Recipe, kind: str, gpus: Sequence[int]) -> dict[str, Any]:
    """All predictions for a recipe, as plain data. kind: a name in ``ACCELERATORS``, or ``CPU``."""
    if recipe.model.architecture != "transformer":
        raise RegardError(
            f"model.architecture: {recipe.model.architecture}: only the transformer was measured"
        )
    size = ModelSize.of(recipe.model, recipe.tokenizer.vocab_size)
    batch_tokens = recipe.batch_tokens * recipe.training.accumulate
    core = measure_core(recipe) if kind == CPU else None
    gpu = core_as_accelerator() if kind == CPU else ACCELERATORS[kind]
    options = StepOptions.of(recipe)
    steps = [step_cost(size, gpu, count, batch_tokens, core, options) for count in gpus]
    return {
        "kind": kind,
        "preset": recipe.model.preset,
        "parameters": size.parameters,
        "tokens_per_batch": batch_tokens,
        "steps": [
            {
                **asdict(step),
                "seconds": step.seconds,
                "tokens_per_second": step.tokens_per_second,
                "fits": step.memory < gpu.memory,
                "training": {
                    corpus.name: training_cost(step, corpus, recipe, size, batch_tokens)._asdict()
                    for corpus in CORPORA
                },
            }
            for step in steps
        ],
    }


PADDED_NOTE = (
    "The estimates for padded batches, also of sharded models, assume texts of equal length; on an H200, texts of "
    "different lengths took three times as long."
)


def describe(found: dict[str, Any], price: float | None) -> list[str]:
    """The predictions as lines of a table with one column for each number of GPUs."""
    steps, cpu = found["steps"], found["kind"] == CPU
    unit = "core" if cpu else "GPU"

    def row(name: str, values: Sequence[str]) -> str:
        return f"{name:<28}" + "".join(f"{value:>15}" for value in values)

    def total(step: dict[str, Any], corpus: str) -> float:
        return float(sum(step["training"][corpus].values()))

    lines = [
        f"{found['preset']}, about {found['parameters'] / 1e6:,.0f} M parameters, {found['kind']}, batches of "
        f"{found['tokens_per_batch']:,} target tokens",
        row("processes" if cpu else "GPUs", [str(step["gpus"]) for step in steps]),
        row(f"target tokens per {unit}", [f"{step['tokens_per_gpu']:,.0f}" for step in steps]),
        row("ms per step", [f"{1000 * step['seconds']:,.1f}" for step in steps]),
        row("  of which exchange", [f"{1000 * step['exchange']:,.1f}" for step in steps]),
        row("target tokens/s", [f"{step['tokens_per_second']:,.0f}" for step in steps]),
        row(
            f"GB per {unit}",
            [
                f"{step['memory'] / 1e9:,.1f}"
                + (" sharded" if step["sharded"] else "")
                + ("" if step["fits"] else " too much")
                for step in steps
            ],
        ),
    ]
    for corpus in CORPORA:
        lines.append(row(corpus.name, [duration(total(step, corpus.name)) for step in steps]))
        preparing = [duration(step["training"][corpus.name]["preparing"]) for step in steps]
        lines.append(row("  of which preparing", preparing))
        if price is not None:
            hours = [step["gpus"] * total(step, corpus.name) / 3600 for step in steps]
            lines.append(row("  cost", [f"{price * one:,.0f}" for one in hours]))
    padded = not cpu and not all(step["packed"] for step in steps)
    measured = "a step on one core of this machine" if cpu else "measurements on one H200"
    return [
        *lines,
        f"Estimated from {measured}; validation and test are not included.",
        *[PADDED_NOTE] * padded,
        "The time to prepare the data is estimated for one process. Preparing uses all cores; regard data prepare "
        "does it without GPUs.",
    ]
