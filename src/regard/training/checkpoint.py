"""Checkpoints: everything needed to resume training, in a safetensors file or a folder that is written atomically.

Tensors: the weights, their exponential moving average, the optimizer state. Header: the step, the position in the data,
the validation results. A sharded run writes a folder, each process its own part (``sharded_checkpoint.py``); any other
run writes one file. Both are read by any number of processes, sharded or not.

Random states are not saved, because none outlives a step: dropout is seeded from (seed, step,
rank) in every step, and the order of an epoch is drawn from (seed, epoch), so the seed and the step *are* the random
state. That is also why N + N steps give exactly the weights of 2N steps.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, optim

from regard.errors import RegardError
from regard.recipe import TrainingConfig
from regard.storage.atomic_files import (
    CHECKSUM,
    read_metadata,
    read_tensors,
    temporary_folder,
    write_tensors,
)
from regard.storage.run_dir import CHECKPOINT_STATE, RunDir
from regard.training.distributed import ProcessGroup
from regard.training.sharding import gather_tensors, is_sharded, shard_like

if TYPE_CHECKING:  # torch.distributed.checkpoint takes a third of the time to import torch
    from regard.training.sharded_checkpoint import PendingParts

TENSOR_GROUPS = ("model", "ema", "optimizer")
"""Prefixes of the tensor names in a checkpoint."""


@dataclass
class TrainingState:
    """How far training has come."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """number of batches of this epoch that are done"""
    tokens: int = 0
    """number of target tokens trained on"""
    seconds: float = 0.0
    """time spent, over all sessions"""
    validations: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, objective, loss) of each validation; the lowest objective is the best, ties are broken by the loss"""
    max_validation_pairs: int | None = None
    """the validation loss is computed on this many pairs, chosen by the plan of the run; None: all"""
    environment: str = ""
    """what the rounding of the weights depends on: device, number of threads, version of torch"""
    micro_batches: int = 1
    """number of parts in which a batch is processed"""
    out_of_memory: list[int] = field(default_factory=list)
    """the steps after which memory ran out, and batches were split further"""

    @property
    def best(self) -> tuple[float, float]:
        """Objective and loss of the best validation."""
        return min((validation[1:] for validation in self.validations), default=(inf, inf))

    @property
    def start(self) -> tuple[float, float]:
        """Objective and loss of the weights that fine-tuning started from; infinity for any other training."""
        starts = (validation[1:] for validation in self.validations if validation[0] == 0)
        return next(starts, (inf, inf))

    @property
    def is_start_best(self) -> bool:
        """Whether no validation was better than that of the weights that fine-tuning started from."""
        return self.start == self.best != (inf, inf)


# ---------------------------------------------------------------------------------------------
# Files


def checkpoint_name(step: int, in_parts: bool = False) -> str:
    """The name of a checkpoint: of a file, or of a folder if it is in parts."""
    return f"step-{step:09d}{'' if in_parts else '.safetensors'}"


