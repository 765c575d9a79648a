"""Time of a packed training step in several processes, and how much of the exchange of gradients computation hides.

    torchrun --nproc-per-node 2 benchmarks/scale.py step multi30k --folder FOLDER

Every process must see the folder ``--folder``, in which the data are prepared. Compare the figures with those of one
process: the same batches, so tokens per second are comparable. Steps with and without overlap alternate, so that other
work on the machine affects both.

With ``--share-gpu`` all processes use the first GPU and exchange gradients through gloo, in main memory. Its speed says
nothing about several GPUs, but its losses can be compared with those of one process.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed

from regard.recipe import load_recipe
from regard.storage.run_dir import RunDir
from regard.training.data_loader import TrainingBatch
from regard.training.distributed import ProcessGroup, process_group
from regard.training.model_card import hardware
from regard.training.prepare_data import open_prepared, prepare
from regard.training.progress import ProgressReporter
from regard.training.resume import open_run
from regard.training.sharding import local_part
from regard.training.trainer import Trainer

STEPS_IN_TURN = 5
"""with overlap, then as many without it, and so on"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe that supports packed batches")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--folder", type=Path, required=True, help="folder for the prepared data")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--losses", type=int, default=0, help="the losses of this many steps")
    parser.add_argument("--share-gpu", action="store_true", help="all processes use one GPU")


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """The figures; None if another process of the group returns them."""
    recipe = load_recipe(options.recipe, [*options.changes, "training.batching=packed"])
    run = RunDir(options.folder)
    group_of = sharing_gpu() if options.share_gpu else process_group(recipe.training.device)
    with group_of as group:

        def prepare_run() -> None:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            open_run(run, recipe)
            prepare(run, recipe, ProgressReporter(run, enabled=False))

        group.on_main(prepare_run)
        group.check_shared_file(run.metadata_file)
        trainer = Trainer(run, recipe, open_prepared(run, recipe), group)
        found = timed_steps(trainer, options.steps)
        if options.losses:
            found["losses"] = losses(trainer, options.losses)
        return found if group.is_main else None


@contextmanager
def sharing_gpu() -> Iterator[ProcessGroup]:
    """The processes of torchrun, which all use the first GPU. NCCL refuses this, gloo copies to main memory."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ProcessGroup(0, 1, device)
        return
    distributed.init_process_group("gloo")
    try:
        rank = distributed.get_rank()
        yield ProcessGroup(rank, size, device, rank, size)
    finally:
        distributed.destroy_process_group()


# ---------------------------------------------------------------------------------------------
# Speed


@dataclass
class Timing:
    """Steps of one kind."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    exchanges: list[tuple[Any, Any]] = field(default_factory=list)
    """for each step, when ``average`` started and ended: seconds, or events of a GPU"""

    def per_step_ms(self, group: ProcessGroup) -> dict[str, float]:
        found = {"step_ms": self.seconds / self.steps, "cpu_ms": self.cpu_seconds / self.steps}
        found = {name: round(1e3 * seconds, 3) for name, seconds in found.items()}
        return found | {"exposed_ms": self.exchange_ms(group)}

    def exchange_ms(self, group: ProcessGroup) -> float:
        """The median time from the end of the backward pass of the last process to the end of the exchange.

        Processes of one machine have the same clock. GPUs do not: there, each waits for the slowest process, too.
        """
        if not self.exchanges:
            return 0.0
        if group.device.type == "cuda":
            return round(float(median(a.elapsed_time(b) for a, b in self.exchanges)), 3)
        of_processes = zip(*group.gather(self.exchanges), strict=True)
        times = (list(zip(*one, strict=True)) for one in of_processes)
        exposed: float = median(max(ends) - max(starts) for starts, ends in times)
        return round(1e3 * exposed, 3)


