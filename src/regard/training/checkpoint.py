"""A checkpoint holds all that going on needs, in one safetensors file written whole or not at all.

Tensors: the weights, their moving average, the optimizer's moments. In the header: the step, the place in the data,
the best so far. Random states are not stored because none outlives a step: every step seeds dropout from (seed, step,
process), and every epoch's order comes from (seed, epoch), so the seed and the step *are* the random state. That is
also why N + N steps give the very weights of 2N steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, optim

from regard.errors import RegardError
from regard.storage.run_dir import RunDir, facts_of, write_tensors


@dataclass
class Progress:
    """Where a training stands."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """batches of this epoch already learned from"""
    tokens: int = 0
    """target tokens learned from"""
    seconds: float = 0.0
    """time spent, over all its sessions"""
    validations: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, badness, loss) of each; the smallest badness is the best, of equal ones the smallest loss"""

    @property
    def best(self) -> tuple[float, float]:
        return min((validation[1:] for validation in self.validations), default=(inf, inf))


def checkpoint_name(step: int) -> str:
    return f"step-{step:09d}.safetensors"


def checkpoint_files(folder: Path) -> list[Path]:
    """Oldest first."""
    pattern = re.compile(r"step-\d{9}\.safetensors")
    return sorted(path for path in folder.glob("step-*") if pattern.fullmatch(path.name))


def step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def save_checkpoint(
    path: Path,
    progress: Progress,
    weights: Mapping[str, Tensor],
    average: Mapping[str, Tensor] | None,
    moments: Mapping[str, Tensor],
) -> None:
    groups = {"model": weights, "average": average or {}, "optimizer": moments}
    tensors = {
        f"{group}.{name}": tensor.contiguous()
        for group, named in groups.items()
        for name, tensor in named.items()
    }
    write_tensors(path, tensors, asdict(progress))


def load_checkpoint(
    path: Path, wanted: Sequence[str] = ("model", "average", "optimizer")
) -> tuple[Progress, dict[str, dict[str, Tensor]]]:
    """Progress, and the tensors of each group by name; groups that are not wanted are not read."""
    groups: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}, "optimizer": {}}
    try:
        with safe_open(path, "pt") as file:
            facts = facts_of(file)
            for key in file.keys():  # noqa: SIM118
                group, _, name = key.partition(".")
                if group in wanted:
                    groups[group][name] = file.get_tensor(key)
        facts["validations"] = [
            (int(step), float(badness), float(loss)) for step, badness, loss in facts["validations"]
        ]
        return Progress(**facts), groups
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise RegardError(f"{path}: not a whole checkpoint: {error}") from None


def weights_in(path: Path) -> dict[str, Tensor]:
    """The weights a checkpoint would be used with: the moving average where there is one."""
    _, groups = load_checkpoint(path, ("model", "average"))
    return groups["average"] or groups["model"]


def average(paths: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of the weights of several checkpoints, summed in float64, one file in memory at a time."""
    sums: dict[str, Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for path in paths:
        weights = weights_in(path)
        if sums and weights.keys() != sums.keys():
            raise RegardError(f"{path}: other weights than {paths[0]}; average one run at a time")
        for name, tensor in weights.items():
            kinds[name] = tensor.dtype
            sums[name] = tensor.double() + sums[name] if name in sums else tensor.double()
    return {name: (total / len(paths)).to(kinds[name]) for name, total in sums.items()}


def average_run(run: Path, out: Path, last: int | None) -> list[int]:
    """A new bundle with the mean of a run's checkpoints, or of its last few; the steps it was made of."""
    old, new = RunDir(run), RunDir(out)
    recipe = old.recipe()
    files = checkpoint_files(old.checkpoints)
    if not files or (last or 0) > len(files):
        raise RegardError(f"{run}: {len(files)} checkpoints are kept there, {last or 1} asked for")
    if new.folder.exists() and any(new.folder.iterdir()):
        raise RegardError(f"{out}: not empty; nothing is overwritten, choose another --out")
    files = files[-last:] if last else files
    new.folder.mkdir(parents=True, exist_ok=True)
    new.write_recipe(recipe)
    old.tokenizer(recipe).save(new.folder)
    new.write_weights(average(files))
    new.write_card({"averaged_from": str(run), "averaged_steps": [step_of(p) for p in files]})
    return [step_of(path) for path in files]


def moments_of(optimizer: optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    """The optimizer's memory of each weight, as ``<weight>/<moment>``."""
    return {
        f"{names[parameter]}/{moment}": value
        for parameter, moments in optimizer.state.items()
        for moment, value in moments.items()
        if isinstance(value, Tensor)
    }


def put_moments(
    optimizer: optim.Optimizer, names: Mapping[Tensor, str], moments: Mapping[str, Tensor]
) -> None:
    parameters = {name: parameter for parameter, name in names.items()}
    for key, value in moments.items():
        name, _, moment = key.rpartition("/")
        parameter = parameters[name]
        # Beside the weight, where the fused kernels want even the counter of steps.
        optimizer.state[parameter][moment] = value.to(parameter.device)


def discard(paths: Iterable[Path], keep: Iterable[Path]) -> None:
    kept = set(keep)
    for path in paths:
        if path not in kept:
            path.unlink(missing_ok=True)
