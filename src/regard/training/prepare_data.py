"""Data preparation: from text files to a tokenizer and token ids on disk. Done once per run and reused on resume.

With ``training.subword_sampling`` or ``training.augment``, the training data are also written in several copies, each
with different randomly sampled subword segmentations (BPE-dropout, or sampling from a unigram model) and differently
augmented pairs, and each epoch uses the next copy. They are written in advance, by several processes, because a GPU
trains on a small corpus faster than one process can tokenize it. The copies depend on the data and the seed alone, so a
resumed or distributed run uses the same ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from regard.data.augmentation import Augmenter
from regard.data.cleaning import CleaningCounts, EncodedPair, encode_with_context
from regard.data.corpus import (
    data_paths,
    fingerprint,
    one_direction_pairs,
    read_pairs,
    train_pairs,
    valid_pairs,
)
from regard.data.formats.base import Skipped
from regard.data.pairs import Pair, context_of, tags_of
from regard.data.quality import are_sides_swapped
from regard.data.special_tokens import SPECIAL_TOKENS
from regard.data.subword_sampling import SamplingTokenizer, subword_samplers
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.inference.worker_pool import available_cores
from regard.metrics import MODEL_METRICS, score
from regard.recipe import CleaningConfig, Recipe, max_sequence_length
from regard.storage.atomic_files import write_text
from regard.storage.resumable_output import WHOLE, Shard
from regard.storage.run_dir import RunDir, sha256
from regard.tasks import TASKS
from regard.training.checkpoint import checkpoint_files
from regard.training.fine_tuning import initial_tokenizer, old_data_fingerprint, old_train_pairs
from regard.training.prepare_data_shards import (
    OLD,
    TRAIN,
    PartFiles,
    merge_parts,
    run_processes,
    write_parts_in_processes,
)
from regard.training.progress import ProgressReporter
from regard.training.train_test_overlap import SourceOverlap


@dataclass(frozen=True)
class PreparedData:
    tokenizer: Tokenizer
    train: TokenDataset
    valid: TokenDataset
    metadata: dict[str, Any]
    """data fingerprints and counts, for the card"""
    copies: Sequence[TokenDataset] = ()
    """copies of the training data with sampled subword segmentations or augmented pairs: the same pairs in the same
    order"""
    new_rows: int | None = None
    """with ``training.mix``: the number of rows at the beginning that are new; the others are from the old run"""
    file_rows: Sequence[int] | None = None
    """with ``data.train.weights`` or ``temperature``: the number of rows of each training file"""

    def dataset_for_epoch(self, epoch: int) -> TokenDataset:
        return self.copies[epoch % len(self.copies)] if self.copies else self.train


def check_files(recipe: Recipe) -> None:
    """Raise if a data file of the recipe, or its teacher, does not exist."""
    for name, texts in recipe.data.splits.items():
        data_paths(texts, recipe.data, f"data.{name}")
    if recipe.training.mix:
        old_data_fingerprint(recipe)
    for folder in recipe.training.teacher or ():
        if not RunDir(Path(folder)).weights_file.is_file():
            raise RegardError(
                f"training.teacher: {folder} is not a run folder with a trained model"
            )


def prepare(
    run: RunDir,
    recipe: Recipe,
    reporter: ProgressReporter,
    shard: Shard = WHOLE,
    workers: int | None = None,
) -> None:
    """Write tokenizer and datasets into the run folder, unless they exist already for the same data.

    shard: write only the parts of one shard of the training data. When all shards are done, a call without it merges
    them.
    workers: number of processes; by default one per core, for small data fewer.
    """
    _check_evaluation(recipe)
    identity = data_identity(recipe)
    if _read_metadata(run).get("identity") == identity:
        return
    if checkpoint_files(run.checkpoints):
        raise RegardError(
            f"{run}: the data have changed since this run started; restore them, or choose another --out"
        )
    if shard != WHOLE and recipe.text_only:
        raise RegardError(
            f"--shard {shard}: not supported for task {recipe.task}, whose texts form one stream"
        )
    _check_valid(recipe)
    _warn_if_swapped(recipe, reporter)
    start = time.monotonic()
    run.data.mkdir(parents=True, exist_ok=True)
    tokenizer = _prepare_tokenizer(run, recipe, reporter, identity)
    if not recipe.text_only:
        write_parts_in_processes(run, recipe, shard, workers)
    if shard != WHOLE:
        reporter.message(
            f"Shard {shard} is prepared; after all shards, run the same command without --shard to combine them"
        )
        return
    counts = _write_train(run, recipe, tokenizer, reporter)
    counts["valid"] = asdict(_write_valid(run, recipe, tokenizer, reporter))
    _check_valid_lengths(recipe, TokenDataset(run.data / "valid.arrow"))
    _check_test_lengths(recipe, tokenizer)
    _write_metadata(run, identity, counts, time.monotonic() - start)
    PartFiles(run).remove()


def _warn_if_swapped(recipe: Recipe, reporter: ProgressReporter) -> None:
    """Warn if the training data are in the languages that the recipe says only with source and target swapped."""
    data = recipe.data
    if not recipe.is_seq2seq or not data.named or data.train.to:
        return
    pairs = read_pairs(data.train, data, "data.train")
    if are_sides_swapped(pairs, data.language_pair):
        source, target = data.language_pair
        reporter.message(
            f"warning: the texts look like {target} to {source}, not like {source} to {target}; are the files or "
            "columns of source and target swapped?"
        )


def _prepare_tokenizer(
    run: RunDir, recipe: Recipe, reporter: ProgressReporter, identity: dict[str, str]
) -> Tokenizer:
    """The tokenizer, trained unless it belongs to parts of the same data. One process at a time: others wait."""
    parts = PartFiles(run)
    with parts.lock_file.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if parts.begin(identity):
            return run.tokenizer(recipe)
        run.metadata_file.unlink(missing_ok=True)  # it describes the datasets about to be replaced
        for copy in run.data.glob("train-[0-9]*.arrow"):
            copy.unlink()
        reporter.message(f"Reading {', '.join(_training_files(recipe))}")
        tokenizer = initial_tokenizer(recipe, lambda: _tokenizer_pairs(recipe))
        tokenizer.save(run.folder)
        parts.save_identity(identity)
    reporter.message(f"Tokenizer: {_describe_tokenizer(tokenizer, recipe)}")
    return tokenizer


def open_prepared(run: RunDir, recipe: Recipe) -> PreparedData:
    """Open what ``prepare`` wrote."""
    train, valid = TokenDataset(run.data / "train.arrow"), TokenDataset(run.data / "valid.arrow")
    copies = [TokenDataset(path) for path in sampled_files(run, recipe)]
    metadata = _read_metadata(run)
    new_rows = metadata["new_rows"] if recipe.training.mix else None
    file_rows = metadata["file_rows"] if recipe.data.train.mixed else None
    return PreparedData(run.tokenizer(recipe), train, valid, metadata, copies, new_rows, file_rows)


# ---------------------------------------------------------------------------------------------
# Training data


def _write_train(
    run: RunDir, recipe: Recipe, tokenizer: Tokenizer, reporter: ProgressReporter
) -> dict[str, Any]:
    """Write the training data, and report the overlap with validation and test data. Returns counts for the card."""
    if recipe.text_only:
        return _write_texts(run, recipe, tokenizer, reporter)
    overlap = SourceOverlap(recipe)
    merged = merge_parts(run, recipe, overlap)
    train = merged.counts[TRAIN]
    for line in merged.skipped:
        reporter.message(line)
    directions = ", in both directions" * recipe.data.bidirectional
    reporter.message(f"Training pairs{directions}: {train.summary}")
    if train.kept and (dropped := train.too_long + train.ratio) > train.read / 2:
        how = "" if recipe.has_labels else " and data.clean.max_ratio, or set data.clean.truncate"
        reporter.message(
            f"warning: {dropped:,} pairs are dropped for their length; if they are good, raise "
            f"data.clean.max_tokens{how}"
        )
    counts: dict[str, Any] = {"train": asdict(train)}
    if recipe.training.mix:
        old = merged.counts.get(OLD, CleaningCounts())
        reporter.message(f"Pairs from {recipe.training.init_from}: {old.summary}")
        if not old.kept:
            raise RegardError(
                f"training.mix: {recipe.training.init_from} has no training pairs that pass data.clean; set it to 0"
            )
        counts |= {"old": asdict(old), "new_rows": train.kept}
    if recipe.data.train.mixed:
        counts["file_rows"] = list(merged.rows.values())
        reporter.message(f"Mixing: {_describe_mixing(recipe, counts['file_rows'])}")
    if copies := recipe.training.copies:
        write_sampled_copies(run, recipe, train.read)
        contents = {
            "sampled subword segmentations": recipe.training.subword_sampling > 0,
            "augmented pairs": recipe.training.augment.enabled,
        }
        reporter.message(
            f"Wrote {copies} copies with {' and '.join(name for name, on in contents.items() if on)}"
        )
    for line in overlap.messages():
        reporter.message(line)
    return counts


def _describe_mixing(recipe: Recipe, rows: list[int]) -> str:
    """The share of each training file in an epoch, and how often its pairs are used."""
    files = recipe.data.train
    names, shares = files.source or files.pairs or (), files.sampling_shares(rows)
    return ", ".join(
        f"{name} {share:.1%} ({share * sum(rows) / max(1, count):.2g} times per epoch)"
        for name, share, count in zip(names, shares, rows, strict=True)
    )


def _write_texts(
    run: RunDir, recipe: Recipe, tokenizer: Tokenizer, reporter: ProgressReporter
) -> dict[str, Any]:
    """Write training texts without targets."""
    skipped, rows = Skipped(), TASKS[recipe.task].encoder(recipe).rows
    pairs = train_pairs(recipe.data, skipped)
    counts = write_dataset(run.data / "train.arrow", pairs, tokenizer, recipe.data.clean, rows)
    for line in skipped.messages():
        reporter.message(line)
    reporter.message(f"Training pairs: {counts.summary}")
    return {"train": asdict(counts)}


# ---------------------------------------------------------------------------------------------
# Copies with sampled subword segmentations and augmented pairs

PAIRS_PER_PROCESS, SAMPLED_PAIRS_PER_PROCESS = 100_000, 10_000
"""Number of pairs that take about as long to tokenize (4 seconds) as a process takes to start, without and with
subword sampling."""


COPYING_PROCESS = """
import os, sys, threading
# First of all, since imports take long: end when the process at the other end of standard input ends.
threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
from regard.training.prepare_data import write_numbered_copies
write_numbered_copies(sys.argv[1], [int(number) for number in sys.argv[2:]])
"""
"""The program of a process that writes copies; its arguments are the run folder and the numbers of the copies."""


def sampled_files(run: RunDir, recipe: Recipe) -> list[Path]:
    """The files of the copies; none without subword sampling and augmentation."""
    numbers = range(recipe.training.copies)
    return [run.data / f"train-{number:03d}.arrow" for number in numbers]


def valid_cleaning(recipe: Recipe) -> CleaningConfig | None:
    """The cleaning rules for validation pairs: those for training pairs, but duplicates stay; None with labels."""
    if recipe.has_labels or recipe.text_only:
        return None
    return recipe.data.clean.model_copy(update={"keep_duplicates": True})


def _write_valid(
    run: RunDir, recipe: Recipe, tokenizer: Tokenizer, reporter: ProgressReporter
) -> CleaningCounts:
    """Write the validation data; pairs are cleaned by the rules for training data, but duplicates stay."""
    rows, skipped = TASKS[recipe.task].encoder(recipe).rows, Skipped()
    pairs, clean = valid_pairs(recipe.data, skipped), valid_cleaning(recipe)
    valid = write_dataset(run.data / "valid.arrow", pairs, tokenizer, clean, rows)
    for line in skipped.messages():
        reporter.message(line)
    dropped = f"; {valid.summary}" if valid.kept < valid.read else ""
    reporter.message(f"Validation pairs: {valid.kept:,}{dropped}")
    return valid


def write_sampled_copies(run: RunDir, recipe: Recipe, pairs: int) -> None:
    """Write all copies, in several processes if there are many pairs; recipe and tokenizer are in the run folder."""
    copies = len(sampled_files(run, recipe))
    share = SAMPLED_PAIRS_PER_PROCESS if recipe.training.subword_sampling else PAIRS_PER_PROCESS
    processes = min(copies, available_cores(), 1 + pairs * copies // share)
    assigned = [range(first, copies, processes) for first in range(processes)]
    run_processes(
        COPYING_PROCESS,
        [[str(run), *map(str, numbers)] for numbers in assigned[1:]],
        lambda: _write_copies(run, recipe, assigned[0]),
        f"{run.data}: writing a copy of the data failed",
    )


def _write_copies(run: RunDir, recipe: Recipe, numbers: range | list[int]) -> None:
    """Write the copies with these numbers."""
    plain, training, files = run.tokenizer(recipe), recipe.training, sampled_files(run, recipe)
    alpha, labels = training.subword_sampling, recipe.has_labels
    samplers = subword_samplers(plain, recipe.tokenizer.kind, alpha) if alpha else None
    for number in numbers:
        tokenizer = plain
        if samplers:
            seed = (training.seed, number)
            tokenizer = SamplingTokenizer.wrap(plain, samplers, seed, labels)
        rows = partial(_copied_rows, run, recipe, _augmenter(recipe, number))
        write_dataset(files[number], train_pairs(recipe.data), tokenizer, recipe.data.clean, rows)


def _copied_rows(
    run: RunDir,
    recipe: Recipe,
    augment: Augmenter | None,
    pairs: Iterable[Pair],
    tokenizer: Tokenizer,
    clean: CleaningConfig | None,
    counts: Counter[str],
) -> Iterator[EncodedPair]:
    """The rows of a copy: of the training pairs, and after them, with ``training.mix``, those of the old run."""
    encoder, parts = TASKS[recipe.task].encoder(recipe, augment), PartFiles(run)
    encoder.seen = parts.seen(recipe, TRAIN)
    yield from encoder.rows(pairs, tokenizer, clean, counts)
    if recipe.training.mix:
        encoder.seen = parts.seen(recipe, OLD)
        yield from encoder.rows(old_train_pairs(recipe), tokenizer, clean, Counter())


def write_numbered_copies(run: str, numbers: list[int]) -> None:
    """Write the copies with these numbers, in a process of its own."""
    folder = RunDir(run)
    _write_copies(folder, folder.recipe(), numbers)


def _augmenter(recipe: Recipe, copy: int) -> Augmenter | None:
    training = recipe.training
    if not training.augment.enabled:
        return None
    return Augmenter(training.augment, training.seed, copy, training.copies)


def _tokenizer_pairs(recipe: Recipe) -> Iterator[Pair]:
    """The pairs that a tokenizer is trained on: as in the first epoch, so that it has upper-cased entries if needed.

    With ``data.bidirectional`` they are in one direction, so that the tokenizer is that of the recipe without it.
    """
    pairs = one_direction_pairs(recipe.data)
    augment = _augmenter(recipe, copy=0)
    return pairs if augment is None else map(augment, pairs)


# ---------------------------------------------------------------------------------------------
# Checks: problems that would otherwise appear only at the end of training


def _check_evaluation(recipe: Recipe) -> None:
    """Raise if the metrics cannot be computed or the test data cannot be read."""
    metrics = [metric for metric in recipe.evaluation.metrics if metric not in MODEL_METRICS]
    score(metrics, ["a"], ["a"], ["a"], tokenize=recipe.evaluation.tokenize)
    if recipe.data.test is not None:
        for _ in read_pairs(recipe.data.test, recipe.data, "data.test"):
            pass


def _check_valid(recipe: Recipe) -> None:
    """Raise if there are no validation data, or if a line of ``data.valid`` cannot be read."""
    pairs = valid_pairs(recipe.data)
    first = next(pairs, None)
    if recipe.data.valid is not None:
        if first is None:
            raise RegardError("data.valid: has no pairs; validation needs at least one")
        for _ in pairs:
            pass
    elif first is None:
        raise RegardError(
            "no pair was held out for validation, because there are too few distinct sources; "
            "set data.valid, or increase data.hold_out"
        )


def _check_valid_lengths(recipe: Recipe, valid: TokenDataset) -> None:
    """Raise if a validation text is longer than the model can read; texts without targets were split into blocks."""
    limit = max_sequence_length(recipe.model)
    if limit is None or recipe.text_only:
        return
    longest = int(max(valid.source_lengths.max(), valid.target_lengths.max())) + 1
    if recipe.model.architecture == "decoder_only":
        both = valid.source_lengths[:] + valid.target_lengths[:]
        longest = int(both.max()) + 2
    if longest > limit:
        raise RegardError(
            f"data.valid has a text of {longest} tokens, special tokens included, but the model can "
            f"read only {limit}: increase model.max_length, or shorten the text"
        )


def _check_test_lengths(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Raise if a test source is longer than the model can read."""
    limit, data = max_sequence_length(recipe.model), recipe.data
    if limit is None or data.test is None or recipe.text_only:
        return
    truncate = TASKS[recipe.task].encoder(recipe).truncate
    pairs = list(read_pairs(data.test, data, "data.test"))
    sources, contexts = [pair.source for pair in pairs], list(map(context_of, pairs))
    encoded = encode_with_context(tokenizer.source, sources, contexts)
    for number, (pair, ids) in enumerate(zip(pairs, encoded, strict=True), 1):
        length = len(tags_of(pair)) + len(ids[:truncate]) + 1
        if length > limit:
            raise RegardError(
                f"data.test: source {number} has {length} tokens, EOS included, but the model can "
                f"read only {limit}: increase model.max_length, or shorten the text"
            )


