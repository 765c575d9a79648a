"""Scores of pairs by dual conditional cross-entropy (Junczys-Dowmunt 2018).

Two small models, one for each direction, are trained on the pairs themselves. Of a good pair, each side is likely given
the other, and both models agree about it. With the cross-entropies per token H(y|x) and H(x|y), the score is

    exp(-(|H(y|x) - H(x|y)| + (H(y|x) + H(x|y)) / 2))

The models are small and trained for a few epochs only, so they learn what most pairs have in common, not single pairs.
They are kept in a folder, so that training is resumed, and several processes score a share of the pairs each.
"""

from __future__ import annotations

import fcntl
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from regard import __version__
from regard.data.batching import collate, plan_sorted
from regard.data.formats.writers import one_field
from regard.data.pairs import Pair
from regard.data.special_tokens import PAD
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.errors import RegardError
from regard.recipe import TokenizerConfig, make_recipe
from regard.storage.atomic_files import write_atomic, write_text
from regard.storage.resumable_output import WHOLE, ResumableOutput, ResumableRecords, Shard
from regard.tasks import TASKS, Translator
from regard.training.autoconfig import MIN_PAIRS, VOCABULARY_RULES
from regard.training.corpus_statistics import CorpusStatistics, collect_statistics
from regard.training.progress import ProgressLine
from regard.training.run import train

CHUNK_PAIRS = 4_096
"""Pairs that are scored together. Batches are formed within a chunk, so a score does not depend on other chunks."""
MAX_CHARACTERS = 1_000
"""of a text that is scored; longer ones are scored by their beginnings"""
TOKENS_PER_BATCH = 8_192
MIN_STEPS = 10
DIRECTIONS = {"forward": ("source", "target"), "backward": ("target", "source")}

Scores = NDArray[np.float64]


# ---------------------------------------------------------------------------------------------
# The two models


