"""Memory of a loaded model in each precision: base preset, random weights, vocabulary of 8,000.

    python benchmarks/model_memory.py

Each precision is measured in a process of its own. Counted is the growth of Linux's RssAnon while the model is loaded:
weights that are only mapped from the file are not included, because the system can release them.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from regard.bench.translate import preset_workload
from regard.recipe import Precision, parse_choice
from regard.tasks import Translator

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")


def anonymous_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def loaded_megabytes(run: Path, precision: Precision) -> float:
    before = anonymous_megabytes()
    model = Translator.load(run, "cpu", precision, 1)
    return anonymous_megabytes() - before if model.engine.packed else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run, precision = given.one
        print(loaded_megabytes(Path(run), parse_choice(PRECISIONS, precision, "precision")))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        preset_workload(folder, "base", 1)
        for precision in PRECISIONS:
            command = [sys.executable, "-W", "ignore", __file__, "--one", str(folder), precision]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{precision:5} {float(done.stdout):6.0f} MB")


if __name__ == "__main__":
    main()
