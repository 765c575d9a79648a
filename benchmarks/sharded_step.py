"""One training step of a sharded model: what each process holds, and its peak memory.

    torchrun --nproc-per-node 2 benchmarks/sharded_step.py --preset huge --optimizer sgd --json sharded-step.json

The weights are initialized in shards, so that no process ever has all of them. The batch is four sentences of 8 tokens.

With ``--save parts`` or ``--save gather``, a checkpoint is saved after the steps: each process writes its own part, or
the main process gathers everything, as it does where the machines share no folder.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed

from regard.data.batching import Batch
from regard.nn.architectures import ARCHITECTURES
from regard.nn.loss import Seq2SeqLoss
from regard.nn.network import named_weights
from regard.recipe import make_recipe
from regard.storage.run_dir import RunDir
from regard.training.checkpoint import CheckpointWriter, TrainingState, optimizer_state
from regard.training.distributed import ProcessGroup, process_group
from regard.training.optimizers_and_schedules import OPTIMIZERS
from regard.training.sharding import local_part, shard
from regard.training.train_step import StepScalars, TrainStep


def memory(field: str) -> int:
    """A value of /proc/self/status in bytes: VmRSS, the resident memory, or VmHWM, its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(value) * 1024


def save(
    loss_fn: Seq2SeqLoss, optimizer: torch.optim.Optimizer, group: ProcessGroup, way: str
) -> dict[str, float]:
    """Save a checkpoint in a temporary folder: how long training stops, how long it takes, and what memory it adds."""
    names = {parameter: name for name, parameter in loss_fn.network.named_parameters()}
    with tempfile.TemporaryDirectory() as temporary:
        run = RunDir(group.broadcast(temporary))
        if group.is_main:
            run.checkpoints.mkdir()
        group.barrier()
        writer = CheckpointWriter(run, group, shares_folder=way == "parts")
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak starts again
        before, start = memory("VmRSS"), time.monotonic()
        tensors = named_weights(loss_fn.network), None, optimizer_state(optimizer, names)
        writer.start(TrainingState(1), *tensors)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="huge")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--save", choices=["parts", "gather"])
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
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        saving = save(loss_fn, optimizer, group, options.save) if options.save else {}
        state = [one for known in optimizer.state.values() for one in known.values()]
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
            "preset": options.preset,
            "optimizer": options.optimizer,
            "save": options.save,
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