@dataclass(frozen=True)
class PairScorer:
    """The models of both directions."""

    forward: Translator
    backward: Translator

    @classmethod
    def train(
        cls,
        pairs: Callable[[], Iterable[Pair]],
        folder: Path,
        identity: Mapping[str, Any],
        epochs: float = 3.0,
        device: str = "auto",
        report: Callable[[str], None] = lambda line: None,
        changes: Sequence[str] = (),
    ) -> PairScorer:
        """Train the models in a folder, resume, or load them if they are trained. Processes wait for each other.

        pairs: called for each pass over the pairs.
        identity: what identifies the pairs, as JSON; models of other pairs are refused.
        changes: settings of the recipe, such as ``model.d_model=64``.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RegardError(f"{folder}: cannot be written: {error.strerror}") from None
        key = {**identity, "epochs": epochs, "changes": [*changes]}
        with (folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            recipes = _write_training_data(pairs, folder, key)
            models = []
            for name, columns in DIRECTIONS.items():
                report(f"Training a model from {' to '.join(columns)}")
                data = {"root": str(folder.absolute()), **recipes[name]["data"]}
                recipe = make_recipe(
                    {**recipes[name], "data": data},
                    "the recipe of regard data score",
                    [f"training.device={device}", *changes],
                )
                models.append(train(recipe, folder / name))
        forward, backward = models
        assert isinstance(forward, Translator)
        assert isinstance(backward, Translator)
        return cls(forward, backward)

    @property
    def fingerprints(self) -> list[str]:
        """Hashes of the models."""
        return [run.fingerprint() for model in (self.forward, self.backward) for run in model.runs]

    def score(self, pairs: Sequence[Pair]) -> Scores:
        """The score of each pair, from 0 to 1."""
        forward = list(map(_shortened, pairs))
        backward = [Pair(pair.target, pair.source) for pair in forward]
        return dual_score(
            _cross_entropies(self.forward, forward), _cross_entropies(self.backward, backward)
        )


def _write_training_data(
    pairs: Callable[[], Iterable[Pair]], folder: Path, key: dict[str, Any]
) -> dict[str, Any]:
    """Write the pairs that the models are trained on, unless they are there. Returns the recipes of both models."""
    # Written last, so its existence says that the pairs are complete.
    file = folder / "recipes.json"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["key"] != json.loads(json.dumps(key)):
            raise RegardError(
                f"{folder}: the models in it were trained on other pairs or with other options; "
                "choose another --models, or remove it"
            )
        return dict(stored["recipes"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError):
        raise RegardError(f"{file}: damaged; remove {folder}") from None

    def write(path: Path) -> None:
        with path.open("w", encoding="utf-8") as output:
            for pair in map(_shortened, pairs()):
                output.write(json.dumps(pair._asdict(), ensure_ascii=False) + "\n")

    write_atomic(folder / "pairs.jsonl", write)
    corpus = collect_statistics(map(_shortened, pairs()))
    swapped = CorpusStatistics(corpus.pairs, corpus.target, corpus.source)
    recipes = {
        name: _recipe_sections(statistics, columns, key["epochs"])
        for (name, columns), statistics in zip(DIRECTIONS.items(), (corpus, swapped), strict=True)
    }
    write_text(file, json.dumps({"key": key, "recipes": recipes}, indent=2) + "\n")
    return recipes


def _shortened(pair: Pair) -> Pair:
    return Pair(pair.source[:MAX_CHARACTERS], pair.target[:MAX_CHARACTERS])


def _recipe_sections(
    corpus: CorpusStatistics, columns: tuple[str, str], epochs: float
) -> dict[str, Any]:
    """The recipe of a tiny model and a few epochs."""
    if corpus.pairs < MIN_PAIRS:
        raise RegardError(
            f"too few pairs to train on: {corpus.pairs}; at least {MIN_PAIRS} are needed, preferably thousands"
        )
    vocabulary = next(rule for rule in VOCABULARY_RULES if corpus.pairs <= rule.max_pairs)
    tokenizer = TokenizerConfig(kind="unigram", vocab_size=corpus.vocab_size(vocabulary.vocab_size))
    tokens = corpus.pairs * corpus.tokens_per_target(vocabulary.characters_per_token, tokenizer)
    steps = max(MIN_STEPS, round(epochs * tokens / vocabulary.tokens_per_batch))
    return {
        "data": {"train": {"pairs": "pairs.jsonl", "columns": columns}, "hold_out": 0.05},
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


# ---------------------------------------------------------------------------------------------
# Scores


def dual_score(forward: Scores, backward: Scores) -> Scores:
    """The score from the cross-entropies of both directions."""
    return np.exp(-(np.abs(forward - backward) + (forward + backward) / 2))


def _cross_entropies(model: Translator, pairs: Sequence[Pair]) -> Scores:
    """The cross-entropy per token of each target given its source."""
    rows = TASKS[model.recipe.task].encoder(model.recipe).rows
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.arrow"
        write_dataset(path, pairs, model.tokenizer, None, rows)
        return target_entropies(model, TokenDataset(path))


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


# ---------------------------------------------------------------------------------------------
# Output


def write_scores(
    scorer: PairScorer,
    pairs: Callable[[], Iterable[Pair]],
    output: Path,
    identity: Mapping[str, Any],
    best_first: bool,
    shard: Shard = WHOLE,
    overwrite: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> int:
    """Write score, source and target of each pair of a shard, and return their number. A killed call is resumed.

    best_first: otherwise they are in the order of the input, and the files of all shards one after the other are that
    of the whole; only the first has the header.
    """
    first, last = shard.bounds(sum(1 for _ in pairs()), CHUNK_PAIRS)
    key = {**identity, "models": scorer.fingerprints, "version of regard": __version__}
    key |= {"device": scorer.forward.device.type, "shard": str(shard), "best first": best_first}
    file = (
        ResumableRecords(output, key, _best_first, overwrite, report)
        if best_first
        else ResumableOutput([output], key, overwrite, report)
    )
    file.items, file.header = "pairs", int(not best_first and shard.number == 1)
    with file:
        if file.header and not file.done:
            file.add(1, [HEADER])  # it counts as an item: a resumed file has it already
        done = file.done - file.header
        if done and not file.complete:
            report(f"{output}: resuming after pair {done:,}")
        rest = islice(pairs(), first + done, last)
        with closing(ProgressLine("Scoring pairs: ", last - first, done)) as progress:
            while not file.complete and (chunk := list(islice(rest, CHUNK_PAIRS))):
                scores = scorer.score(chunk).tolist()
                lines = [
                    # Pairs are sorted by the exact scores.
                    f"{score!r}\t{one_field(source)}\t{one_field(target)}\n"
                    if best_first
                    else f"{score:.6f}\t{one_field(source)}\t{one_field(target)}\n"
                    for score, (source, target) in zip(scores, chunk, strict=True)
                ]
                file.add(len(chunk), ["".join(lines)])
                progress.advance(file.done - file.header)
    return last - first


HEADER = "score\tsource\ttarget\n"


def _best_first(lines: Iterable[str]) -> bytes:
    """The contents of a file from lines with exact scores; equal scores stay in the order of the input."""
    fields = [line.split("\t", 1) for line in lines]
    fields.sort(key=lambda one: -float(one[0]))
    return (HEADER + "".join(f"{float(score):.6f}\t{rest}\n" for score, rest in fields)).encode()