def checkpoint_files(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first: files, and folders of checkpoints in parts.

    A step may have both for a moment. They have the same tensors, and the file is taken.
    """
    return [*{checkpoint_step(path): path for path in _all_checkpoints(folder)}.values()]


def _all_checkpoints(folder: Path) -> list[Path]:
    pattern = re.compile(r"step-\d{9}(\.safetensors)?")
    found = sorted(path for path in folder.glob("step-*") if pattern.fullmatch(path.name))
    return [path for path in found if path.suffix or is_in_parts(path)]


def is_in_parts(path: Path) -> bool:
    """Whether a checkpoint is a folder of parts."""
    return (path / CHECKPOINT_STATE).is_file()


def checkpoint_step(path: Path) -> int:
    """The step at which a checkpoint was saved."""
    return int(path.stem.removeprefix("step-"))


def delete_checkpoints(folder: Path, keep: Iterable[Path]) -> None:
    """Delete all checkpoints in a folder but those to keep."""
    kept = set(keep)
    for path in _all_checkpoints(folder):
        if path in kept:
            continue
        if path.is_dir():  # it disappears as a whole, also if this process is killed
            path = path.replace(temporary_folder(path))
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


Tensors = Mapping[str, Tensor]
CheckpointTensors = tuple[Tensors, Tensors | None, Tensors]
"""the weights, their moving average, and the result of ``optimizer_state``, as in ``TENSOR_GROUPS``"""


def _by_name(tensors: CheckpointTensors) -> dict[str, Tensor]:
    """All tensors of a checkpoint, with the names that they have in it."""
    return {
        f"{group}.{name}": tensor
        for group, some in zip(TENSOR_GROUPS, tensors, strict=True)
        for name, tensor in (some or {}).items()
    }


def save_checkpoint(path: Path, state: TrainingState, *tensors: *CheckpointTensors) -> None:
    """Write a checkpoint to a file."""
    named = {name: tensor.contiguous() for name, tensor in _by_name(tensors).items()}
    write_tensors(path, named, asdict(state))


class CheckpointWriter:
    """Writes checkpoints while training continues, one at a time.

    Each process writes its own part of sharded tensors, if all of them reach the folder. Otherwise the tensors are
    gathered, and a thread of the main process writes them to a file.
    """

    def __init__(self, run: RunDir, group: ProcessGroup, shares_folder: bool = True) -> None:
        """shares_folder: whether all processes reach the run folder."""
        self.run, self.group, self.shares_folder = run, group, shares_folder
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | PendingParts | None = None

    def start(self, state: TrainingState, *tensors: *CheckpointTensors) -> None:
        """Begin to save a checkpoint; the tensors are copied before this returns.

        If they are sharded, all processes must call this.
        """
        self.wait()
        in_parts = self.shares_folder and any(map(is_sharded, tensors[0].values()))
        path = self.run.checkpoints / checkpoint_name(state.step, in_parts)
        if in_parts:
            from regard.training.sharded_checkpoint import save_parts

            named, check = _by_name(tensors), self.run.check_owner
            self._writing = save_parts(path, asdict(state), named, self.group, check)
            return
        weights, ema, optimizer = (
            None if some is None else gather_tensors(some, self.group.is_main) for some in tensors
        )
        if self.group.is_main:
            assert weights is not None
            assert optimizer is not None
            self._writing = self._thread.submit(
                save_checkpoint, path, deepcopy(state), weights, ema, optimizer
            )

    def wait(self) -> bool:
        """Wait until the checkpoint is written; raises what went wrong. Returns whether there was one."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
        return writing is not None


def load_checkpoint(
    path: Path,
    tensor_groups: Sequence[str] = TENSOR_GROUPS,
    like: Tensors | None = None,
    group: ProcessGroup | None = None,
) -> tuple[TrainingState, dict[str, dict[str, Tensor]]]:
    """The training state, and the tensors of each group by name: whole, or parts of them.

    like: sharded weights by name. Each process of ``group`` then reads only its own part, where a checkpoint is in
    parts. The tensors of a file are whole; see ``shard_like``.
    """
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in TENSOR_GROUPS}
    try:
        if is_in_parts(path):
            from regard.training.sharded_checkpoint import load_parts

            state = load_training_state(path)
            tensors = load_parts(path, tensor_groups, like, group)
        else:
            tensors, header = read_tensors(path)
            state = _training_state(header)
        for key, tensor in tensors.items():
            prefix, _, name = key.partition(".")
            groups[prefix][name] = tensor
        return state, groups
    except DAMAGE as error:
        raise RegardError(f"{path}: not a complete checkpoint: {error}") from None


def load_training_state(path: Path) -> TrainingState:
    """The training state of a checkpoint; its tensors are not read."""
    try:
        if is_in_parts(path):
            from regard.training.sharded_checkpoint import read_state

            return _training_state(read_state(path))
        with safe_open(path, "pt") as file:
            header = read_metadata(file)
        header.pop(CHECKSUM, None)
        return _training_state(header)
    except DAMAGE as error:
        raise RegardError(f"{path}: not a complete checkpoint: {error}") from None


DAMAGE = (SafetensorError, OSError, KeyError, ValueError, TypeError)
"""Errors from reading a file that is damaged, or not a checkpoint."""


def _training_state(header: dict[str, Any]) -> TrainingState:
    header["validations"] = [
        (int(step), float(objective), float(loss))
        for step, objective, loss in header["validations"]
    ]
    return TrainingState(**header)


