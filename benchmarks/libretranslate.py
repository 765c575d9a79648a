"""Regard's server beside LibreTranslate, with the same weights, the same beam size and the same clients.

    python -m venv /tmp/lt && /tmp/lt/bin/pip install libretranslate
    python benchmarks/libretranslate.py runs/demo /tmp/lt/bin/python      # writes benchmarks/libretranslate.json

LibreTranslate gets the run as an Argos package: the weights in CTranslate2's format, and the vocabulary. It runs as it
is, on its own web server, with three changes that make it faster. Its sentence splitter is a neural network that is
downloaded at the first request; it is replaced by a function that returns the text unchanged. It logs nothing; by
default it writes several lines for each request. And CTranslate2 translates one request on each core; by default all
threads share each request, and on two busy cores a sentence then takes 500 ms of CPU time. Each request has one
sentence. Both servers run on all cores, one after the other, several times in turn.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from server_throughput import cpu_seconds, measure, serving

from regard.demo.corpus import generate
from regard.storage.run_dir import RunDir

LAUNCHER = """
import logging
logging.disable(logging.ERROR)
from argostranslate import sbd
sbd.MiniSBDSentencizer.split_sentences = lambda self, text: [text]
import sys
from libretranslate.main import main
sys.argv = ["libretranslate", *sys.argv[1:]]
main()
"""


def make_packages(run: Path, folder: Path, languages: tuple[str, str]) -> None:
    """Write an Argos package with the weights of a run, and a second one that is never used.

    With a single package, LibreTranslate tries to download others at its start.
    """
    package = folder / "regard"
    export = [sys.executable, "-m", "regard", "export", str(run), "--to", "ctranslate2"]
    subprocess.run(
        [*export, "--out", str(package / "model")], check=True, stdout=subprocess.DEVNULL
    )
    shutil.copy(package / "model" / "source.spm", package / "sentencepiece.model")
    shutil.copytree(package, folder / "reverse")
    for place, (source, target) in ((package, languages), (folder / "reverse", languages[::-1])):
        metadata = {"package_version": "1.0", "argos_version": "1.9"}
        metadata |= {"from_code": source, "from_name": source}
        metadata |= {"to_code": target, "to_name": target}
        (place / "metadata.json").write_text(json.dumps(metadata), encoding="utf-8")


@contextmanager
def libretranslate(python: str, packages: Path, threads: int) -> Iterator[tuple[str, int]]:
    """The address and process id of LibreTranslate with the packages of a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(packages.parent),
        "ARGOS_PACKAGES_DIR": str(packages),
        "ARGOS_INTER_THREADS": str(os.cpu_count()),
        "ARGOS_INTRA_THREADS": "1",
    }
    command = [python, "-c", LAUNCHER, "--port", str(port), "--disable-web-ui"]
    command += ["--threads", str(threads)]
    with subprocess.Popen(
        command, env=environment, cwd=packages.parent, stderr=subprocess.DEVNULL
    ) as server:
        try:
            for _ in range(600):
                time.sleep(0.2)
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
            yield f"127.0.0.1:{port}", server.pid
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("python", help="the Python of an environment with LibreTranslate")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=4, help="of LibreTranslate; 4 is its default"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    languages = RunDir(given.run).recipe().data.language_pair
    texts = [pair.source for pair in islice(generate("test", 500), 500)]
    rounds: dict[str, list[dict[str, float]]] = {"regard": [], "libretranslate": []}
    with tempfile.TemporaryDirectory() as folder:
        packages = Path(folder) / "packages"
        make_packages(given.run, packages, languages)
        for _ in range(given.rounds):
            servers: dict[str, Any] = {
                "regard": serving(given.run),
                "libretranslate": libretranslate(given.python, packages, given.threads),
            }
            for name, server in servers.items():
                with server as (address, pid):
                    measure(address, languages, 8, texts, 2, pid)  # warm-up
                    assert cpu_seconds(pid) > 0
                    found = measure(address, languages, given.clients, texts, given.seconds, pid)
                    print(name, found, flush=True)
                    rounds[name].append(found)
    ours, theirs = (
        statistics.median(one["sentences_per_second"] for one in some) for some in rounds.values()
    )
    cpu = [
        statistics.median(one["server_cpu_ms_per_sentence"] for one in some)
        for some in rounds.values()
    ]
    results = {
        "cores": os.cpu_count(),
        "rounds": rounds,
        "median_sentences_per_second": {"regard": ours, "libretranslate": theirs},
        "times_as_fast": round(ours / theirs, 2),
        "times_less_cpu": round(cpu[1] / cpu[0], 2),
    }
    given.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(given.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
