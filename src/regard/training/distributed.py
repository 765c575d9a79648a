"""Data-parallel training in several processes: ``regard train … --processes N``, or with torchrun on several machines.

Every process has all weights. It computes the gradients of its share of each batch, and the processes average them
with ``all_reduce`` while the backward pass runs. Padded batches use DistributedDataParallel (DDP), packed ones
``FlatGradients``, with which the passes can be CUDA graphs.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

# Before a process group exists: default arguments of this module would keep it, and its threads must end before Python.
import torch.distributed.nn.functional
from jaxtyping import Float
from torch import Tensor, distributed, nn

from regard.data.batching import TILE, Lengths, PackedSize, row_owners
from regard.data.token_dataset import RowIndices
from regard.errors import RegardError
from regard.inference.device import choose_device
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.recipe import Device

T = TypeVar("T")

CONNECTION_LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "recv/send error"),
    *("NCCL communicator was aborted", "remote process exited", "Connection timed out"),
)
"""Parts of the messages of torch's errors when another process has ended."""
TIMEOUT = timedelta(hours=3)
"""How long a process waits for another one: the main one may prepare data or validate, which can take long."""
SILENT_PEER_SECONDS = 20
"""After how long a connection to a machine that no longer answers is closed."""
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
    local_size: int = 1
    """the number of processes on its machine"""
    _background: list[distributed.ProcessGroup] = field(default_factory=list, compare=False)
    """the group that ``background`` returns, if it was made"""

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

    def broadcast(self, value: T, source: int = 0) -> T:
        """The value of the main process, or of another one, returned in each process."""
        if self.size == 1:
            return value
        values = [value]
        distributed.broadcast_object_list(values, source, device=self.device)
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

    def background(self) -> distributed.ProcessGroup:
        """A second group of the same processes, on the CPU, for a thread that runs beside training.

        Two threads cannot share a group, because their messages would mix. It is made by the first call, for which all
        processes must meet, and ends with this group.
        """
        if not self._background:
            earlier = open_files()
            made = distributed.new_group(backend="gloo", timeout=TIMEOUT)
            close_silent_connections(open_files() - earlier)
            self._background.append(made)
        return self._background[0]

    def close(self) -> None:
        """Leave the groups of torch, so that their threads end."""
        self._background.clear()
        distributed.destroy_process_group()

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
                        "wrote it. All processes need the same run folder: choose an --out on a file system "
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
    backend = "nccl" if torch_device.type == "cuda" else "gloo"
    earlier = open_files()
    try:
        distributed.init_process_group(backend, timeout=TIMEOUT)
    except RuntimeError as error:
        raise RegardError(
            f"the {size} processes cannot connect to each other: {first_sentence(error)}; check that MASTER_ADDR and "
            f"MASTER_PORT can be reached from each machine, and set {backend.upper()}_SOCKET_IFNAME to the network "
            "interface between them"
        ) from None
    close_silent_connections(open_files() - earlier)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    group = ProcessGroup(distributed.get_rank(), size, torch_device, local_rank, local_size)
    try:
        yield group
    finally:
        group.close()


