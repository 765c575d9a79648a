"""Files are translated in chunks, in constant memory, and a killed translation can be resumed."""

import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.inference.hallucinations import OutputChecker, OutputStatistics
from regard.recipe import DataConfig, DataFiles, DecodingConfig
from regard.tasks import Translation, Translator
from tests.cli.commands import environment, inside, write

KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
import regard.cli.text_io
import regard.inspection.alignment, regard.storage.resumable_output, regard.tasks  # once, for all child processes
from regard.cli.main import main

regard.cli.text_io.CHUNK_LINES = 8
run, *arguments = sys.argv[1:]
entry = Path(".out.txt.journal")

def start(*more, stderr="stderr"):
    child = os.fork()
    if child == 0:
        sys.argv = ["regard", "translate", run, *arguments, *more]
        sys.stderr = open(stderr, "w")
        try:
            main()
        except SystemExit as exit:
            sys.stderr.flush()
            os._exit(exit.code or 0)
        os._exit(0)
    return child

def done():
    return json.loads(entry.read_text())["done"] if entry.exists() else 0

def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

draw, resumed = random.Random(1), []
for _ in range(5):
    child, goal = start("--output", "out.txt", "--alignment", "out.al"), done() + draw.randrange(8, 40)
    while done() < goal:
        time.sleep(0.001)
    time.sleep(draw.random() * 0.03)  # kill it anywhere in a chunk, or while it writes one
    os.kill(child, signal.SIGKILL)
    exit_code(child)
    resumed.append(done())
other = exit_code(start("--output", "out.txt", "--alignment", "out.al", "--beam", "1", stderr="refused"))
last = exit_code(start("--output", "out.txt", "--alignment", "out.al"))
whole = exit_code(start("--output", "whole.txt", "--alignment", "whole.al"))
print(json.dumps({"resumed": resumed, "codes": [other, last, whole]}))
"""


def test_a_killed_translation_loses_and_repeats_no_line(finished_run: Path, tmp_path: Path) -> None:
    lines = [" ".join(["a dog ein"] * (number % 5)) for number in range(400)]
    with gzip.open(tmp_path / "in.gz", "wt") as file:
        file.writelines(f"{line}\n" for line in lines)
    arguments = [finished_run, "--input", "in.gz", "--set", "extra_length=3", "--json"]
    arguments += ["--threads", "2"]  # worker processes, which must end with their parent
    done = subprocess.run(
        [sys.executable, "-c", KILLER, *map(str, arguments)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["codes"] == [2, 0, 0]
    assert sorted({*report["resumed"]}) == report["resumed"]  # each got further than the one before
    found = [json.loads(line)["source"] for line in (tmp_path / "out.txt").read_text().splitlines()]
    assert found == lines
    for name in ("txt", "al"):
        assert (tmp_path / f"out.{name}").read_bytes() == (tmp_path / f"whole.{name}").read_bytes()
    assert "started with different options" in (tmp_path / "refused").read_text()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


class Echo:
    """A translator that returns its input."""

    recipe = SimpleNamespace(
        decoding=DecodingConfig(), data=DataConfig(train=DataFiles(pairs=("pairs.tsv",)))
    )
    runs = (SimpleNamespace(fingerprint=lambda: "echo"),)
    language = None
    precision, threads, device = "fp32", 1, torch.device("cpu")
    engine = SimpleNamespace(summary="fp32 on no device")

    words = SimpleNamespace(encode=lambda texts: [[] for _ in texts])
    tokenizer = SimpleNamespace(source=words)
    max_text_tokens = 4096
    calibration = None

    def start_workers(self) -> None:
        """It has none."""

    def with_target_language(self, language: str | None) -> "Echo":
        return self

    def output_checker(self) -> OutputChecker:
        return OutputChecker(OutputStatistics(copied=1.0))

    def search(self, texts: list[str], **options: Any) -> list[list[Translation]]:
        return [[Translation(text, 0.0, 0.0, [], [], True)] for text in texts]


def test_memory_does_not_grow_with_the_number_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Translator, "load", lambda run, **options: Echo())
    monkeypatch.setattr("regard.data.text_files.CHUNK", 1 << 14)
    peaks = []
    for count in (4_000, 4_000, 40_000):  # the first one includes the memory of imports
        path = write(tmp_path / "in", (f"line {number} of a file" for number in range(count)))
        tracemalloc.start()
        done = inside("translate", "run", "--input", path, "--output", "out", cwd=tmp_path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "out").read_bytes() == path.read_bytes()
    assert peaks[2] < 1.1 * peaks[1]


def test_terms_and_placeholders_are_kept_and_losses_are_reported(
    finished_run: Path, tmp_path: Path
) -> None:
    write(tmp_path / "terms.tsv", ["dog\tHund"])
    write(tmp_path / "in", ["a Dog", "ein", "%s dog dog"])
    done = inside(
        *("translate", finished_run, "--input", "in", "--glossary", "terms.tsv", "--threads", 2),
        *("--protect", "placeholders", "--set", "extra_length=3", "--no-repeat-ngram", "2"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert ["Hund" in line.split() for line in lines] == [True, "Hund" in lines[1], True]
    # A vocabulary of whole words cannot encode %s.
    assert done.stderr.endswith("line 3: %s occurs 1 time(s) in the source, 0 in the translation\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--protect", "names"], "--protect: 'names' must be 'placeholders' or 'numbers'"),
        (["--beam", "0"], "--beam: 0 must be greater than or equal to 1"),
        (
            ["--length-penalty", "-1", "--top-p", "2", "--set", "beam=0"],
            "decoding.beam: 0 must be greater than or equal to 1; --length-penalty: -1.0 must be ",
        ),
        (["--set", "coverge=1"], "unknown key decoding.coverge; did you mean coverage_penalty?"),
        (
            ["--set", "coverage"],
            "--set coverage: expected key=value with a key of the recipe's decoding section",
        ),
        (["--nbest", "2", "--alignment", "al"], "--nbest 2: cannot be combined with --alignment"),
        (
            ["--mbr", "4", "--beam", "2"],
            "beam 2, mbr 4: mbr turns on sampling, which uses no beam; set only one of the two",
        ),
        (["--glossary", "absent"], "absent: no such file"),
        (["--input", "absent", "--output", "out"], "absent: no such file"),
    ],
)
def test_invalid_options_are_refused_in_one_line(
    arguments: list[str], message: str, finished_run: Path, tmp_path: Path
) -> None:
    texts = [] if "--input" in arguments else ["a dog"]
    done = inside("translate", finished_run, *texts, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("regard: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
