"""Fine-tuning (domain adaptation): training that starts from the tokenizer and weights of another run.

The recipe key is ``training.init_from``. This module chooses a recipe for new data
(``regard train more.tsv --from RUN``), initializes the tokenizer and weights, extends the vocabulary, freezes weights,
and mixes in pairs from the training data of the run. ``evaluation.py`` scores the result.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.data.corpus import (
    fingerprint,
    is_held_out,
    one_direction_pairs,
    read_pairs,
    train_pairs,
)
from regard.data.language_identification import KNOWN_CODES, normalized_code, primary_subtag
from regard.data.pairs import Pair, TaggedPair
from regard.data.special_tokens import UNK
from regard.data.tokenizer import (
    ExtendedIds,
    Tokenizer,
    Vocabulary,
    extend_tokenizer,
    extended_ids,
    train_labels,
)
from regard.errors import RegardError
from regard.inference.device import choose_device
from regard.nn.network import named_weights
from regard.recipe import (
    ALL_BUT,
    DataConfig,
    DataFiles,
    Recipe,
    TrainingConfig,
    as_written,
    language_tag,
    load_recipe,
    make_recipe,
    model_choices,
)
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import checkpoint_files
from regard.training.cpu_kernels import fastest_batches
from regard.training.distillation import teacher_tokenizer
from regard.training.optimizers import learning_rate

# ---------------------------------------------------------------------------------------------
# The recipe: what comes from the run, and what is chosen from the new data

MIN_PAIRS = 50
SAMPLED_PAIRS = 2_000
"""pairs that are tokenized to estimate the number of tokens"""
RATE_FACTOR = 0.25
"""peak learning rate of fine-tuning relative to that of the run; ``benchmarks/fine_tuning.py`` compares factors"""
IMPORTED_RATE = 1e-4
"""peak learning rate for an imported model, whose original learning rate is not known"""
IMPORTED_BATCH = 4_096
"""tokens per batch for an imported model"""
EPOCHS = ((1_000, 20), (10_000, 12), (100_000, 6), (math.inf, 2))
"""epochs over the new pairs for up to this many of them; early stopping may end training sooner"""
BATCHES_PER_EPOCH = 20
"""batches are made smaller so that an epoch has at least this many"""
MIN_BATCH = 512
VALIDATIONS = 20
PATIENCE = 6
UNKNOWN_SHARE = 0.02
"""a larger share of bytes and unknown tokens in the new texts means that the vocabulary should be extended"""
NOT_TAKEN = {
    *("init_from", "mix", "freeze", "extend_vocab", "seed", "device", "teacher", "teacher_weight"),
    *("steps", "tokens_per_batch", "accumulate", "learning_rate", "schedule", "warmup"),
    *("validate_every", "checkpoint_every", "patience", "batching", "precision"),
}
"""keys of the training section that are not taken from the run"""
CHOSEN_TOGETHER = {"learning_rate", "schedule", "warmup"}
"""if a recipe gives one of these, none of them is chosen"""


@dataclass(frozen=True)
class FineTuning:
    """The options of ``regard train --from``."""

    run: Path
    """run folder to start from"""
    mix: float | None = None
    """share of the training pairs that are drawn from the run's own training data"""
    freeze: tuple[str, ...] | None = None
    """groups of weights that are not trained"""
    extend_vocab: int | None = None
    """maximum number of entries to add to each vocabulary"""

    def changes(self) -> list[str]:
        """The options as ``key=value`` settings of a recipe."""
        folder = os.path.abspath(self.run)  # noqa: PTH100 (a link to a run stays a link)
        given = {"init_from": folder, "mix": self.mix, "freeze": self.freeze}
        given["extend_vocab"] = self.extend_vocab
        return [
            f"training.{key}={json.dumps(value)}"
            for key, value in given.items()
            if value is not None
        ]


