"""A run folder, a port, and a clean end."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import torch
import uvicorn

from regard.errors import RegardError
from regard.recipe import Device, Precision
from regard.server.app import create_app
from regard.server.service import Service
from regard.server.settings import Settings
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

SMALL = 10_000_000
"""parameters; the demo's 850,000 are well below (docs/decisions.md), the border itself is a guess"""
LONGEST_END = 5.0
"""Seconds, beyond those a request may take, after which a server told to stop no longer waits."""


def serve(
    run: Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: int | None = None,
    languages: tuple[str, str] | None = None,
) -> None:
    """Serve the model of a run until a signal ends it. Port 0 takes one that is free.

    languages: the codes of source and target, if other than the run's.
    """
    settings = settings or Settings()
    model = Translator.load(run, device, precision, threads)
    if languages:
        if model.recipe.data.targets:
            raise RegardError(f"--languages: {run} translates into several, and knows their names")
        data = model.recipe.data.model_copy(update={"languages": languages})
        model.recipe = model.recipe.model_copy(update={"data": data})
    choose_threads(model)
    # Else its weights may change, and by then there are threads: no forks.
    if RunDir(run).card_file.is_file():
        model.start_workers()
    app = create_app(model, settings, RunDir(run).card())
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.seconds + LONGEST_END),
    )
    if not model.recipe.data.named:
        known = " and ".join(model.recipe.data.language_pair)
        print(
            f"regard: languages without names are called {known}; --languages en,de names them",
            file=sys.stderr,
        )
    with _listen(host, port) as listening:  # only now: who is let in before would have to wait
        place = f"[{host}]" if ":" in host else host
        greeting = f"regard: serving {run} at http://{place}:{listening.getsockname()[1]}"
        Server(config, app.state.service, greeting).run(sockets=[listening])


def choose_threads(model: Translator) -> None:
    """One thread for a small model: to wait for a second takes longer than what that one saves.

    The environment's OMP_NUM_THREADS goes before.
    """
    size = sum(parameter.numel() for parameter in model.network.parameters())
    if model.device.type == "cpu" and size < SMALL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, place = found[0]
        # With its protocol named, asyncio turns off Nagle's algorithm: without, each answer waits 40 ms.
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            listening.listen()
        except OSError:
            listening.close()
            raise
        return listening
    except OSError as error:
        raise RegardError(f"cannot listen on {host}, port {port}: {error.strerror}") from None


class Server(uvicorn.Server):
    """Ends at the first signal: what has come in is finished, what comes after is refused."""

    def __init__(self, config: uvicorn.Config, service: Service, greeting: str) -> None:
        super().__init__(config)
        self.service = service
        self.greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.greeting, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.batcher.refuses = True
        self.force_exit = self.should_exit and sig == signal.SIGINT  # asked again: at once
        self.should_exit = True
