"""The server in a process of its own, reached through a loopback port."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from libretranslatepy import LibreTranslateAPI

from regard.errors import RegardError
from regard.server.supervisor import serve
from tests.cli.commands import REGARD, TIMEOUT, environment, sequences

PAIR = {"source": "src", "target": "tgt"}
LINES = 4000
LONG = {"q": "a b c d e f\n" * LINES, **PAIR, "beam": 20}
"""a request that takes a few seconds, in three batches"""


@contextmanager
def serving(run: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Start a server; yields its process and a client for it."""
    server = subprocess.Popen(
        [*REGARD, "serve", str(run), "--port", "0", "--threads", "2", *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith(f"regard: serving {run}"), server.communicate()
        address = line.split()[-1]
        with httpx.Client(
            base_url=address, timeout=TIMEOUT, limits=httpx.Limits(max_connections=100)
        ) as client:
            yield server, client
    finally:
        server.kill()
        server.communicate(timeout=TIMEOUT)


def wait_for_end(server: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit status of the server, and its output after the first line."""
    stdout, stderr = server.communicate(timeout=TIMEOUT)
    return server.returncode, stdout + stderr


@pytest.fixture(scope="module")
def client(workshop: Path) -> Iterator[httpx.Client]:
    """A client of a server whose model copies. The server must end without any output."""
    with serving(workshop / "run") as (server, client):
        yield client
        server.send_signal(signal.SIGINT)
        assert wait_for_end(server) == (0, "")


def translate(client: httpx.Client, text: str) -> Any:
    response = client.post("/translate", json={"q": text, **PAIR})
    assert response.status_code == 200, response.text
    return response.json()["translatedText"]


def metric(client: httpx.Client, name: str) -> float:
    """The value of a metric of the server."""
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}{{"))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_libretranslates_client_works(client: httpx.Client) -> None:
    libre = LibreTranslateAPI(str(client.base_url))
    assert libre.translate("a b c d\n\n e f g", "src", "tgt") == "a b c d\n\n e f g"
    assert libre.detect("a b c") == [{"confidence": 100.0, "language": "src"}]
    assert [language["code"] for language in libre.languages()] == ["src", "tgt"]


def test_64_concurrent_clients(client: httpx.Client) -> None:
    texts = [" ".join(sequence) for sequence in sequences(256, "abcdefgh", range(2, 6), seed=5)]
    alone = [translate(client, text) for text in texts[:16]]
    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(lambda text: translate(client, text), texts))
    assert results[:16] == alone
    correct = sum(result == text for result, text in zip(results, texts, strict=True))
    assert correct > 0.9 * len(texts)


def test_responses_are_not_delayed(client: httpx.Client) -> None:
    times = [client.get("/health").elapsed.total_seconds() for _ in range(20)]
    assert min(times) < 0.03  # with Nagle's algorithm, TCP would wait 0.04 seconds


def test_a_disconnected_client_leaves_the_queue(client: httpx.Client) -> None:
    before = metric(client, "regard_sentences_total")
    with pytest.raises(httpx.ReadTimeout):
        client.post("/translate", json=LONG, timeout=0.5)
    wait_until(lambda: metric(client, "regard_queue_sentences") == 0)
    assert translate(client, "a b c") == "a b c"
    assert metric(client, "regard_sentences_total") - before < LINES


def test_a_stream_sends_sentences_one_by_one_and_ends_with_its_client(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/translate/stream", json=LONG) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(2)] == [
            "event: start",
            f'data: {{"sentences": {LINES}}}',
        ]
        assert [next(lines) for _ in range(2)] == ["", "event: part"]
        assert next(lines) == 'data: {"text": "a b c d e f", "source": "a b c d e f"}'
        assert metric(client, "regard_queue_sentences") > 0
    wait_until(lambda: metric(client, "regard_queue_sentences") == 0)


def test_languages_can_be_named(workshop: Path) -> None:
    with serving(workshop / "run", "--languages", "xx,yy") as (_, client):
        assert [one["code"] for one in client.get("/languages").json()] == ["xx", "yy"]
        response = client.post("/translate", json={"q": "a b c", "source": "xx", "target": "yy"})
        assert response.json()["translatedText"] == "a b c"


def children(process: int) -> list[int]:
    return list(map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()))


@pytest.mark.skipif(
    sys.platform != "linux", reason="worker processes need fork, which only Linux has"
)
@pytest.mark.skipif(os.cpu_count() == 1, reason="a single core uses no workers")
def test_the_server_survives_the_death_of_a_worker(workshop: Path) -> None:
    # In int8 the native decoder uses threads.
    with serving(workshop / "run", "--precision", "fp32") as (server, client):
        (worker,) = children(server.pid)
        workers = children(worker)
        assert len(workers) == 4  # two of low priority
        assert translate(client, "a b c") == "a b c"
        os.kill(workers[0], signal.SIGKILL)
        texts = ["a b c", "d e f", "b c", "g h"]
        assert translate(client, "\n".join(texts)) == "\n".join(texts)
        server.send_signal(signal.SIGTERM)
        code, output = wait_for_end(server)
        assert code == 0
        assert output.count("\n") == 1
        assert "was killed, possibly because memory ran out; using threads from now on" in output


def test_a_signal_finishes_running_requests_and_refuses_new_ones(workshop: Path) -> None:
    with serving(workshop / "run") as (server, client), ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, "/translate", json=LONG)
        wait_until(lambda: metric(client, "regard_queue_sentences") > 0)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: is_refused(client))
        assert not running.done()
        response = running.result()
        assert response.status_code == 200
        assert response.json()["translatedText"] == LONG["q"]
        assert wait_for_end(server) == (0, "")


def test_a_server_that_stops_refuses_connections_at_once(workshop: Path) -> None:
    """A connection that nobody accepts would wait until the last request is finished."""
    with serving(workshop / "run") as (server, client):
        address = (client.base_url.host, client.base_url.port)
        with socket.create_connection(address) as running:
            running.sendall(
                b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
            )
            wait_until(lambda: client.get("/health").status_code == 200)
            client.close()
            server.send_signal(signal.SIGTERM)

            def is_closed() -> bool:
                try:
                    socket.create_connection(address).close()
                except ConnectionRefusedError:
                    return True
                return False

            wait_until(is_closed)
            assert server.poll() is None, "one request is still running"
            running.sendall(b"123456789")
            assert running.recv(100).startswith(b"HTTP/1.1 ")
        assert wait_for_end(server) == (0, "")


def is_refused(client: httpx.Client) -> bool:
    """The port stays open for a moment, and the server responds with 503; then it is closed."""
    try:
        return client.get("/ready").status_code == 503
    except httpx.TransportError:
        return True


class Load:
    """Clients that send one request after another on connections of their own, which the server may close."""

    def __init__(self, address: str, clients: int = 4) -> None:
        self.address = address
        self.failures: list[str] = []
        self.count = 0
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]

    def _run(self) -> None:
        with httpx.Client(base_url=self.address, timeout=TIMEOUT) as client:
            while not self._end.is_set():
                try:
                    response = client.post("/translate", json={"q": "a b c", **PAIR})
                    if response.json().get("translatedText") != "a b c":
                        self.failures.append(response.text)
                except httpx.TransportError as error:
                    self.failures.append(repr(error))
                self.count += 1

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the processes from /proc")
def test_reloads_lose_no_request_and_killed_processes_are_replaced(
    workshop: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(workshop / "run", run)
    with serving(run, "--workers", "2") as (server, client):

        def replaced(old: list[int]) -> bool:
            new = children(server.pid)
            return len(new) == 2 and not {*new} & {*old}

        with Load(str(client.base_url)) as load:
            first = children(server.pid)
            server.send_signal(signal.SIGHUP)
            wait_until(lambda: replaced(first))
            second = children(server.pid)
            card = run / "card.json"
            os.utime(card, ns=(0, card.stat().st_mtime_ns + 1))
            wait_until(lambda: replaced(second))
            third = children(server.pid)
            count = load.count
            wait_until(lambda: load.count > count + 20)
        assert load.failures == []
        # Counted by processes that have ended, too.
        assert metric(client, "regard_sentences_total") >= load.count
        time.sleep(1.1)  # a process that dies soon after its start is replaced later
        os.kill(third[0], signal.SIGKILL)
        wait_until(lambda: len(children(server.pid)) == 2 and third[0] not in children(server.pid))
        client.close()
        server.send_signal(signal.SIGTERM)
        assert wait_for_end(server) == (
            0,
            "regard: a server process was killed by SIGKILL; replacing it\n",
        )


def test_a_reload_that_fails_keeps_the_old_models(workshop: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "one", tmp_path / "two"]
    for run in runs:
        shutil.copytree(workshop / "run", run)
    options = (str(runs[1]), "--memory", "500MB", "--pivot", "en", "--access-log", "-")
    with serving(runs[0], *options) as (server, client):
        response = client.post("/translate?model=two", json={"q": "a b c", **PAIR})
        assert response.json() == {"translatedText": "a b c", "model": "two"}
        info = client.get("/v1/info").json()
        assert [(one["name"], one["loaded"]) for one in info["models"]] == [
            ("one", False),
            ("two", True),
        ]
        (runs[0] / "recipe.yaml").unlink()
        server.send_signal(signal.SIGHUP)
        assert server.stderr is not None
        assert "recipe.yaml" in server.stderr.readline()
        assert "ended with status 2; trying again in 1 s" in server.stderr.readline()
        response = client.post("/translate?model=two", json={"q": "a b c", **PAIR})
        assert response.json()["translatedText"] == "a b c"
        server.send_signal(signal.SIGTERM)
        status, output = wait_for_end(server)
        assert status == 0
        routes = [json.loads(line)["route"] for line in output.splitlines() if line[0] == "{"]
        assert routes == ["/translate", "/v1/info", "/translate"]


def test_an_unusable_address_is_an_error(finished_run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RegardError,
            match=rf"cannot listen on 127\.0\.0\.1, port {port}: .*in use; choose another --port",
        ):
            serve([finished_run], port=port)
    with pytest.raises(RegardError, match=r"cannot listen on no\.such\.host\.invalid"):
        serve([finished_run], host="no.such.host.invalid")