def fine_tuning_recipe(
    options: FineTuning,
    files: DataFiles,
    root: str,
    overrides: Sequence[str] = (),
    languages: tuple[str, str] | None = None,
    pairs: Iterable[Pair] | None = None,
) -> tuple[Recipe, list[str]]:
    """A recipe that fine-tunes a run on training files under ``root``, and the reasons, one line each.

    ``overrides`` are ``key=value`` settings of the user, ``languages`` the codes of source and target, if they are
    known, and ``pairs`` the pairs of the files, if the caller reads them.
    """
    run = RunDir(options.run)
    _check_one_run(run, from_changes(overrides))
    theirs = open_initial_run(run)
    if not theirs.is_seq2seq:
        raise RegardError(
            f"--from {run}: a run for task {theirs.task}; files of pairs can only fine-tune a translation model. For "
            f"this task, write a recipe with task, data and training.init_from: {run}"
        )
    data: dict[str, Any] = {"root": root, "train": files.model_dump(exclude_none=True)}
    data |= {"clean": theirs.data.clean.model_dump()}
    data["train"], others = _add_target_language(run, theirs, options, data["train"], languages)
    data |= {"other_targets": others} if others else {}
    if languages or theirs.data.named:
        data["languages"] = languages or theirs.data.language_pair
    config = DataConfig(root=root, train=files, languages=languages)
    statistics = NewData.measure(
        pairs or read_pairs(files, config, section=""), run.tokenizer(theirs)
    )
    if statistics.pairs < MIN_PAIRS:
        raise RegardError(
            f"too few pairs to train on: {statistics.pairs}; at least {MIN_PAIRS} are needed"
        )
    if not any(change.strip().startswith("data.valid") for change in overrides):
        data["hold_out"] = round(min(0.1, max(500 / statistics.pairs, 0.001)), 4)
    values: dict[str, Any] = {
        "task": theirs.task,
        "data": data,
        "training": theirs.training.model_dump(exclude=NOT_TAKEN) | _requested_validation(run),
        "decoding": theirs.decoding.model_dump(),
        "evaluation": theirs.evaluation.model_dump(),
    }
    changes = [*options.changes(), *overrides]
    where = f"the recipe for {run}"
    partial = make_recipe(values, where, changes)
    values["training"] |= _choose_training(run, theirs, partial.training, statistics, set())
    recipe = make_recipe(values, where, changes)
    return recipe, _reasons(run, theirs, recipe, statistics)


def _requested_validation(run: RunDir) -> dict[str, Any]:
    """How the run was to be validated, before a plan for ``--minutes`` changed it; empty if there was no plan."""
    requested = run.requested_training()
    keys = "validate_sentences", "best_checkpoint_metric"
    return {key: requested[key] for key in keys if key in requested}


def fine_tuning_from_recipe(
    options: FineTuning, name: str | Path, overrides: Sequence[str] = ()
) -> tuple[Recipe, list[str]]:
    """A recipe file with a run to start from; keys that its training section omits are chosen as for files of pairs."""
    run = RunDir(options.run)
    theirs = open_initial_run(run)
    other = load_recipe(name, overrides).training.init_from
    _check_one_run(run, None if other is None else FineTuning(Path(other)))
    changes = [*options.changes(), *overrides]
    partial = load_recipe(name, changes)
    check_compatible(run, theirs, partial)
    if not partial.is_seq2seq:
        return partial, [f"from {run}: tokenizer and weights"]
    given = set(partial.training.model_fields_set)
    default = TrainingConfig.model_validate({"schedule": partial.training.schedule})
    if partial.training.learning_rate == default.learning_rate:
        given -= {"learning_rate"}  # always set, see TrainingConfig
    given |= CHOSEN_TOGETHER if given & CHOSEN_TOGETHER else set()
    statistics = NewData.measure(train_pairs(partial.data), run.tokenizer(theirs))
    chosen = _choose_training(run, theirs, partial.training, statistics, given)
    chosen_changes = [f"training.{key}={json.dumps(value)}" for key, value in chosen.items()]
    recipe = load_recipe(name, [*chosen_changes, *changes])
    return recipe, _reasons(run, theirs, recipe, statistics)


def from_changes(changes: Sequence[str]) -> FineTuning | None:
    """The run that ``key=value`` settings start from, if any; their other keys are applied as they are."""
    key = "training.init_from="
    runs = [
        change.strip().removeprefix(key) for change in changes if change.strip().startswith(key)
    ]
    return FineTuning(Path(runs[-1].strip("\"'"))) if runs and runs[-1] != "null" else None


