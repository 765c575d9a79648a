"""How good and how fast: BLEU and sentences a second of some runs on a CPU, in each precision, greedy and by beam.

    python benchmarks/fast.py runs/multi30k runs/multi30k-fast  # writes fast.json and docs/images/fast.svg
    python benchmarks/fast.py --only-plot

Each run translates the sentences of its own test, text to text: first all of them, to warm up and to be scored, then
some of them again and again. All take turns, so that whatever else the machine does meets them alike; a speed is the
median of the turns, by the clock and by CPU time. The picture shows the latter: other work on the machine changes it
less.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_args

import torch

from regard.data.corpus import Pair, read_pairs
from regard.errors import RegardError
from regard.metrics import score
from regard.recipe import Precision
from regard.storage.run_dir import RunDir, write_text
from regard.tasks import Translator
from regard.training.run import hardware

HERE = Path(__file__).resolve()
PRECISIONS: list[Precision] = ["fp32", "bf16", "int8"]
BEAMS = [1, 5]


class Turn(NamedTuple):
    """Sentences a second."""

    by_clock: float
    by_cpu: float


class Runner(NamedTuple):
    """A run that is opened, and a way to use it."""

    name: str
    model: Translator
    beam: int
    pairs: list[Pair]

    def translate(self, sentences: int | None = None) -> list[str]:
        texts = [pair.source for pair in self.pairs[:sentences]]
        return self.model.translate(texts, beam=self.beam)

    def turn(self, sentences: int) -> Turn:
        clock, cpu = time.perf_counter(), self.model.cpu_seconds
        count = len(self.translate(sentences))
        return Turn(count / (time.perf_counter() - clock), count / (self.model.cpu_seconds - cpu))

    def point(self, said: list[str], turns: Sequence[Turn]) -> dict[str, Any]:
        sources, targets = zip(*self.pairs, strict=True)
        how = self.model.recipe.evaluation.tokenize
        (bleu,) = score(["bleu"], said, list(targets), list(sources), tokenize=how)
        section = self.model.recipe.model
        return {
            "run": self.name,
            "layers": f"{section.encoder_layers}+{section.decoder_layers}",
            "precision": self.model.precision,
            "beam": self.beam,
            "sentences": len(said),
            "bleu": round(bleu.value, 2),
            "low": bleu.low,
            "high": bleu.high,
            "sentences_per_second": round(median(turn.by_clock for turn in turns), 2),
            "sentences_per_cpu_second": round(median(turn.by_cpu for turn in turns), 2),
        }


def runners(
    folders: Iterable[Path], precisions: Iterable[Precision], sentences: int | None
) -> list[Runner]:
    found = []
    for folder in folders:
        data = RunDir(folder).recipe().data
        if data.test is None:
            raise RegardError(f"{folder}: its recipe has no data.test to translate")
        pairs = list(islice(read_pairs(data.test, data, "data.test"), sentences))
        for precision in precisions:
            model = Translator.load(folder, "cpu", precision)
            model.start_worker_pool()
            found += [Runner(folder.resolve().name, model, beam, pairs) for beam in BEAMS]
    return found


def measure(every: Sequence[Runner], repeats: int, timed: int) -> list[dict[str, Any]]:
    said = [one.translate() for one in every]
    rounds = [[one.turn(timed) for one in every] for _ in range(repeats)]
    turns = zip(*rounds, strict=True)
    return [one.point(text, own) for one, text, own in zip(every, said, turns, strict=True)]


# The picture

WIDTH, HEIGHT, LEFT, TOP, LINE = 560, 320, 60, 30, 20
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MIDDLE = 'text-anchor="middle"'


class Axes(NamedTuple):
    """Sentences for each CPU second to the right, logarithmic; BLEU upwards."""

    slowest: float
    fastest: float
    low: int
    high: int

    @classmethod
    def around(cls, points: Sequence[dict[str, Any]]) -> Axes:
        speeds = [point["sentences_per_cpu_second"] for point in points]
        bleus = [point["bleu"] for point in points]
        room = 0.3  # for the names of points
        low, high = math.floor(min(bleus) - room), math.ceil(max(bleus) + room)
        return cls(min(speeds) / 1.4, max(speeds) * 1.4, low, high)

    def place(self, speed: float, bleu: float) -> tuple[float, float]:
        x = math.log(speed / self.slowest) / math.log(self.fastest / self.slowest)
        y = (bleu - self.low) / (self.high - self.low)
        return round(x * WIDTH, 1), round((1 - y) * HEIGHT, 1)

    def grid(self) -> Iterator[str]:
        for value in range(self.low, self.high + 1, math.ceil((self.high - self.low) / 8)):
            _, y = self.place(self.slowest, value)
            yield f'<path d="M0 {y}H{WIDTH}" stroke="#ddd"/>'
            yield f'<text x="-6" y="{y + 4}" text-anchor="end">{value}</text>'
        for speed in (digit * 10**power for power in range(-2, 6) for digit in (1, 2, 5)):
            if self.slowest <= speed <= self.fastest:
                x, _ = self.place(speed, self.low)
                yield f'<path d="M{x} {HEIGHT}v4" stroke="#000"/>'
                yield f'<text x="{x}" y="{HEIGHT + 18}" {MIDDLE}>{speed:g}</text>'
        yield f'<text x="{WIDTH / 2}" y="{HEIGHT + 38}" {MIDDLE}>sentences for each second of CPU time</text>'
        yield '<text x="-6" y="-10" text-anchor="end">BLEU</text>'


def picture(points: Sequence[dict[str, Any]]) -> str:
    """A point for each run, precision and search; the further right and up, the better."""
    runs = list(dict.fromkeys(point["run"] for point in points))
    colours = {run: COLOURS[number % len(COLOURS)] for number, run in enumerate(runs)}
    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in points:
        lines.setdefault((point["run"], point["beam"]), []).append(point)
    axes = Axes.around(points)
    parts, names = [*axes.grid()], []
    for number, ((run, beam), own) in enumerate(lines.items()):
        y = TOP + LINE * number
        name = f"{run} ({own[0]['layers']} layers), {way(beam)}"
        names += [
            mark(LEFT, y - 4, colours[run], beam),
            f'<text x="{LEFT + 12}" y="{y}">{name}</text>',
        ]
        parts += curve(own, points, axes, colours[run], beam)
    top = TOP + LINE * (len(lines) + 1)
    wide, tall = LEFT + WIDTH + 30, top + HEIGHT + 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {tall}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{wide}" height="{tall}" fill="white"/>\n'
        + "\n".join([*names, f'<g transform="translate({LEFT} {top})">', *parts, "</g>"])
        + "\n</svg>\n"
    )


def curve(
    own: Sequence[dict[str, Any]],
    points: Sequence[dict[str, Any]],
    axes: Axes,
    colour: str,
    beam: int,
) -> Iterator[str]:
    """The precisions of one run, searched in one way; a name stands above its point unless another point does."""
    at = [axes.place(point["sentences_per_cpu_second"], point["bleu"]) for point in own]
    all_at = [axes.place(point["sentences_per_cpu_second"], point["bleu"]) for point in points]
    path = " ".join(f"{x},{y}" for x, y in at)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}"/>'
    for (x, y), point in zip(at, own, strict=True):
        yield mark(x, y, colour, beam)
        crowded = any(abs(x - other) < 40 and 5 < y - above < 30 for other, above in all_at)
        named = y + 18 if crowded else y - 9
        yield f'<text x="{x}" y="{named}" {MIDDLE} fill="{colour}">{point["precision"]}</text>'


def mark(x: float, y: float, colour: str, beam: int) -> str:
    """Filled for beam search, hollow for greedy."""
    inside = colour if beam > 1 else "white"
    return f'<circle cx="{x}" cy="{y}" r="4" fill="{inside}" stroke="{colour}" stroke-width="2"/>'


def way(beam: int) -> str:
    return f"beam {beam}" if beam > 1 else "greedy"


# The command


def table(points: Sequence[dict[str, Any]]) -> str:
    heads = ["run", "layers", "precision", "search", "BLEU", "sentences/s", "per CPU second"]
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---|--:|--:|--:|"]
    for point in points:
        words = [point["run"], point["layers"], point["precision"], way(point["beam"])]
        words += [f"{point['bleu']:.1f}", f"{point['sentences_per_second']:.0f}"]
        words.append(f"{point['sentences_per_cpu_second']:.0f}")
        lines.append(f"| {' | '.join(words)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--precision", nargs="+", choices=get_args(Precision), default=PRECISIONS)
    parser.add_argument("--sentences", type=int, help="of the test, to be scored; all unless given")
    parser.add_argument("--timed", type=int, default=300, help="sentences of a timed turn")
    parser.add_argument("--repeats", type=int, default=3, help="timed turns")
    parser.add_argument("--json", type=Path, default=HERE.with_suffix(".json"))
    parser.add_argument("--plot", type=Path, default=HERE.parents[1] / "docs/images/fast.svg")
    parser.add_argument("--only-plot", action="store_true", help="draw what the JSON file holds")
    given = parser.parse_args(arguments)
    if not given.only_plot:
        if not given.runs:
            parser.error("which runs?")
        load = os.getloadavg()[0]
        every = runners(given.runs, given.precision, given.sentences)
        result = {
            "hardware": hardware(torch.device("cpu")),
            "batches_at_once": every[0].model.threads,
            "load_before": round(load, 2),
            "torch": torch.__version__,
            "repeats": given.repeats,
            "points": measure(every, given.repeats, given.timed),
        }
        write_text(given.json, json.dumps(result, indent=1) + "\n")
    result = json.loads(given.json.read_text(encoding="utf-8"))
    write_text(given.plot, picture(result["points"]))
    print(table(result["points"]))


if __name__ == "__main__":
    main()
