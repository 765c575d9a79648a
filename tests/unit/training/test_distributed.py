"""How rows are shared by processes, gradients in one buffer, and what is said when a process fails."""

import socket
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from regard.data.batching import TILE, PackedSize, pack, plan_packed, row_owners
from regard.errors import RegardError
from regard.nn.loss import Seq2SeqLoss
from regard.training import distributed
from regard.training.distributed import (
    SILENT_PEER_SECONDS,
    FlatGradients,
    ProcessGroup,
    backward_order,
    close_silent_connections,
    first_sentence,
    is_connection_lost,
    open_files,
    share_size,
)
from tests.unit.training.test_packed_batches import dataset_of, loss_fn_of, recipe_of

lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=80)
CPU = torch.device("cpu")


@given(lengths, st.integers(1, 9))
def test_processes_share_rows_evenly(pairs: list[tuple[int, int]], ranks: int) -> None:
    source, target = (np.array(side) for side in zip(*pairs, strict=True))
    owners = row_owners(source, target, ranks)
    rows = np.bincount(owners, minlength=ranks)
    assert rows.sum() == len(pairs)
    assert rows.max() - rows.min() <= 1
    tokens = np.bincount(owners, source + target, minlength=ranks)
    assert tokens.max() - tokens.min() <= (source + target).max()


def test_a_share_of_realistic_lengths_fits_into_one_row_with_little_padding() -> None:
    random = np.random.default_rng(1)
    source = random.gamma(4, 6, 20_000).astype(int) + 1
    target = np.maximum(1, (source * random.normal(1.1, 0.2, 20_000)).astype(int))
    plan = np.array_split(random.permutation(20_000), 20_000 // 800)  # about 20,000 tokens each
    size = share_size(plan, source, target, 8)
    shares = [
        batch[row_owners(source[batch], target[batch], 8) == rank]
        for batch in plan
        for rank in range(8)
    ]
    rows = [len(plan_packed(source[one], target[one], size, 1, 0)) for one in shares]
    assert max(rows) <= 2
    assert rows.count(2) <= 0.02 * len(rows)
    tokens = source.sum() + target.sum() + 2 * len(source)
    assert tokens / (sum(rows) * sum(size)) > 0.85
    assert size.source % TILE == size.target % TILE == 0


def test_the_longest_text_fits_into_a_share() -> None:
    source, target = np.array([500, 1, 1, 1]), np.array([1, 1, 1, 300])
    size = share_size([np.array([1, 2])], source, target, 2)
    assert size.source >= 501
    assert size.target >= 301


def test_gradients_are_added_to_one_buffer() -> None:
    layer = nn.Linear(3, 2)
    gradients = FlatGradients(list(layer.parameters()), ProcessGroup(0, 2, CPU))
    for _ in range(2):
        layer(torch.ones(1, 3)).sum().backward()
    assert gradients.buffer.tolist() == [2.0] * 8
    gradients.zero()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()
    assert layer.weight.grad.data_ptr() == gradients.buffer.data_ptr()


class AllReduces:
    """Records the all-reduces that are started and waited for, instead of exchanging anything."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def all_reduce(self, values: torch.Tensor, async_op: bool) -> SimpleNamespace:
        assert async_op
        name = f"{len(values)} values"
        self.events.append(f"start {name}")
        return SimpleNamespace(wait=lambda: self.events.append(f"wait {name}"))


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = AllReduces()
    monkeypatch.setattr(distributed, "BUCKET_BYTES", 40)
    monkeypatch.setattr(torch.distributed, "all_reduce", found.all_reduce)
    return found.events


class Chain(nn.Module):
    """Matrix products, and a parameter that is not used. ``events`` gets the layers of each backward pass."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(width, width)) for width in (4, 3, 2)]
        self.unused = nn.Parameter(torch.ones(6))
        self.events = events

    def forward(self) -> torch.Tensor:
        x = torch.ones(1, 4)
        for weight in self.weights:
            x = x[:, : len(weight)] @ weight
            name = f"layer {len(weight)}"
            x.register_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
        return x.sum()

    def _note(self, name: str, _: torch.Tensor) -> None:
        self.events.append(name)


def test_a_bucket_is_exchanged_as_soon_as_it_is_complete(exchanged: list[str]) -> None:
    """Buckets of at most 10 values, in the order of the backward pass; one that is not reached comes last."""
    network = Chain(exchanged)
    parameters = [*reversed(network.weights), network.unused]
    gradients = FlatGradients(parameters, ProcessGroup(0, 2, CPU))
    assert [len(bucket) for bucket in gradients.buckets] == [4, 9, 16, 6]
    network().backward()  # not the last micro-batch: nothing is exchanged
    assert exchanged == ["layer 2", "layer 3", "layer 4"]
    summed = gradients.buffer.clone()
    exchanged.clear()
    with gradients.overlap():
        network().backward()
    assert exchanged == [
        *("layer 2", "start 4 values", "layer 3", "start 9 values", "layer 4", "start 16 values"),
        "start 6 values",
    ]
    exchanged.clear()
    gradients.average()
    assert exchanged == [f"wait {count} values" for count in (4, 9, 16, 6)]
    assert torch.equal(gradients.buffer, summed), "the mean over two processes of twice the sum"


def test_buckets_are_exchanged_in_the_same_order_by_all_processes(exchanged: list[str]) -> None:
    """A bucket waits for those before it; a process without rows exchanges them all."""
    network = Chain(exchanged)
    first, second, third = network.weights
    gradients = FlatGradients([third, first, second], ProcessGroup(0, 2, CPU))
    order = ["start 4 values", "start 16 values", "start 9 values"]
    with gradients.overlap():
        network().backward()
    assert exchanged == ["layer 2", order[0], "layer 3", "layer 4", *order[1:]]
    gradients.average()
    exchanged.clear()
    gradients.average()
    assert exchanged[:3] == order
    exchanged.clear()
    gradients.overlaps = False
    with gradients.overlap():
        network().backward()
    assert exchanged == ["layer 2", "layer 3", "layer 4"]


def test_parameters_are_in_the_order_of_the_backward_pass() -> None:
    """As autograd completes them in packed rows, up to the order within a layer."""
    network = loss_fn_of(recipe_of()).network
    names = {parameter: name for name, parameter in network.named_parameters()}
    completed: list[str] = []
    for parameter in names:
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda one: completed.append(names[one])
        )
    dataset = dataset_of([(3, 4), (7, 5)])
    batch = pack(dataset, np.arange(2), PackedSize(128, 128))
    loss_fn = Seq2SeqLoss(network, recipe_of().training)
    loss_fn(batch.source, batch.target, batch.labels, batch.position_info).backward()
    expected = [names[parameter] for parameter in backward_order(network)]
    assert sorted(expected) == sorted(completed)
    assert list(dict.fromkeys(map(place, expected))) == list(dict.fromkeys(map(place, completed)))


