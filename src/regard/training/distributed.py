"""Several processes, one training. ``torchrun --nproc-per-node N -m regard train …`` starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from regard.errors import RegardError
from regard.inference.precision import choose_device
from regard.recipe import Device


@dataclass(frozen=True)
class Group:
    """This process among those that learn together; alone unless torchrun started it."""

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """The one process that writes files and speaks."""
        return self.rank == 0

    def wait(self) -> None:
        if self.size > 1:
            distributed.barrier()

    def max(self, number: int) -> int:
        """The greatest of all processes' numbers, in each of them: how they agree to stop."""
        if self.size == 1:
            return number
        numbers = torch.tensor(number, device=self.device)
        distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
        return int(numbers.item())

    def mean(self, number: torch.Tensor) -> float:
        """The mean over all processes, in each of them."""
        if self.size > 1:
            number = number.clone()
            distributed.all_reduce(number)
        return float(number) / self.size


@contextmanager
def join(device: Device) -> Iterator[Group]:
    """Join the other processes for the time of the with-block."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    place = choose_device(device)
    if size == 1:
        yield Group(0, 1, place)
        return
    local = int(os.environ["LOCAL_RANK"])
    if place.type == "cuda":
        if local >= torch.cuda.device_count():
            raise RegardError(
                f"process {local} has no GPU: torchrun started more processes than the "
                f"{torch.cuda.device_count()} GPU(s) here"
            )
        place = torch.device("cuda", local)
        torch.cuda.set_device(place)
    # Others wait while the first one prepares data or validates, which can take long.
    backend = "nccl" if place.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=timedelta(hours=3))
    try:
        yield Group(distributed.get_rank(), size, place)
    finally:
        distributed.destroy_process_group()