# ---------------------------------------------------------------------------------------------
# Metadata of the prepared data


def data_identity(recipe: Recipe) -> dict[str, str]:
    """Everything that the token ids on disk depend on: fingerprints of the data and of the relevant settings."""
    data = recipe.data
    settings = [recipe.task, recipe.tokenizer.identity, data.clean.model_dump_json()]
    settings.append(str(recipe.training.init_from))
    if recipe.training.teacher:
        settings.append(f"teacher {recipe.training.teacher}")
    if recipe.training.extend_vocab:
        settings.append(f"extend_vocab {recipe.training.extend_vocab}")
    if recipe.data.other_targets:
        settings.append(f"other_targets {recipe.data.other_targets}")
    if data.context:
        settings.append(f"context {data.context}")
    if data.bidirectional:
        settings.append("bidirectional")
    if data.train.mixed:
        settings.append("mixed")
    if data.valid is None:
        settings.append(str(data.hold_out))
    if recipe.training.subword_sampling:
        settings.append(
            recipe.training.model_dump_json(include={"subword_sampling", "subword_copies", "seed"})
        )
    if recipe.training.augment.enabled:
        settings.append(
            recipe.training.model_dump_json(include={"augment", "subword_copies", "seed"})
        )
    identity = {"train": fingerprint(data.train, data)}
    if data.valid is not None:
        identity["valid"] = fingerprint(data.valid, data)
    if recipe.training.mix:
        identity["old"] = old_data_fingerprint(recipe)
    identity["settings"] = hashlib.sha256("\n".join(settings).encode()).hexdigest()
    return identity


