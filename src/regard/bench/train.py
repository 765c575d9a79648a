"""Training speed: one training step, compared with the same step of other libraries in the same run.

A step is loss, gradient and Adam, on random tokens. Regard is measured with ``batching: packed`` (on a GPU compiled, in
a CUDA graph; on a CPU with native kernels) and with padded batches in eager mode. Speeds do not count padding. A CPU
with instructions for bf16 is measured in fp32 and in bf16, where the other libraries use torch's autocast.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data.batching import (
    Batch,
    Lengths,
    collate,
    pack,
    pack_evenly,
    packed_size,
    plan_batches,
    plan_packed,
)
from regard.data.cleaning import EncodedPair
from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.inference.precision import autocast
from regard.nn.architectures import ARCHITECTURES
from regard.nn.loss import Seq2SeqLoss
from regard.recipe import ModelConfig, Preset, Recipe, make_recipe
from regard.training.cost_model import matmul_speed
from regard.training.cpu_kernels import (
    CPU_ROW_TOKENS,
    attach_cpu_kernels,
    fastest_cpu_precision,
    has_cpu_kernels,
)
from regard.training.cuda_graph import EAGER_STEPS, CUDAGraphStep
from regard.training.optimizers import OPTIMIZERS
from regard.training.train_step import (
    MIN_ROW_TOKENS,
    StepScalars,
    ThreadedTrainStep,
    TrainStep,
    parallel_rows,
)

Step = Callable[[], None]
TrainPrecision = Literal["fp32", "bf16"]

BATCHES = 20
"""distinct batches, used in turn"""


@dataclass(frozen=True)
class TrainSetting:
    """What every library is measured with."""

    preset: Preset
    vocab_size: int
    dataset: TokenDataset
    tokens_per_batch: int
    device: torch.device
    precision: TrainPrecision = "fp32"

    @property
    def lengths(self) -> tuple[Lengths, Lengths]:
        return self.dataset.source_lengths, self.dataset.target_lengths

    @property
    def recipe(self) -> Recipe:
        return make_recipe(
            {
                "data": {"train": {"pairs": "random"}},
                "model": {"preset": self.preset},
                "training": {"batching": "packed", "precision": self.precision},
            },
            "bench",
        )


@dataclass(frozen=True)
class TrainRow:
    """The figures of one library."""

    name: str
    precision: str
    milliseconds: float
    tokens_per_second: float
    """target tokens, without padding"""
    tokens_per_cpu_second: float
    """the same per second of CPU time of this process: hardly changed by other processes on the machine"""
    non_pad_fraction: float
    """fraction of the computed positions that are not padding"""
    peak_fraction: float
    """matrix-product operations that the tokens need, relative to the speed of one large matrix product"""
    memory_gb: float
    """peak memory; 0 on a CPU"""


@dataclass
class StepBenchmark:
    """A library's training step: every call of ``step`` trains on the next batch."""

    name: str
    step: Step
    source: float
    """mean number of source tokens per batch, without padding"""
    target: float
    """mean number of target tokens per batch, without padding"""
    positions: float
    """mean number of source and target positions per batch, with padding"""


def measure(
    setting: TrainSetting,
    peers: Sequence[str],
    steps: int,
    repeats: int,
    precisions: Sequence[TrainPrecision] = (),
) -> list[TrainRow]:
    """A row for each library and precision; the median of the repeats counts.

    Default precisions: bf16 on a GPU; on a CPU, fp32, and bf16 if the machine computes it faster.

    On a CPU the libraries take turns, so that another process on the machine slows down all of them. On a GPU they
    are measured one after the other, because of their memory.
    """
    peak = matmul_speed(setting.device)
    builders = (*regard_steps(setting), *(PEERS[name] for name in peers))
    gpu = setting.device.type == "cuda"
    fastest = "bf16" if gpu else fastest_cpu_precision()
    chosen = precisions or (["bf16"] if gpu else list(dict.fromkeys([fastest, "fp32"])))
    settings = [replace(setting, precision=precision) for precision in chosen]
    benchmarks = [(build, setting) for build in builders for setting in settings]
    if gpu:
        return [_measure_turns([one], steps, repeats, peak)[0] for one in benchmarks]
    return _measure_turns(benchmarks, steps, repeats, peak)


def _measure_turns(
    benchmarks: Sequence[tuple[Callable[[TrainSetting], StepBenchmark], TrainSetting]],
    steps: int,
    repeats: int,
    peak: float,
) -> list[TrainRow]:
    """The rows of some benchmarks, which take turns."""
    gpu = benchmarks[0][1].device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    built = []
    for build, setting in benchmarks:
        torch.manual_seed(0)
        built.append(build(setting))
        for _ in range(EAGER_STEPS + 2):
            built[-1].step()
    turns = [
        [time_step(benchmark.step, steps, setting.device) for benchmark in built]
        for _ in range(repeats)
    ]
    memory = torch.cuda.max_memory_allocated() / 1e9 if gpu else 0.0
    rows = []
    for number, (benchmark, (_, setting)) in enumerate(zip(built, benchmarks, strict=True)):
        seconds, cpu_seconds = (
            statistics.median(turn[number][clock] for turn in turns) for clock in (0, 1)
        )
        operations = 3 * forward_operations(setting, benchmark.source, benchmark.target)
        rows.append(
            TrainRow(
                benchmark.name,
                setting.precision,
                1000 * seconds,
                benchmark.target / seconds,
                benchmark.target / cpu_seconds,
                (benchmark.source + benchmark.target) / benchmark.positions,
                operations / seconds / peak,
                memory,
            )
        )
    return rows