def open_files() -> set[int]:
    """The numbers of the open file descriptors of this process; on Linux only."""
    folder = Path("/proc/self/fd")
    numbers = [int(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    found = set()
    for number in numbers:
        with suppress(OSError):  # that of the folder itself is closed by now
            os.fstat(number)
            found.add(number)
    return found


def close_silent_connections(descriptors: Iterable[int]) -> None:
    """Let the kernel close each TCP connection whose peer does not answer for ``SILENT_PEER_SECONDS``.

    A process that is killed closes its connections. A machine without power or network does not, and the others would
    wait for it for hours: gloo sets none of these options.
    """
    probes = 4
    for descriptor in descriptors:
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # not a socket, or closed by now
            continue
        with connection:
            if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, SILENT_PEER_SECONDS // probes),
                (socket.TCP_KEEPINTVL, SILENT_PEER_SECONDS // probes),
                (socket.TCP_KEEPCNT, probes - 1),
                (socket.TCP_USER_TIMEOUT, 1000 * SILENT_PEER_SECONDS),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


# ---------------------------------------------------------------------------------------------
# Starting processes on this machine

GRACE_SECONDS = 20.0
"""When one process has ended with an error, the others get this time to notice it."""


def run_processes(arguments: Sequence[str], count: int) -> int:
    """Run ``regard`` with these arguments in several processes that train together; returns the exit status.

    Each gets an equal share of the cores as threads, unless OMP_NUM_THREADS is set. Process 0 prints messages; what
    another one writes to standard error is shown if it fails first and in another way. A signal goes to all of them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = max(1, (cores or 1) // count)
    environment = {"OMP_NUM_THREADS": str(threads)} | dict(os.environ)
    environment |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    environment["MASTER_PORT"] = str(_free_port())
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(1, count)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "regard", *arguments],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL if error else None,
                stderr=error,
            )
            for rank, error in enumerate([None, *errors])
        ]
        stack.callback(_end, processes)
        for number in (signal.SIGINT, signal.SIGTERM):
            previous = signal.signal(number, lambda *_: _interrupt(processes))
            stack.callback(signal.signal, number, previous)
        failed = _wait(processes)
        # All processes make the same mistake of the user, which process 0 has printed.
        if failed and processes[failed].returncode != processes[0].returncode:
            errors[failed - 1].seek(0)
            sys.stderr.write(errors[failed - 1].read().decode(errors="replace"))
    return processes[failed or 0].returncode


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Wait until all processes have ended; returns the rank of the first to fail. The rest is ended after a while."""
    failed, deadline = None, math.inf
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        ended = [rank for rank, process in enumerate(processes) if process.returncode]
        if ended and failed is None:
            failed, deadline = ended[0], time.monotonic() + GRACE_SECONDS
        time.sleep(0.05)
    if failed is None:
        failed = next((rank for rank, one in enumerate(processes) if one.returncode), None)
    return failed


def _interrupt(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_connection_lost(error: BaseException) -> bool:
    """Whether an error means that another process has ended or cannot be reached."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in CONNECTION_LOST)


def first_sentence(error: BaseException) -> str:
    """The first sentence of a message, without the place in the C++ source that torch puts before it."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    return text.partition("] ")[2] if text.startswith("[") else text


# ---------------------------------------------------------------------------------------------
# Gradients


BUCKET_BYTES = 8 * 2**20
"""Gradients are exchanged in messages of about this size. It must not depend on the processes of a run."""


class FlatGradients:
    """The gradients of all parameters in one buffer, which the processes average (all-reduce) in the backward pass.

    ``grad`` of each parameter is a view of the buffer, and the backward pass adds to it in place. The buffer is divided
    into buckets, in the order of the parameters. As soon as the last backward pass of a step has completed a bucket and
    those before it, its all-reduce starts; ``average`` starts the rest and waits for all. So every process exchanges
    the same buckets in the same order, even one without a row of the batch.

    The addresses stay the same, as a CUDA graph needs it, and no hook keeps the AccumulateGrad nodes of a parameter
    alive: these hooks belong to the parameters. Those of DistributedDataParallel belong to the nodes, which belong to
    the stream on which they were made, and this breaks the capture of a later backward pass on another stream.
    """

    overlaps = True
    """whether the exchange starts during the backward pass; benchmarks compare both"""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        """parameters: best in the order in which the backward pass completes them, see ``backward_order``."""
        (dtype,) = {parameter.dtype for parameter in parameters}
        self.group = group
        sizes = [parameter.numel() for parameter in parameters]
        self.buffer: Float[Tensor, " n"] = torch.zeros(sum(sizes), dtype=dtype, device=group.device)
        buckets = _divide(sizes, BUCKET_BYTES // self.buffer.itemsize)
        elements = [sum(sizes[number] for number in numbers) for numbers in buckets]
        self.buckets = torch.split(self.buffer, elements)
        self._parameters_in = [len(numbers) for numbers in buckets]
        self._missing: list[int] = []
        """for each bucket, the parameters whose gradient is not complete"""
        self._completed = 0
        """the buckets that are complete, with all before them"""
        self._on_complete: Callable[[int], None] | None = None
        self._running: list[distributed.Work] = []
        views = torch.split(self.buffer, sizes)
        for bucket, numbers in enumerate(buckets):
            for number in numbers:
                parameter = parameters[number]
                parameter.grad = views[number].view_as(parameter)
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._count, bucket)
                )

    def overlap(self) -> AbstractContextManager[None]:
        """Exchange the gradients during the backward pass in the with-block, the last one before ``average``."""
        return self.watch(self._start) if self.overlaps else nullcontext()

    @contextmanager
    def watch(self, on_complete: Callable[[int], None]) -> Iterator[None]:
        """Call a function with the number of each bucket, in order, when the backward pass has completed it.

        At the end of the with-block, all buckets are complete that a backward pass has not reached.
        """
        self._missing, self._completed = list(self._parameters_in), 0
        self._on_complete = on_complete
        try:
            yield
            self._missing = [0] * len(self.buckets)
            self._report()
        finally:
            self._on_complete = None

    def _count(self, bucket: int, _: Tensor) -> None:
        """Called when the gradient of a parameter of this bucket is complete."""
        if self._on_complete is not None:
            self._missing[bucket] -= 1
            self._report()

    def _report(self) -> None:
        assert self._on_complete is not None
        while self._completed < len(self.buckets) and not self._missing[self._completed]:
            self._on_complete(self._completed)
            self._completed += 1

    def _start(self, bucket: int) -> None:
        """Start the all-reduce of a bucket."""
        values = self.buckets[bucket].div_(self.group.size)
        work = distributed.all_reduce(values, async_op=True)
        assert work is not None
        self._running.append(work)

    def average(self, ready: Sequence[torch.cuda.Event] = ()) -> None:
        """Replace the gradients of this process by the mean over all processes.

        ready: events for the buckets, after which a CUDA graph that is still running does not change them.
        """
        for event in ready:
            with torch.cuda.stream(self._stream):
                event.wait()
                self._start(len(self._running))
        for bucket in range(len(self._running), len(self.buckets)):
            self._start(bucket)
        for work in self._running:
            work.wait()
        self._running.clear()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.group.device)  # type: ignore[no-untyped-call]

    def zero(self) -> None:
        self.buffer.zero_()


def _divide(sizes: Sequence[int], most: int) -> list[list[int]]:
    """The indices of consecutive sizes in groups of at most this sum; a larger size is a group of its own."""
    groups: list[list[int]] = []
    total = 0
    for number, size in enumerate(sizes):
        if not groups or total + size > most:
            groups.append([])
            total = 0
        groups[-1].append(number)
        total += size
    return groups


def backward_order(network: nn.Module) -> list[nn.Parameter]:
    """The trained parameters, about in the order in which a backward pass completes their gradients.

    This is the reverse order of the forward pass. The decoder computes the keys and values of cross-attention before it
    runs its layers.
    """
    attentions = [getattr(module, "cross_attention", None) for module in network.modules()]
    keys_values = {
        parameter
        for attention in attentions
        if isinstance(attention, MultiHeadAttention)
        for linear in (attention.key, attention.value)
        for parameter in linear.parameters()
    }
    encoder = set(getattr(network, "encoder", nn.Module()).parameters())

    def place(parameter: nn.Parameter) -> int:
        return 0 if parameter in encoder else 1 if parameter in keys_values else 2

    forward = sorted(network.parameters(), key=place)
    return [parameter for parameter in reversed(forward) if parameter.requires_grad]


# ---------------------------------------------------------------------------------------------
# Rows


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
