"""Ray Data against a plain loop: the same model, sentences and batches, one actor with one core.

    python benchmarks/ray_data.py RUN --sentences 20000 40000      # needs regard[ray]; adds to benchmarks/ray_data.json

The loop reads a Parquet file, translates it in batches and writes another one; Ray Data does the same with
``regard.ray.Translate``. Two numbers of sentences give the time to start, and the time per sentence after it. It is the
CPU time of all processes, without ``ray.init``, so that other work on the machine matters little. No other Ray must
run on the machine.
"""

import argparse
import json
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

RESULTS = Path(__file__).with_suffix(".json")
BATCH = 1024
REPETITIONS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--sentences", type=int, nargs=2, default=[20_000, 40_000])
    parser.add_argument("--one", choices=["loop", "ray"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps({"loop": loop, "ray": ray_data}[options.one](options.run, options.folder)))
        return
    seconds: dict[str, dict[int, float]] = {"loop": {}, "ray": {}}
    """CPU seconds by number of sentences"""
    for count in options.sentences:
        with tempfile.TemporaryDirectory() as folder:
            write_input(Path(folder) / "in.parquet", count)
            # Both in turn, each in a process of its own, so that other work on the machine affects both.
            for _ in range(REPETITIONS):
                for name in seconds:
                    taken = measure(name, options.run, Path(folder))
                    best = seconds[name].get(count, float("inf"))
                    seconds[name][count] = round(min(best, taken), 2)
                    print(count, name, taken, flush=True)
    few, many = options.sentences
    rates = {
        name: (many - few) / max(1e-9, taken[many] - taken[few]) for name, taken in seconds.items()
    }
    result: dict[str, Any] = {
        "sentences": options.sentences,
        "cpu_seconds": seconds,
        "sentences_per_cpu_second": {name: round(rate) for name, rate in rates.items()},
        "cpu_seconds_to_start": {
            name: round(taken[few] - few / rates[name], 2) for name, taken in seconds.items()
        },
        "overhead_percent": round(100 * (rates["loop"] / rates["ray"] - 1), 1),
        "load": round(os.getloadavg()[0], 1),
    }
    RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(RESULTS.read_text(encoding="utf-8"))


def write_input(path: Path, count: int) -> None:
    sources = [pair.source for pair in generate("train", 5_000)]
    texts = list(islice(cycle(sources), count))
    parquet.write_table(pa.table({"id": range(count), "source": texts}), path)


def measure(name: str, run: Path, folder: Path) -> float:
    """The seconds of one of the two, in a new process."""
    command = [sys.executable, __file__, str(run), "--one", name, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return float(json.loads(done.stdout.strip().split("\n")[-1]))


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


if __name__ == "__main__":
    main()
