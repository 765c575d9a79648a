"""Sharded training (FSDP2): each process holds a part of every weight, its gradient and its optimizer state.

Before a layer runs, the processes exchange their parts of its weights (all-gather), and forget them afterwards. The
gradients are summed and divided among them (reduce-scatter). Validation gathers all weights for its duration.

Each process writes its own part of a checkpoint (``sharded_checkpoint.py``), which any number of processes can read,
sharded or not. Models are written whole, by the main process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.recipe import Recipe
from regard.recipe.registry import find_registry
from regard.training.distributed import ProcessGroup
from regard.training.out_of_memory import available_memory

if TYPE_CHECKING:  # FSDP takes a third of the time to import torch, and is imported when it is used
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

STATE_BYTES = 16
"""Memory of one trained weight with Adam in float32: the weight, its gradient and two moments."""
AUTO_SHARE = 0.5
"""``auto`` shards if the states of all weights take more than this share of a process's memory; activations need the
rest."""


# ---------------------------------------------------------------------------------------------
# Whether and what to shard


def shards(recipe: Recipe, network: nn.Module, group: ProcessGroup) -> bool:
    """Whether the processes shard the network, by ``training.sharding``."""
    choice = recipe.training.sharding
    if group.size == 1 or choice == "no_shard":
        return False
    parts = {
        "model.architecture": recipe.model.architecture,
        "training.optimizer": recipe.training.optimizer,
    }
    unsupported = [
        f"{key}: {name}"
        for key, name in parts.items()
        if not find_registry(key).choices[name].sharding
    ]
    if choice == "full_shard":
        if unsupported:
            raise RegardError(
                f"training.sharding: full_shard does not support {' and '.join(unsupported)}; use no_shard"
            )
        return True
    needed = STATE_BYTES * sum(parameter.numel() for parameter in network.parameters())
    memory = process_memory(group)
    return group.max(not unsupported and memory is not None and needed > AUTO_SHARE * memory) == 1


def process_memory(group: ProcessGroup) -> int | None:
    """The bytes that one process of this machine may use: its GPU, or its part of the free memory; None: unknown."""
    if group.device.type == "cuda":
        return int(torch.cuda.get_device_properties(group.device).total_memory)
    available = available_memory()
    return None if available is None else available // group.local_size


def shard(loss_fn: nn.Module, group: ProcessGroup) -> None:
    """Shard the weights of a loss with its network; each layer is gathered on its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(group.device.type, (group.size,))
    for layers in [part for part in loss_fn.modules() if isinstance(part, nn.ModuleList)]:
        for layer in layers:
            # The decoder computes the keys and values of the encoder output before it runs its layers.
            cross_attention = getattr(layer, "cross_attention", None)
            if isinstance(cross_attention, MultiHeadAttention):
                fully_shard([cross_attention.key, cross_attention.value], mesh=mesh)
            fully_shard(layer, mesh=mesh)
    fully_shard(loss_fn, mesh=mesh)


# ---------------------------------------------------------------------------------------------
# Whole weights from shards, and back


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is divided among the processes."""
    return hasattr(tensor, "full_tensor")


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds: all of it, unless it is sharded. It shares the memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gather_tensors(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Copies of whole tensors on the CPU, gathered from all processes, which must all call this.

    Empty without ``keep``.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if is_sharded(tensor) else tensor
        if keep:
            whole[name] = full.to("cpu", copy=full is tensor)
    return whole


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor on the device of ``like``, or this process's part of it if ``like`` is sharded.

    Tensors of another shape, such as a step counter of the optimizer, stay whole. A sharded tensor is returned as it
    is.
    """
    if is_sharded(tensor):
        return tensor
    if is_sharded(like) and tensor.shape == like.shape:
        from torch.distributed.tensor import distribute_tensor

        # Without communication: each process has read the tensor.
        whole = tensor.to(like.to_local().device)
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return tensor.to(like.device)


def shard_all(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``shard_like`` for tensors by name; names that ``like`` does not have are left as they are."""
    return {
        name: shard_like(tensor, like[name]) if name in like else tensor
        for name, tensor in tensors.items()
    }


@contextmanager
def gathered(loss_fn: nn.Module) -> Iterator[None]:
    """Give each process all weights of a sharded network for the duration of the with-block."""
    gather(loss_fn)
    try:
        yield
    finally:
        parts = _sharded_parts(loss_fn)
        for part in parts:
            part.set_reshard_after_forward(True, recurse=False)
            part.reshard()
        # What the outermost part gathers stays until the backward pass, as fully_shard sets it.
        parts[0].set_reshard_after_forward(False, recurse=False)


def gather(loss_fn: nn.Module) -> None:
    """Give each process all weights of a sharded network; all processes must call this."""
    for part in _sharded_parts(loss_fn):
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()


def _sharded_parts(loss_fn: nn.Module) -> list[FSDPModule]:
    """The outermost part first."""
    from torch.distributed.fsdp import FSDPModule

    return [part for part in loss_fn.modules() if isinstance(part, FSDPModule)]
