"""The processes of a server: a supervisor and its workers, which share one port.

The supervisor opens the port and starts the workers. Each worker loads the models and serves requests. The supervisor
replaces workers that die. To reload the models it starts new workers and, once they serve, stops the old ones: these
finish their requests first, so none is lost.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch
import uvicorn
from prometheus_client.multiprocess import mark_process_dead

from regard.errors import RegardError
from regard.inference.worker_pool import available_cores, death_signal
from regard.recipe import Device, Precision
from regard.server.app import create_app
from regard.server.middleware import TimeLimitedProtocol
from regard.server.model_pool import ModelPool, check_memory, entries_of_runs
from regard.server.schemas import Settings
from regard.storage.atomic_files import shared_folder
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

SMALL_MODEL = 10_000_000
"""parameters; the demo's 850,000 are well below (docs/decisions.md), the limit itself is an estimate"""
SHUTDOWN_SECONDS = 5.0
"""how long a shutdown may take in addition to the timeout of a request"""
LINGER_SECONDS = 0.5
"""how long a worker that stops still serves requests on open connections, which are closed after their response"""
SWITCH_SECONDS = 0.0005
"""how long a thread that splits a long text may keep Python's interpreter lock while small requests wait for it"""
POLL_SECONDS = 2.0
"""how often the supervisor checks whether a run has a new card"""
RESTART_SECONDS = 1.0
"""how long the supervisor waits before it replaces a worker that died soon after its start; doubled each time"""
MAX_RESTART_SECONDS = 60.0