def time_step(step: Step, steps: int, device: torch.device) -> tuple[float, float]:
    """Seconds per step, and seconds of CPU time."""
    synchronize(device)
    start = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - start[0]) / steps, (time.process_time() - start[1]) / steps


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def forward_operations(setting: TrainSetting, source: float, target: float) -> float:
    """Operations of the matrix products of one forward pass over this many source and target tokens."""
    model = setting.recipe.model
    d, d_ff = model.d_model, model.d_ff
    feed_forward = 2 * d * d_ff
    encoder = model.encoder_layers * (4 * d * d + feed_forward)
    decoder = model.decoder_layers * (6 * d * d + feed_forward) + d * setting.vocab_size
    cross_kv = model.decoder_layers * 2 * d * d  # keys and values of cross-attention
    # Scores and weighted sums: 2 d per query and key; with the causal mask, a token attends to half its text.
    S, T = (lengths.sum() / len(lengths) + 1 for lengths in setting.lengths)
    attention = model.encoder_layers * S * source + model.decoder_layers * (T / 2 + S) * target
    return 2 * (source * (encoder + cross_kv) + target * decoder) + 4 * d * attention


# ---------------------------------------------------------------------------------------------
# Regard


def regard_steps(setting: TrainSetting) -> list[Callable[[TrainSetting], StepBenchmark]]:
    if setting.device.type == "cuda":
        return [cuda_graph, plain]
    return [native, plain] if has_cpu_kernels() else [plain]


def cuda_graph(setting: TrainSetting) -> StepBenchmark:
    """Packed batches and a CUDA graph, as in training on a GPU with ``batching: packed``."""
    size = packed_size(*setting.lengths, setting.tokens_per_batch)
    plan = plan_packed(*setting.lengths, size, 1, 0)
    # The last batch of an epoch may be almost empty.
    batches = [pack(setting.dataset, rows, size) for rows in (plan[:-1] or plan)[:BATCHES]]
    step = _train_step(setting)
    recorded = CUDAGraphStep(step, cast(Seq2SeqLoss, step.loss_fn).network)
    pinned = [[batch.map(Tensor.pin_memory)] for batch in batches]
    return _benchmark("regard", recorded, pinned)


def native(setting: TrainSetting) -> StepBenchmark:
    """Packed batches and native kernels, as in training on a CPU with ``batching: packed``."""
    size = packed_size(*setting.lengths, setting.tokens_per_batch)
    plan = plan_packed(*setting.lengths, size, 1, 0)
    step = _train_step(setting, ThreadedTrainStep)
    attach_cpu_kernels(cast(Seq2SeqLoss, step.loss_fn))
    batches = [
        pack_evenly(setting.dataset, rows, CPU_ROW_TOKENS, parallel_rows(), MIN_ROW_TOKENS)
        for rows in (plan[:-1] or plan)[:BATCHES]
    ]
    return _benchmark("regard", step, batches)


def plain(setting: TrainSetting) -> StepBenchmark:
    """Padded batches, one text per row, in eager mode."""
    batches = [[batch] for batch in _padded(setting)]
    return _benchmark("regard, plain", _train_step(setting), batches)


def _train_step(setting: TrainSetting, kind: type[TrainStep] = TrainStep) -> TrainStep:
    recipe = setting.recipe
    network = ARCHITECTURES["transformer"](recipe.model, setting.vocab_size, setting.vocab_size)
    loss_fn = Seq2SeqLoss(network.to(setting.device), recipe.training)
    optimizer = OPTIMIZERS[recipe.training.optimizer](network, recipe.training)
    return kind(loss_fn, optimizer, recipe.training, setting.device)


def _benchmark(
    name: str, train_step: Callable[..., Tensor], batches: Sequence[Sequence[Batch]]
) -> StepBenchmark:
    """A step on each batch in turn. A batch is a list of micro-batches."""
    tokens = [sum(part.tokens for part in parts) for parts in batches]
    endless = cycle(zip(batches, tokens, strict=True))

    def step() -> None:
        parts, count = next(endless)
        train_step(parts, StepScalars(1 / count, 1e-4))

    return StepBenchmark(name, step, *_counts(batches))


def _counts(batches: Sequence[Sequence[Batch]]) -> tuple[float, float, float]:
    """Mean source tokens, target tokens and positions per batch."""
    parts = [part for batch in batches for part in batch]
    source = sum(int((part.source != PAD).sum()) for part in parts)
    target = sum(part.tokens for part in parts)
    positions = sum(part.source.numel() + part.target.numel() for part in parts)
    return source / len(batches), target / len(batches), positions / len(batches)


