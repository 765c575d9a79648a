"""Scores of pairs by dual conditional cross-entropy (Junczys-Dowmunt 2018).

Two small models, one for each direction, are trained on the pairs themselves. Of a good pair, each side is likely given
the other, and both models agree about it. With the cross-entropies per token H(y|x) and H(x|y), the score is

    exp(-(|H(y|x) - H(x|y)| + (H(y|x) + H(x|y)) / 2))

The models are small and trained for a few epochs only, so they learn what most pairs have in common, not single pairs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from regard.data.batching import collate, plan_sorted
from regard.data.pairs import Pair
from regard.data.special_tokens import PAD
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.errors import RegardError
from regard.recipe import Recipe, TokenizerConfig, make_recipe
from regard.tasks import TASKS, Translator
from regard.training.autoconfig import MIN_PAIRS, VOCABULARY_RULES, collect_statistics
from regard.training.run import train

MAX_CHARACTERS = 1_000
"""of a text that is scored; longer ones are scored by their beginnings"""
TOKENS_PER_BATCH = 8_192
MIN_STEPS = 10

Scores = NDArray[np.float64]


def score_pairs(
    pairs: Sequence[Pair],
    epochs: float = 3.0,
    device: str = "auto",
    report: Callable[[str], None] = lambda line: None,
    changes: Sequence[str] = (),
) -> Scores:
    """The score of each pair, from 0 to 1. ``changes`` are settings of the recipe, such as ``model.d_model=64``."""
    forward = [Pair(*(text[:MAX_CHARACTERS] for text in pair[:2])) for pair in pairs]
    backward = [Pair(pair.target, pair.source) for pair in forward]
    entropies = []
    for name, direction in (("source to target", forward), ("target to source", backward)):
        report(f"Training a model from {name}")
        with tempfile.TemporaryDirectory() as folder:
            entropies.append(_cross_entropies(direction, Path(folder), epochs, device, changes))
    return dual_score(*entropies)


def dual_score(forward: Scores, backward: Scores) -> Scores:
    """The score from the cross-entropies of both directions."""
    return np.exp(-(np.abs(forward - backward) + (forward + backward) / 2))


def _cross_entropies(
    pairs: Sequence[Pair], folder: Path, epochs: float, device: str, changes: Sequence[str]
) -> Scores:
    """The cross-entropy per token of each target given its source, by a model trained on all of them."""
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for source, target in pairs:
            record = {"source": source, "target": target}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    recipe = _recipe(pairs, folder, epochs, [f"training.device={device}", *changes])
    model = train(recipe, folder / "run")
    assert isinstance(model, Translator)
    rows = TASKS[recipe.task].encoder(recipe).rows
    path = folder / "all.arrow"
    write_dataset(path, pairs, model.tokenizer, None, rows)
    return target_entropies(model, TokenDataset(path))


def _recipe(pairs: Sequence[Pair], folder: Path, epochs: float, changes: Sequence[str]) -> Recipe:
    """The recipe of a tiny model and a few epochs."""
    corpus = collect_statistics(pairs)
    if corpus.pairs < MIN_PAIRS:
        raise RegardError(
            f"too few pairs to train on: {corpus.pairs}; give at least {MIN_PAIRS}, preferably thousands"
        )
    vocabulary = next(rule for rule in VOCABULARY_RULES if corpus.pairs <= rule.max_pairs)
    tokenizer = TokenizerConfig(kind="unigram", vocab_size=corpus.vocab_size(vocabulary))
    tokens = corpus.pairs * corpus.tokens_per_target(vocabulary, tokenizer)
    steps = max(MIN_STEPS, round(epochs * tokens / vocabulary.tokens_per_batch))
    values: dict[str, Any] = {
        "data": {"root": str(folder), "train": {"pairs": "pairs.jsonl"}, "hold_out": 0.05},
        "tokenizer": {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size},
        "model": {"preset": "tiny", "norm_order": "pre"},
        "training": {
            "steps": steps,
            "validate_every": steps,
            "checkpoint_every": steps,
            "tokens_per_batch": vocabulary.tokens_per_batch,
            "warmup": max(1, steps // 5),
            "schedule": "cosine",
            "learning_rate": 0.002,
            "validate_sentences": 0,
            "best_checkpoint_metric": "loss",
        },
    }
    return make_recipe(values, "the recipe of regard data score", changes)


@torch.inference_mode()
def target_entropies(model: Translator, dataset: TokenDataset) -> Scores:
    """The cross-entropy per token of each target of a dataset, in nats, EOS included."""
    network = model.network.eval()
    device = next(network.parameters()).device
    entropies = np.zeros(len(dataset))
    for rows in plan_sorted(dataset.source_lengths, dataset.target_lengths, TOKENS_PER_BATCH):
        batch = collate(dataset, rows).to(device)
        states = network.decode(batch.target, network.encode(batch.source))
        logits: Float[Tensor, "B T V"] = network.project(states)
        losses = F.cross_entropy(
            logits.float().transpose(1, 2), batch.labels.long(), ignore_index=PAD, reduction="none"
        )
        tokens = (batch.labels != PAD).sum(1)
        entropies[rows] = (losses.sum(1) / tokens).double().cpu().numpy()
    return entropies