def _read_metadata(run: RunDir) -> dict[str, Any]:
    """The metadata, or nothing if they are missing or belong to another tokenizer."""
    path = run.metadata_file
    try:
        metadata = json.loads(path.read_text()) if path.is_file() else {}
    except (ValueError, RecursionError):
        return {}
    if not isinstance(metadata, dict):
        return {}
    hashes = {path.name: sha256(path) for path in run.tokenizer_files()}
    return metadata if metadata.get("tokenizer") == hashes else {}


def _write_metadata(
    run: RunDir, identity: dict[str, str], counts: Mapping[str, Any], seconds: float
) -> None:
    metadata = {
        "identity": identity,
        "tokenizer": {path.name: sha256(path) for path in run.tokenizer_files()},
        **counts,
        "seconds": round(seconds, 1),
    }
    write_text(run.metadata_file, json.dumps(metadata, indent=2) + "\n")


# ---------------------------------------------------------------------------------------------
# Messages


def _training_files(recipe: Recipe) -> list[str]:
    train = recipe.data.train
    roles = (train.source, train.target, train.pairs, train.conllu, train.text)
    return [recipe.data.location(name) for names in roles if names for name in names]


def _describe_tokenizer(tokenizer: Tokenizer, recipe: Recipe) -> str:
    kind = recipe.tokenizer.kind
    if target_kind := recipe.tokenizer.target_kind:
        return (
            f"{kind} with {tokenizer.source.size:,} entries for sources, "
            f"{target_kind} with {tokenizer.target.size:,} entries for targets"
        )
    if recipe.has_labels:
        labels = tokenizer.target.size - len(SPECIAL_TOKENS)
        return f"{kind}, {tokenizer.source.size:,} entries; {labels:,} label{'s' * (labels != 1)}"
    if recipe.tokenizer.shared:
        return f"{kind}, {tokenizer.source.size:,} entries, shared by source and target"
    return f"{kind}, {tokenizer.source.size:,} source and {tokenizer.target.size:,} target entries"
