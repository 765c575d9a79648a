"""The trainer: the training loop, one step, validation, saving and resuming."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard import recipe as recipes
from regard.data.batching import Batch, plan_sorted
from regard.data.corpus import valid_pairs
from regard.data.pairs import Pair
from regard.data.prefetch import prefetch
from regard.data.token_dataset import RowIndices, TokenDataset
from regard.errors import RegardError
from regard.metrics import MetricResult
from regard.nn.loss import Seq2SeqLoss
from regard.nn.network import checkpoint_activations, copy_weights, named_weights
from regard.storage.run_dir import RunDir, Selection
from regard.tasks import TASKS, Translator, build_network
from regard.training.autoconfig import AutomaticRecipe
from regard.training.checkpoint import (
    CheckpointWriter,
    TrainingState,
    averageable_checkpoints,
    checkpoint_files,
    checkpoint_name,
    checkpoint_step,
    delete_checkpoints,
    load_checkpoint,
    load_optimizer_state,
    optimizer_state,
    save_checkpoint,
)
from regard.training.cpu_kernels import attach_cpu_kernels
from regard.training.cuda_graph import EAGER_STEPS, CUDAGraphStep, DistributedCUDAGraphStep
from regard.training.data_loader import (
    DataCursor,
    TrainingBatch,
    TrainingDataLoader,
    can_pack,
    packs_on_cpu,
)
from regard.training.distillation import read_teacher
from regard.training.distributed import FlatGradients, ProcessGroup, backward_order
from regard.training.evaluation import (
    DistributedEvaluation,
    Validation,
    evenly_spaced,
    report_validation,
)
from regard.training.fine_tuning import freeze_weights, load_initial_weights
from regard.training.optimizers import OPTIMIZERS, learning_rate
from regard.training.out_of_memory import (
    estimate_micro_batches,
    few_rows,
    fits_in_memory,
    is_out_of_memory,
    largest_batch,
    release_memory,
)
from regard.training.planner import (
    estimate_validation_time,
    is_too_slow,
    keep_to_time,
    revision_is_due,
)
from regard.training.prepare_data import PreparedData, valid_cleaning
from regard.training.progress import ProgressReporter, shorten_text
from regard.training.resume import describe_environment
from regard.training.run_mirror import RunMirror
from regard.training.sharding import gather, gathered, local_part, shard, shard_all, shards
from regard.training.stopping import (
    NonFiniteError,
    StopReason,
    all_steps_done,
    catch_signals,
    early_stop,
)
from regard.training.train_step import StepScalars, ThreadedTrainStep, TrainStep, parallel_rows

PREFETCHED_BATCHES = 8


class Trainer:
    """Trains one network: holds weights, optimizer and training state, and the run folder they are saved in."""

    def __init__(
        self,
        run: RunDir,
        recipe: recipes.Recipe,
        prepared: PreparedData,
        group: ProcessGroup,
        mirror: RunMirror | None = None,
    ) -> None:
        self.run, self.recipe, self.prepared, self.group = run, recipe, prepared, group
        self.mirror = mirror
        """the copies of the run folder, if the machines do not share it"""
        self.training = recipe.training
        task = TASKS[recipe.task]

        # The network. The order matters: weights are drawn after seeding, initialized from another run, frozen, wrapped
        # in the loss, made equal in all processes, and sharded.
        torch.manual_seed(self.training.seed)
        self.network = build_network(recipe, prepared.tokenizer).to(group.device)
        self.encoder = task.encoder(recipe)
        self.init_message: str | None = None
        """says which weights came from ``training.init_from``; None if all are random or the run is resumed"""
        if self.training.init_from and not checkpoint_files(run.checkpoints):
            self.init_message = load_initial_weights(self.network, recipe, prepared.tokenizer)
        freeze_weights(self.network, self.training.freeze)
        special_tokens = prepared.tokenizer.source.num_special_tokens
        self.loss_fn = task.loss(self.network, self.training, special_tokens)
        if self.training.activation_checkpointing:
            checkpoint_activations(self.network)
        self.sharded = shards(recipe, self.network, group)
        """whether each process holds only a part of the weights"""
        if group.size > 1 and (self.sharded or can_pack(recipe)):
            group.broadcast_tensors(named_weights(self.network).values())
        if self.sharded:
            shard(self.loss_fn, group)
        if self.training.teacher:
            assert isinstance(self.loss_fn, Seq2SeqLoss)
            self.loss_fn.teachers = (read_teacher(recipe, run, group.device),)

        # The optimizer, which holds the parameters as sharding left them, and the training step
        self.parameter_names: dict[Tensor, str] = {
            parameter: name for name, parameter in self.network.named_parameters()
        }
        self.optimizer = OPTIMIZERS[self.training.optimizer](self.network, self.training)
        self.data_loader = TrainingDataLoader(recipe, prepared, self.encoder, group)
        self.distributed_loss_fn: nn.Module = self.loss_fn
        self.cuda_graph_step: CUDAGraphStep | None = None
        self.train_step = self._make_train_step(packs=can_pack(recipe) and not self.sharded)
        self.ema: dict[str, Tensor] | None = None
        if self.training.ema:
            self._set_ema({name: w.clone() for name, w in named_weights(self.network).items()})

        # Checkpoints
        self.state = TrainingState()
        self.checkpoint_writer = CheckpointWriter(run, group, shares_folder=mirror is None)
        self.selection: Selection | None = None
        """the weights in the run's model.safetensors; None if there are none yet"""

        # Validation
        self.model = task.model(
            recipe, prepared.tokenizer, self.network, group.device, self.training.precision
        )
        self.examples = self.validation_pairs(self.training.validate_sentences)
        """the validation pairs that are translated and scored"""
        self.evaluation = DistributedEvaluation(self)

        # Time planning, see ``planner``
        self.validation_seconds = 0.0
        """duration of the last validation, or an estimate before the first"""
        self.automatic: AutomaticRecipe | None = None
        """how the automatic recipe was chosen; None if the model must not change"""
        self.reserved_seconds = 0.0
        """planned for averaging and scoring after the last step"""
        self.max_steps = self.training.steps
        """a plan is not extended beyond this number of steps"""
        self.announced_steps = self.training.steps
        """the number of steps that the user was last told"""

    def _make_train_step(self, packs: bool) -> TrainStep:
        """The function for one optimizer step, and how batches are laid out for it.

        packs: whether batches are packed rows, if the device has kernels for them.
        """
        group, gradients = self.group, None
        if packs and packs_on_cpu(self.recipe, group.device):
            attach_cpu_kernels(self.loss_fn)
            self.data_loader.packs_on_cpu = True
            if group.size == 1:
                self.data_loader.parallel_rows = parallel_rows()
                return ThreadedTrainStep(self.loss_fn, self.optimizer, self.training, group.device)
        if group.size > 1 and packs:
            gradients = FlatGradients(backward_order(self.network), group)
            self.data_loader.balances_tokens = True
        elif group.size > 1 and not self.sharded:
            ids = [group.device.index] if group.device.type == "cuda" else None
            self.distributed_loss_fn = DistributedDataParallel(self.loss_fn, ids)
        step = TrainStep(
            self.distributed_loss_fn, self.optimizer, self.training, group.device, gradients
        )
        if group.device.type == "cuda" and packs:
            graph_step = CUDAGraphStep if gradients is None else DistributedCUDAGraphStep
            self.cuda_graph_step = graph_step(step, self.network)
            self.data_loader.packs_on_gpu = True
        return step

    def disable_cuda_graph(self) -> None:
        """Run every step eagerly from now on, on padded batches: a graph needs the whole batch as one packed row."""
        self.cuda_graph_step = None
        self.data_loader.packs_on_gpu = False

    def validation_pairs(self, most: int) -> list[Pair]:
        """At most this many validation pairs, evenly spaced; pairs that cleaning drops are not replaced."""
        prepared, clean = self.prepared, valid_cleaning(self.recipe)
        read = len(prepared.valid) if clean is None else prepared.metadata["valid"]["read"]
        chosen = evenly_spaced(valid_pairs(self.recipe.data), read, most)
        if clean is None:
            return chosen
        rows = self.encoder.rows
        return [pair for pair in chosen if any(rows([pair], prepared.tokenizer, clean, Counter()))]

    # -----------------------------------------------------------------------------------------
    # The training loop

    def fit(self, reporter: ProgressReporter, deadline: float | None) -> StopReason:
        """Train until the last step, early stopping, the deadline (of ``time.monotonic()``) or a signal.

        If memory runs out, batches are split further, and training continues from the last consistent state.
        """
        if deadline is not None and not self.validation_seconds:
            estimate_validation_time(self, limit=0.1 * (deadline - time.monotonic()))
        reporter.start(self.state.step, self.training.steps, deadline, self.untimed_steps)
        while True:
            try:
                return self._fit(reporter, deadline)
            except (MemoryError, RuntimeError) as error:
                self.finish_saving()
                if not is_out_of_memory(error) or not self._can_split_batches():
                    raise
            finally:
                self.finish_saving()
            # Here, and not above: the error holds the tensors of the step that failed.
            self._split_batches(reporter)

    def _fit(self, reporter: ProgressReporter, deadline: float | None) -> StopReason:
        training, state, group = self.training, self.state, self.group
        meter = Meter(self, reporter)
        with catch_signals() as interrupted, self._prefetched_batches() as batches:
            if self.validation_is_due():
                self.validate_and_save_best(reporter)
                self.save()
                meter.restart_clock()
            while True:
                meter.update(self.step([next(batches) for _ in range(training.accumulate)]))
                reporter.advance(state.step)
                stop, revising = self._agree(
                    self._stop_reason(deadline, interrupted.is_set()),
                    deadline is not None and revision_is_due(self, deadline, meter),
                )
                stopping = stop is not StopReason.NONE
                validating = state.step % training.validate_every == 0 or (
                    stopping and stop is not StopReason.INTERRUPTED
                )
                saving = validating or stopping or state.step % training.checkpoint_every == 0
                logging = saving or revising or state.step % training.log_every == 0
                if logging:
                    meter.log()
                if validating:
                    self.validate_and_save_best(reporter)
                    stop = StopReason(max(stop, group.max(early_stop(state, training))))
                if saving:
                    meter.restart_clock()  # so that the checkpoint includes the time of the validation
                    self.save()
                    meter.restart_clock()
                if stop is not StopReason.NONE:
                    return stop
                if logging and deadline is not None:
                    if is_too_slow(self, deadline, meter):
                        return StopReason.TOO_SLOW
                    keep_to_time(self, reporter, deadline, meter)
                    training = self.training

    def batches(self) -> Iterator[TrainingBatch]:
        """An endless stream of batches, starting at the current position in the data."""
        cursor = DataCursor(self.state.epoch, self.state.batch)
        return self.data_loader.batches(cursor, self.state.micro_batches)

    def _prefetched_batches(self) -> closing[Generator[TrainingBatch, None, None]]:
        return closing(prefetch(self.batches(), PREFETCHED_BATCHES))

    def validation_is_due(self) -> bool:
        """Whether the last step was saved without its validation, because memory ran out, or fine-tuning begins."""
        step = self.state.step
        due = self.validates_start if step == 0 else step % self.training.validate_every == 0
        validated = any(step == validated for validated, *_ in self.state.validations)
        return self.group.max(self.group.is_main and due and not validated) == 1

    @property
    def validates_start(self) -> bool:
        """Whether the initial weights are validated, to be kept if training does not improve them: in fine-tuning."""
        keeps_last = self.training.best_checkpoint_metric == "last"
        return self.training.init_from is not None and not self.recipe.has_labels and not keeps_last

    def _stop_reason(self, deadline: float | None, interrupted: bool) -> StopReason:
        if interrupted:
            return StopReason.INTERRUPTED
        done = all_steps_done(self.state, self.training)
        late = deadline is not None and time.monotonic() > deadline - self.time_to_finish()
        # After the last step there is nothing to resume, also where the time limit has shortened the plan.
        return StopReason.TIME_LIMIT if late and done is StopReason.NONE else done

    def _agree(self, stop: StopReason, revising: bool) -> tuple[StopReason, bool]:
        """Whether all processes stop, and whether they revise the plan: their clocks may differ."""
        stop_number, any_revising = divmod(self.group.max(2 * stop + revising), 2)
        return StopReason(stop_number), any_revising == 1

    # -----------------------------------------------------------------------------------------
    # Time planning, see ``planner``

    def set_recipe(self, recipe: recipes.Recipe) -> None:
        """Use this recipe from now on. It may differ in steps, validations, warmup, schedule and decoding only."""
        self.recipe, self.training = recipe, recipe.training
        self.train_step.training = recipe.training
        self.model.recipe = recipe
        if self.group.is_main:
            self.run.write_recipe(recipe)

    @contextmanager
    def trial_steps(self) -> Iterator[Callable[[], int]]:
        """A function that trains for one step and returns its target tokens; afterwards the state is restored.

        Only before the first step.
        """
        assert self.state.step == 0
        state = replace(self.state)
        weights = {name: w.clone() for name, w in named_weights(self.network).items()}
        known = {p: {k: _clone(v) for k, v in s.items()} for p, s in self.optimizer.state.items()}
        with self._prefetched_batches() as batches:

            def run_step() -> int:
                chosen = [next(batches) for _ in range(self.training.accumulate)]
                self.step(chosen)
                return sum(batch.tokens for batch in chosen)

            try:
                yield run_step
            finally:
                self.state = state
                copy_weights(self.network, weights, "the initial weights")
                if self.ema is not None:
                    for name, mean in self.ema.items():
                        mean.copy_(weights[name])
                reset_optimizer(self.optimizer, known)

    @property
    def untimed_steps(self) -> int:
        """The first steps, which are slower and not timed: a GPU compiles and captures the step."""
        return EAGER_STEPS + 2 if self.cuda_graph_step is not None else 1

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)

    def count_labels(self, dataset: TokenDataset) -> int:
        """The labels of a whole dataset, counted as those of a step: target tokens, tags, or masked tokens."""
        count, size = len(dataset), 10_000
        chunks = (np.arange(start, min(start + size, count)) for start in range(0, count, size))
        return sum(self.encoder.count_labels(dataset, chunk) for chunk in chunks)

    # -----------------------------------------------------------------------------------------
    # One step

    def step(self, batches: list[TrainingBatch]) -> Tensor:
        """One optimizer step on some batches; returns the mean loss per token of this process."""
        step, training = self.state.step + 1, self.training
        _seed_step(training.seed, step, self.group.rank)
        tokens = sum(batch.tokens for batch in batches)
        # In the first steps the moving average follows closely, so that it forgets the random initialization.
        ema_rate = 1 - min(training.ema, (1 + step) / (10 + step))
        # The processes average their gradients; the mean over all tokens is needed.
        grad_scale = self.group.size / tokens
        rate = learning_rate(step, training, self.recipe.model.d_model)
        micro_batches = [part for batch in batches for part in batch.micro_batches]
        train_step = self.cuda_graph_step or self.train_step
        loss = train_step(micro_batches, StepScalars(grad_scale, rate, ema_rate))
        self.state.step = step  # from here on the state is that of the new weights
        self.state.tokens += tokens
        self.state.epoch, self.state.batch = batches[-1].cursor
        return loss

    def _set_ema(self, means: dict[str, Tensor]) -> None:
        """Use these tensors as the moving average of the weights."""
        self.ema, weights = means, named_weights(self.network)
        self.train_step.ema = (
            [local_part(mean) for mean in means.values()],
            [local_part(weights[name]) for name in means],
        )

    # -----------------------------------------------------------------------------------------
    # Memory

    def choose_micro_batches(self, reporter: ProgressReporter) -> None:
        """Choose the fewest micro-batches that fit into memory, judged by the largest batch of the first pool."""
        if self.cuda_graph_step is not None:
            return  # its memory is that of compiled layers; if it runs out, batches are split then
        loader, dataset, state = self.data_loader, self.prepared.dataset_for_epoch(0), self.state
        plan = loader.plan_epoch(dataset, 0).pool(0)
        rows = largest_batch(plan, dataset.source_lengths, dataset.target_lengths)

        def parts_of(rows: RowIndices) -> list[Batch]:
            return loader.collate(dataset, rows, state.micro_batches)

        def largest() -> list[Batch]:
            """The largest micro-batches: as many as are in memory at the same time."""
            by_size = sorted(parts_of(rows), key=lambda part: part.source.numel(), reverse=True)
            return by_size[: loader.parallel_rows]

        if parts_of(rows):  # a process may have no row of the batch
            if self.group.device.type == "cpu":
                some = rows[: few_rows(len(rows))] if loader.packs_on_cpu else rows
                state.micro_batches = estimate_micro_batches(
                    self.train_step,
                    parts_of(some)[0],
                    largest()[0],
                    len(rows),
                    loader.parallel_rows,
                )
            while not fits_in_memory(self.train_step, largest()):
                if state.micro_batches >= len(rows):
                    break
                state.micro_batches *= 2
        state.micro_batches = self.group.max(state.micro_batches)
        parts = state.micro_batches
        reporter.log("micro_batches", step=0, micro_batches=parts)
        reporter.message(
            f"training.tokens_per_batch: auto is {self.recipe.batch_tokens:,} tokens in {parts} "
            f"micro-batch{'es' * (parts > 1)}"
        )

    def release(self) -> None:
        """Free all memory of a trainer that is no longer used, wherever there are still references to it."""
        device = self.group.device
        vars(self).clear()
        gc.collect()  # trainer and evaluation refer to each other
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def _can_split_batches(self) -> bool:
        """Whether smaller micro-batches are possible, and the weights belong to a step or can be restored."""
        if self.group.size > 1 or self.recipe.model.norm == "batch":
            return False  # processes must agree; statistics are those of a whole batch
        if self.train_step.updating and not checkpoint_files(self.run.checkpoints):
            return False
        dataset = self.prepared.dataset_for_epoch(self.state.epoch)
        plan = self.data_loader.plan_epoch(dataset, self.state.epoch).pool(0)
        return self.state.micro_batches < max(map(len, plan))

    def _split_batches(self, reporter: ProgressReporter) -> None:
        """Use micro-batches of half the size from now on, starting at the last consistent state."""
        failed, parts = self.state.step, 2 * self.state.micro_batches
        earlier = self.state.out_of_memory
        release_memory(self.train_step)
        self.disable_cuda_graph()
        if self.train_step.updating:  # the weights are inconsistent
            self.load()
            self.train_step.updating = False
        self.state.micro_batches, self.state.out_of_memory = parts, [*earlier, failed]
        reporter.log(
            "out_of_memory", step=failed, micro_batches=parts, resumed_from=self.state.step
        )
        reporter.message(
            f"Out of memory after step {failed:,}. Continuing from step {self.state.step:,} with batches in {parts} "
            "micro-batches: the same tokens in each step, but the weights are not bit for bit those of a run with "
            "more memory"
        )

    # -----------------------------------------------------------------------------------------
    # Validation

    @contextmanager
    def evaluation_mode(self) -> Iterator[None]:
        """Turn dropout off and use the moving average as the weights for the duration of the with-block.

        If the weights are sharded, all processes must call this.
        """
        with self._averaged_weights():
            if self.sharded:
                with self._gathered_weights():
                    yield
                return
            self.distributed_loss_fn.eval()
            try:
                yield
            finally:
                self.distributed_loss_fn.train()

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Use the moving average as the weights for the duration of the with-block, if there is one."""
        if self.ema is None:
            yield
            return
        weights = {name: tensor.clone() for name, tensor in named_weights(self.network).items()}
        copy_weights(self.network, self.ema, "the moving average")
        try:
            yield
        finally:
            copy_weights(self.network, weights, "the weights")

    @contextmanager
    def _gathered_weights(self) -> Iterator[None]:
        """``evaluation_mode`` of sharded weights: each process has all of them for the duration of the with-block."""
        ema, self.ema, self.sharded = self.ema, None, False
        try:
            with gathered(self.loss_fn), self.evaluation_mode():
                yield
        finally:
            self.ema, self.sharded = ema, True

    def gather_weights(self) -> None:
        """End training: give each process all weights, and free the state of the optimizer."""
        self.ema = None
        if self.sharded:
            self.train_step.ema = None
            self.optimizer.state.clear()
            gather(self.loss_fn)
            self.sharded = False

    def validate(self) -> Validation:
        """The loss on all validation pairs, and the score of some of them, translated greedily."""
        start = time.monotonic()
        with self.evaluation_mode():
            loss = self._validation_loss()
            result = self._validation_score()
        self.validation_seconds = time.monotonic() - start
        if self.training.best_checkpoint_metric == "last":
            return Validation(loss, result, -float(self.state.step))
        if self.training.best_checkpoint_metric == "loss" or result is None:
            return Validation(loss, result, loss)
        return Validation(loss, result, -result.value if result.higher_is_better else result.value)

    def validate_and_save_best(self, reporter: ProgressReporter) -> None:
        """Validate, and save the weights as the run's model if they are the best so far.

        The main process decides and saves; the others compute their share of the validation.

        The model of a run that was finished before may be an average that is better than any single checkpoint. It is
        replaced only by better weights.
        """
        if self.sharded:
            if self.group.broadcast(not checkpoint_files(self.run.checkpoints)):
                self.save()  # while the weights are sharded; a model without a checkpoint could not be resumed
            with self.evaluation_mode():
                self.validate_and_save_best(reporter)
        elif self.group.is_main:
            self._validate_and_save_best(reporter)
            self.evaluation.dismiss()
        else:
            self.evaluation.assist()

    def _validate_and_save_best(self, reporter: ProgressReporter) -> None:
        state = self.state
        validation = self.validate()
        if not math.isfinite(validation.loss):
            raise NonFiniteError
        self.finish_saving()
        if not checkpoint_files(self.run.checkpoints):
            self._save_checkpoint()  # a model without a checkpoint could not be resumed
            self.finish_saving()
        best = validation.sort_key < state.best
        change = None
        if state.validations and self.training.best_checkpoint_metric == "score":
            change = state.validations[-1][1] - validation.objective
        state.validations.append((state.step, *validation.sort_key))
        keeps_last = (
            self.training.best_checkpoint_metric == "last"
        )  # then every validation is the best
        note = ", best so far" if best and not keeps_last else ""
        seconds = self.validation_seconds
        report_validation(reporter, state.step, validation, best, change, seconds, note)
        if reporter.samples_are_due():
            self._show_samples(reporter)
        if best and (self.selection is None or validation.sort_key < self.selection.sort_key):
            with self.evaluation_mode():
                # Copies: FSDP cannot free weights that safetensors has read as arrays of numpy.
                weights = {name: one.clone() for name, one in named_weights(self.network).items()}
                self.select(weights, Selection(1, *validation.sort_key))

    def _show_samples(self, reporter: ProgressReporter) -> None:
        """Print the current translations of two validation pairs."""
        if self.examples and isinstance(self.model, Translator):
            few = self.examples[:: max(1, len(self.examples) // 2)][:2]
            with self.evaluation_mode():
                outputs = self.model.predict_pairs(few, quick=True)
            for pair, output in zip(few, outputs, strict=True):
                reporter.message(f"    {shorten_text(pair.source)}  →  {shorten_text(output)}")

    def time_to_finish(self) -> float:
        """Seconds to reserve for the last validation; averaging and test scores are skipped if time is short."""
        return 2 + 1.5 * self.validation_seconds

    def _validation_loss(self) -> float:
        dataset = self.prepared.valid
        count = len(dataset)
        limit = min(count, self.state.max_validation_pairs or count)
        chosen = np.arange(limit) * count // max(1, limit)  # evenly spaced: files are often sorted
        lengths = dataset.source_lengths[chosen], dataset.target_lengths[chosen]
        plan = plan_sorted(*lengths, self.recipe.batch_tokens // self.state.micro_batches)
        batches = [chosen[indices] for indices in plan]
        tokens = sum(self.encoder.count_labels(dataset, rows) for rows in batches)
        total = 0.0
        for loss in self.evaluation.losses(batches):
            total += loss
        return total / tokens

    @torch.inference_mode()
    def summed_validation_loss(self, rows: RowIndices) -> float:
        """The summed loss of these rows of the validation data; the network must be in evaluation mode."""
        batch = self.encoder.collate(self.prepared.valid, rows).to(self.group.device)
        return float(self.train_step.compute_loss(self.loss_fn, batch))

    def _validation_score(self) -> MetricResult | None:
        if not self.examples:
            return None
        return self.evaluate(self.examples, quick=True)[0]

    def evaluate(self, pairs: list[Pair], *, quick: bool = False) -> list[MetricResult]:
        """Like ``Model.evaluate``, but all processes share the work. Main process only."""
        if self.recipe.text_only:
            # One stream of text, not one output per pair.
            return self.model.evaluate(pairs, quick=quick)
        outputs = self.evaluation.outputs(pairs, quick=quick)
        return self.model.score_outputs(outputs, pairs, quick=quick)

    # -----------------------------------------------------------------------------------------
    # Saving and resuming

    def select(self, weights: Mapping[str, Tensor], selection: Selection) -> None:
        """Make these weights the run's model."""
        self.run.write_weights(weights, selection)
        self.selection = selection

    def save(self) -> None:
        """Save a checkpoint, and delete those no longer needed; see ``finish_saving``. All processes must call this."""
        if self.group.is_main or self.sharded:
            self._save_checkpoint()
        self.group.barrier()
        if self.mirror is not None:
            self.finish_saving()
            self.mirror.update()

    def _save_checkpoint(self) -> None:
        """Save a checkpoint: in the background if its tensors are copied anyway, otherwise at once."""
        self.finish_saving()
        weights = named_weights(self.network)
        optimizer = optimizer_state(self.optimizer, self.parameter_names)
        if not self._all_finite(weights):
            raise NonFiniteError
        self.run.check_owner()
        self.state.environment = describe_environment(self)
        if self.saves_in_background:
            self.checkpoint_writer.start(self.state, weights, self.ema, optimizer)
        else:
            path = self.run.checkpoints / checkpoint_name(self.state.step)
            save_checkpoint(path, self.state, weights, self.ema, optimizer)
            self._delete_checkpoints()

    def _all_finite(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether all weights are finite, in all processes if they are sharded."""
        finite = all(bool(local_part(weight).isfinite().all()) for weight in weights.values())
        return self.group.max(not finite) == 0 if self.sharded else finite

    @property
    def saves_in_background(self) -> bool:
        """Whether the tensors of a checkpoint are copied to main memory first: from a GPU, or because of sharding."""
        return self.sharded or self.group.device.type == "cuda"

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is written, and delete those no longer needed."""
        if self.checkpoint_writer.wait() and self.group.is_main:
            self._delete_checkpoints()

    def _delete_checkpoints(self) -> None:
        """Delete the checkpoints that are no longer needed; the newest is kept."""
        folder = self.run.checkpoints
        newest = checkpoint_files(folder)[-1]
        delete_checkpoints(folder, keep=[*self.selected_checkpoints(), newest])

    def rescue(self) -> int:
        """Save a checkpoint after memory ran out, if that is possible, and return the step of the newest one.

        It is not possible in the middle of an update, and not for one of several processes.
        """
        self.train_step.zero_grad()  # frees the gradients
        files = checkpoint_files(self.run.checkpoints)
        newest = checkpoint_step(files[-1]) if files else 0
        if self.train_step.updating or self.group.size > 1 or self.state.step <= newest:
            return newest
        try:
            self._save_checkpoint()
            self.finish_saving()
        except (MemoryError, RuntimeError, RegardError, NonFiniteError):
            return newest
        return self.state.step

    def load(self) -> None:
        """Resume from the newest checkpoint, if there is one."""
        files = checkpoint_files(self.run.checkpoints)
        if not files:
            return
        own = named_weights(self.network)
        if self.sharded:
            self.state, tensors = load_checkpoint(files[-1], like=own, group=self.group)
        else:
            self.state, tensors = load_checkpoint(files[-1])
        if self.state.micro_batches > 1:
            self.disable_cuda_graph()
        copy_weights(self.network, shard_all(tensors["model"], own), str(files[-1]))
        if self.ema is not None:
            self._set_ema(shard_all(tensors["ema"], own))
        load_optimizer_state(self.optimizer, self.parameter_names, tensors["optimizer"])
        if self.group.is_main and self.run.weights_file.exists():
            _, self.selection = self.run.read_weights()

    def selected_checkpoints(self) -> list[Path]:
        """The checkpoints to keep and, at the end, to average."""
        training = self.training
        files = averageable_checkpoints(self.run.checkpoints, training, self.state)
        if training.average == "last":
            return files[-training.keep_checkpoints :]
        by_step = {checkpoint_step(path): path for path in files}
        ranked = sorted(self.state.validations, key=lambda validation: validation[1:])
        best = [by_step[step] for step, *_ in ranked if step in by_step]
        averages = training.average == "best" and training.best_checkpoint_metric != "last"
        return best[: training.keep_checkpoints if averages else 1]


def reset_optimizer(
    optimizer: torch.optim.Optimizer, known: Mapping[Tensor, Mapping[str, object]]
) -> None:
    """Restore the optimizer state ``known``; what is new since then is set to zero, its initial value.

    In place, because a CUDA graph has the addresses of the tensors.
    """
    for parameter, state in optimizer.state.items():
        before = known.get(parameter, {})
        for name, value in state.items():
            if isinstance(value, Tensor):
                earlier = before.get(name)
                value.copy_(earlier) if isinstance(earlier, Tensor) else value.zero_()
            else:
                state[name] = before.get(name, 0)


def _clone(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch, so that the dropout of a step does not depend on the steps before it."""
    (state,) = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)
    torch.manual_seed(int(state >> 1))


# ---------------------------------------------------------------------------------------------
# Speed


class Meter:
    """Measures the mean loss and the training speed between two log lines."""

    def __init__(self, trainer: Trainer, reporter: ProgressReporter) -> None:
        self.trainer, self.reporter = trainer, reporter
        self.total_loss, self.steps = torch.zeros((), device=trainer.group.device), 0
        self.tokens, self.start = trainer.state.tokens, time.monotonic()
        self.logged = False
        self.measured_steps, self.measured_seconds = 0, 0.0
        """since the first log line: the steps before it are slower, above all if a GPU compiles"""

    @property
    def seconds_per_step(self) -> float:
        """The mean, so that a short delay changes little."""
        return self.measured_seconds / max(1, self.measured_steps)

    def update(self, loss: Tensor) -> None:
        """Add the loss of one step."""
        self.total_loss += loss
        self.steps += 1

    def log(self) -> None:
        """Write a log line and start over; raises NonFiniteError if the loss is not finite."""
        state, training = self.trainer.state, self.trainer.training
        loss = self.trainer.group.mean(self.total_loss) / self.steps
        seconds = time.monotonic() - self.start
        state.seconds += seconds
        if self.logged:
            self.measured_steps += self.steps
            self.measured_seconds += seconds
        self.logged = True
        if not math.isfinite(loss):
            raise NonFiniteError
        values = {
            "loss": loss,
            "learning_rate": learning_rate(state.step, training, self.trainer.recipe.model.d_model),
            "speed": (state.tokens - self.tokens) / seconds,
        }
        self.reporter.show_step(state.step, training.steps, **values)
        self.reporter.log("step", step=state.step, epoch=state.epoch, **values)
        self.total_loss.zero_()
        self.steps, self.tokens, self.start = 0, state.tokens, time.monotonic()

    def restart_clock(self) -> None:
        """Count the time since the last log line as training time, but not in the training speed."""
        self.trainer.state.seconds += time.monotonic() - self.start
        self.start = time.monotonic()
