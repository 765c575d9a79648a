"""The server as its clients meet it: in a process of its own, through a port of the loopback."""

import os
import signal
import socket
import subprocess
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
from regard.inference.worker_pool import WorkerPool
from regard.server.serve import serve
from tests.cli.commands import REGARD, TIMEOUT, environment, sequences

PAIR = {"source": "src", "target": "tgt"}
LINES = 4000
LONG = {"q": "a b c d e f\n" * LINES, **PAIR, "beam": 20}
"""What takes a few seconds, in three batches."""


@contextmanager
def serving(run: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server, and a client with its address."""
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
        assert line.startswith(f"regard: serving {run} at http://127.0.0.1:"), server.communicate()
        address = line.split()[-1]
        with httpx.Client(
            base_url=address, timeout=TIMEOUT, limits=httpx.Limits(max_connections=100)
        ) as client:
            yield server, client
    finally:
        server.kill()
        server.communicate(timeout=TIMEOUT)


def ended(server: subprocess.Popen[str]) -> tuple[int, str]:
    """How the server ended, and what it said on its way."""
    said, complained = server.communicate(timeout=TIMEOUT)
    return server.returncode, said + complained


@pytest.fixture(scope="module")
def client(workshop: Path) -> Iterator[httpx.Client]:
    """Of a server that copies. At the end, it must have nothing to complain of."""
    with serving(workshop / "run") as (server, client):
        yield client
        server.send_signal(signal.SIGINT)
        assert ended(server) == (0, "")


def translate(client: httpx.Client, text: str) -> Any:
    answer = client.post("/translate", json={"q": text, **PAIR})
    assert answer.status_code == 200, answer.text
    return answer.json()["translatedText"]


def count(client: httpx.Client, name: str) -> float:
    """One of the server's metrics."""
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_client_of_libretranslate_works_unchanged(client: httpx.Client) -> None:
    libre = LibreTranslateAPI(str(client.base_url))
    assert libre.translate("a b c d\n\n e f g", "src", "tgt") == "a b c d\n\n e f g"
    assert libre.detect("a b c") == [{"confidence": 100.0, "language": "src"}]
    assert [language["code"] for language in libre.languages()] == ["src", "tgt"]


def test_64_clients_at_once(client: httpx.Client) -> None:
    texts = [" ".join(sequence) for sequence in sequences(256, "abcdefgh", range(2, 6), seed=5)]
    alone = [translate(client, text) for text in texts[:16]]
    with ThreadPoolExecutor(64) as pool:
        found = list(pool.map(lambda text: translate(client, text), texts))
    assert found[:16] == alone
    right = sum(found == text for found, text in zip(found, texts, strict=True))
    assert right > 0.9 * len(texts)


def test_an_answer_is_not_held_back(client: httpx.Client) -> None:
    times = [client.get("/health").elapsed.total_seconds() for _ in range(20)]
    assert min(times) < 0.03  # 0.04 is what TCP waits to fill a packet, if it is let


def test_a_client_that_goes_away_leaves_the_queue(client: httpx.Client) -> None:
    before = count(client, "regard_sentences_total")
    with pytest.raises(httpx.ReadTimeout):
        client.post("/translate", json=LONG, timeout=0.5)
    wait_until(lambda: count(client, "regard_queue_sentences") == 0)
    assert translate(client, "a b c") == "a b c"
    assert count(client, "regard_sentences_total") - before < LINES


def test_a_stream_comes_sentence_by_sentence_and_ends_with_its_client(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/translate/stream", json=LONG) as answer:
        lines = answer.iter_lines()
        assert [next(lines) for _ in range(2)] == [
            "event: start",
            f'data: {{"sentences": {LINES}}}',
        ]
        assert [next(lines) for _ in range(2)] == ["", "event: part"]
        assert next(lines) == 'data: {"text": "a b c d e f", "source": "a b c d e f"}'
        assert count(client, "regard_queue_sentences") > 0
    wait_until(lambda: count(client, "regard_queue_sentences") == 0)


def test_languages_can_be_named(workshop: Path) -> None:
    with serving(workshop / "run", "--languages", "xx,yy") as (_, client):
        assert [one["code"] for one in client.get("/languages").json()] == ["xx", "yy"]
        answer = client.post("/translate", json={"q": "a b c", "source": "xx", "target": "yy"})
        assert answer.json()["translatedText"] == "a b c"


@pytest.mark.skipif(not WorkerPool.possible, reason="processes are forked on Linux only")
@pytest.mark.skipif(os.cpu_count() == 1, reason="one core has no use for a second process")
def test_a_process_that_is_lost_is_not_missed(workshop: Path) -> None:
    with serving(workshop / "run") as (server, client):
        workers = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert len(workers) == 2
        assert translate(client, "a b c") == "a b c"
        os.kill(int(workers[0]), signal.SIGKILL)
        texts = ["a b c", "d e f", "b c", "g h"]
        assert translate(client, "\n".join(texts)) == "\n".join(texts)
        server.send_signal(signal.SIGTERM)
        code, complained = ended(server)
        assert code == 0
        assert complained.count("\n") == 1
        assert "ended from outside, perhaps for want of memory; from now on threads" in complained


def test_a_signal_lets_it_finish_what_it_has_and_refuse_the_rest(workshop: Path) -> None:
    with serving(workshop / "run") as (server, client), ThreadPoolExecutor(1) as pool:
        opened = pool.submit(client.post, "/translate", json=LONG)
        wait_until(lambda: count(client, "regard_queue_sentences") > 0)
        server.send_signal(signal.SIGTERM)
        wait_until(lambda: is_refused(client))
        assert not opened.done()
        answer = opened.result()
        assert answer.status_code == 200
        assert answer.json()["translatedText"] == LONG["q"]
        assert ended(server) == (0, "")


def is_refused(client: httpx.Client) -> bool:
    """For a moment the port is still open, and the server says so itself; then it is closed."""
    try:
        return client.get("/ready").status_code == 503
    except httpx.TransportError:
        return True


def test_a_port_that_is_taken_is_said_in_a_line(finished_run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            RegardError, match=rf"cannot listen on 127\.0\.0\.1, port {port}: .*in use"
        ):
            serve(finished_run, port=port)
    with pytest.raises(RegardError, match=r"cannot listen on no\.such\.host\.invalid"):
        serve(finished_run, host="no.such.host.invalid")
