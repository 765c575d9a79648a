"""How fast it learns: one step of training, beside the same step of others, in one run.

A step is loss, gradient and Adam, on random tokens. On a GPU Regard learns as ``batches: packed`` does, and once more
the plain way; on a CPU there is the plain way only. Speeds count real tokens, not padding.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data.batching import Batch, collate, pack, plan_batches, plan_packed, room
from regard.data.dataset import EncodedPair, IntArray, TokenDataset, write_dataset
from regard.data.special_tokens import BOS, EOS, PAD, SPECIAL_TOKENS
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.nn.architectures import ARCHITECTURES
from regard.nn.loss import Seq2SeqLoss
from regard.recipe import Model, Preset, Recipe, make_recipe
from regard.training.optimizers import OPTIMIZERS
from regard.training.train_step import EAGER_STEPS, CUDAGraphStep, Numbers, TrainStep

Step = Callable[[], None]

BATCHES = 20
"""different ones, over and over"""


@dataclass(frozen=True)
class Setting:
    """What every side is given."""

    preset: Preset
    vocabulary: int
    store: TokenDataset
    tokens_per_batch: int
    device: torch.device

    @property
    def lengths(self) -> tuple[IntArray, IntArray]:
        return self.store.source_lengths, self.store.target_lengths

    @property
    def recipe(self) -> Recipe:
        precision = "bf16" if self.device.type == "cuda" else "fp32"
        return make_recipe(
            {
                "data": {"train": {"pairs": "random"}},
                "model": {"preset": self.preset},
                "training": {"batching": "packed", "precision": precision},
            },
            "bench",
        )


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    milliseconds: float
    tokens_per_second: float
    """target tokens; padding does not count"""
    real: float
    """share of the computed positions that are words"""
    share: float
    """of the speed of one large matrix product, counting the products that the words need"""
    memory: float
    """gigabytes at most; 0 on a CPU"""


@dataclass
class Side:
    """One who learns: every call of step learns from the next batch."""

    name: str
    step: Step
    source: float
    target: float
    """real tokens of a batch, on average"""
    positions: float
    """source and target positions computed for them"""


def measure(setting: Setting, peers: Sequence[str], steps: int, repeats: int) -> list[Row]:
    """Every side in turn, as often as asked; the median counts."""
    peak = product_speed(setting.device)
    rows = []
    for build in (*own(setting), *(PEERS[name] for name in peers)):
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        side = build(setting)
        for _ in range(EAGER_STEPS + 2):
            side.step()
        seconds = statistics.median(timed(side.step, steps, setting.device) for _ in range(repeats))
        memory = torch.cuda.max_memory_allocated() / 1e9 if setting.device.type == "cuda" else 0.0
        work = 3 * products(setting, side.source, side.target)
        rows.append(
            Row(
                side.name,
                1000 * seconds,
                side.target / seconds,
                (side.source + side.target) / side.positions,
                work / seconds / peak,
                memory,
            )
        )
    return rows


def timed(step: Step, steps: int, device: torch.device) -> float:
    """Seconds of a step."""
    wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return (time.perf_counter() - start) / steps


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def product_speed(device: torch.device) -> float:
    """Operations a second of one large matrix product, as good as they come here."""
    gpu = device.type == "cuda"
    size = 8192 if gpu else 1024
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16 if gpu else torch.float32)

    def multiply() -> None:
        torch.mm(x, x)

    timed(multiply, 3, device)
    return 2 * size**3 / min(timed(multiply, 10, device) for _ in range(3))


def products(setting: Setting, source: float, target: float) -> float:
    """Operations of the matrix products of one forward pass over so many tokens."""
    model = setting.recipe.model
    d, inner = model.d_model, model.d_ff
    feedforward = 2 * d * inner
    encoder = model.encoder_layers * (4 * d * d + feedforward)
    decoder = model.decoder_layers * (6 * d * d + feedforward) + d * setting.vocabulary
    read = model.decoder_layers * 2 * d * d  # keys and values of the memory
    # Scores and weighted sums: twice d for each pair of query and key; before itself a word sees half its text.
    long, wide = (float(lengths.mean()) + 1 for lengths in setting.lengths)
    looks = model.encoder_layers * long * source + model.decoder_layers * (wide / 2 + long) * target
    return 2 * (source * (encoder + read) + target * decoder) + 4 * d * looks


# Regard


def own(setting: Setting) -> list[Callable[[Setting], Side]]:
    return [recorded, plain] if setting.device.type == "cuda" else [plain]


def recorded(setting: Setting) -> Side:
    """As a training with packed batches learns on a GPU."""
    space = room(*setting.lengths, setting.tokens_per_batch)
    plan = plan_packed(*setting.lengths, space, 1, 0)
    # The last of an epoch may be almost empty.
    batches = [pack(setting.store, rows, space) for rows in (plan[:-1] or plan)[:BATCHES]]
    update = _update(setting)
    learn = CUDAGraphStep(update, update.objective.network)
    return _side("regard", learn, [batch.map(Tensor.pin_memory) for batch in batches])


def plain(setting: Setting) -> Side:
    """One text to a row, nothing compiled."""
    update = _update(setting)
    return _side("regard, plain", update, _padded(setting))


def _update(setting: Setting) -> Any:
    recipe = setting.recipe
    network = ARCHITECTURES["transformer"](recipe.model, setting.vocabulary, setting.vocabulary)
    objective = Seq2SeqLoss(network.to(setting.device), recipe.training)
    optimizer = OPTIMIZERS[recipe.training.optimizer](network.parameters(), recipe.training)
    return TrainStep(objective, optimizer, recipe.training, setting.device)


def _side(name: str, learn: Callable[..., Tensor], batches: Sequence[Batch]) -> Side:
    tokens = [batch.tokens for batch in batches]
    endless = cycle(zip(batches, tokens, strict=True))

    def step() -> None:
        batch, count = next(endless)
        learn([batch], Numbers(1 / count, 1e-4))

    return Side(name, step, *_counts(batches))


def _counts(batches: Sequence[Batch]) -> tuple[float, float, float]:
    """Real source and target tokens, and positions, of a batch on average."""
    source = sum(int((batch.source != PAD).sum()) for batch in batches)
    target = sum(batch.tokens for batch in batches)
    positions = sum(batch.source.numel() + batch.target.numel() for batch in batches)
    return source / len(batches), target / len(batches), positions / len(batches)


def _padded(setting: Setting) -> list[Batch]:
    """Batches of like length, as a plain training has them."""
    plan = plan_batches(*setting.lengths, setting.tokens_per_batch, 1, 0)
    return [collate(setting.store, rows) for rows in plan[:BATCHES]]


# Others


def marian(setting: Setting) -> Side:
    """Hugging Face's MarianMT of the same sizes."""
    try:
        from transformers import MarianConfig, MarianMTModel
    except ModuleNotFoundError as error:
        raise RegardError(
            f"--peer marian needs {error.name}: pip install 'regard[exchange]'"
        ) from None
    model = setting.recipe.model
    sizes: dict[str, Any] = {"vocab_size": setting.vocabulary, "d_model": model.d_model}
    for side in ("encoder", "decoder"):
        sizes[f"{side}_layers"] = getattr(model, f"{side}_layers")
        sizes[f"{side}_attention_heads"] = model.heads
        sizes[f"{side}_ffn_dim"] = model.d_ff
    for kind in ("dropout", "attention_dropout", "activation_dropout"):
        sizes[kind] = model.dropout
    marks: dict[str, Any] = {
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }
    network: Any = MarianMTModel(MarianConfig(scale_embedding=True, **sizes, **marks))
    network.to(setting.device).train()
    return _peer("MarianMT", network, lambda s, t, real: network(s, real, t).logits, setting)