def _check_one_run(run: RunDir, other: FineTuning | None) -> None:
    if other is not None and other.run.resolve() != run.folder.resolve():
        raise RegardError(f"--from {run}: training.init_from is {other.run}; use only one of them")


def open_initial_run(run: RunDir) -> Recipe:
    """The recipe of a run to start from; raises if it is not a run that has a model."""
    if not run.recipe_file.is_file() and (run.folder / "config.json").is_file():
        raise RegardError(
            f"--from {run}: not a run folder; import the model first:  regard import {run} --from huggingface "
            "--out FOLDER"
        )
    if not run.recipe_file.is_file():
        problem = "not a run folder" if run.folder.is_dir() else "no such folder"
        raise RegardError(
            f"--from {run}: {problem} (a run folder contains recipe.yaml; "
            "regard runs lists your runs)"
        )
    if not run.weights_file.is_file():
        raise RegardError(f"--from {run}: the run has no model yet (model.safetensors is missing)")
    return run.recipe()


def _add_target_language(
    run: RunDir,
    theirs: Recipe,
    options: FineTuning,
    train: dict[str, Any],
    languages: tuple[str, str] | None,
) -> tuple[dict[str, Any], list[str]]:
    """The training files with their target language, and the other target languages that the model keeps."""
    known = theirs.data.targets
    if known and languages is None:
        raise RegardError(
            f"--from {run}: it translates to {', '.join(known)}; name the languages of the new data with "
            f"--languages, for example --languages {theirs.data.language_pair[0]},{known[0]}"
        )
    if languages is None or (not known and not theirs.data.named):
        return train, []
    source, target = theirs.data.language_pair
    targets = known or [target]
    same = next((code for code in targets if not _differ(code, languages[1])), None)
    both_ways = theirs.data.bidirectional
    is_reversed = any(_is_reversed((source, to), languages) for to in targets)
    if is_reversed and both_ways:
        return train, []
    if is_reversed:
        same = None
    is_new = same is None or _differ(source, languages[0])
    marian = theirs.tokenizer.kind == "marian"
    if is_new and (marian or not options.extend_vocab):
        how = "import a model for these languages" if marian else "--extend-vocab N adds a language"
        how = f"swap source and target, or {how}" if is_reversed else how
        raise RegardError(
            f"--from {run}: it translates {source} to {', '.join(targets)}, but the new data are "
            f"{languages[0]} to {languages[1]}; {how}"
        )
    if same is not None and not known:
        return train, []
    return {**train, "to": [same or languages[1]]}, [code for code in targets if code != same]


def _differ(code: str, other: str) -> bool:
    """Whether two codes name different languages; ``eng`` may be ``en``, and a group such as ``mul`` may be any."""
    one, two = (primary_subtag(text) for text in (code, other))
    return one != two and len(one) == len(two) and {one, two} <= KNOWN_CODES


def _is_reversed(pair: tuple[str, str], other: tuple[str, str]) -> bool:
    """Whether two pairs of codes are the two directions of one language pair."""
    source, target = map(normalized_code, pair)
    return source != target and (target, source) == tuple(map(normalized_code, other))


@dataclass(frozen=True)
class NewData:
    """Counts of the new training data, tokenized by the run's tokenizer."""

    pairs: int
    tokens: float
    """mean number of tokens of a target, EOS included"""
    unknown: float
    """share of the tokens that are bytes or unknown"""

    @classmethod
    def measure(cls, pairs: Iterable[Pair], tokenizer: Tokenizer) -> NewData:
        pairs = iter(pairs)
        sample = list(islice(pairs, SAMPLED_PAIRS))
        count = len(sample) + sum(1 for _ in pairs)
        target = tokenizer.target.encode([pair.target for pair in sample])
        source = tokenizer.source.encode([pair.source for pair in sample])
        unknown = _count_unknown(source, tokenizer.source)
        unknown += _count_unknown(target, tokenizer.target)
        total = sum(map(len, chain(source, target)))
        tokens = sum(map(len, target)) / max(1, len(sample)) + 1
        return cls(max(1, count), tokens, unknown / max(1, total))


def _count_unknown(texts: Sequence[Sequence[int]], vocabulary: Vocabulary) -> int:
    unknown = {UNK, *vocabulary.byte_ids}
    return sum(i in unknown for ids in texts for i in ids)


