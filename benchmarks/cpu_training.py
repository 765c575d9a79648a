"""Training on a CPU compared with other libraries: Regard in one process and in several, in bf16 and in fp32.

    python benchmarks/cpu_training.py --out cpu_training.json                                   # on two cores
    python benchmarks/cpu_training.py --processes 1 4 8 16 --sentences 512 --out cpu_training_intel.json

Every row is a process of its own, and is written to the file when it is measured, so that a part remains if the time is
over. Regard trains on random sentences of about 25 words with packed batches (``benchmarks/scale.py step``), each
process with an equal share of the cores as threads. The other libraries have all cores, and sentences of one length, so
that they compute no padding (``regard bench train``). Batches have about as many tokens. The ratio of a row is its
speed over that of the fastest row of another library in the same precision.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from reporting import markdown_table
from scaling.shared_gpu import write_recipe

from regard.inference.worker_pool import available_cores
from regard.storage.atomic_files import write_text
from regard.training.cpu_kernels import fastest_cpu_precision
from regard.training.model_card import hardware

HERE = Path(__file__).parent
PEERS = ("torch", "marian")
WORDS_PER_SENTENCE = 32


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--presets", nargs="+", default=["tiny", "base"])
    parser.add_argument("--processes", type=int, nargs="+", default=[1])
    parser.add_argument("--sentences", type=int, default=32, help="sentences of a batch")
    parser.add_argument("--steps", type=int, default=10, help="steps that are timed")
    parser.add_argument("--precisions", nargs="+", help="default: fp32, and bf16 if it is faster")
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    report: dict[str, Any] = {"hardware": hardware(torch.device("cpu")), "rows": []}
    report |= {"cores": available_cores(), "sentences": options.sentences}
    with tempfile.TemporaryDirectory() as folder:
        for preset in options.presets:
            for row in measured_rows(preset, options, Path(folder)):
                report["rows"].append({"preset": preset, "load": os.getloadavg()[0], **row})
                write_text(options.out, json.dumps(report, indent=1) + "\n")
                print(json.dumps(report["rows"][-1]), flush=True)
    print("\n".join(table(report["rows"])))


def measured_rows(
    preset: str, options: argparse.Namespace, folder: Path
) -> Iterator[dict[str, Any]]:
    """The other libraries, then Regard with each number of processes."""
    precisions = options.precisions or list(dict.fromkeys([fastest_cpu_precision(), "fp32"]))
    command = [sys.executable, "-m", "regard", "bench", "train", "--device", "cpu", "--json"]
    command += ["--preset", preset, "--sentences", str(options.sentences), "--repeats", "1"]
    command += [word for peer in PEERS for word in ("--peer", peer)]
    command += [word for precision in precisions for word in ("--precision", precision)]
    output = subprocess.run(command, capture_output=True, check=True).stdout
    for row in json.loads(output)["rows"]:
        if not row["name"].startswith("regard"):
            yield {key: row[key] for key in ("name", "precision", "tokens_per_second")}
    for processes in options.processes:
        for precision in precisions:
            speed = regard_speed(preset, processes, precision, options, folder)
            name = f"Regard, {processes} process{'es' * (processes > 1)}"
            yield {"name": name, "precision": precision, "tokens_per_second": speed}


def regard_speed(
    preset: str, processes: int, precision: str, options: argparse.Namespace, folder: Path
) -> float:
    """Target tokens per second of a packed training step."""
    given = argparse.Namespace(
        preset=preset,
        tokens=options.sentences * WORDS_PER_SENTENCE,
        pairs=options.pairs,
        device="cpu",
    )
    data = folder / preset
    data.mkdir(exist_ok=True)
    output = folder / "step.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(HERE / "scale.py"), "step"]
    command += [str(write_recipe(data, given)), "--folder", str(data / f"run-{precision}")]
    command += ["--set", f"training.precision={precision}", "--set", "model.dropout=0.1"]
    command += ["--steps", str(options.steps), "--json", str(output)]
    threads = {"OMP_NUM_THREADS": str(max(1, available_cores() // processes))}
    subprocess.run(command, env=os.environ | threads, capture_output=True, check=True)
    return float(json.loads(output.read_text())["step"][-1]["target_tokens_per_second"])


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Tokens per second, and the ratio to the fastest other library in the same preset and precision."""
    lines = []
    for row in rows:
        kind = row["preset"], row["precision"]
        peers = [
            other["tokens_per_second"]
            for other in rows
            if (other["preset"], other["precision"]) == kind
            and not other["name"].startswith("Regard")
        ]
        ratio = f"{row['tokens_per_second'] / max(peers):.2f}" if peers else ""
        lines.append([*kind, row["name"], f"{row['tokens_per_second']:,.0f}", ratio])
    return markdown_table(["preset", "precision", "library", "tokens/s", "ratio"], lines, left=3)


if __name__ == "__main__":
    main()
