"""How a server process ends; tests/cli/test_server_process.py runs real ones."""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
import uvicorn

from regard.errors import RegardError
from regard.server.model_pool import ModelPool
from regard.server.schemas import Settings
from regard.server.supervisor import Server, Supervisor, serve, tune_interpreter


class FakePool:
    stopping = False


@pytest.mark.parametrize(
    ("signals", "forced"),
    [
        ([signal.SIGINT], False),
        ([signal.SIGTERM], False),
        ([signal.SIGTERM, signal.SIGTERM], False),
        ([signal.SIGINT, signal.SIGINT], True),
        ([signal.SIGTERM, signal.SIGINT], True),
    ],
)
def test_the_first_signal_lets_requests_finish_and_a_second_ctrl_c_does_not(
    signals: list[signal.Signals], forced: bool
) -> None:
    async def app(*arguments: Any) -> None: ...

    pool = FakePool()
    server = Server(uvicorn.Config(app), cast(ModelPool, pool), lambda: None)
    for one in signals:
        server.handle_exit(one, None)
    assert pool.stopping
    assert server.should_exit
    assert server.force_exit == forced


def test_a_busy_thread_keeps_others_waiting_for_a_short_time() -> None:
    """Splitting a long text is pure Python; meanwhile small requests need the interpreter lock several times."""
    usual = sys.getswitchinterval()
    try:
        tune_interpreter()
        assert sys.getswitchinterval() < usual / 5
        assert gc.get_freeze_count()
    finally:
        sys.setswitchinterval(usual)
        gc.unfreeze()


@pytest.fixture
def twenty_seconds() -> Iterator[None]:
    """A supervisor whose workers do not do what it waits for would wait for ever."""

    def stop(*_: object) -> NoReturn:
        raise TimeoutError

    usual = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, usual)


@pytest.mark.usefixtures("twenty_seconds")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("reloads", [0, 1])
def test_workers_are_started_replaced_and_stopped(tmp_path: Path, reloads: int) -> None:
    """Two workers; after SIGHUP two others; the last one that starts sends SIGTERM to the supervisor."""
    supervisor_id, started, greetings = os.getpid(), tmp_path / "started", list[int]()

    def work(ready: Callable[[], None]) -> None:
        with started.open("ab", buffering=0) as file:
            file.write(b"x")
        ready()
        if started.stat().st_size == 4:
            os.kill(supervisor_id, signal.SIGTERM)
        signal.pause()

    def greet() -> None:
        greetings.append(started.stat().st_size)
        os.kill(supervisor_id, signal.SIGHUP if reloads else signal.SIGTERM)

    supervisor = Supervisor(work, 2, greet)
    assert supervisor.run() == 0
    assert greetings == [2], "when both workers are ready, and only then"
    assert started.stat().st_size == 2 + 2 * reloads
    assert supervisor._workers == {}


@pytest.mark.usefixtures("twenty_seconds")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_server_that_cannot_start_ends_with_the_status_of_its_worker() -> None:
    def work(ready: Callable[[], None]) -> None:
        raise SystemExit(7)

    def greet() -> None:
        raise AssertionError("no worker was ready")

    assert Supervisor(work, 1, greet).run() == 7


@pytest.mark.parametrize(("memory", "each"), [(9_000, 4_500), (None, None)])
def test_workers_share_the_memory(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, memory: int | None, each: int | None
) -> None:
    def check_memory(entries: object, limit: int | None, pivots: object) -> NoReturn:
        raise RegardError(f"limit {limit}")

    monkeypatch.setattr("regard.server.supervisor.check_memory", check_memory)
    monkeypatch.setattr("regard.server.supervisor.limit_threads", lambda runs: None)
    with pytest.raises(RegardError, match=f"limit {each}$"):
        serve([finished_run], settings=Settings(memory=memory), workers=2)
