"""int8 translation on a CPU compared with CTranslate2: presets, beam and greedy search, many sentences and one.

    python benchmarks/cpu_decoding.py --out cpu_decoding.json
    python benchmarks/cpu_decoding.py --presets tiny --turns 1 --repeats 1 --batch 4 --out /tmp/cpu_decoding.json

Each turn measures every row anew, with models loaded anew: Regard, and CTranslate2 in both of its configurations, which
take turns within a row (``regard bench translate``). The ratio of a row is Regard's speed over that of the faster
configuration of CTranslate2 in the same turn. A machine without a compiler needs a library that was built elsewhere
(``python -m regard.inference.native_library FOLDER``), named in the environment variable REGARD_NATIVE.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from reporting import markdown_table

from regard.bench.translate import TranslateRow, TranslateSetting, measure, preset_workload
from regard.inference.native_library import native_library
from regard.inference.worker_pool import available_cores
from regard.storage.atomic_files import write_text
from regard.training.model_card import hardware


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--presets", nargs="+", default=["base", "small", "fast"])
    parser.add_argument("--beams", nargs="+", type=int, default=[5, 1])
    parser.add_argument("--batch", type=int, default=256, help="sentences per call; also 1")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    library = native_library()
    report: dict[str, Any] = {
        "hardware": hardware(torch.device("cpu")),
        "threads": arguments.threads,
        "native": library.kernels or library.reason,
        "rows": [],
    }
    print(f"{report['threads']} threads, native library: {report['native']}", flush=True)
    for turn in range(arguments.turns):
        for row in measured_rows(arguments):
            report["rows"].append({"turn": turn, "load": os.getloadavg()[0], **row})
            write_text(arguments.out, json.dumps(report, indent=1))
            print(f"turn {turn} {row['name']}: {row['ratio']:.2f}x", flush=True)
    print("\n".join(table(report["rows"])))


def measured_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each preset, beam size and number of sentences."""
    for preset in arguments.presets:
        for sentences in (arguments.batch, 1):
            for beam in arguments.beams:
                with tempfile.TemporaryDirectory() as folder:
                    workload = preset_workload(Path(folder, "run"), preset, sentences)
                    setting = TranslateSetting(workload, "int8", beam, arguments.threads, "cpu")
                    found = measure([setting], ["ctranslate2"], Path(folder), arguments.repeats)
                yield summary(f"{preset}, beam {beam}, {sentences} sentences", found)


def summary(name: str, rows: list[TranslateRow]) -> dict[str, Any]:
    ours, *theirs = rows
    best = max(theirs, key=lambda row: row.sentences_per_second)
    return {
        "name": name,
        "ratio": ours.sentences_per_second / best.sentences_per_second,
        "cpu_ratio": ours.sentences_per_cpu_second
        / max(row.sentences_per_cpu_second for row in theirs),
        "engines": [asdict(row) for row in rows],
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The median over the turns of each row, and the ratios of all turns."""
    lines = []
    for name in dict.fromkeys(row["name"] for row in rows):
        turns = [row for row in rows if row["name"] == name]
        speeds = [
            [row["engines"][engine]["sentences_per_second"] for row in turns]
            for engine in range(len(turns[0]["engines"]))
        ]
        medians = [median(each) for each in speeds]
        ratios = ", ".join(f"{row['ratio']:.2f}" for row in turns)
        cpu_ratios = ", ".join(f"{row['cpu_ratio']:.2f}" for row in turns)
        lines.append([name, f"{medians[0]:.1f}", f"{max(medians[1:]):.1f}", ratios, cpu_ratios])
    header = ["int8", "regard", "CTranslate2, best", "ratio, each turn", "per CPU second"]
    return markdown_table(header, lines)


if __name__ == "__main__":
    main()
