"""Memory of its own that an opened model takes, in each number format: base, random weights, 8,000 entries.

    python benchmarks/opened.py

Each format is a process of its own. What is counted is Linux's RssAnon, above what it was before the model was opened:
weights that stand in the file and are only mapped are not among it, since the system can let go of them.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from regard.bench.subject import of_preset
from regard.recipe import Precision, parse_choice
from regard.tasks import Translator

FORMATS: tuple[Precision, ...] = ("fp32", "bf16", "int8")


def own_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def opened(run: Path, precision: Precision) -> float:
    before = own_megabytes()
    model = Translator.load(run, "cpu", precision, 1)
    return own_megabytes() - before if model.ready else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run, precision = given.one
        print(opened(Path(run), parse_choice(FORMATS, precision, "precision")))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "run"
        of_preset(folder, "base", 1)
        for precision in FORMATS:
            command = [sys.executable, "-W", "ignore", __file__, "--one", str(folder), precision]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{precision:5} {float(done.stdout):6.0f} MB")


if __name__ == "__main__":
    main()
