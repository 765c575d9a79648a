"""One training step of a sharded model: what each process holds, and its peak memory.

    torchrun --nproc-per-node 2 benchmarks/scale.py sharded --preset huge --optimizer sgd

The weights are initialized in shards, so that no process ever has all of them. The batch is four sentences of 8 tokens.
"""

import argparse
import resource
import time
from typing import Any

import torch
from torch import distributed

from regard.nn.loss import Seq2SeqLoss
from regard.recipe import make_recipe
from regard.training.distributed import process_group
from regard.training.model_card import hardware
from regard.training.sharding import local_part, shard
from regard.training.train_step import StepScalars
from scaling.random_model import VOCABULARY, RandomModel

TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", default="huge")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--steps", type=int, default=2)


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

        model = RandomModel.of(recipe, group.device, change)
        parameters = list(model.loss_fn.parameters())
        sentences = 4 // group.size or 1
        ids = torch.randint(10, VOCABULARY, (sentences, TOKENS), device=group.device)
        losses, start = [], time.monotonic()
        for _ in range(options.steps):
            loss = model.train(ids, StepScalars(group.size / 32, 1e-3))
            losses.append(group.mean(loss))
        seconds = (time.monotonic() - start) / options.steps
        state = [one for known in model.optimizer.state.values() for one in known.values()]
        held = {
            "rank": group.rank,
            "weights": sum(local_part(one).nbytes for one in parameters),
            "optimizer": sum(
                local_part(one).nbytes for one in state if isinstance(one, torch.Tensor)
            ),
            "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
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
    return rows