def _choose_training(
    run: RunDir, theirs: Recipe, training: TrainingConfig, data: NewData, given: set[str]
) -> dict[str, Any]:
    """The keys of the training section that are chosen, without those that are ``given``.

    ``training`` has the settings of the user, such as the number of steps.
    """
    per_epoch = data.pairs * data.tokens / (1 - training.mix)
    largest = theirs.batch_tokens * theirs.training.accumulate
    largest = IMPORTED_BATCH if "imported_from" in run.card() else largest
    batch = int(min(largest, max(MIN_BATCH, per_epoch / BATCHES_PER_EPOCH)))
    if "tokens_per_batch" in training.model_fields_set:
        given_batch = training.tokens_per_batch
        batch = theirs.batch_tokens if given_batch == "auto" else given_batch
    epochs = next(epochs for most, epochs in EPOCHS if data.pairs <= most)
    steps = max(100, round(epochs * per_epoch / (batch * training.accumulate)))
    steps = training.steps if "steps" in training.model_fields_set else steps
    every = max(1, steps // VALIDATIONS)
    chosen = {
        "steps": steps,
        "tokens_per_batch": batch,
        "schedule": "cosine",
        "learning_rate": _fine_tuning_rate(run, theirs)[0],
        "warmup": max(1, steps // 20),
        "validate_every": every,
        "checkpoint_every": every,
        "patience": PATIENCE,
        **_fastest_batches(theirs, training),
    }
    return {key: value for key, value in chosen.items() if key not in given}


def _fastest_batches(theirs: Recipe, training: TrainingConfig) -> dict[str, Any]:
    """Batching and precision depend on the device, not on the one that the run was trained on.

    A precision that the run states is kept, except bf16 on a CPU that is slower with it.
    """
    device = choose_device(training.device)
    batching, precision = fastest_batches(device)
    stated = theirs.training.precision
    if stated == "fp32" or (stated == "bf16" and device.type == "cuda"):
        precision = stated
    unpackable = any(not choice.packed_batches for _, choice in model_choices(theirs.model))
    if unpackable or training.activation_checkpointing:
        return {"batching": "padded", "precision": stated if device.type == "cuda" else "auto"}
    return {"batching": batching, "precision": precision}


def _fine_tuning_rate(run: RunDir, theirs: Recipe) -> tuple[float, str]:
    """The peak learning rate, and why."""
    peak = peak_learning_rate(theirs)
    if "imported_from" in run.card():
        return IMPORTED_RATE, "low, because the model is imported"
    if theirs.training.init_from is not None:
        return float(f"{peak:.2g}"), "as in the run, which was itself fine-tuned"
    why = f"{RATE_FACTOR:.0%} of the original peak, {peak:.2g}, to limit forgetting"
    return float(f"{RATE_FACTOR * peak:.2g}"), why


def peak_learning_rate(recipe: Recipe) -> float:
    """The peak learning rate of a training run: that of the last step of the warmup."""
    training = recipe.training
    step = max(1, min(training.warmup, training.steps))
    return learning_rate(step, training, recipe.model.d_model)


def _reasons(run: RunDir, theirs: Recipe, recipe: Recipe, data: NewData) -> list[str]:
    """What was taken from the run and what was chosen, including the user's overrides, and why."""
    training, model = recipe.training, recipe.model
    epochs = training.steps * recipe.batch_tokens * training.accumulate * (1 - training.mix)
    epochs /= data.pairs * data.tokens
    early = f"; stops early after {training.patience} validations without improvement"
    rate = f"learning rate: {training.learning_rate:g}, schedule {training.schedule}"
    chosen_rate, why = _fine_tuning_rate(run, theirs)
    if training.learning_rate == chosen_rate:
        rate += f", warmup {training.warmup} steps ({why})"
    lines = [
        f"from {run}: {model.preset} of {model.encoder_layers}+{model.decoder_layers} layers, width "
        f"{model.d_model}, {recipe.tokenizer.kind} tokenizer",
        f"{data.pairs:,} new pairs, about {data.tokens:.0f} tokens per target",
        rate,
        f"training: {training.steps:,} steps of {recipe.batch_tokens:,} tokens (about {round(epochs, 1):,g} epochs of "
        f"the new pairs){early if training.patience else ''}",
    ]
    if training.mix:
        lines.append(f"mix: {training.mix:.0%} of the pairs are from the run's training data")
    else:
        lines.append(
            "mix: new pairs only; --mix 0.5 adds pairs from the run's training data, which reduces forgetting"
        )
    if training.freeze:
        lines.append(f"freeze: {', '.join(training.freeze)}")
    if training.extend_vocab:
        lines.append(f"vocabulary: at most {training.extend_vocab:,} new entries")
    elif data.unknown > UNKNOWN_SHARE:
        lines.append(
            f"vocabulary: {data.unknown:.0%} of the tokens are bytes or unknown; --extend-vocab N adds entries"
        )
    held = f"about {round(100 * recipe.data.hold_out, 1):g}% of the new pairs, held out"
    lines.append(f"validation: {held if recipe.data.valid is None else 'data.valid'}")
    return lines


# ---------------------------------------------------------------------------------------------
# Initial tokenizer and weights

MAY_DIFFER = {"preset", "dropout", "attention_dropout", "activation_dropout"}
"""Keys of the model section that do not affect the weights."""
MAY_DIFFER_FOR_ENCODER = {"decoder_layers", "tie_embeddings", "tie_output", "output_bias"}
"""Further keys that may differ if only the encoder is initialized."""
TARGET_TOKENIZER_KEYS = {"shared", "target_kind"}
"""Keys of the tokenizer section that the source tokenizer does not depend on."""


def check_initial_run(run: RunDir, recipe: Recipe) -> None:
    """Raise if a new run cannot start from ``training.init_from``; a resumed run no longer needs it."""
    if recipe.training.init_from is None:
        return
    initial = RunDir(recipe.training.init_from)
    if initial.folder.resolve() == run.folder.resolve():
        raise RegardError(f"{run}: training.init_from is the run itself; choose another --out")
    if checkpoint_files(run.checkpoints):
        return
    check_compatible(initial, initial.recipe(), recipe)


def initial_tokenizer(recipe: Recipe, pairs: Callable[[], Iterable[Pair]]) -> Tokenizer:
    """The tokenizer of the run to initialize from, or of the teacher, or one trained on ``pairs``.

    Labels are always new.
    """
    if recipe.training.init_from is None and recipe.training.teacher:
        return teacher_tokenizer(recipe)
    if recipe.training.init_from is None:
        return Tokenizer.train(recipe.tokenizer, pairs, recipe.has_labels, recipe.data.tags)
    run = RunDir(recipe.training.init_from)
    run_recipe = run.recipe()
    check_compatible(run, run_recipe, recipe)
    tokenizer = run.tokenizer(run_recipe)
    if recipe.has_labels:
        return Tokenizer(tokenizer.source, train_labels(pairs))
    extend = recipe.training.extend_vocab
    missing = [tag for tag in recipe.data.tags if tag not in tokenizer.source.tags]
    if not extend and not missing:
        return tokenizer
    if recipe.tokenizer.kind == "marian":
        raise RegardError(
            f"data.train: the vocabulary of {run}, an imported Marian model, has no tag <{missing[0]}>; remove to and "
            "tag (its target languages are part of the text: >>fra<< How are you?)"
        )
    return extend_tokenizer(tokenizer, recipe.tokenizer, pairs, extend, recipe.data.tags)


def load_initial_weights(network: nn.Module, recipe: Recipe, tokenizer: Tokenizer) -> str:
    """Copy the weights of ``training.init_from`` into a network; returns a message that says which ones.

    A network with labels gets the encoder, and its head stays random; any other network gets all weights. The embedding
    of a new entry of an extended vocabulary is the mean of those that it used to be split into.
    """
    assert recipe.training.init_from is not None
    run = RunDir(recipe.training.init_from)
    original = run.tokenizer(run.recipe())
    if not _extends(original.source, tokenizer.source):
        raise RegardError(
            f"training.init_from: the tokenizer of {run} has changed since the data were prepared; choose another --out"
        )
    theirs, own = run.weights(), named_weights(network)
    copied = [name for name in own if not recipe.has_labels or name.startswith("encoder.")]
    added = tokenizer.source.size - original.source.size
    if not recipe.has_labels and (added or tokenizer.target.size != original.target.size):
        theirs = _extend_weights(theirs, own, original, tokenizer)
    for name in copied:
        if name not in theirs:
            raise RegardError(f"training.init_from: {run} has no weight {name}")
        if theirs[name].shape != own[name].shape:
            raise RegardError(
                f"training.init_from: {name} of {run} has shape {list(theirs[name].shape)}, "
                f"but this recipe needs {list(own[name].shape)}"
            )
    with torch.no_grad():
        for name in copied:
            own[name].copy_(theirs[name])
    new = [name for name in own if name not in copied]
    randomly = f"; randomly initialized: {', '.join(new)}" if new else ""
    part = "encoder " if recipe.has_labels else ""
    message = f"Initialized the tokenizer and {len(copied)} {part}weights from {run}{randomly}"
    if recipe.has_labels or not recipe.training.extend_vocab:
        return message
    target = tokenizer.target.size - original.target.size
    counts = f"{added:,}" if tokenizer.shared else f"{added:,} source and {target:,} target"
    return f"{message}; {counts} new vocabulary entries start as the mean of the pieces they were split into"


def _extends(original: Vocabulary, vocabulary: Vocabulary) -> bool:
    """Whether a vocabulary is the original one, or an extension of it."""
    if vocabulary.size == original.size:
        return vocabulary.model == original.model
    known = original.pieces(range(original.size))
    pieces, names = vocabulary.pieces(range(vocabulary.size)), {*known}
    return [piece for piece in pieces if piece in names] == known


def _extend_weights(
    theirs: dict[str, Tensor], own: dict[str, Tensor], original: Tokenizer, tokenizer: Tokenizer
) -> dict[str, Tensor]:
    """The weights with rows for the new entries: embeddings, output projection and its bias."""
    sides = {
        side: extended_ids(getattr(original, side), getattr(tokenizer, side))
        for side in ("source", "target")
    }
    extended = dict(theirs)
    for name in own.keys() & theirs.keys():
        is_source = name.startswith("encoder.") and not tokenizer.shared
        ids = sides["source" if is_source else "target"]
        if theirs[name].shape != own[name].shape and len(ids) == len(own[name]):
            extended[name] = _mean_rows(theirs[name], ids)
    return extended


def _mean_rows(x: Tensor, ids: ExtendedIds) -> Tensor:
    """For each list of row numbers, the mean of these rows of ``x``."""
    return torch.stack([x[some[0]] if len(some) == 1 else x[some].mean(0) for some in ids])


def check_compatible(run: RunDir, run_recipe: Recipe, recipe: Recipe) -> None:
    """Raise if the tokenizer, a key that weights depend on, or the language pair differs."""
    exclude = MAY_DIFFER | (MAY_DIFFER_FOR_ENCODER if recipe.has_labels else set())
    theirs, ours = (
        {
            "model": one.model.model_dump(exclude=exclude),
            "tokenizer": one.tokenizer.model_dump(
                exclude=TARGET_TOKENIZER_KEYS if recipe.has_labels else set()
            ),
        }
        for one in (run_recipe, recipe)
    )
    if different := [text for _, text in recipe_differences(theirs, ours)]:
        raise RegardError(
            f"training.init_from: {run} does not match this recipe: {'; '.join(different)} "
            "(keys that the recipe omits, including model.preset, are taken from the run)"
        )
    both = run_recipe.data, recipe.data
    seq2seq = run_recipe.is_seq2seq and recipe.is_seq2seq
    if not seq2seq or recipe.training.extend_vocab or not all(one.named for one in both):
        return
    known, new = (one.language_pairs for one in both)
    if run_recipe.data.bidirectional:
        known = [*known, *((target, source) for source, target in known)]
    if all(_differ(s, source) or _differ(t, target) for s, t in known for source, target in new):
        (source, target), pairs = new[0], ", ".join(f"{s} to {t}" for s, t in known)
        raise RegardError(
            f"training.init_from: {run} translates {pairs}, but the new data are {source} to {target}; "
            "training.extend_vocab adds a language"
        )


def recipe_differences(
    theirs: dict[str, Any], ours: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, str]]:
    """The keys in which two recipes, or parts of them, differ, each with a text that gives both values."""
    for key in ours:
        if isinstance(theirs[key], dict) and isinstance(ours[key], dict):
            yield from recipe_differences(theirs[key], ours[key], f"{prefix}{key}.")
        elif theirs[key] != ours[key]:
            values = f"{as_written(theirs[key])} there, {as_written(ours[key])} here"
            yield f"{prefix}{key}", f"{prefix}{key} is {values}"


# ---------------------------------------------------------------------------------------------
# Frozen weights

_GROUPS = {
    "encoder": r"encoder\.(?!embedding\.)",
    "decoder": r"(decoder\.(?!embedding\.)|layers\.)",
    "embeddings": r"((encoder|decoder)\.)?embedding\.|projection\.",
    "self_attention": r".*\.attention\.",
    "cross_attention": r".*\.cross_attention\.",
    "feed_forward": r".*\.feed_forward\.",
    "norms": r".*norm\.",
}
"""patterns of the names of the weights in each group; the output projection belongs to the embeddings"""


def freeze_weights(network: nn.Module, groups: Sequence[str]) -> None:
    """Exclude groups of weights from training (``training.freeze``)."""
    named = dict(network.named_parameters())
    for group in groups:
        pattern = re.compile(_GROUPS[group.removeprefix(ALL_BUT)])
        matching = {name for name in named if pattern.match(name)}
        if not matching:
            raise RegardError(f"training.freeze: {group}: this model has no such weights")
        for name in named.keys() - matching if group.startswith(ALL_BUT) else matching:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise RegardError(f"training.freeze: {', '.join(groups)} leaves nothing to train")


# ---------------------------------------------------------------------------------------------
# The data of the run


def old_train_pairs(recipe: Recipe) -> Iterator[Pair]:
    """The training pairs of the run ``training.init_from``, for ``training.mix``.

    Pairs whose sources are held out for validation are excluded. If that run was itself fine-tuned with old pairs,
    these are included.
    """
    _, theirs = initial_run(recipe)
    # A tag says the target language of the run, which swapped pairs do not have.
    pairs = (one_direction_pairs if _adds_tags(theirs, recipe) else train_pairs)(theirs.data)
    if theirs.training.mix:
        pairs = chain(pairs, old_train_pairs(theirs))
    for pair in with_target_language(pairs, theirs, recipe):
        if recipe.data.valid is not None or not is_held_out(pair.source, recipe.data.hold_out):
            yield pair


def old_data_fingerprint(recipe: Recipe) -> str:
    """The fingerprint of the data of ``old_train_pairs``; raises if they are missing or have changed."""
    run, theirs = initial_run(recipe)
    card = run.card()
    if "imported_from" in card:
        raise RegardError(
            f"training.mix: {run} was imported, so its training data are not known; set training.mix to 0, and add "
            "general pairs to the new ones"
        )
    try:
        found = fingerprint(theirs.data.train, theirs.data)
    except RegardError as error:
        raise RegardError(
            f"training.mix: cannot read the training data of {run}: {error}; restore them, or set training.mix to 0"
        ) from None
    recorded = card.get("data", {}).get("identity", {}).get("train", found)
    if found != recorded:
        raise RegardError(
            f"training.mix: the training data of {run} have changed since it was trained; restore them, or set "
            "training.mix to 0"
        )
    return found + (old_data_fingerprint(theirs) if theirs.training.mix else "")


def initial_run(recipe: Recipe) -> tuple[RunDir, Recipe]:
    """The run that a recipe starts from, and its recipe."""
    assert recipe.training.init_from is not None
    run = RunDir(recipe.training.init_from)
    return run, run.recipe()


def with_target_language(pairs: Iterable[Pair], theirs: Recipe, recipe: Recipe) -> Iterable[Pair]:
    """Pairs of the run as the fine-tuned model reads them: with a language tag if only the new model has tags."""
    if not _adds_tags(theirs, recipe):
        return pairs
    tag = language_tag(theirs.data.language_pair[1])
    return (TaggedPair.from_pair(pair, (tag,)) for pair in pairs)


def _adds_tags(theirs: Recipe, recipe: Recipe) -> bool:
    """Whether the fine-tuned model has language tags, and the run has none."""
    return not theirs.data.targets and theirs.data.language_pair[1] in recipe.data.targets
