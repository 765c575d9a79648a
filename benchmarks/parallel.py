"""One word after another against all at once: how good and how fast, side by side.

    python benchmarks/parallel.py runs/multi30k-transformer runs/multi30k-parallel    # writes benchmarks/parallel.json

Both runs translate the test pairs of the second. Scores are of all of them. Speed is measured on the processor, on some
of them, one sentence at a time and 32 at a time; the ways take turns sentence by sentence, so that whatever else the
machine does falls on all of them alike.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from regard.version import __version__

from regard.data.corpus import Pair, read_pairs
from regard.metrics import score
from regard.recipe import Device
from regard.tasks import Translator
from regard.training.run import hardware

BATCHES = (1, 32)


class Way(NamedTuple):
    """A model and how it is asked."""

    name: str
    run: Path
    options: dict[str, int]


def ways(one_by_one: Path, at_once: Path) -> list[Way]:
    return [
        Way("autoregressive, greedy", one_by_one, {"beam": 1}),
        Way("autoregressive, beam 5", one_by_one, {"beam": 5}),
        *(
            Way(f"parallel, {rounds} round{'s' * (rounds > 1)}", at_once, {"iterations": rounds})
            for rounds in (1, 4, 10)
        ),
        Way("parallel, 1 round, 1 length", at_once, {"iterations": 1, "candidates": 1}),
    ]


class Models:
    """Runs opened on one device, each once."""

    def __init__(self, device: Device, threads: int | None = None) -> None:
        self.device: Device = device
        self.threads = threads
        self.open: dict[Path, Translator] = {}

    def translate(self, way: Way, texts: Sequence[str]) -> list[str]:
        if way.run not in self.open:
            self.open[way.run] = Translator.load(way.run, self.device, threads=self.threads)
        return self.open[way.run].translate(texts, **way.options)


def test_pairs(run: Path) -> list[Pair]:
    data = Translator.load(run, "cpu").recipe.data
    if data.test is None:
        raise SystemExit(f"{run}: its recipe names no data.test to score")
    return list(read_pairs(data.test, data, "data.test"))


def bleu(models: Models, way: Way, pairs: Sequence[Pair]) -> dict[str, Any]:
    sources, targets = zip(*pairs, strict=True)
    (result,) = score(["bleu"], models.translate(way, sources), targets, sources)
    return result.to_json()


def seconds(
    models: Models, every: Sequence[Way], texts: Sequence[str], batch: int
) -> dict[str, float]:
    """What each way took for all the texts, so many at a time, the ways in turn."""
    total = dict.fromkeys((way.name for way in every), 0.0)
    for way in every:
        models.translate(way, texts[:batch])  # the first use takes long
    for number, part in enumerate(portions(texts, batch)):
        turn = number % len(every)
        for way in (*every[turn:], *every[:turn]):
            start = time.perf_counter()
            models.translate(way, part)
            total[way.name] += time.perf_counter() - start
    return total


def portions(texts: Sequence[str], size: int) -> Iterator[list[str]]:
    remaining = iter(texts)
    while part := list(islice(remaining, size)):
        yield part


def table(measured: dict[str, Any]) -> str:
    lines = [
        "| way | BLEU | sentences/s, batch 1 | against beam 5 | sentences/s, batch 32 | against beam 5 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    beam = measured["ways"]["autoregressive, beam 5"]["sentences_per_second"]
    for name, facts in measured["ways"].items():
        speeds = facts["sentences_per_second"]
        cells = [f"{speeds[n]:.1f} | {speeds[n] / beam[n]:.2f}x" for n in map(str, BATCHES)]
        lines.append(f"| {name} | {facts['bleu']['value']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def measure(
    every: Sequence[Way], pairs: Sequence[Pair], count: int, device: Device, threads: int
) -> Any:
    scoring, timing = Models(device), Models("cpu", threads)
    scores = {way.name: bleu(scoring, way, pairs) for way in every}
    some = [pair.source for pair in pairs[:: max(1, len(pairs) // count)]][:count]
    speeds: dict[str, dict[str, float]] = {way.name: {} for way in every}
    for batch in BATCHES:
        for name, total in seconds(timing, every, some, batch).items():
            speeds[name][str(batch)] = len(some) / total
    return {
        "regard": __version__,
        "torch": torch.__version__,
        "hardware": hardware(torch.device("cpu")),
        "threads": threads,
        "sentences": {"scored": len(pairs), "timed": len(some)},
        "ways": {
            way.name: {
                "run": str(way.run),
                "options": way.options,
                "bleu": scores[way.name],
                "sentences_per_second": speeds[way.name],
            }
            for way in every
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("one_by_one", type=Path, metavar="RUN_AR")
    parser.add_argument("at_once", type=Path, metavar="RUN_NAT")
    parser.add_argument("--sentences", type=int, default=200, help="how many are timed")
    parser.add_argument("--scored", type=int, default=None, help="how many are scored (all)")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="to score"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the processor")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    pairs = test_pairs(given.at_once)[: given.scored]
    every = ways(given.one_by_one, given.at_once)
    found = measure(every, pairs, given.sentences, given.device, given.threads)
    given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(table(found))
    print(f"\nSpeed on {found['hardware']}, {found['threads']} threads; written to {given.out}")


if __name__ == "__main__":
    main()
