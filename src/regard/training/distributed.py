"""Data-parallel training in several processes, started by ``torchrun --nproc-per-node N -m regard train …``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed

from regard.errors import RegardError
from regard.inference.precision import choose_device
from regard.recipe import Device

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train together, seen from one of them; a single process unless torchrun started it."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes files and prints messages."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all processes get here."""
        if self.size > 1:
            distributed.barrier()

    def max(self, value: int) -> int:
        """The maximum over all processes, returned in each of them. Processes agree on a stop reason this way."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, device=self.device)
        distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
        return int(tensor.item())

    def broadcast(self, value: T) -> T:
        """The value of the main process, returned in each process."""
        if self.size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, device=self.device)
        return values[0]

    def mean(self, value: torch.Tensor) -> float:
        """The mean over all processes, returned in each of them."""
        if self.size > 1:
            value = value.clone()
            distributed.all_reduce(value)
        return float(value) / self.size


@contextmanager
def process_group(device: Device) -> Iterator[ProcessGroup]:
    """Join the process group of torchrun for the duration of the with-block."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    torch_device = choose_device(device)
    if size == 1:
        yield ProcessGroup(0, 1, torch_device)
        return
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch_device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise RegardError(
                f"process {local_rank} has no GPU: torchrun started more processes than there are "
                f"GPUs ({torch.cuda.device_count()})"
            )
        torch_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(torch_device)
    # The other processes wait while the main one prepares data or validates, which can take long.
    backend = "nccl" if torch_device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=timedelta(hours=3))
    try:
        yield ProcessGroup(distributed.get_rank(), size, torch_device)
    finally:
        distributed.destroy_process_group()