def torch_transformer(setting: Setting) -> Side:
    """torch.nn.Transformer between an embedding and its transpose."""
    network = Tutorial(setting.recipe.model, setting.vocabulary).to(setting.device)
    return _peer("torch.nn.Transformer", network, network, setting)


class Tutorial(nn.Module):
    def __init__(self, model: Model, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, model.d_model)
        self.layers = nn.Transformer(
            model.d_model, model.heads, model.encoder_layers, model.decoder_layers, model.d_ff,
            model.dropout, batch_first=True,
        )  # fmt: skip

    def forward(self, source: Tensor, target: Tensor, real: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], source.device)
        states = self.layers(
            self.embedding(source), self.embedding(target),
            tgt_mask=causal, tgt_is_causal=True,
            src_key_padding_mask=~real, memory_key_padding_mask=~real,
        )  # fmt: skip
        return F.linear(states, self.embedding.weight)


def _peer(
    name: str,
    network: nn.Module,
    logits: Callable[[Tensor, Tensor, Tensor], Tensor],
    setting: Setting,
) -> Side:
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, betas=(0.9, 0.98), fused=True)
    batches = [batch.to(setting.device) for batch in _padded(setting)]
    endless = cycle(batches)
    gpu = setting.device.type == "cuda"

    def step() -> None:
        batch = next(endless)
        with torch.autocast("cuda", torch.bfloat16) if gpu else nullcontext():
            found = logits(batch.source, batch.target, batch.source != PAD)
            loss = F.cross_entropy(
                found.flatten(0, 1).float(),
                batch.labels.flatten(),
                ignore_index=PAD,
                label_smoothing=0.1,
            )
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Side(name, step, *_counts(batches))


PEERS: dict[str, Callable[[Setting], Side]] = {"marian": marian, "torch": torch_transformer}


def table(rows: Sequence[Row]) -> Iterator[str]:
    """For a person; ratio: how many times as fast the first is."""
    first = rows[0]
    yield f"{'':24}{'ms a step':>10}{'tokens/s':>12}{'ratio':>7}{'words':>7}{'of peak':>9}{'GB':>6}"
    for row in rows:
        ratio = first.tokens_per_second / row.tokens_per_second
        memory = f"{row.memory:6.1f}" if row.memory else f"{'':>6}"
        yield (
            f"{row.name:24}{row.milliseconds:>10.2f}{row.tokens_per_second:>12,.0f}{ratio:>6.2f}x"
            f"{row.real:>7.1%}{row.share:>9.1%}{memory}"
        )


def random_dataset(path: Path, sentences: int, length: int, vocabulary: int) -> TokenDataset:
    """Random words; all sentences are as long, their mark counted, on both sides."""
    ids = np.random.default_rng(1).integers(
        len(SPECIAL_TOKENS), vocabulary, (2, sentences, length - 1)
    )

    def rows(
        pairs: object, tokenizer: object, clean: object, tally: Counter[str]
    ) -> Iterator[EncodedPair]:
        tally["kept"] = sentences
        return (EncodedPair(source, target) for source, target in zip(*ids.tolist(), strict=True))

    write_dataset(path, [], cast(Tokenizer, None), None, rows)
    return TokenDataset(path)