def serve(
    runs: Sequence[Path],
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: Settings | None = None,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: int | None = None,
    languages: tuple[str, str] | None = None,
    workers: int = 1,
) -> None:
    """Serve the models of runs until SIGINT or SIGTERM.

    port: 0 selects a free port. languages: codes of source and target, if the recipe of a single run names none or
    others. workers: number of processes that serve requests.
    """
    settings = settings or Settings()
    settings = replace(
        settings,
        allowed_hosts=(*settings.allowed_hosts, host),
        memory=settings.memory and settings.memory // workers,
    )
    if workers > 1 and threads is None:
        threads = max(1, available_cores() // workers)
    limit_threads(runs)

    def load(run: Path) -> Translator:
        return Translator.load(run, device, precision, threads)

    check_memory(entries_of_runs(runs, load, languages), settings.memory, settings.pivots)
    with _bind(host, port) as listening, shared_folder("regard-files-") as files:
        settings = replace(settings, file_folder=files)
        # A worker listens once it has loaded its model, so clients need not wait for it.
        address = f"[{host}]" if ":" in host else host
        names = ", ".join(map(str, runs))
        greeting = f"regard: serving {names} at http://{address}:{listening.getsockname()[1]}"

        def work(ready: Callable[[], None]) -> None:
            # Processes that translate must not keep the port open after this one has closed it.
            os.register_at_fork(after_in_child=listening.close)
            # Runs are read again, because the worker may have been started to reload them.
            entries = entries_of_runs(runs, load, languages)
            app = create_app(entries, settings)
            pool: ModelPool = app.state.service.models
            if len(entries) == 1:
                _warn_about_unnamed_languages(pool)
                load_now(pool, processes=workers == 1)
            tune_interpreter()
            config = uvicorn.Config(
                app,
                http=TimeLimitedProtocol,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(settings.timeout + SHUTDOWN_SECONDS),
            )
            Server(config, pool, ready).run(sockets=[listening])

        cards = [RunDir(run).card_file for run in runs]

        def greet() -> None:
            print(greeting, flush=True)

        status = Supervisor(work, workers, greet, cards, listening.close).run()
    if status:
        sys.exit(status)


def load_now(pool: ModelPool, processes: bool) -> None:
    """Load the model of a server that has only one.

    processes: translate in worker processes. They are forked with the weights, so only for a finished run:
    others may get new weights later.
    """
    (entry,) = pool.entries
    model = entry.load()
    assert isinstance(model, Translator)
    assert model.run is not None
    if processes and model.run.card_file.is_file():
        model.start_workers(background=True)
    pool.add(entry, model)


def tune_interpreter() -> None:
    """Settings of Python for a process that answers many small requests."""
    sys.setswitchinterval(SWITCH_SECONDS)
    # What exists now stays for good: the collector need not look at it again after some of the requests.
    gc.collect()
    gc.freeze()


def _warn_about_unnamed_languages(pool: ModelPool) -> None:
    data = pool.entries[0].recipe.data
    if not data.named:
        source, target = data.language_pair
        print(
            f"regard: the recipe names no languages, so they are called {source} and {target}; "
            "name them with --languages, for example --languages en,de",
            file=sys.stderr,
        )


def limit_threads(runs: Sequence[Path]) -> None:
    """Use one thread if all models are small: synchronizing a second one costs more than it saves.

    The environment variable OMP_NUM_THREADS takes precedence.
    """
    files = [RunDir(run).weights_file for run in runs]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    if max(sizes, default=0) < 4 * SMALL_MODEL and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def _bind(host: str, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        # asyncio disables Nagle's algorithm only if the protocol is given; otherwise each response waits 40 ms.
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
        except OSError:
            listening.close()
            raise
        return listening
    except OSError as error:
        hint = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
        raise RegardError(f"cannot listen on {host}, port {port}: {error.strerror}{hint}") from None


# ---------------------------------------------------------------------------------------------
# Workers


class Server(uvicorn.Server):
    """Serves requests in a worker.

    Stops at the first signal: finishes running requests, then refuses new ones. A second SIGINT ends it at once.
    ready: called once it accepts connections.
    """

    def __init__(
        self, config: uvicorn.Config, models: ModelPool, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self.models = models
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.models.stopping = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port, finish what arrives on open connections, then refuse the rest and wait for the queues."""
        for server in self.servers:
            server.close()
        end = time.monotonic() + LINGER_SECONDS
        while self.server_state.connections and time.monotonic() < end and not self.force_exit:
            await asyncio.sleep(0.02)
        self.models.refuse()
        await super().shutdown(sockets)


# ---------------------------------------------------------------------------------------------
# The supervisor


@dataclass(eq=False)
class Worker:
    """A process that serves requests, as the supervisor sees it."""

    pid: int
    pipe: int
    """the worker writes to it when it is ready"""
    generation: int
    """the number of reloads before it was started"""
    started: float
    ready: bool = False


class Supervisor:
    """Keeps a number of workers running.

    work: what a worker does, with a function to call when it is ready. greet: called when the first workers are ready.
    watched: files; when one of them changes, all workers are replaced, as after SIGHUP. close_port: called when the
    workers are stopped; connections that none of them accepts would wait otherwise.
    """

    def __init__(
        self,
        work: Callable[[Callable[[], None]], None],
        count: int,
        greet: Callable[[], None],
        watched: Sequence[Path] = (),
        close_port: Callable[[], None] = lambda: None,
    ) -> None:
        self._work = work
        self._count = count
        self._greet = greet
        self._watched = watched
        self._close_port = close_port
        self._seen = self._stamps()
        self._workers: dict[int, Worker] = {}
        self._generation = 0
        self._greeted = False
        self._stopping = False
        self._status = 0
        self._retry_at: float | None = None
        self._retry_seconds = RESTART_SECONDS
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Run until SIGINT or SIGTERM; returns the exit status."""
        with self._signals() as wake:
            self._selector.register(wake, selectors.EVENT_READ)
            self._fill()
            while self._workers or not self._stopping:
                for key, _ in self._selector.select(self._seconds_to_wait()):
                    if key.fd == wake:
                        for number in os.read(wake, 1024):
                            self._handle_signal(number)
                    else:
                        self._mark_ready(key.data)
                self._reap()
                if not self._stopping:
                    self._check_files()
                    self._fill()
        self._selector.close()
        return self._status

    @contextmanager
    def _signals(self) -> Iterator[int]:
        """Write the numbers of signals to a pipe; yields its end to read from."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        usual = {number: signal.signal(number, lambda *_: None) for number in numbers}
        usual_pipe = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        try:
            yield read
        finally:
            signal.set_wakeup_fd(usual_pipe)
            for number, handler in usual.items():
                signal.signal(number, handler)
            os.close(read)
            os.close(write)

    def _seconds_to_wait(self) -> float:
        if self._retry_at is None:
            return POLL_SECONDS
        return max(0.0, min(POLL_SECONDS, self._retry_at - time.monotonic()))

    # -----------------------------------------------------------------------------------------
    # Start

    def _fill(self) -> None:
        """Start workers until the present generation is complete."""
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            return
        self._retry_at = None
        current = [
            worker for worker in self._workers.values() if worker.generation == self._generation
        ]
        for _ in range(self._count - len(current)):
            self._start()

    def _start(self) -> None:
        read, write = os.pipe()
        die_with_parent, parent = death_signal(signal.SIGTERM), os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            self._run_worker(write)
        os.close(write)
        worker = Worker(pid, read, self._generation, time.monotonic())
        self._workers[pid] = worker
        self._selector.register(read, selectors.EVENT_READ, worker)

    def _run_worker(self, pipe: int) -> None:
        """The worker process: does the work and ends. Never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is the supervisor's
            self._selector.close()
            for other in self._workers.values():
                if not other.ready:
                    os.close(other.pipe)
            self._work(lambda: _write_and_close(pipe))
            status = 0
        except RegardError as error:
            print(f"regard: {error}", file=sys.stderr)
            status = 2
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _mark_ready(self, worker: Worker) -> None:
        """A worker has written to its pipe, or closed it because it died."""
        worker.ready = bool(os.read(worker.pipe, 1))
        self._selector.unregister(worker.pipe)
        os.close(worker.pipe)
        if not worker.ready or self._stopping:
            return
        current = [
            other for other in self._workers.values() if other.generation == self._generation
        ]
        if len(current) < self._count or not all(other.ready for other in current):
            return
        for other in self._workers.values():
            if other.generation < self._generation:
                _send(other.pid, signal.SIGTERM)
        if not self._greeted:
            self._greeted = True
            self._greet()

    # -----------------------------------------------------------------------------------------
    # Reload and end

    def _stamps(self) -> list[int]:
        """When the watched files were written; 0 for one that is missing."""
        return [file.stat().st_mtime_ns if file.is_file() else 0 for file in self._watched]

    def _check_files(self) -> None:
        with suppress(OSError):
            if (stamps := self._stamps()) != self._seen:
                self._seen = stamps
                self._reload()

    def _reload(self) -> None:
        """Replace all workers. If they are being replaced already, only the newest ones stay."""
        if not self._greeted or self._stopping:
            return
        for worker in self._workers.values():
            if not worker.ready:
                _send(worker.pid, signal.SIGKILL)
        self._generation += 1
        self._retry_at, self._retry_seconds = None, RESTART_SECONDS

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGHUP:
            self._reload()
        elif number in (signal.SIGTERM, signal.SIGINT):
            # In a terminal, Ctrl-C also reaches the workers, and a second SIGINT would end them at once.
            forwarded = signal.SIGINT if self._stopping else signal.SIGTERM
            self._stop(forwarded)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping = True
        self._close_port()
        for worker in self._workers.values():
            _send(worker.pid, number if worker.ready else signal.SIGKILL)

    def _reap(self) -> None:
        """Forget workers that have ended."""
        for worker in list(self._workers.values()):
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                del self._workers[pid]
                if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
                    mark_process_dead(pid)
                self._after_end(worker, os.waitstatus_to_exitcode(status))

    def _after_end(self, worker: Worker, status: int) -> None:
        if not worker.ready:
            with suppress(KeyError, OSError):
                self._selector.unregister(worker.pipe)
                os.close(worker.pipe)
        if self._stopping:
            self._status = self._status or max(0, status)
        elif worker.generation < self._generation:
            return  # it was replaced
        elif not self._greeted:  # the server cannot start
            self._status = max(1, status)
            self._stop(signal.SIGTERM)
        elif worker.ready and time.monotonic() - worker.started > RESTART_SECONDS:
            print(f"regard: a server process {_how(status)}; replacing it", file=sys.stderr)
            self._retry_seconds = RESTART_SECONDS
        else:
            self._retry_at = time.monotonic() + self._retry_seconds
            print(
                f"regard: a new server process {_how(status)}; trying again in {self._retry_seconds:g} s",
                file=sys.stderr,
            )
            self._retry_seconds = min(2 * self._retry_seconds, MAX_RESTART_SECONDS)


def _write_and_close(pipe: int) -> None:
    os.write(pipe, b"1")
    os.close(pipe)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _how(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"
