"""Serve a run: load its model, listen on a port, shut down cleanly."""

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

SMALL_MODEL = 10_000_000
"""parameters; the demo's 850,000 are well below (docs/decisions.md), the limit itself is an estimate"""
SHUTDOWN_SECONDS = 5.0
"""how long a shutdown may take in addition to the timeout of a request"""


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
    """Serve the model of a run until SIGINT or SIGTERM.

    port: 0 selects a free port. languages: codes of source and target, if the recipe names none or others.
    """
    settings = settings or Settings()
    model = Translator.load(run, device, precision, threads)
    if languages:
        if model.recipe.data.targets:
            raise RegardError(
                f"--languages {','.join(languages)}: {run} has several target languages, "
                "which its recipe names; leave --languages out"
            )
        data = model.recipe.data.model_copy(update={"languages": languages})
        model.recipe = model.recipe.model_copy(update={"data": data})
    limit_threads(model)
    # Workers are forked with the weights, so only for a finished run: others may get new weights later.
    if RunDir(run).card_file.is_file():
        model.start_workers()
    app = create_app(model, settings, RunDir(run).card())
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.timeout + SHUTDOWN_SECONDS),
    )
    if not model.recipe.data.named:
        source, target = model.recipe.data.language_pair
        print(
            f"regard: the recipe names no languages, so they are called {source} and {target}; "
            "name them with --languages, for example --languages en,de",
            file=sys.stderr,
        )
    with _listen(host, port) as listening:  # after loading, so that clients need not wait for it
        address = f"[{host}]" if ":" in host else host
        greeting = f"regard: serving {run} at http://{address}:{listening.getsockname()[1]}"
        Server(config, app.state.service, greeting).run(sockets=[listening])


def limit_threads(model: Translator) -> None:
    """Use one thread for a small model on a CPU: synchronizing a second one costs more than it saves.

    The environment variable OMP_NUM_THREADS takes precedence.
    """
    size = sum(parameter.numel() for parameter in model.network.parameters())
    if model.device.type == "cpu" and size < SMALL_MODEL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _listen(host: str, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        # asyncio disables Nagle's algorithm only if the protocol is given; otherwise each response waits 40 ms.
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
        except OSError:
            listening.close()
            raise
        return listening
    except OSError as error:
        raise RegardError(f"cannot listen on {host}, port {port}: {error.strerror}") from None


class Server(uvicorn.Server):
    """Shuts down at the first signal: finishes running requests, refuses new ones. A second SIGINT ends it at once."""

    def __init__(self, config: uvicorn.Config, service: Service, greeting: str) -> None:
        super().__init__(config)
        self.service = service
        self.greeting = greeting

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self.greeting, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.service.batcher.closed = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
