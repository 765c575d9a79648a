"""One training step of a sharded model: what each process holds, and its peak memory.

    torchrun --nproc-per-node 2 benchmarks/scale.py sharded --preset huge --optimizer sgd

The weights are initialized in shards, so that no process ever has all of them. The batch is four sentences of 8 tokens.

With ``--save parts`` or ``--save gather``, a checkpoint is saved after the steps: each process writes its own part, or
the main process gathers everything, as it does where the machines share no folder.
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from regard.nn.loss import Seq2SeqLoss
from regard.nn.network import named_weights
from regard.recipe import make_recipe
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import CheckpointWriter, TrainingState, optimizer_state
from regard.training.distributed import ProcessGroup, process_group
from regard.training.model_card import hardware
from regard.training.sharding import local_part, shard
from regard.training.train_step import StepScalars
from scaling.random_model import VOCABULARY, RandomModel

TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="huge")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--save", choices=["parts", "gather"])


def measure(options: argparse.Namespace) -> dict[str, Any] | None:
    """The figures; None if another process of the group returns them."""
    sections = {
        "data": {"train": {"pairs": "x"}},
        "model": {"preset": options.preset, "norm_order": "pre"},
        "training": {"optimizer": options.optimizer},
    }
    recipe = make_recipe(sections, "sharded")
    with process_group("auto") as group:

        def change(loss_fn: Seq2SeqLoss) -> None:
            if group.size > 1:
                shard(loss_fn, group)
            torch.manual_seed(group.rank)

        model = RandomModel.of(recipe, group.device, change, options.vocabulary)
        parameters = list(model.loss_fn.parameters())
        sentences = 4 // group.size or 1
        ids = torch.randint(10, options.vocabulary, (sentences, TOKENS), device=group.device)
        losses, start = [], time.monotonic()
        for _ in range(options.steps):
            loss = model.train(ids, StepScalars(group.size / 32, 1e-3))
            losses.append(group.mean(loss))
        seconds = (time.monotonic() - start) / options.steps
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        saving = save(model, group, options.save) if options.save else {}
        state = [one for known in model.optimizer.state.values() for one in known.values()]
        held = {
            "rank": group.rank,
            "weights": sum(local_part(one).nbytes for one in parameters),
            "optimizer": sum(
                local_part(one).nbytes for one in state if isinstance(one, torch.Tensor)
            ),
            "peak_memory": peak,
            **saving,
        }
        found = {
            "hardware": hardware(group.device),
            "preset": options.preset,
            "optimizer": options.optimizer,
            "parameters": sum(one.numel() for one in parameters),
            "processes": group.gather(held),
            "losses": losses,
            "seconds_per_step": seconds,
        }
        if group.size > 1:
            distributed.barrier()
        return found if group.is_main else None


def save(model: RandomModel, group: ProcessGroup, way: str) -> dict[str, float]:
    """Save a checkpoint in a temporary folder: how long training stops, how long it takes, and what memory it adds."""
    network = model.loss_fn.network
    names: dict[torch.Tensor, str] = {one: name for name, one in network.named_parameters()}
    with tempfile.TemporaryDirectory() as temporary:
        run = RunDir(group.broadcast(temporary))
        if group.is_main:
            run.checkpoints.mkdir()
        group.barrier()
        writer = CheckpointWriter(run, group, shares_folder=way == "parts")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again
        before, start = memory("VmRSS"), time.monotonic()
        writer.start(
            TrainingState(1), named_weights(network), None, optimizer_state(model.optimizer, names)
        )
        blocked = time.monotonic() - start
        writer.wait()
        group.barrier()
        seconds = time.monotonic() - start
    return {
        "blocked_seconds": blocked,
        "saving_seconds": seconds,
        "memory_before_saving": before,
        "added_by_saving": memory("VmHWM") - before,
    }


def memory(field: str) -> int:
    """A value of /proc/self/status in bytes: VmRSS, the resident memory, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(value) * 1024


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (f"parameters, preset {record['preset']}", f"{record['parameters']:,}"),
        ("processes", f"{len(record['processes'])}"),
        ("step", f"{record['seconds_per_step']:.1f} s"),
    ]
    names = {"weights": "weights", "optimizer": "optimizer state", "peak_memory": "peak memory"}
    for key, name in names.items():
        most = max(held[key] for held in record["processes"])
        rows.append((f"{name} of a process", f"{most / 1e9:.2f} GB"))
    main = record["processes"][0]
    if "saving_seconds" in main:
        rows += [
            (
                "memory that saving adds in the main process",
                f"{main['added_by_saving'] / 1e9:.2f} GB",
            ),
            ("training stops for", f"{main['blocked_seconds']:.2f} s"),
            ("saving takes", f"{main['saving_seconds']:.1f} s"),
        ]
    return rows
