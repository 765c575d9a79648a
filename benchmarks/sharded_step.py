"""One training step of a sharded model: what each process holds, and its peak memory.

    torchrun --nproc-per-node 2 benchmarks/sharded_step.py --preset huge --optimizer sgd --json sharded-step.json

The weights are initialized in shards, so that no process ever has all of them. The batch is four sentences of 8 tokens.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from torch import distributed

from regard.data.batching import Batch
from regard.nn.architectures import ARCHITECTURES
from regard.nn.loss import Seq2SeqLoss
from regard.recipe import make_recipe
from regard.training.distributed import process_group
from regard.training.optimizers_and_schedules import OPTIMIZERS
from regard.training.sharding import local_part, shard
from regard.training.train_step import StepScalars, TrainStep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="huge")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sections = {
        "data": {"train": {"pairs": "x"}},
        "model": {"preset": options.preset, "norm_order": "pre"},
        "training": {"optimizer": options.optimizer},
    }
    recipe = make_recipe(sections, "sharded_step")
    with process_group("auto") as group:
        with torch.device("meta"):
            network = ARCHITECTURES["transformer"](
                recipe.model, options.vocabulary, options.vocabulary
            )
        loss_fn = Seq2SeqLoss(network, recipe.training)
        if group.size > 1:
            shard(loss_fn, group)
        loss_fn.to_empty(device=group.device)
        torch.manual_seed(group.rank)
        for parameter in loss_fn.parameters():
            torch.nn.init.normal_(local_part(parameter.detach()), std=0.02)
        parameters = list(loss_fn.parameters())
        optimizer = OPTIMIZERS[options.optimizer](parameters, recipe.training)
        step = TrainStep(loss_fn, optimizer, recipe.training, group.device)
        ids = torch.randint(10, options.vocabulary, (4 // group.size or 1, 8))
        losses, start = [], time.monotonic()
        for _ in range(options.steps):
            loss = step([Batch(ids, ids, ids)], StepScalars(group.size / 32, 1e-3))
            losses.append(group.mean(loss))
        seconds = (time.monotonic() - start) / options.steps
        state = [one for known in optimizer.state.values() for one in known.values()]
        held = {
            "rank": group.rank,
            "weights": sum(local_part(one).nbytes for one in parameters),
            "optimizer": sum(
                local_part(one).nbytes for one in state if isinstance(one, torch.Tensor)
            ),
            "peak_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        found = {
            "preset": options.preset,
            "optimizer": options.optimizer,
            "parameters": sum(one.numel() for one in parameters),
            "processes": group.gather(held),
            "losses": losses,
            "seconds_per_step": seconds,
        }
        if group.is_main:
            print(json.dumps(found, indent=2))
            if options.json:
                options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        if group.size > 1:
            distributed.barrier()


if __name__ == "__main__":
    main()
