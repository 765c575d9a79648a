"""Time to translate one sentence from the shell: regard, and a script with CTranslate2 and SentencePiece.

    regard export runs/demo --to ctranslate2-int8 --out /tmp/demo.ct2
    python benchmarks/cold_start.py runs/demo /tmp/demo.ct2 --out benchmarks/cold_start.json

Each command is a process of its own; the commands take turns. The first start of regard, which prepares the model, is
measured separately, with an empty cache. CTranslate2 has one thread, which is its fastest for one sentence. Times are
medians, in seconds: CPU time of the process, and wall-clock time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from regard.training.model_card import hardware

CTRANSLATE2 = """
import sys
import ctranslate2, sentencepiece

folder, text = sys.argv[1:]
source = sentencepiece.SentencePieceProcessor(folder + "/source.spm")
target = sentencepiece.SentencePieceProcessor(folder + "/target.spm")
translator = ctranslate2.Translator(folder, compute_type="int8", intra_threads=1)
tokens = source.encode(text, out_type=str) + ["</s>"]
(result,) = translator.translate_batch([tokens], beam_size=5)
print(target.decode(result.hypotheses[0]))
"""


def measure(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float, str]:
    """CPU time, wall-clock time and output of a process."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return usage.ru_utime + usage.ru_stime, seconds, output.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("ctranslate2", type=Path)
    parser.add_argument("--text", default="The cat was hungry.")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    commands = {
        "regard": [sys.executable, "-m", "regard", "translate", arguments.run, arguments.text],
        "CTranslate2": [sys.executable, "-c", CTRANSLATE2, arguments.ctranslate2, arguments.text],
        "python": [sys.executable, "-c", "pass"],
        "regard --help": [sys.executable, "-m", "regard", "--help"],
    }
    found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in commands}
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "REGARD_PREPARED": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has compiled files
        environment["PYTHONPYCACHEPREFIX"] = str(Path(cache, "compiled"))
        for command in commands.values():  # compile, and read from disk
            measure(list(map(str, command)), environment)
        Path(cache, "models").mkdir()
        for path in Path(cache).glob("*.safetensors"):
            path.unlink()
        regard = list(map(str, commands["regard"]))
        first = measure(regard, environment)
        for _ in range(arguments.repeats):
            for name, command in commands.items():
                found[name].append(measure(list(map(str, command)), environment))
    load.append(os.getloadavg()[0])
    rows = {"regard, first start": [first], **found}
    result = {
        "hardware": hardware(torch.device("cpu")),
        "load": load,
        "text": arguments.text,
        "outputs": {name: one[0][2] for name, one in rows.items() if name != "regard --help"},
        "cpu_seconds": {name: [round(one[0], 3) for one in some] for name, some in rows.items()},
        "wall_seconds": {name: [round(one[1], 3) for one in some] for name, some in rows.items()},
    }
    for name, some in rows.items():
        cpu, wall = (statistics.median(one[column] for one in some) for column in (0, 1))  # type: ignore[misc]
        print(f"{name:20} {cpu:.3f} s CPU, {wall:.3f} s")
    print(f"load {load[0]:.1f} to {load[1]:.1f}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
