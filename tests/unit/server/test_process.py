"""How a server process ends; tests/cli/test_server_process.py runs real ones."""

import gc
import signal
import sys
from typing import Any, cast

import pytest
import uvicorn

from regard.server.models import ModelPool
from regard.server.process import Server, tune_interpreter


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
