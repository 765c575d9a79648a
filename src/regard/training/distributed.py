"""Data-parallel training in several processes, started by ``torchrun --nproc-per-node N -m regard train …``.

Every process has all weights. It computes the gradients of its share of each batch, and the processes average them.
Padded batches use DistributedDataParallel, which exchanges gradients during the backward pass. Packed batches use
``FlatGradients``, which exchanges them after it, so that the passes before and after can be CUDA graphs.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from regard.data.batching import TILE, Lengths, PackedSize
from regard.data.dataset import RowIndices
from regard.errors import RegardError
from regard.inference.precision import choose_device
from regard.recipe import Device

T = TypeVar("T")

CONNECTION_LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "recv/send error"),
    *("NCCL communicator was aborted", "remote process exited"),
)
"""Parts of the messages of torch's errors when another process has ended."""
SHARED_FOLDER_SECONDS = 3.0
"""How long to wait for a file of another machine; a network file system may show it later."""
MEASURED_BATCHES, FITTING_BATCHES = 1000, 0.99
"""The size of a process's packed row is chosen for this share of the first batches."""


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train together, seen from one of them; a single process unless torchrun started it."""

    rank: int
    size: int
    device: torch.device
    local_rank: int = 0
    """the number of the process on its machine"""

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

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of the main process into these tensors of each process."""
        for tensor in tensors if self.size > 1 else ():
            value = tensor.detach().clone()  # c10d does not count its writes as changes of a tensor
            distributed.broadcast(value, 0)
            if not self.is_main:
                tensor.copy_(value)

    def gather(self, value: T) -> list[T]:
        """The values of all processes in the order of their ranks, returned in each process."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        distributed.all_gather_object(values, value)
        return values

    def mean(self, value: torch.Tensor) -> float:
        """The mean over all processes, returned in each of them."""
        if self.size > 1:
            value = value.clone()
            distributed.all_reduce(value)
        return float(value) / self.size

    def in_each(self, function: Callable[[], T]) -> T:
        """Call a function in each process. If it raises RegardError in one of them, all raise it and none waits.

        Only the first process of each machine prints the message.
        """
        if self.size == 1:
            return function()
        try:
            result, message = function(), None
        except RegardError as error:
            message = str(error)
        for found in self.gather(message):
            if found is not None:
                raise RegardError(found) if self.local_rank == 0 else SystemExit(2)
        return result

    def on_main(self, function: Callable[[], object]) -> None:
        """Call a function in the main process, while the others wait; errors as with ``in_each``."""
        self.in_each(lambda: function() if self.is_main else None)

    def check_shared_file(self, path: Path) -> None:
        """Raise if a process does not see the file that the main process has written, or sees another one."""
        host = socket.gethostname()
        content = path.read_bytes() if self.is_main else b""
        written, main_host = self.broadcast((content, host))

        def check() -> None:
            deadline = time.monotonic() + SHARED_FOLDER_SECONDS
            while not (path.is_file() and path.read_bytes() == written):
                if time.monotonic() > deadline:
                    raise RegardError(
                        f"{path}: process {self.rank} on {host} does not see this file as process 0 on {main_host} "
                        "has written it. All processes need the same run folder: choose an --out on a file system "
                        "that the machines share, such as NFS, and give its absolute path on each of them"
                    )
                time.sleep(0.1)

        self.in_each(check)


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
    try:
        distributed.init_process_group(backend, timeout=timedelta(hours=3))
    except RuntimeError as error:
        raise RegardError(
            f"the {size} processes cannot connect to each other: {first_sentence(error)}; see that MASTER_ADDR and "
            f"MASTER_PORT can be reached from each machine, and set {backend.upper()}_SOCKET_IFNAME to the network "
            "interface between them"
        ) from None
    try:
        yield ProcessGroup(distributed.get_rank(), size, torch_device, local_rank)
    finally:
        distributed.destroy_process_group()


def is_connection_lost(error: BaseException) -> bool:
    """Whether an error means that another process has ended or cannot be reached."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CONNECTION_LOST)


def first_sentence(error: BaseException) -> str:
    """The first sentence of a message, without the place in the C++ source that torch puts before it."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    return text.partition("] ")[2] if text.startswith("[") else text


# ---------------------------------------------------------------------------------------------
# Gradients


class FlatGradients:
    """The gradients of all parameters in one buffer, which the processes average with a single all-reduce.

    ``grad`` of each parameter is a view of the buffer, and the backward pass adds to it in place. The addresses stay
    the same, as a CUDA graph needs it, and no hook keeps the AccumulateGrad nodes of a parameter alive. Those of
    DistributedDataParallel belong to the stream on which they were made, which breaks the capture of a later backward
    pass on another stream.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        (dtype,) = {parameter.dtype for parameter in parameters}
        self.group = group
        sizes = [parameter.numel() for parameter in parameters]
        self.buffer: Float[Tensor, " n"] = torch.zeros(sum(sizes), dtype=dtype, device=group.device)
        for parameter, part in zip(parameters, torch.split(self.buffer, sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def average(self) -> None:
        """Replace the gradients of this process by the mean over all processes."""
        self.buffer.div_(self.group.size)
        distributed.all_reduce(self.buffer)

    def zero(self) -> None:
        self.buffer.zero_()


# ---------------------------------------------------------------------------------------------
# Rows


def row_owners(source_lengths: Lengths, target_lengths: Lengths, ranks: int) -> RowIndices:
    """The process of each row of a batch, given the lengths of the rows.

    The rows are sorted by length and dealt in the order 0 1 2 2 1 0 0 1 …, so that all get about the same tokens.
    """
    tokens = np.asarray(source_lengths, np.int64) + np.asarray(target_lengths)
    order = np.argsort(-tokens, kind="stable")
    number = np.arange(len(order)) % (2 * ranks)
    owners = np.empty(len(order), dtype=np.int64)
    owners[order] = np.minimum(number, 2 * ranks - 1 - number)
    return owners


def share_size(
    plan: Sequence[RowIndices], source_lengths: Lengths, target_lengths: Lengths, ranks: int
) -> PackedSize:
    """The size of a packed row that holds the share of each process, in 99 of 100 batches.

    It is at least that of the longest text of the dataset.
    """
    loads = []
    for number in range(min(len(plan), MEASURED_BATCHES)):
        source, target = source_lengths[plan[number]], target_lengths[plan[number]]
        owners = row_owners(source, target, ranks)
        loads.append([np.bincount(owners, side + 1).max() for side in (source, target)])
    longest = [side.max() + 1 for side in (source_lengths, target_lengths)]
    tokens = np.maximum(np.quantile(loads, FITTING_BATCHES, axis=0), longest)
    return PackedSize(*(int(-(-count // TILE) * TILE) for count in tokens))
