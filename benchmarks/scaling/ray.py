"""Ray Data against a plain loop: the same model, sentences and batches, one actor with one core.

    python benchmarks/scale.py ray RUN --sentences 20000 40000      # needs regard[ray]

The loop reads a Parquet file, translates it in batches and writes another one; Ray Data does the same with
``regard.ray.Translate``. Two numbers of sentences give the time to start, and the time per sentence after it. It is the
CPU time of all processes, without ``ray.init``, so that other work on the machine matters little. No other Ray must
run on the machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from regard.demo.corpus import generate

BATCH = 1024
REPETITIONS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path)
    parser.add_argument("--sentences", type=int, nargs=2, default=[20_000, 40_000])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, dict[str, float]] = {"loop": {}, "ray": {}}
    """CPU seconds by number of sentences"""
    for count in options.sentences:
        with tempfile.TemporaryDirectory() as folder:
            write_input(Path(folder) / "in.parquet", count)
            # Both in turn, each in a process of its own, so that other work on the machine affects both.
            for _ in range(REPETITIONS):
                for name in seconds:
                    taken = cpu_seconds(name, options.run, Path(folder))
                    best = seconds[name].get(str(count), float("inf"))
                    seconds[name][str(count)] = round(min(best, taken), 2)
                    print(count, name, taken, flush=True)
    few, many = options.sentences
    rates = {
        name: (many - few) / max(1e-9, taken[str(many)] - taken[str(few)])
        for name, taken in seconds.items()
    }
    return {
        "sentences": options.sentences,
        "cpu_seconds": seconds,
        "sentences_per_cpu_second": {name: round(rate) for name, rate in rates.items()},
        "cpu_seconds_to_start": {
            name: round(taken[str(few)] - few / rates[name], 2) for name, taken in seconds.items()
        },
        "overhead_percent": round(100 * (rates["loop"] / rates["ray"] - 1), 1),
    }


def write_input(path: Path, count: int) -> None:
    sources = [pair.source for pair in generate("train", 5_000)]
    texts = list(islice(cycle(sources), count))
    parquet.write_table(pa.table({"id": range(count), "source": texts}), path)


def cpu_seconds(name: str, run: Path, folder: Path) -> float:
    """The CPU seconds of ``loop`` or ``ray``, in a new process."""
    program = "import sys; from scaling import ray; from pathlib import Path; "
    program += "print(ray.KINDS[sys.argv[1]](*map(Path, sys.argv[2:])))"
    command = [sys.executable, "-c", program, name, str(run), str(folder)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.strip().split("\n")[-1])


class CPUTime:
    """The CPU time of this process and of those of Ray, also of those that end meanwhile; sampled."""

    def __init__(self) -> None:
        self.ticks: dict[int, int] = {}
        self.sample()
        self.start = dict(self.ticks)
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self) -> None:
        while not self.ended.wait(0.5):
            self.sample()

    def sample(self) -> None:
        for path in Path("/proc").glob("[0-9]*"):
            process = int(path.name)
            with suppress(OSError):  # it has just ended
                if process == os.getpid() or b"ray" in (path / "cmdline").read_bytes():
                    fields = (path / "stat").read_text().rpartition(")")[2].split()
                    self.ticks[process] = int(fields[11]) + int(fields[12])

    def stop(self) -> float:
        """The seconds since the beginning."""
        self.ended.set()
        self.thread.join()
        self.sample()
        ticks = sum(self.ticks.values()) - sum(self.start.values())
        return ticks / os.sysconf("SC_CLK_TCK")


def loop(run: Path, folder: Path) -> float:
    """CPU seconds to load the model, and to read, translate and write all sentences."""
    from regard.ray import Translate

    time_used = CPUTime()
    translate = Translate(run, threads=1)
    with parquet.ParquetFile(folder / "in.parquet") as table:
        batches = [
            translate(
                {
                    name: column.to_numpy(False)
                    for name, column in zip(batch.schema.names, batch.columns, strict=True)
                }
            )
            for batch in table.iter_batches(BATCH)
        ]
    written = pa.concat_tables(pa.table(batch) for batch in batches)
    parquet.write_table(written, folder / "loop.parquet")
    return time_used.stop()


def ray_data(run: Path, folder: Path) -> float:
    """The same with one actor that has one core."""
    import ray

    from regard.ray import Translate

    # One core is for the actor, the other one for reading and writing.
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    time_used = CPUTime()
    rows = ray.data.read_parquet(str(folder / "in.parquet")).map_batches(
        Translate,
        fn_constructor_kwargs={"run": str(run.absolute())},
        batch_size=BATCH,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    rows.write_parquet(str(folder / "ray"))
    seconds = time_used.stop()
    expected = parquet.read_table(folder / "loop.parquet")
    found = parquet.read_table(folder / "ray").sort_by("id")
    assert found.column("translation").to_pylist() == expected.column("translation").to_pylist()
    subprocess.run(["rm", "-r", str(folder / "ray")], check=True)
    ray.shutdown()
    return seconds


KINDS = {"loop": loop, "ray": ray_data}


def figures(record: dict[str, Any]) -> list[tuple[str, str]]:
    names = {"loop": "plain loop", "ray": "Ray Data, one actor"}
    rates = record["sentences_per_cpu_second"]
    return [
        *((f"sentences per CPU second, {name}", f"{rates[key]:,}") for key, name in names.items()),
        ("CPU time of Ray Data to start", f"{record['cpu_seconds_to_start']['ray']} s"),
        ("overhead of Ray Data for each sentence", f"{record['overhead_percent']}%"),
    ]
