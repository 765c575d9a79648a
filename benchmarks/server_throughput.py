"""What batching of concurrent requests gains: 64 clients at once against one.

    python benchmarks/server_throughput.py runs/demo        # writes benchmarks/server_throughput.json

One server, one sentence per request; first one client, then all at once, each for the same time. The clients run on the
same machine as the server.
"""

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from urllib.parse import urlsplit

from regard.demo.grammar import generate
from regard.storage.run_dir import RunDir


@contextmanager
def serving(run: Path) -> Iterator[str]:
    """The address of a server of the run; it must exit with status 0 at the end."""
    command = [sys.executable, "-W", "error", "-m", "regard", "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield urlsplit(server.stdout.readline().split()[-1]).netloc
        finally:
            server.terminate()
            if server.wait(30) != 0:
                sys.exit(f"the server ended with status {server.returncode}")


def client(address: str, languages: tuple[str, str], texts: list[str], end: float) -> list[float]:
    """One client that sends one request after another until ``end``; the seconds of each."""
    connection = http.client.HTTPConnection(address, timeout=60)
    times = []
    for text in cycle(texts):
        if time.monotonic() > end:
            break
        request = {"q": text, "source": languages[0], "target": languages[1]}
        start = time.monotonic()
        connection.request(
            "POST", "/translate", json.dumps(request), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        answer = json.loads(response.read())
        times.append(time.monotonic() - start)
        if response.status != 200 or not answer["translatedText"]:
            sys.exit(f"{response.status}: {answer}")
    connection.close()
    return times


def measure(
    address: str, languages: tuple[str, str], clients: int, texts: list[str], seconds: float
) -> dict[str, float]:
    start = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        jobs = [
            pool.submit(client, address, languages, texts[number:], start + seconds)
            for number in range(clients)
        ]
        times = [one for job in jobs for one in job.result()]
    took = time.monotonic() - start
    return {
        "clients": clients,
        "requests": len(times),
        "sentences_per_second": round(len(times) / took, 1),
        "median_seconds": round(statistics.median(times), 4),
        "p95_seconds": round(statistics.quantiles(times, n=20)[-1], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15)
    given = parser.parse_args()
    languages = RunDir(given.run).recipe().data.language_pair
    texts = [pair.source for pair in islice(generate("test", 500), 500)]
    with serving(given.run) as address:
        measure(address, languages, 1, texts, 1)  # warm-up
        alone = measure(address, languages, 1, texts, given.seconds)
        together = measure(address, languages, given.clients, texts, given.seconds)
    results = {
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "one client": alone,
        "all clients": together,
        "speedup": round(together["sentences_per_second"] / alone["sentences_per_second"], 2),
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
