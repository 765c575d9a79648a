"""How rows are shared by processes, gradients in one buffer, and what is said when a process fails."""

import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from regard.data.batching import TILE, plan_packed, row_owners
from regard.errors import RegardError
from regard.training import distributed
from regard.training.distributed import (
    SILENT_PEER_SECONDS,
    FlatGradients,
    ProcessGroup,
    close_silent_connections,
    first_sentence,
    is_connection_lost,
    open_files,
    share_size,
)

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
    with pytest.raises(RegardError, match=r"process 1 on .* as process 0 on first has written it"):
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