def place(name: str) -> str:
    """What is computed together: a layer, or the keys and values of the cross-attention of all layers."""
    if "cross_attention.key" in name or "cross_attention.value" in name:
        return "keys and values"
    return ".".join(name.split(".")[:3])


class Failing(ProcessGroup):
    """The first of two processes; the other one has failed."""

    def gather(self, value: Any) -> list[Any]:
        return [value, "x.tsv: no such file"]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value


def test_an_error_of_another_process_is_raised_in_each() -> None:
    with pytest.raises(RegardError, match=r"x\.tsv: no such file"):
        Failing(0, 2, CPU).in_each(lambda: None)
    with pytest.raises(SystemExit, match="2"):  # printed by the first process of the machine
        Failing(1, 2, CPU, local_rank=1).in_each(lambda: None)


def test_one_process_raises_its_own_error() -> None:
    error = RegardError("own")
    with pytest.raises(RegardError) as raised:
        ProcessGroup(0, 1, CPU).in_each(lambda: (_ for _ in ()).throw(error))
    assert raised.value is error


def test_a_file_that_appears_late_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may show a file of another machine after a while."""
    path = tmp_path / "file"

    class Second(ProcessGroup):
        def gather(self, value: Any) -> list[Any]:
            return [None, value]

        def broadcast(self, value: Any, source: int = 0) -> Any:
            return b"written", "first"

    monkeypatch.setattr(time, "sleep", lambda _: path.write_bytes(b"written"))
    Second(1, 2, CPU).check_shared_file(path)
    monkeypatch.setattr(distributed, "SHARED_FOLDER_SECONDS", 0.0)
    path.write_bytes(b"other")
    with pytest.raises(RegardError, match=r"process 1 on .* as process 0 on first wrote it"):
        Second(1, 2, CPU).check_shared_file(path)


def test_messages_of_torch_are_shortened() -> None:
    text = (
        "[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:1. This is typical.\nx"
    )
    assert is_connection_lost(RuntimeError(text))
    assert not is_connection_lost(RuntimeError("shapes differ"))
    assert not is_connection_lost(ValueError(text))
    assert first_sentence(RuntimeError(text)) == "Connection closed by peer [::1]:1"


def test_connections_to_silent_machines_are_closed() -> None:
    """The kernel closes them: keep-alive probes while nothing is sent, a time limit for what is sent."""
    with socket.create_server(("localhost", 0)) as server:
        before = open_files()
        with (
            socket.create_connection(server.getsockname()) as client,
            server.accept()[0],
            Path(__file__).open(),
        ):
            close_silent_connections(open_files() - before)
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            timeout = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout == 1000 * SILENT_PEER_SECONDS
            idle, interval, probes = (
                client.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + interval * probes == SILENT_PEER_SECONDS
            assert server.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
