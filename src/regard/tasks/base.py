"""What a task is, how its data are encoded, and what every model can do.

A ``Task`` gathers all that is specific to a task: how its data are encoded, which loss it is trained with, its
defaults and metrics, and the ``Model`` class that users work with. To add a task, write one module like
``tagging.py`` and import it in ``regard/tasks/__init__.py``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

from regard.data.pairs import Pair, parse_of
from regard.data.special_tokens import PAD, SPECIAL_TOKENS, UNK
from regard.errors import RegardError
from regard.inference.engine import Engine
from regard.inference.worker_pool import SharedFlag, available_cores, on_one_core
from regard.recipe.registry import Registry
from regard.storage.run_dir import RunDir

if TYPE_CHECKING:
    import torch
    from torch import nn

    from regard.data.batching import Batch
    from regard.data.cleaning import AugmentFunction, EncodedPair, SeenPairs
    from regard.data.dependency_trees import TokenTree
    from regard.data.token_dataset import RowIndices, TokenDataset
    from regard.data.tokenizer import Tokenizer, Vocabulary
    from regard.inference.native_decoder import NativeDecoder
    from regard.metrics import Comparison, MetricResult
    from regard.nn.ensemble import Ensemble
    from regard.nn.loss import TrainingLoss
    from regard.nn.network import Network
    from regard.recipe import CleaningConfig, Device, Precision, Recipe

# ---------------------------------------------------------------------------------------------
# How the pairs of a task become token ids on disk and tensors in a batch.
#
#     task            pair              source        target      labels
#     translation     source, target    text EOS      BOS text    text EOS
#     tagging         words, tags       tokens EOS    -           a tag at the first token of each word, else PAD
#     classification  text, label       text EOS      -           the label
#     masked_lm       text              text EOS      -           the text; the loss masks tokens of it in each step
#     language_model  line              -             a block     the block, shifted by one
#
# ``PairEncoder`` is the encoder of translation and the base class of the others.


class PairEncoder:
    """Encodes pairs of source and target text."""

    def __init__(self, recipe: Recipe, augment: AugmentFunction | None = None) -> None:
        """augment: text augmentation, applied before tokenization (translation only)."""
        clean = recipe.data.clean
        self.max_tokens = clean.max_tokens
        self.truncate = clean.max_tokens if clean.truncate else None
        """where sources are truncated"""
        self.trees = recipe.model.position == "tree"
        self.augment = augment
        self.seen: SeenPairs | None = None
        """recognizes duplicates among the training pairs; None: those of one call of ``rows``"""

    def rows(
        self,
        pairs: Iterable[Pair],
        tokenizer: Tokenizer,
        clean: CleaningConfig | None,
        counts: Counter[str],
    ) -> Iterator[EncodedPair]:
        """The encoded pairs that pass the cleaning rules; ``counts`` counts what happens to each pair."""
        from regard.data.cleaning import clean_and_encode

        return clean_and_encode(
            pairs, tokenizer, clean, counts, self.encode, self.augment, self.seen
        )

    def encode(self, pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[EncodedPair]:
        from regard.data.cleaning import EncodedPair, encode_pairs

        encoded = encode_pairs(pairs, tokenizer)
        if self.truncate is None and not self.trees:
            return encoded
        return (
            EncodedPair(ids.source[: self.truncate], ids.target, self._tree(pair, tokenizer))
            for pair, ids in zip(pairs, encoded, strict=True)
        )

    def _tree(self, pair: Pair, tokenizer: Tokenizer) -> TokenTree | None:
        from regard.data.dependency_trees import token_tree

        if not self.trees:
            return None
        return token_tree(pair.source, parse_of(pair), tokenizer.source).truncate(self.truncate)

    def collate(
        self, dataset: TokenDataset, rows: RowIndices, rank: int = 0, ranks: int = 1
    ) -> Batch:
        """The tensors of a batch, or the share of one of several processes."""
        from regard.data.batching import collate

        return collate(dataset, rows, rank, ranks)

    def count_labels(self, dataset: TokenDataset, rows: RowIndices) -> int:
        """The number of labels in these rows, which the loss is averaged over."""
        return int(dataset.target_lengths[rows].sum()) + len(rows)


def encoder_batch(source: RowIndices, labels: RowIndices, idle: bool) -> Batch:
    """A batch without decoder input; an idle process has no labels."""
    import numpy as np

    from regard.data.batching import Batch, as_tensors

    labels = np.full_like(labels, PAD) if idle else labels
    return Batch(*as_tensors(source, labels[:, :0], labels))


def label_ids(labels: list[str], vocabulary: Vocabulary, where: str) -> list[int]:
    """The ids of labels; an unknown label is an error."""
    ids = [i for (i,) in vocabulary.encode(labels)]
    if UNK in ids:
        from regard.data.formats import abbreviate

        known = ", ".join(label_names(vocabulary)[:20])
        raise RegardError(
            f"label {labels[ids.index(UNK)]!r} of {abbreviate(where)} does not occur in "
            f"data.train; known labels: {known}"
        )
    return ids


def label_names(vocabulary: Vocabulary) -> list[str]:
    """The labels, in the order of their ids, without the special tokens."""
    return vocabulary.decode([[i] for i in range(len(SPECIAL_TOKENS), vocabulary.size)])


def encode_texts(
    pairs: Iterable[Pair], vocabulary: Vocabulary, counts: Counter[str]
) -> Iterator[tuple[Pair, list[int]]]:
    """Each pair with the ids of its source."""
    for pair in pairs:
        counts["read"] += 1
        (ids,) = vocabulary.encode([pair.source])
        yield pair, ids


# ---------------------------------------------------------------------------------------------
# Tasks and models


@dataclass(frozen=True)
class Task:
    """Everything that is specific to one task."""

    model: type[Model]
    """the class that users work with"""
    encoder: type[PairEncoder]
    """how pairs become token ids and batches"""
    loss: Callable[..., TrainingLoss]
    """training loss: built from the network, the training section and the number of special tokens"""
    architectures: tuple[str, ...]
    """architectures that can be trained"""
    own_metrics: tuple[str, ...] = ()
    """metrics that can be computed; empty: all metrics of output texts"""
    defaults: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """defaults of recipe sections that differ from the schema's"""
    has_labels: bool = False
    """the targets are labels, not text"""
    text_only: bool = False
    """the data are text without targets"""
    supports: tuple[str, ...] = ()
    """recipe keys that not every task supports, and this one does; see ``task_options`` in ``recipe/validation.py``"""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """why it does not support some of the other keys"""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics that can be computed."""
        from regard.metrics import TEXT_METRICS

        return self.own_metrics or TEXT_METRICS


TASKS: Registry[Task] = Registry("task")

# What several tasks register: recipe keys that they support or ignore, and defaults

DECODER_KEYS = (
    "model.decoder_layers",
    "model.attention.decoder",
    "model.attention.cross_attention",
)
"""ignored by tasks whose network has no decoder"""

LABEL_SUPPORTS = (
    "training.word_dropout",
    "training.subword_sampling",
    "training.rdrop",
    "training.simcut",
)
"""what tasks with labels support"""
LABEL_IGNORES = (*DECODER_KEYS, "model.tie_output")
LABEL_DEFAULTS: Mapping[str, dict[str, Any]] = {
    "tokenizer": {"shared": False},
    "evaluation": {"metrics": ("accuracy", "f1")},
}

PAIR_SUPPORTS = (
    *LABEL_SUPPORTS,
    *("data.to", "data.tag", "data.bidirectional", "data.context", "data.clean.truncate"),
    *("model.output_bias", "model.position: tree", "training.target_word_dropout"),
    *("training.augment", "training.teacher", "training.batching: packed"),
)
"""what tasks with texts as sources and targets support"""

TEXT_IGNORES = (
    "data.clean.max_ratio",
    "data.clean.keep_duplicates",
    "data.clean.truncate",
    "data.languages",
)
"""options that have no effect on text without targets"""
TEXT_DEFAULTS = {"best_checkpoint_metric": "loss", "validate_sentences": 0, "label_smoothing": 0.0}
"""of the training section"""


def decoding_keys() -> list[str]:
    """The keys of the decoding section, which only translation reads."""
    from regard.recipe import DecodingConfig

    return [f"decoding.{name}" for name in DecodingConfig.model_fields]


def build_network(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
    """The network of a recipe with random weights."""
    return TASKS[recipe.task].model.build(recipe, tokenizer)


RunFolders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""one run folder, or those of an ensemble"""

