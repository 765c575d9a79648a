"""Open a run folder: lock it, and check that a run in it can be resumed with this recipe.

A resumed run has the weights of an uninterrupted one, bit for bit, in the same environment (``describe_environment``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regard.data.corpus import data_paths
from regard.errors import RegardError
from regard.recipe import DataConfig, DataFiles, Recipe, make_recipe
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import checkpoint_files, checkpoint_step
from regard.training.fine_tuning import recipe_differences

if TYPE_CHECKING:
    from regard.training.trainer import Trainer

CHANGEABLE_KEYS = (
    *("training.steps", "training.patience", "training.device", "training.log_every"),
    *("training.sharding", "training.activation_checkpointing"),
    *("data.root", "data.test", "decoding.", "evaluation."),
)
"""Keys and sections that may change when a run is resumed; any other change would give another model."""

PLANNED_KEYS = (
    *("steps", "warmup", "schedule", "learning_rate"),
    *("validate_every", "validate_sentences", "best_checkpoint_metric", "checkpoint_every"),
)
"""The keys of the training section that a plan sets."""
RESTART_SECONDS = 60.0
"""If torchrun restarts processes: how long to wait for the lock of one that has not ended yet."""


def restart_seconds() -> float:
    """How long to wait for the lock of a run: with ``torchrun --max-restarts``, an earlier process may still have it.

    It may be on a machine that the others no longer reach. It notices this after ``SILENT_PEER_SECONDS``.
    """
    return RESTART_SECONDS if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) else 0.0


@contextmanager
def locked(run: RunDir, seconds: float = 0.0) -> Iterator[None]:
    """Allow one process at a time to train in a folder; the lock is released when the process ends, however it ends.

    seconds: how long to wait for the lock.
    """
    check_run_folder(run)
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RegardError(f"{run}: cannot create the folder: {error.strerror}") from None
    with run.lock(seconds) as free:
        if not free:
            raise RegardError(
                f"{run}: another process is training here; wait for it, or choose another --out"
            )
        run.delete_files(run.temporary_files())
        yield


def check_run_folder(run: RunDir) -> None:
    """Raise if the folder contains files but no run; a recipe alone may be one that the user wrote."""
    started = (run.lock_file, run.metadata_file, run.weights_file)
    if not run.folder.exists() or any(path.exists() for path in started):
        return
    if not run.folder.is_dir():
        raise RegardError(f"{run}: a file, not a folder; choose another --out")
    own = (run.checkpoints, run.data)
    others = sorted(path.name for path in run.folder.iterdir() if path not in own)
    if others:
        raise RegardError(
            f"{run}: the folder contains other files ({', '.join(others[:3])}) and is not a run folder; "
            "choose another --out"
        )


def open_run(run: RunDir, recipe: Recipe) -> None:
    """Write the recipe of a new run; for a run with checkpoints, check that it can be resumed with this recipe."""
    if not checkpoint_files(run.checkpoints):
        if run.weights_file.exists():
            raise RegardError(
                f"{run}: contains a model but no checkpoints, so it cannot be resumed; choose another --out"
            )
        run.write_recipe(recipe)
        return
    previous = run.recipe()
    differences = list(recipe_differences(previous.model_dump(), recipe.model_dump()))
    fixed = tuple(_fixed_keys(previous, recipe))
    forbidden = [
        text
        for key, text in differences
        if not key.startswith(CHANGEABLE_KEYS) or key.startswith(fixed)
    ]
    if forbidden:
        raise RegardError(
            f"{run}: contains a run with a different recipe; choose another --out. Differences: "
            + "; ".join(forbidden[:5])
        )
    done = checkpoint_step(checkpoint_files(run.checkpoints)[-1])
    if recipe.training.steps < done:
        raise RegardError(
            f"{run}: already trained for {done:,} steps, more than training.steps: {recipe.training.steps:,}; "
            "increase training.steps, or choose another --out"
        )
    if differences:
        run.card_file.unlink(missing_ok=True)  # it belongs to the old recipe
        run.write_recipe(recipe)


def resumable_recipe(
    out: Path,
    files: DataFiles,
    root: str,
    changes: Sequence[str],
    languages: tuple[str, str] | None = None,
) -> Recipe | None:
    """The recipe of a run that was started with an automatic recipe for the same files; None if there is none.

    ``changes`` are settings of the user, which must agree with it, and so must ``languages``, if they are given. The
    recipe is not chosen again, because the choice depends on the current speed of the machine.
    """
    run = RunDir(out)
    if not checkpoint_files(run.checkpoints):
        return None
    recipe = run.recipe()
    if (
        recipe.data.train != files
        or Path(recipe.data.root or ".").resolve() != Path(root).resolve()
    ):
        data_paths(files, DataConfig(root=root, train=files), "")  # a missing file is named first
        raise RegardError(f"{run}: contains a run with different data; choose another --out")
    if languages is not None and languages != recipe.data.languages:
        raise RegardError(
            f"{run}: contains a run with languages other than {','.join(languages)}; choose another --out"
        )
    if not any(change.startswith("training.steps=") for change in changes):
        # The run has a plan, which may have changed what the user has set.
        planned = tuple(f"training.{key}=" for key in PLANNED_KEYS)
        changes = [change for change in changes if not change.startswith(planned)]
    return make_recipe(recipe.model_dump(), str(run.recipe_file), changes)


def keep_plan(run: RunDir, recipe: Recipe) -> Recipe:
    """The recipe with the plan of a run that is resumed, unless the user asks for something else now."""
    if not checkpoint_files(run.checkpoints) or not run.plan_file.exists():
        return recipe
    try:
        requested = json.loads(run.plan_file.read_text(encoding="utf-8"))
    except ValueError:
        raise RegardError(
            f"{run.plan_file}: not JSON; delete it to resume without a plan"
        ) from None
    if requested != planned_values(recipe):
        return recipe
    return with_plan(recipe, run.recipe())


def with_plan(recipe: Recipe, planned: Recipe) -> Recipe:
    """The recipe with the plan of another."""
    training = recipe.training.model_copy(update=planned_values(planned))
    return recipe.model_copy(update={"training": training})


def planned_values(recipe: Recipe) -> dict[str, Any]:
    """The values of the recipe that a plan sets."""
    return {key: getattr(recipe.training, key) for key in PLANNED_KEYS}


def _fixed_keys(previous: Recipe, recipe: Recipe) -> Iterator[str]:
    """Keys that may change in other runs, but not in this one."""
    if recipe.training.schedule == "cosine":
        yield "training.steps"  # every learning rate depends on it
    if recipe.training.best_checkpoint_metric == "score":
        yield "evaluation.tokenize"  # the scores of checkpoints would not be comparable
        if previous.evaluation.metrics[0] != recipe.evaluation.metrics[0]:
            yield "evaluation.metrics"


# ---------------------------------------------------------------------------------------------
# Exact resume: the same weights, bit for bit


def describe_environment(trainer: Trainer) -> str:
    """What the rounding of the weights depends on. A resumed run is exact in the same environment."""
    group, loader = trainer.group, trainer.data_loader
    if group.device.type == "cuda":
        device = torch.cuda.get_device_name(group.device)
    else:
        threads = torch.get_num_threads()
        device = f"{torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' * (threads > 1)}"
    kernels = ", native kernels" if loader.packs_on_cpu else ""
    if loader.parallel_rows > 1:
        kernels += f", {loader.parallel_rows} packed rows at a time"
    processes = f"{group.size} process{'es' * (group.size > 1)}"
    return f"torch {torch.__version__}, {device}{kernels}, {processes}"


def inexact_resume_warning(trainer: Trainer) -> str | None:
    """A warning if the run was trained in another environment so far, so that it cannot be resumed exactly."""
    before, here = trainer.state.environment, describe_environment(trainer)
    if before == here:
        return None
    return (
        f"Trained so far with {before}, now with {here}: the weights may differ in rounding from those of an "
        "uninterrupted run"
    )