def checkpoint_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint for inference: the moving average if there is one."""
    _, tensors = load_checkpoint(path, ("model", "ema"))
    return tensors["ema"] or tensors["model"]


# ---------------------------------------------------------------------------------------------
# Optimizer state


def optimizer_state(optimizer: optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The tensors of the optimizer state, named ``<weight>/<key>``; ``names`` are the names of the weights."""
    return {
        f"{names[parameter]}/{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


def load_optimizer_state(
    optimizer: optim.Optimizer, names: Mapping[Tensor, str], state: Mapping[str, Tensor]
) -> None:
    """Restore what ``optimizer_state`` returned."""
    parameters = {name: parameter for parameter, name in names.items()}
    for path, value in state.items():
        name, _, key = path.rpartition("/")
        parameter = parameters[name]
        # On the device of the weight: the fused kernels need even the step counter there.
        optimizer.state[parameter][key] = shard_like(value, parameter)


# ---------------------------------------------------------------------------------------------
# Checkpoint averaging


def is_scheduled(step: int, training: TrainingConfig) -> bool:
    """Whether an uninterrupted run has a checkpoint at this step."""
    due = step % training.checkpoint_every == 0 or step % training.validate_every == 0
    return due or step == training.steps


def averageable_checkpoints(
    folder: Path, training: TrainingConfig, state: TrainingState | None = None
) -> list[Path]:
    """The checkpoints in a folder that may be averaged, oldest first.

    A checkpoint that an interruption wrote between two scheduled steps is left out: an interruption must not change
    the resulting model. So is one of the weights that fine-tuning started from. With ``average: best`` every validated
    checkpoint counts, also one that was written when the time limit was reached. ``state`` defaults to that of the
    newest checkpoint.
    """
    files = checkpoint_files(folder)
    if state is None:
        state = load_training_state(files[-1]) if files else TrainingState()
    validated = {step for step, *_ in state.validations} if training.average != "last" else set()
    steps = [checkpoint_step(path) for path in files]
    return [
        path
        for path, step in zip(files, steps, strict=True)
        if step and (step in validated or is_scheduled(step, training))
    ]


def average_checkpoints(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights of several checkpoints, with one of them in memory at a time."""
    return average_weights((str(path), checkpoint_weights(path)) for path in paths)


def average_weights(named: Iterable[tuple[str, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The mean of several sets of weights, summed in float64. Each comes with its origin, for error messages."""
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    first, count = "", 0
    for where, weights in named:
        first, count = first or where, count + 1
        if sums and weights.keys() != sums.keys():
            raise RegardError(
                f"{where}: its weights differ in name from those of {first}; average checkpoints of one run"
            )
        for name, tensor in weights.items():
            dtypes[name] = tensor.dtype
            sums[name] = tensor.double() + sums[name] if name in sums else tensor.double()
    return {name: (total / count).to(dtypes[name]) for name, total in sums.items()}


def average_run(run: Path, out: Path, last: int | None) -> list[int]:
    """Write a new run folder with the average of a run's checkpoints and return their steps.

    ``last``: only the last few checkpoints; None: all that were kept. See ``averageable_checkpoints``.
    """
    old, new = RunDir(run), RunDir(out)
    recipe = old.recipe()
    files = averageable_checkpoints(old.checkpoints, recipe.training)
    if not files or (last or 0) > len(files):
        raise RegardError(
            f"{run}: cannot average {last or 1} checkpoint{'s' * ((last or 1) > 1)}: there are only {len(files)}"
            + _excluded(old.checkpoints, files)
        )
    _check_empty(new)
    files = files[-last:] if last else files
    steps = [checkpoint_step(path) for path in files]
    card = {"averaged_from": str(run), "averaged_steps": steps}
    _write_average(new, old, average_checkpoints(files), card)
    return steps


def average_runs(runs: Sequence[Path], out: Path) -> None:
    """Write a new run folder with the average of the models of several runs (a model soup, Wortsman et al. 2022).

    They must have the same network and tokenizer, and must have started from the same weights: the mean of networks
    that learned from different random weights is no better than random.
    """
    folders, new = [RunDir(run) for run in runs], RunDir(out)
    first, recipe = folders[0], folders[0].recipe()
    files = [path.read_bytes() for path in first.tokenizer_files()]
    for run in folders[1:]:
        theirs = run.recipe()
        if theirs.task != recipe.task or theirs.model != recipe.model:
            raise RegardError(f"{run}: its task or model section differs from that of {first}")
        if [path.read_bytes() for path in run.tokenizer_files()] != files:
            raise RegardError(f"{run}: its tokenizer differs from that of {first}")
        if _initial_weights(theirs.training) != _initial_weights(recipe.training):
            raise RegardError(
                f"{run}: it did not start from the same weights as {first} (training.init_from, or training.seed), so "
                "their average is useless; fine-tune one run with several seeds and average the results"
            )
    _check_empty(new)
    averaged = average_weights((str(run), run.weights()) for run in folders)
    _write_average(new, first, averaged, {"averaged_from": ", ".join(map(str, runs))})


def _initial_weights(training: TrainingConfig) -> object:
    """What the weights of a training started from: those of another run, or random ones."""
    return training.seed if training.init_from is None else training.init_from


def _check_empty(new: RunDir) -> None:
    if new.folder.exists() and any(new.folder.iterdir()):
        raise RegardError(f"{new}: the folder is not empty; choose another --out")


def _write_average(
    new: RunDir, old: RunDir, weights: Mapping[str, Tensor], card: dict[str, Any]
) -> None:
    recipe = old.recipe()
    new.folder.mkdir(parents=True, exist_ok=True)
    new.write_recipe(recipe)
    old.tokenizer(recipe).save(new.folder)
    new.write_weights(weights)
    new.write_card(card)


def _excluded(folder: Path, averageable: Sequence[Path]) -> str:
    """Names the checkpoints that may not be averaged, for an error message."""
    steps = [
        f"{checkpoint_step(path):,}" for path in checkpoint_files(folder) if path not in averageable
    ]
    return f" (not counting step {', '.join(steps)}, saved by an interruption)" if steps else ""