MAX_TEXT_TOKENS = 4096
"""Longer texts are refused, unless the model was trained on texts half as long: time and memory of attention grow with
the square of the length."""


class Model(ABC):
    """A run folder opened for use. Each task has a subclass with the method that performs the task."""

    task: ClassVar[str]
    command: ClassVar[str]
    """the command that uses models of this task"""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        network: nn.Module | None,
        device: torch.device | None,
        precision: Precision = "fp32",
        run: RunDir | None = None,
        threads: int | None = None,
    ) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self._network = network
        self._device = device
        self.precision: Precision = precision
        self.run = run
        """the run folder it was loaded from; None for an ensemble"""
        self.runs: tuple[RunDir, ...] = () if run is None else (run,)
        """the run folders it was loaded from: one, or several for an ensemble"""
        self.threads = min(threads or available_cores(), os.cpu_count() or 1)
        """batches processed at a time on a CPU"""

    @property
    def network(self) -> nn.Module:
        """The network in torch. A model that was loaded without it (``native_model_cache.py``) loads it here."""
        assert self._network is not None
        return self._network

    @property
    def device(self) -> torch.device:
        assert self._device is not None
        return self._device

    @classmethod
    def load(
        cls,
        folder: RunFolders,
        device: Device = "auto",
        precision: Precision = "fp32",
        threads: int | None = None,
    ) -> Self:
        """Open a run folder, or several as an ensemble: translation models with the same tokenizer.

        ``Model.load`` opens a run of any task and returns the class of its task.
        """
        folders = [folder] if isinstance(folder, str | os.PathLike) else list(folder)
        if not folders:
            raise RegardError("no run folder was given")
        runs = [RunDir(Path(path)) for path in folders]
        run = runs[0]
        if len(runs) == 1 and (cached := cls.load_cached(run, device, precision, threads)):
            return cached
        from regard.inference.device import choose_device
        from regard.nn.network import assign_weights

        recipe = run.recipe()
        model_class = cls.class_for(recipe, run)
        key = model_class.cache_key(run, device, precision) if len(runs) == 1 else None
        with on_one_core():  # workers can be forked only from a process without threads
            weights = run.weights()
            tokenizer = run.tokenizer(recipe)
            torch_device = choose_device(device)
            if len(runs) > 1:
                network: nn.Module = read_ensemble(runs, tokenizer).to(torch_device).eval()
                model = model_class(
                    recipe, tokenizer, network, torch_device, precision, threads=threads
                )
                model.runs = tuple(runs)
            else:
                network = model_class.build(recipe, tokenizer)
                assign_weights(network, weights, str(run.weights_file))
                network = network.to(torch_device).eval()
                model = model_class(
                    recipe, tokenizer, network, torch_device, precision, run, threads
                )
            model.freeze()
            if key is not None and key == model_class.cache_key(run, device, precision):
                model.store_cached(key)
        return model

    @classmethod
    def cache_key(cls, run: RunDir, device: Device, precision: Precision) -> dict[str, Any] | None:
        """What a cached model depends on, see ``native_model_cache.py``; None if this model cannot be cached."""
        return None

    @classmethod
    def load_cached(
        cls, run: RunDir, device: Device, precision: Precision, threads: int | None
    ) -> Self | None:
        """The model that an earlier process cached for the native decoder, without torch; None if there is none."""
        return None

    def store_cached(self, key: dict[str, Any]) -> None:  # noqa: B027 (only translation models are cached)
        """Store the model for ``load_cached``, if it has a native decoder. key: of the run it was loaded from."""

    @classmethod
    def class_for(cls, recipe: Recipe, run: RunDir) -> type[Self]:
        """The class of a run's task; an error if it is not this class or one derived from it."""
        model_class = TASKS[recipe.task].model
        if not issubclass(model_class, cls):
            raise RegardError(
                f"{run}: a model for task {recipe.task}, not {cls.task}; use it with  regard {model_class.command}, "
                f"in Python with regard.load(run, regard.{model_class.__name__})"
            )
        return model_class

    @staticmethod
    @abstractmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> nn.Module:
        """The network of a recipe with random weights."""

    def freeze(self) -> None:
        """The weights are final: prepare them for inference."""
        if self.precision == "int8":
            raise RegardError(
                f"precision int8: not supported for task {self.task}; use fp32, bf16 or auto"
            )

    def set_precision(self, precision: Precision) -> None:
        """Compute in another precision from now on."""
        self.precision = precision

    def start_workers(self, background: bool = False) -> None:  # noqa: B027 (only sequence generators have workers)
        """Process batches in worker processes from now on, if that is faster and this process has no other threads.

        background: also start workers of low priority, for threads of low priority.
        """

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Source ids of texts, truncated as in training."""
        clean = self.recipe.data.clean
        limit = clean.max_tokens if clean.truncate else None
        encoded = [ids[:limit] for ids in self.tokenizer.source.encode(texts)]
        self.check_lengths(encoded)
        return encoded

    @property
    def max_text_tokens(self) -> int:
        """The number of tokens that a text may have."""
        return max(MAX_TEXT_TOKENS, 2 * self.recipe.data.clean.max_tokens)

    def check_lengths(self, texts: Sequence[Sequence[int]]) -> None:
        """Refuse a text, given as token ids, that is too long."""
        for number, ids in enumerate(texts, 1):
            if len(ids) > self.max_text_tokens:
                raise RegardError(
                    f"text {number} has {len(ids):,} tokens; the limit is {self.max_text_tokens:,}. "
                    "Split it into sentences."
                )

    @abstractmethod
    def predict(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        """The output for each source, to be scored against its target; quick: a fast method for validation."""

    def predict_pairs(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[str]:
        """The output for the source of each pair, with its parse and target language."""
        return self.predict([pair.source for pair in pairs], quick=quick)

    def evaluate(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[MetricResult]:
        """Score the outputs for the sources against the targets.

        quick: for validation; only the first metric, without a confidence interval.
        """
        return self.score_outputs(self.predict_pairs(pairs, quick=quick), pairs, quick=quick)

    def score_outputs(
        self, outputs: Sequence[str], pairs: Sequence[Pair], *, quick: bool = False
    ) -> list[MetricResult]:
        """Score outputs, for the sources of pairs, against their targets; see ``evaluate``."""
        from regard.metrics import score

        evaluation = self.recipe.evaluation
        metrics = evaluation.metrics[:1] if quick else evaluation.metrics
        references, sources = [pair.target for pair in pairs], [pair.source for pair in pairs]
        tokenize = evaluation.tokenize
        return score(metrics, outputs, references, sources, tokenize=tokenize, intervals=not quick)

    def compare(
        self, other: Self, pairs: Sequence[Pair], outputs: Sequence[str] | None = None
    ) -> tuple[list[MetricResult], list[Comparison]]:
        """The scores, and a paired significance test against another model for each metric.

        outputs: of this model for the sources, if they are known already.
        """
        from regard.metrics import MODEL_METRICS, compare

        evaluation = self.recipe.evaluation
        if unsupported := MODEL_METRICS & {*evaluation.metrics}:
            raise RegardError(
                f"{', '.join(sorted(unsupported))}: models cannot be compared on this metric"
            )
        sources, references = [pair.source for pair in pairs], [pair.target for pair in pairs]
        ours = outputs if outputs is not None else self.predict_pairs(pairs)
        theirs = other.predict_pairs(pairs)
        tokenize = evaluation.tokenize
        comparisons = compare(
            evaluation.metrics, ours, theirs, references, sources, tokenize=tokenize
        )
        return self.score_outputs(ours, pairs), comparisons


def read_ensemble(runs: Sequence[RunDir], tokenizer: Tokenizer) -> Ensemble:
    """The networks of several translation runs, to decode together."""
    from regard.nn.ensemble import Ensemble
    from regard.nn.network import assign_weights

    check_ensemble(runs)
    configs, networks = [run.recipe().model for run in runs], []
    for run in runs:
        networks.append(SequenceGenerator.build(run.recipe(), tokenizer))
        assign_weights(networks[-1], run.weights(), str(run.weights_file))
    return Ensemble(networks, configs)


def check_ensemble(runs: Sequence[RunDir]) -> None:
    """Raise if these runs cannot decode together: they must read and write the same token ids."""
    recipes = [run.recipe() for run in runs]
    for run, recipe in zip(runs, recipes, strict=True):
        if not recipe.is_seq2seq:
            raise RegardError(
                f"{run}: a model for task {recipe.task}; only translation models can be combined"
            )
        if recipe.model.architecture == "non_autoregressive":
            raise RegardError(
                f"{run}: a non-autoregressive model; only autoregressive models can be combined"
            )
    first, expected = runs[0], recipes[0]
    files = {path.name: path.read_bytes() for path in first.tokenizer_files()}
    for run, recipe in zip(runs[1:], recipes[1:], strict=True):
        if {path.name: path.read_bytes() for path in run.tokenizer_files()} != files:
            raise RegardError(
                f"{run}: its tokenizer differs from that of {first}, so the two cannot be combined"
            )
        for key in ("tags", "context"):
            theirs, ours = getattr(recipe.data, key), getattr(expected.data, key)
            if theirs != ours:
                from regard.recipe import as_written

                raise RegardError(
                    f"{run}: data.{key} is {as_written(theirs)}, but {as_written(ours)} in {first}, so the two "
                    "cannot be combined"
                )
        if (recipe.model.position == "tree") != (expected.model.position == "tree"):
            raise RegardError(f"{run}, {first}: only one of them has model.position: tree")


class SequenceGenerator(Model):
    """A model whose network generates tokens."""

    def __init__(
        self, *arguments: Any, native: NativeDecoder | None = None, **options: Any
    ) -> None:
        """native: the native decoder of a model without a network, which is loaded when it is needed."""
        super().__init__(*arguments, **options)
        self.engine = Engine(
            self.recipe.model,
            cast("Network | None", self._network),
            self.tokenizer.target,
            self._device,
            self.precision,
            self.threads,
            native,
            None if native is None else self._load_network,
        )

    @property
    def network(self) -> Network:
        return self.engine.network

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def _load_network(self) -> Network:
        from regard.nn.network import assign_weights

        assert self.run is not None
        network = self.build(self.run.recipe(), self.tokenizer)
        assign_weights(network, self.run.weights(), str(self.run.weights_file))
        return network.eval()

    @staticmethod
    def build(recipe: Recipe, tokenizer: Tokenizer) -> Network:
        from regard.nn.architectures import ARCHITECTURES

        config = recipe.model
        build = ARCHITECTURES[config.architecture]
        return build(config, tokenizer.source.size, tokenizer.target.size)

    def set_precision(self, precision: Precision) -> None:
        super().set_precision(precision)
        self.engine.precision = precision

    def freeze(self) -> None:
        self.engine.freeze()
        self.precision = self.engine.precision

    def start_workers(self, background: bool = False) -> None:
        self.engine.start_workers(background)

    @property
    def interrupt(self) -> SharedFlag:
        """While it is set, all searches of this model stop at their next step."""
        return self.engine.interrupt

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """The number of source tokens of each text, before any truncation."""
        return [len(ids) for ids in self.tokenizer.source.encode(texts)]