def _padded(setting: TrainSetting) -> list[Batch]:
    """Batches of similar length, as with ``batching: padded``."""
    plan = plan_batches(*setting.lengths, setting.tokens_per_batch, 1, 0)
    return [collate(setting.dataset, rows) for rows in plan[:BATCHES]]


# ---------------------------------------------------------------------------------------------
# Other libraries


def marian(setting: TrainSetting) -> StepBenchmark:
    """MarianMT in Hugging Face's transformers, with the same sizes."""
    try:
        from transformers import MarianConfig, MarianMTModel
    except ModuleNotFoundError as error:
        raise RegardError(
            f"--peer marian needs {error.name}: pip install 'regard[interop]'"
        ) from None
    model = setting.recipe.model
    sizes: dict[str, Any] = {"vocab_size": setting.vocab_size, "d_model": model.d_model}
    for stack in ("encoder", "decoder"):
        sizes[f"{stack}_layers"] = getattr(model, f"{stack}_layers")
        sizes[f"{stack}_attention_heads"] = model.heads
        sizes[f"{stack}_ffn_dim"] = model.d_ff
    for dropout_key in ("dropout", "attention_dropout", "activation_dropout"):
        sizes[dropout_key] = model.dropout
    special_tokens: dict[str, Any] = {
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }
    network: Any = MarianMTModel(MarianConfig(scale_embedding=True, **sizes, **special_tokens))
    network.to(setting.device).train()
    return _peer(
        "MarianMT",
        network,
        lambda source, target, mask: network(source, mask, target).logits,
        setting,
    )


def torch_transformer(setting: TrainSetting) -> StepBenchmark:
    """torch.nn.Transformer between an embedding and its transpose."""
    network = TiedTorchTransformer(setting.recipe.model, setting.vocab_size).to(setting.device)
    return _peer("torch.nn.Transformer", network, network, setting)


class TiedTorchTransformer(nn.Module):
    def __init__(self, model: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, model.d_model)
        self.layers = nn.Transformer(
            model.d_model, model.heads, model.encoder_layers, model.decoder_layers, model.d_ff,
            model.dropout, batch_first=True,
        )  # fmt: skip

    def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], source.device)
        states = self.layers(
            self.embedding(source), self.embedding(target),
            tgt_mask=causal, tgt_is_causal=True,
            src_key_padding_mask=~mask, memory_key_padding_mask=~mask,
        )  # fmt: skip
        return F.linear(states, self.embedding.weight)


def _peer(
    name: str,
    network: nn.Module,
    logits: Callable[[Tensor, Tensor, Tensor], Tensor],
    setting: TrainSetting,
) -> StepBenchmark:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)
    batches = [batch.to(setting.device) for batch in _padded(setting)]
    endless = cycle(batches)

    def step() -> None:
        batch = next(endless)
        with autocast(setting.precision, setting.device):
            predicted = logits(batch.source, batch.target, batch.source != PAD)
            loss = F.cross_entropy(
                predicted.flatten(0, 1).float(),
                batch.labels.flatten(),
                ignore_index=PAD,
                label_smoothing=0.1,
            )
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return StepBenchmark(name, step, *_counts([[batch] for batch in batches]))


PEERS: dict[str, Callable[[TrainSetting], StepBenchmark]] = {
    "marian": marian,
    "torch": torch_transformer,
}


def table(rows: Sequence[TrainRow]) -> Iterator[str]:
    """The rows as lines of text; ratio: the speed of the first row over that of this row."""
    first = rows[0]
    yield (
        f"{'':24}{'':6}{'ms/step':>10}{'tokens/s':>12}{'ratio':>7}{'/CPU s':>9}{'ratio':>7}"
        f"{'non-pad':>9}{'of peak':>9}{'GB':>6}"
    )
    for row in rows:
        ratio = first.tokens_per_second / row.tokens_per_second
        cpu_ratio = first.tokens_per_cpu_second / row.tokens_per_cpu_second
        memory = f"{row.memory_gb:6.1f}" if row.memory_gb else f"{'':>6}"
        yield (
            f"{row.name:24}{row.precision:6}{row.milliseconds:>10.2f}{row.tokens_per_second:>12,.0f}"
            f"{ratio:>6.2f}x{row.tokens_per_cpu_second:>9,.0f}{cpu_ratio:>6.2f}x{row.non_pad_fraction:>9.1%}{row.peak_fraction:>9.1%}{memory}"
        )


def random_dataset(path: Path, sentences: int, length: int, vocab_size: int) -> TokenDataset:
    """Random tokens; all sentences have this length on both sides, including EOS or BOS."""
    ids = np.random.default_rng(1).integers(
        len(SPECIAL_TOKENS), vocab_size, (2, sentences, length - 1)
    )

    def rows(
        pairs: object, tokenizer: object, clean: object, tally: Counter[str]
    ) -> Iterator[EncodedPair]:
        tally["kept"] = sentences
        return (EncodedPair(source, target) for source, target in zip(*ids.tolist(), strict=True))

    write_dataset(path, [], cast(Tokenizer, None), None, rows)
    return TokenDataset(path)
