"""A network that learns: one step, one validation, one save. When to do which is the loop's business."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard import recipe as recipes
from regard.learn.checkpoint import (
    Progress,
    checkpoint_files,
    checkpoint_name,
    discard,
    load_checkpoint,
    moments_of,
    put_moments,
    save_checkpoint,
    step_of,
)
from regard.learn.distributed import Group
from regard.learn.loss import OBJECTIVES
from regard.learn.optimizers import OPTIMIZERS, learning_rate
from regard.learn.prepare import Prepared
from regard.learn.start import take_weights
from regard.learn.update import Numbers, Recorded, Update
from regard.model import MODELS, build, put_weights, weights_of
from regard.run import Run
from regard.score import Result
from regard.text.batches import (
    Batch,
    Room,
    pack,
    plan_batches,
    plan_in_order,
    plan_mixed,
    room,
)
from regard.text.corpus import Pair, valid_pairs
from regard.text.forms import FORMS
from regard.text.store import Places, Store


class Place(NamedTuple):
    """A place in the data: this many batches of this epoch are behind us."""

    epoch: int
    batch: int


class Drawn(NamedTuple):
    """One batch as it comes from the data."""

    parts: list[Batch]
    """worked on one after the other"""
    tokens: int
    """target tokens of the whole batch, over all processes"""
    after: Place


class NotANumberError(Exception):
    """The weights or the loss are infinite or not a number."""


class Validation(NamedTuple):
    loss: float
    """mean negative log-probability of a target token, without smoothing"""
    result: Result | None
    """the score of the examples"""
    badness: float
    """what checkpoints are chosen by; smaller is better"""

    @property
    def rank(self) -> tuple[float, float]:
        """Of equal badness the smaller loss is the better."""
        return self.badness, self.loss


class Learner:
    """A network that learns: weights, optimizer, progress, and the run folder they are saved in."""

    def __init__(self, run: Run, recipe: recipes.Recipe, prepared: Prepared, group: Group) -> None:
        self.run, self.recipe, self.prepared, self.group = run, recipe, prepared, group
        self.training = recipe.training
        torch.manual_seed(self.training.seed)
        self.network = build(recipe, prepared.tokenizer).to(group.device)
        self.form = FORMS[recipe.task](recipe)
        self.taken: str | None = None
        """what a new training began with, in words; None: with random weights"""
        if self.training.start_from and not checkpoint_files(run.checkpoints):
            self.taken = take_weights(self.network, recipe, prepared.tokenizer)
        self.names: dict[Tensor, str] = {
            parameter: name for name, parameter in self.network.named_parameters()
        }
        self.optimizer = OPTIMIZERS[self.training.optimizer](
            self.network.parameters(), self.training
        )
        self.progress = Progress()
        self.validation_seconds = 0.0
        """what the last one took, or a guess before the first"""
        marks = prepared.tokenizer.source.marks
        self.objective = OBJECTIVES[recipe.task](self.network, self.training, marks)
        self.shared: nn.Module = self.objective
        if group.size > 1:
            ids = [group.device.index] if group.device.type == "cuda" else None
            self.shared = DistributedDataParallel(self.objective, ids)
        self.update = Update(self.shared, self.optimizer, self.training, group.device)
        self.recorded = Recorded(self.update, self.network) if records(recipe, group) else None
        self.moving: dict[str, Tensor] | None = None
        if self.training.ema:
            self.follow({name: w.clone() for name, w in weights_of(self.network).items()})
        self.model = MODELS[recipe.task](
            recipe, prepared.tokenizer, self.network, group.device, self.training.precision
        )
        self.examples = _spread(valid_pairs(recipe.data), len(prepared.valid), self.training)

    # One step

    def step(self, drawn: list[Drawn]) -> Tensor:
        """Learn from some batches at once; the mean loss of this process's tokens."""
        self.progress.step += 1
        step, training = self.progress.step, self.training
        _seed(training.seed, step, self.group)
        tokens = sum(one.tokens for one in drawn)
        # In the first steps the average follows closely, so that it forgets the random start.
        drift = 1 - min(training.ema, (1 + step) / (10 + step))
        # Other processes add their share: DistributedDataParallel takes the mean.
        share = self.group.size / tokens
        rate = learning_rate(step, training, self.recipe.model.width)
        parts = [part for one in drawn for part in one.parts]
        loss = (self.recorded or self.update)(parts, Numbers(share, rate, drift))
        self.progress.tokens += tokens
        self.progress.epoch, self.progress.batch = drawn[-1].after
        return loss

    def follow(self, means: dict[str, Tensor]) -> None:
        """Let these be the moving average of the weights."""
        self.moving, weights = means, weights_of(self.network)
        self.update.moving = list(means.values()), [weights[name] for name in means]

    # The data

    def batches(self) -> Iterator[Drawn]:
        """Batches without end, from where the progress stands."""
        epoch, batch = self.progress.epoch, self.progress.batch
        while True:
            store = self.prepared.of_epoch(epoch)
            plan = self.planned(store, epoch)
            for number in range(batch, len(plan)):
                rows = plan[number]
                tokens = self.form.tokens(store, rows)
                yield Drawn(self.tensors(store, rows), tokens, Place(epoch, number + 1))
            epoch, batch = epoch + 1, 0

    def planned(self, store: Store, epoch: int) -> list[Places]:
        """The rows of each batch of an epoch."""
        training = self.training
        lengths = store.source_lengths, store.target_lengths
        if training.batches == "packed":
            return plan_mixed(*lengths, self.room, training.seed, epoch)
        return plan_batches(*lengths, training.tokens_per_batch, training.seed, epoch)

    @cached_property
    def room(self) -> Room:
        """Of every packed batch, whichever copy of the text it comes from."""
        stores = self.prepared.copies or [self.prepared.train]
        source = np.concatenate([store.source_lengths for store in stores])
        target = np.concatenate([store.target_lengths for store in stores])
        return room(source, target, self.training.tokens_per_batch)

    def tensors(self, store: Store, rows: Places) -> list[Batch]:
        """A batch as it is worked on: packed into one row, in a few parts of like length, or whole."""
        group = self.group
        if self.recorded is not None:
            return [pack(store, rows, self.room).map(torch.Tensor.pin_memory)]
        parts = [rows]
        if self.training.batches == "packed":
            lengths = store.source_lengths[rows], store.target_lengths[rows]
            most = -(-self.training.tokens_per_batch // recipes.PARTS)
            parts = [rows[part] for part in plan_in_order(*lengths, most)]
        return [self.form.collate(store, part, group.rank, group.size) for part in parts]

    # Validation

    @contextmanager
    def resting(self) -> Iterator[None]:
        """No dropout, and the moving average in place of the weights, for the time of the with-block."""
        own = None
        if self.moving is not None:
            own = {name: tensor.clone() for name, tensor in weights_of(self.network).items()}
            put_weights(self.network, self.moving, "the moving average")
        self.shared.eval()
        try:
            yield
        finally:
            self.shared.train()
            if own is not None:
                put_weights(self.network, own, "the weights")

    def validate(self) -> Validation:
        """Loss on all validation pairs; scores on some of them, translated greedily."""
        start = time.monotonic()
        with self.resting():
            loss = self._valid_loss()
            result = self._valid_score()
        self.validation_seconds = time.monotonic() - start
        if self.training.choose_by == "loss" or result is None:
            return Validation(loss, result, loss)
        return Validation(loss, result, -result.value if result.higher_is_better else result.value)

    def rehearse(self, most: float) -> None:
        """Guess how long a validation takes before there was one: from a few examples, and a high guess."""
        few = self.examples[:16]
        if not few:  # it validates by loss alone, which takes no longer than learning from as much
            return
        with self.resting():
            self.model.answer_to(few[:1], quick=True)  # the first use of a device takes long
            start = time.monotonic()
            self.model.answer_to(few, quick=True)
        each = (time.monotonic() - start) / len(few)
        self.validation_seconds = min(most, each * len(self.examples))

    def time_to_finish(self) -> float:
        """Seconds for the last validation; the average and the test are scored only if time is left."""
        return 2 + 1.5 * self.validation_seconds

    @torch.inference_mode()
    def _valid_loss(self) -> float:
        store = self.prepared.valid
        lengths = store.source_lengths, store.target_lengths
        total, tokens = 0.0, 0
        for rows in plan_in_order(*lengths, self.training.tokens_per_batch):
            batch = self.form.collate(store, rows).to(self.group.device)
            total += float(self.update.loss(self.objective, batch))
            tokens += self.form.tokens(store, rows)
        return total / tokens

    def _valid_score(self) -> Result | None:
        if not self.examples:
            return None
        return self.model.evaluate(self.examples, quick=True)[0]

    # Saving and going on

    def save(self) -> None:
        if not all(bool(weight.isfinite().all()) for weight in weights_of(self.network).values()):
            raise NotANumberError
        path = self.run.checkpoints / checkpoint_name(self.progress.step)
        moments = moments_of(self.optimizer, self.names)
        save_checkpoint(path, self.progress, weights_of(self.network), self.moving, moments)
        files = checkpoint_files(self.run.checkpoints)
        discard(files, [*self.chosen(), files[-1]])

    def is_regular(self, step: int) -> bool:
        """Not the place of an interruption: that must not change what a run becomes."""
        training = self.training
        due = step % training.checkpoint_every == 0 or step % training.validate_every == 0
        return due or step == training.steps

    def load(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        files = checkpoint_files(self.run.checkpoints)
        if not files:
            return
        self.progress, groups = load_checkpoint(files[-1])
        put_weights(self.network, groups["model"], str(files[-1]))
        if self.moving is not None:
            self.follow({n: t.to(self.group.device) for n, t in groups["average"].items()})
        put_moments(self.optimizer, self.names, groups["optimizer"])

    def chosen(self) -> list[Path]:
        """The checkpoints to keep and, at the end, to average."""
        files = {step_of(path): path for path in checkpoint_files(self.run.checkpoints)}
        if self.training.average == "last":
            regular = [step for step in sorted(files) if self.is_regular(step)]
            return [files[step] for step in regular[-self.training.keep :]]
        ranked = sorted(self.progress.validations, key=lambda validation: validation[1:])
        best = [files[step] for step, *_ in ranked if step in files]
        return best[: self.training.keep if self.training.average == "best" else 1]


PACKED: dict[str, tuple[str | int, ...]] = {
    "training.optimizer": ("adam", "adamw"),
    "model.architecture": ("transformer",),
    "model.position": ("none", "index", "sinusoidal", "rotary"),
    "model.norm": ("layer", "rms", "none"),
    "model.attention.score": ("scaled", "unscaled"),
    "model.attention.weighting": ("softmax",),
    "model.attention.encoder": ("full",),
    "model.attention.decoder": ("full",),
    "model.attention.memory": ("full",),
}
"""what can read several texts in one row, and be recorded; whatever else works on the same batches, padded"""


def unpackable(recipe: recipes.Recipe) -> list[str]:
    """What keeps packed batches from being worked on as packed rows."""
    given = {key: attrgetter(key)(recipe) for key in PACKED}
    return [f"{key}: {given[key]}" for key, fit in PACKED.items() if given[key] not in fit]


def records(recipe: recipes.Recipe, group: Group) -> bool:
    """Whether every update is the same work on one GPU."""
    alone = group.size == 1 and group.device.type == "cuda"
    return alone and recipe.training.batches == "packed" and not unpackable(recipe)


def _seed(seed: int, step: int, group: Group) -> None:
    """Dropout of this step in this process depends on nothing that came before."""
    (state,) = np.random.SeedSequence([seed, step, group.rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state >> 1))


def _spread(pairs: Iterable[Pair], count: int, training: recipes.Training) -> list[Pair]:
    """Some pairs at equal distances: files are often sorted, so the first ones would not do."""
    if training.validate_sentences == 0:
        return []  # nothing need be read
    wanted = min(count, training.validate_sentences)
    places = {number * count // wanted for number in range(wanted)}
    return [pair for place, pair in enumerate(pairs) if place in places]