def timed_steps(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, of its all-reduces, and of the part of these that computation does not hide."""
    gradients, alone = trainer.train_step.gradients, Timing()
    kinds = {"overlap": Timing()} | ({} if gradients is None else {"no overlap": Timing()})
    with trainer.trial_steps() as run_step:
        for _ in range(trainer.untimed_steps):
            run_step()
        for first in range(0, steps, STEPS_IN_TURN):
            count = min(STEPS_IN_TURN, steps - first)
            for kind, timing in kinds.items():
                if gradients is None:
                    run_steps(trainer, run_step, timing, count)
                    continue
                with (
                    patch.object(gradients, "overlaps", kind == "overlap"),
                    clocked(trainer, timing),
                ):
                    run_steps(trainer, run_step, timing, count)
    if gradients is not None:
        with clocked(trainer, alone):
            for _ in range(steps):
                trainer.group.barrier()
                gradients.average()
        gradients.zero()
    usual, group = kinds["overlap"], trainer.group
    found: dict[str, Any] = {
        "processes": group.size,
        "hardware": hardware(group.device),
        "parameters": sum(parameter.numel() for parameter in trainer.train_step.parameters),
        "target_tokens_per_step": round(usual.tokens / usual.steps),
        **usual.per_step_ms(group),
        "target_tokens_per_second": round(usual.tokens / usual.seconds),
        "all_reduce_bytes": 0 if gradients is None else gradients.buffer.nbytes,
        "all_reduces": 0 if gradients is None else len(gradients.buckets),
        "all_reduce_ms": alone.exchange_ms(group),
    }
    if "no overlap" in kinds:
        found["without_overlap"] = kinds["no overlap"].per_step_ms(group)
        exposed = found["without_overlap"]["exposed_ms"]
        found["hidden_share"] = round(1 - found["exposed_ms"] / exposed, 3)
    return found


def run_steps(trainer: Trainer, run_step: Callable[[], int], timing: Timing, count: int) -> None:
    trainer.synchronize()
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(count):
        timing.tokens += run_step()
    trainer.synchronize()
    timing.seconds += time.perf_counter() - start
    timing.cpu_seconds += time.process_time() - cpu_start
    timing.steps += count


@contextmanager
def clocked(trainer: Trainer, timing: Timing) -> Iterator[None]:
    """Measure how long ``average`` takes: on a GPU, from the end of the work before it."""
    gradients, on_gpu = trainer.train_step.gradients, trainer.group.device.type == "cuda"
    assert gradients is not None
    average = gradients.average

    def now() -> Any:
        if not on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def timed(*ready: Any) -> None:
        start = now()
        average(*ready)
        timing.exchanges.append((start, now()))

    with patch.object(gradients, "average", timed):
        yield
        trainer.synchronize()


# ---------------------------------------------------------------------------------------------
# Losses


def losses(trainer: Trainer, steps: int) -> dict[str, Any]:
    """The mean losses of the first steps, with and without overlap; the weights are restored."""
    gradients = trainer.train_step.gradients
    if gradients is None:
        return {"overlap": first_losses(trainer, steps)}
    found = {}
    for kind in ("overlap", "no overlap"):
        with patch.object(gradients, "overlaps", kind == "overlap"):
            found[kind] = first_losses(trainer, steps)
    return found


def first_losses(trainer: Trainer, steps: int) -> dict[str, Any]:
    """The losses, and whether all processes have the same weights afterwards; a shard is not compared."""
    values: list[float] = []
    train = trainer.step

    def step(batches: list[TrainingBatch]) -> Tensor:
        loss = train(batches)
        values.append(trainer.group.mean(loss))
        return loss

    with patch.object(trainer, "step", step), trainer.trial_steps() as run_step:
        for _ in range(steps):
            run_step()
        weights = [local_part(one).detach().cpu() for one in trainer.train_step.parameters]
    if trainer.sharded:
        return {"losses": values}
    digest = sha256(b"".join(one.numpy().tobytes() for one in weights)).hexdigest()
    return {"losses": values, "equal_weights": len(set(trainer.group.gather(digest))) == 1}


# ---------------------------------------------------------------------------------------------
# For other parts


class StepError(Exception):
    """The command failed; the message is the end of its standard error."""


def run_in_processes(
    recipe: str,
    folder: Path,
    processes: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    timeout: float | None = None,
) -> dict[str, Any]:
    """The figures of ``scale.py step`` in this many processes; the data are prepared in ``folder``."""
    output = folder.with_name("step.json")
    output.unlink(missing_ok=True)
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes)]
    command += [str(Path(__file__).parents[1] / "scale.py"), "step", recipe]
    command += ["--folder", str(folder), "--json", str(output), *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **environment}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise StepError(f"no result after {timeout} seconds") from None
    if done.returncode:
        # Without what torchrun itself says about it.
        raise StepError(done.stderr.partition("torch/distributed/elastic")[0][-2000:])
    (found,) = json.loads(output.read_text())["step"]
    del found["command"]
    measured: dict[str, Any] = found
    return measured


# ---------------------------------------------------------------------------------------------
# Report


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("processes", f"{record['processes']}"),
        ("parameters", f"{record['parameters']:,}"),
        ("target tokens of a step", f"{record['target_tokens_per_step']:,}"),
        ("step", f"{record['step_ms']:,.0f} ms"),
        ("CPU time of a step in each process", f"{record['cpu_ms']:,.0f} ms"),
    ]
    return rows + exchange_figures(record)


def exchange_figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    """What the exchange of gradients takes; nothing for one process."""
    if "without_overlap" not in record:
        return []
    exposed = record["without_overlap"]["exposed_ms"]
    size = f"{record['all_reduce_bytes'] / 1e6:.1f} MB"
    return [
        (f"exchanged in {record['all_reduces']} all-reduces", size),
        ("all-reduces alone", f"{record['all_reduce_ms']:.1f} ms"),
        ("exchange exposed without overlap", f"{exposed:.1f} ms"),
        ("exchange exposed with overlap", f"{record['exposed_ms']:.1f} ms"),
        ("hidden by computation", f"{record['hidden_share']:.0%}"),
    ]
