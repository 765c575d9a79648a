"""The server under load: batching of concurrent requests, fairness between clients, and a soak test.

    python benchmarks/server_throughput.py runs/demo              # writes benchmarks/server_throughput.json
    python benchmarks/server_throughput.py runs/demo --soak 30    # writes benchmarks/server_soak.json

The clients run on the same machine as the server, in one process. Throughput: one client that sends one sentence per
request, then 64 at once. Fairness: a client that sends small requests, alone and while another one sends the largest
request that the server accepts, again and again. Soak: mixed requests, some of which are disconnected.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from regard.demo.corpus import generate
from regard.server.schemas import Settings
from regard.storage.run_dir import RunDir
from regard.tasks import Translator


@contextmanager
def serving(run: Path, *options: str) -> Iterator[tuple[str, int]]:
    """The address and process id of a server of the run; it must exit with status 0 at the end."""
    command = [sys.executable, "-W", "error", "-m", "regard", "serve", str(run), "--port", "0"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield urlsplit(server.stdout.readline().split()[-1]).netloc, server.pid
        finally:
            server.terminate()
            if server.wait(90) != 0:
                sys.exit(f"the server ended with status {server.returncode}")


# ---------------------------------------------------------------------------------------------
# Clients


class Client:
    """One connection. Parses only what the server sends, so that it uses little of the shared CPU time."""

    def __init__(self, address: str, languages: tuple[str, str]) -> None:
        self.host, _, self.port = address.rpartition(":")
        self.pair = dict(zip(("source", "target"), languages, strict=True))
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> "Client":
        self.reader, self.writer = await asyncio.open_connection(self.host, int(self.port))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self.writer is not None
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    async def translate(self, q: str, **more: Any) -> tuple[int, Any]:
        """Status and body of the response."""
        await self.send(q, **more)
        return await self.receive()

    async def send(self, q: str, **more: Any) -> None:
        assert self.writer is not None
        body = json.dumps({"q": q, **self.pair, **more}).encode()
        self.writer.write(
            b"POST /translate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        await self.writer.drain()

    async def receive(self) -> tuple[int, Any]:
        assert self.reader is not None
        head = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split()[1]), json.loads(await self.reader.readexactly(length))


async def seconds_of_requests(client: Client, texts: Sequence[str], end: float) -> list[float]:
    """Send one request after another until ``end``; the seconds of each."""
    times = []
    async with client:
        for text in cycle(texts):
            start = time.monotonic()
            if start > end:
                return times
            status, answer = await client.translate(text)
            times.append(time.monotonic() - start)
            if status != 200 or not answer["translatedText"]:
                sys.exit(f"{status}: {answer}")
    return times


def summary(times: Sequence[float], seconds: float) -> dict[str, float]:
    return {
        "requests": len(times),
        "sentences_per_second": round(len(times) / seconds, 1),
        "median_seconds": round(statistics.median(times), 4),
        "p95_seconds": round(statistics.quantiles(times, n=20)[-1], 4),
    }


# ---------------------------------------------------------------------------------------------
# Processes of the server


def process_tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
            found += map(int, children.split())
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a server and its processes; of those that have ended too, if their parents have not."""
    total = 0.0
    for one in process_tree(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


def memory_megabytes(pid: int) -> float:
    """Memory of a server and its processes without files; pages that they share are counted once."""
    total = 0
    for one in process_tree(pid):
        with suppress(OSError):
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
    return total / 1024


# ---------------------------------------------------------------------------------------------
# Throughput


def measure(
    address: str,
    languages: tuple[str, str],
    clients: int,
    texts: list[str],
    seconds: float,
    pid: int,
) -> dict[str, float]:
    async def run() -> list[float]:
        end = time.monotonic() + seconds
        jobs = [
            seconds_of_requests(Client(address, languages), texts[number:], end)
            for number in range(clients)
        ]
        return [one for times in await asyncio.gather(*jobs) for one in times]

    before, ours, start = cpu_seconds(pid), time.process_time(), time.monotonic()
    times = asyncio.run(run())
    took, cpu = time.monotonic() - start, cpu_seconds(pid) - before
    return {
        "clients": clients,
        **summary(times, took),
        "server_cpu_ms_per_sentence": round(1000 * cpu / len(times), 2),
        "client_cpu_ms_per_sentence": round(1000 * (time.process_time() - ours) / len(times), 2),
        "cores_used": round((cpu + time.process_time() - ours) / took, 2),
    }


# ---------------------------------------------------------------------------------------------
# Fairness


def worst_requests(run: Path) -> dict[str, dict[str, Any]]:
    """Requests that are as expensive as the limits allow, with the widest beam."""
    limit = Settings().max_sentence_terms
    words = [pair.target.split()[0] for pair in generate("test", 10)]
    terms = {f"{chr(97 + number)}x": words[number % len(words)] for number in range(limit)}
    return {
        "long sentences": _worst_request(run, 598),
        "many sentences": _worst_request(run, 24),
        "glossary terms": _worst_request(run, 500, terms),
    }


def _worst_request(run: Path, length: int, terms: dict[str, str] | None = None) -> dict[str, Any]:
    """As many sentences of this number of random letters as the limits allow, each with all terms of a glossary."""
    settings = Settings()
    model = Translator.load(run, "cpu")
    letters, draw = "bcdfghjklmnpqrstvwxyz", random.Random(1)
    sentences: list[str] = []
    tokens = 0
    while len(sentences) < settings.max_queued_sentences // 2:
        random_letters = "".join(draw.choice(letters) for _ in range(length))
        sentence = " ".join([random_letters, *(terms or ())]) + "."
        tokens += sum(model.count_tokens([sentence]))
        characters = sum(map(len, sentences)) + len(sentence) + len(sentences)
        if tokens > settings.max_tokens or characters > settings.max_characters:
            break
        sentences.append(sentence)
    glossary = {"glossary": terms} if terms else {}
    return {"q": "\n".join(sentences), "beam": settings.max_beam, **glossary}


async def fairness(
    address: str,
    languages: tuple[str, str],
    texts: list[str],
    worst: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Small requests of one client, alone and beside a client that sends the worst request."""

    async def small() -> dict[str, float]:
        end = time.monotonic() + seconds
        return summary(await seconds_of_requests(Client(address, languages), texts, end), seconds)

    statuses: Counter[int] = Counter()

    async def attack() -> None:
        while True:
            async with Client(address, languages) as client:
                status, _ = await client.translate(**worst)
                statuses[status] += 1

    idle = await small()
    attacker = asyncio.create_task(attack())
    await asyncio.sleep(1)
    beside = await small()
    attacker.cancel()
    with suppress(asyncio.CancelledError):
        await attacker
    return {
        "worst_request": {
            "characters": len(worst["q"]),
            "sentences": worst["q"].count("\n") + 1,
            "beam": worst["beam"],
        },
        "idle": idle,
        "beside_worst": beside,
        "worst_statuses": dict(statuses),
        "p95_ratio": round(beside["p95_seconds"] / idle["p95_seconds"], 2),
    }


# ---------------------------------------------------------------------------------------------
# Soak


async def soak(
    address: str, languages: tuple[str, str], texts: list[str], minutes: float, pid: int
) -> dict[str, Any]:
    """Mixed load with random disconnects; errors, and how memory grows after the first quarter."""
    end = time.monotonic() + 60 * minutes
    outcomes: Counter[str] = Counter()
    samples: list[tuple[int, float]] = []
    errors: list[str] = []

    async def client(number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < end:
            async with Client(address, languages) as one:
                for _ in range(draw.randrange(1, 20)):
                    count = draw.choice((1, 1, 1, 2, 8, 64))
                    body: dict[str, Any] = {"q": "\n".join(draw.choices(texts, k=count))}
                    body |= draw.choice(
                        (
                            *({}, {}, {"beam": 8}, {"format": "html"}, {"alternatives": 2}),
                            {"glossary": {"dog": "Hund", "cat": "Kater"}},
                        )
                    )
                    await one.send(**body)
                    if draw.random() < 0.05:
                        await asyncio.sleep(draw.random() * 0.2)
                        outcomes["disconnected"] += 1
                        break
                    status, answer = await one.receive()
                    outcomes[str(status)] += 1
                    if status != 200:
                        errors.append(str(answer)[:200])

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(min(5.0, 60 * minutes / 40))
            samples.append((sum(outcomes.values()), memory_megabytes(pid)))

    await asyncio.gather(watch(), *(client(number) for number in range(16)))
    steady = samples[len(samples) // 4 :]
    slope = statistics.linear_regression(*zip(*steady, strict=True)).slope
    return {
        "minutes": minutes,
        "outcomes": dict(outcomes),
        "errors": errors[:10],
        "memory_megabytes": {"first": round(samples[0][1]), "last": round(samples[-1][1])},
        "megabytes_per_1000_requests": round(1000 * slope, 3),
        "processes": len(process_tree(pid)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--repeat", type=int, default=3, help="measurements; the best one counts")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--soak", type=float, metavar="MINUTES")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    languages = RunDir(given.run).recipe().data.language_pair
    texts = [pair.source for pair in islice(generate("test", 500), 500)]
    results: dict[str, Any] = {
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "workers": given.workers,
    }
    name = "server_throughput.json" if given.soak is None else "server_soak.json"
    with serving(given.run, "--workers", str(given.workers)) as (address, pid):
        measure(address, languages, 8, texts, 1, pid)  # warm-up
        if given.soak is not None:
            results |= asyncio.run(soak(address, languages, texts, given.soak, pid))
        else:
            results |= throughput_and_fairness(given, address, languages, texts, pid)
    path = given.out or Path(__file__).with_name(name)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


def throughput_and_fairness(
    given: argparse.Namespace,
    address: str,
    languages: tuple[str, str],
    texts: list[str],
    pid: int,
) -> dict[str, Any]:
    def best(clients: int) -> dict[str, float]:
        every = [
            measure(address, languages, clients, texts, given.seconds, pid)
            for _ in range(given.repeat)
        ]
        return max(every, key=lambda one: one["sentences_per_second"])

    alone, together = best(1), best(given.clients)
    fair: dict[str, Any] = {}
    for name, worst in worst_requests(given.run).items():
        every = [
            asyncio.run(fairness(address, languages, texts, worst, given.seconds))
            for _ in range(given.repeat)
        ]
        fair[name] = sorted(every, key=lambda one: float(one["p95_ratio"]))[len(every) // 2]
    return {
        "one client": alone,
        "all clients": together,
        "speedup": round(together["sentences_per_second"] / alone["sentences_per_second"], 2),
        "fairness": fair,
    }


if __name__ == "__main__":
    main()
