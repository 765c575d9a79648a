"""Autoregressive against non-autoregressive models: BLEU and speed, measured in one run.

    python benchmarks/non_autoregressive.py runs/multi30k-transformer runs/multi30k-non-autoregressive
    # writes benchmarks/non_autoregressive.json

Both runs translate the test pairs of the second. Scores are of all of them. Speed is measured on the CPU, on some of
them, one sentence at a time and 32 at a time; the systems take turns batch by batch, so that other load on the machine
affects all of them alike.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from reporting import markdown_table, read_test_pairs

from regard import __version__
from regard.data.pairs import Pair
from regard.metrics import score
from regard.recipe import DecodingOptions, Device
from regard.tasks import Translator
from regard.training.model_card import hardware

BATCHES = (1, 32)


class System(NamedTuple):
    """A run and its decoding options."""

    name: str
    run: Path
    options: DecodingOptions


def systems(autoregressive: Path, non_autoregressive: Path) -> list[System]:
    return [
        System("autoregressive, greedy", autoregressive, {"beam": 1}),
        System("autoregressive, beam 5", autoregressive, {"beam": 5}),
        *(
            System(
                f"non-autoregressive, {count} iteration{'s' * (count > 1)}",
                non_autoregressive,
                {"iterations": count},
            )
            for count in (1, 4, 10)
        ),
        System(
            "non-autoregressive, 1 iteration, 1 length",
            non_autoregressive,
            {"iterations": 1, "length_beam": 1},
        ),
    ]


class Models:
    """The loaded models of the runs, on one device."""

    def __init__(self, device: Device, threads: int | None = None) -> None:
        self.device: Device = device
        self.threads = threads
        self.loaded: dict[Path, Translator] = {}

    def translate(self, system: System, texts: Sequence[str]) -> list[str]:
        if system.run not in self.loaded:
            self.loaded[system.run] = Translator.load(system.run, self.device, threads=self.threads)
        return self.loaded[system.run].translate(texts, **system.options)


def bleu(models: Models, system: System, pairs: Sequence[Pair]) -> dict[str, Any]:
    sources, targets = zip(*pairs, strict=True)
    (result,) = score(["bleu"], models.translate(system, sources), targets, sources)
    return result.to_json()


def seconds(
    models: Models, every: Sequence[System], texts: Sequence[str], batch: int
) -> dict[str, float]:
    """The seconds of each system for all texts, with this batch size; the systems take turns."""
    total = dict.fromkeys((system.name for system in every), 0.0)
    for system in every:
        models.translate(system, texts[:batch])  # warm-up
    for number, some in enumerate(batched(texts, batch)):
        turn = number % len(every)
        for system in (*every[turn:], *every[:turn]):
            start = time.perf_counter()
            models.translate(system, some)
            total[system.name] += time.perf_counter() - start
    return total


def batched(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    remaining = iter(texts)
    while some := list(islice(remaining, size)):
        yield some


def table(measured: dict[str, Any]) -> str:
    head = ["system", "BLEU"]
    for batch in BATCHES:
        head += [f"sentences/s, batch {batch}", "relative to beam 5"]
    beam = measured["systems"]["autoregressive, beam 5"]["sentences_per_second"]
    rows = []
    for name, facts in measured["systems"].items():
        speeds = facts["sentences_per_second"]
        row = [name, f"{facts['bleu']['value']:.2f}"]
        for size in map(str, BATCHES):
            row += [f"{speeds[size]:.1f}", f"{speeds[size] / beam[size]:.2f}x"]
        rows.append(row)
    return "\n".join(markdown_table(head, rows))


def measure(
    every: Sequence[System], pairs: Sequence[Pair], count: int, device: Device, threads: int
) -> Any:
    scoring, timing = Models(device), Models("cpu", threads)
    scores = {system.name: bleu(scoring, system, pairs) for system in every}
    some = [pair.source for pair in pairs[:: max(1, len(pairs) // count)]][:count]
    speeds: dict[str, dict[str, float]] = {system.name: {} for system in every}
    for batch in BATCHES:
        for name, total in seconds(timing, every, some, batch).items():
            speeds[name][str(batch)] = len(some) / total
    return {
        "regard": __version__,
        "torch": torch.__version__,
        "hardware": hardware(torch.device("cpu")),
        "threads": threads,
        "sentences": {"scored": len(pairs), "timed": len(some)},
        "systems": {
            system.name: {
                "run": str(system.run),
                "options": system.options,
                "bleu": scores[system.name],
                "sentences_per_second": speeds[system.name],
            }
            for system in every
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("autoregressive", type=Path, metavar="RUN_AR")
    parser.add_argument("non_autoregressive", type=Path, metavar="RUN_NAR")
    parser.add_argument("--sentences", type=int, default=200, help="sentences that are timed")
    parser.add_argument(
        "--scored", type=int, default=None, help="sentences that are scored (default: all)"
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="device for scoring"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    pairs = read_test_pairs(given.non_autoregressive, given.scored)
    every = systems(given.autoregressive, given.non_autoregressive)
    found = measure(every, pairs, given.sentences, given.device, given.threads)
    given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(table(found))
    print(f"\nSpeed on {found['hardware']}, {found['threads']} threads; written to {given.out}")


if __name__ == "__main__":
    main()
