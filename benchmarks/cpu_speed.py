"""BLEU and sentences per second of some runs on a CPU, in each precision, with greedy and beam search.

    python benchmarks/cpu_speed.py runs/multi30k runs/multi30k-fast  # writes cpu_speed.json, docs/images/cpu_speed.svg
    python benchmarks/cpu_speed.py --only-plot

Each run translates the sentences of its own test data, text to text: first all of them, as a warm-up and for BLEU, then
some of them repeatedly. The systems take turns, so that other load on the machine affects all alike; a speed is the
median, by wall-clock time and by CPU time. The plot shows the latter, which other load changes less.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_args

import torch
from reporting import markdown_table, read_test_pairs

from regard.data.pairs import Pair
from regard.metrics import score
from regard.recipe import Precision
from regard.storage.atomic_files import write_text
from regard.tasks import Translator
from regard.training.model_card import hardware

HERE = Path(__file__).resolve()
PRECISIONS: list[Precision] = ["fp32", "bf16", "int8"]
BEAMS = [1, 5]
NO_WORKERS = (
    "libraries have started threads, so there are no worker processes to measure; set OPENBLAS_NUM_THREADS=1 and "
    "JE_ARROW_MALLOC_CONF=background_thread:false"
)


class Speed(NamedTuple):
    """Sentences per second."""

    by_clock: float
    by_cpu: float


class BenchedRun(NamedTuple):
    """A loaded run and a beam size."""

    name: str
    model: Translator
    beam: int
    pairs: list[Pair]

    def translate(self, sentences: int | None = None) -> list[str]:
        texts = [pair.source for pair in self.pairs[:sentences]]
        return self.model.translate(texts, beam=self.beam)

    def measure_speed(self, sentences: int) -> Speed:
        clock, cpu = time.perf_counter(), self.model.engine.cpu_seconds
        count = len(self.translate(sentences))
        return Speed(
            count / (time.perf_counter() - clock), count / (self.model.engine.cpu_seconds - cpu)
        )

    def point(self, translations: list[str], speeds: Sequence[Speed]) -> dict[str, Any]:
        sources, targets = zip(*self.pairs, strict=True)
        tokenize = self.model.recipe.evaluation.tokenize
        (bleu,) = score(["bleu"], translations, list(targets), list(sources), tokenize=tokenize)
        section = self.model.recipe.model
        return {
            "run": self.name,
            "layers": f"{section.encoder_layers}+{section.decoder_layers}",
            "precision": self.model.precision,
            "beam": self.beam,
            "sentences": len(translations),
            "bleu": round(bleu.value, 2),
            "low": bleu.low,
            "high": bleu.high,
            "sentences_per_second": round(median(one.by_clock for one in speeds), 2),
            "sentences_per_cpu_second": round(median(one.by_cpu for one in speeds), 2),
        }


def load_runs(
    folders: Iterable[Path], precisions: Iterable[Precision], sentences: int | None
) -> list[BenchedRun]:
    found = []
    for folder in folders:
        pairs = read_test_pairs(folder, sentences)
        for precision in precisions:
            model = Translator.load(folder, "cpu", precision)
            model.start_workers()
            if model.engine.pool is None and model.threads > 1:
                raise SystemExit(NO_WORKERS)
            found += [BenchedRun(folder.resolve().name, model, beam, pairs) for beam in BEAMS]
    return found


def measure(runs: Sequence[BenchedRun], repeats: int, timed: int) -> list[dict[str, Any]]:
    translations = [one.translate() for one in runs]
    repeated = [[one.measure_speed(timed) for one in runs] for _ in range(repeats)]
    speeds = zip(*repeated, strict=True)
    return [
        one.point(texts, own) for one, texts, own in zip(runs, translations, speeds, strict=True)
    ]


# ---------------------------------------------------------------------------------------------
# The plot

WIDTH, HEIGHT, LEFT, TOP, LINE = 560, 320, 60, 30, 20
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MIDDLE = 'text-anchor="middle"'


class Axes(NamedTuple):
    """x: sentences per CPU second, logarithmic; y: BLEU."""

    slowest: float
    fastest: float
    low: int
    high: int

    @classmethod
    def around(cls, points: Sequence[dict[str, Any]]) -> Axes:
        speeds = [point["sentences_per_cpu_second"] for point in points]
        bleus = [point["bleu"] for point in points]
        margin = 0.3  # for labels
        low, high = math.floor(min(bleus) - margin), math.ceil(max(bleus) + margin)
        return cls(min(speeds) / 1.4, max(speeds) * 1.4, low, high)

    def position(self, speed: float, bleu: float) -> tuple[float, float]:
        x = math.log(speed / self.slowest) / math.log(self.fastest / self.slowest)
        y = (bleu - self.low) / (self.high - self.low)
        return round(x * WIDTH, 1), round((1 - y) * HEIGHT, 1)

    def grid(self) -> Iterator[str]:
        for value in range(self.low, self.high + 1, math.ceil((self.high - self.low) / 8)):
            _, y = self.position(self.slowest, value)
            yield f'<path d="M0 {y}H{WIDTH}" stroke="#ddd"/>'
            yield f'<text x="-6" y="{y + 4}" text-anchor="end">{value}</text>'
        for speed in (digit * 10**power for power in range(-2, 6) for digit in (1, 2, 5)):
            if self.slowest <= speed <= self.fastest:
                x, _ = self.position(speed, self.low)
                yield f'<path d="M{x} {HEIGHT}v4" stroke="#000"/>'
                yield f'<text x="{x}" y="{HEIGHT + 18}" {MIDDLE}>{speed:g}</text>'
        yield f'<text x="{WIDTH / 2}" y="{HEIGHT + 38}" {MIDDLE}>sentences per second of CPU time</text>'
        yield '<text x="-6" y="-10" text-anchor="end">BLEU</text>'


def plot(points: Sequence[dict[str, Any]]) -> str:
    """An SVG with a point for each run, precision and beam size; right and up is better."""
    runs = list(dict.fromkeys(point["run"] for point in points))
    colours = {run: COLOURS[number % len(COLOURS)] for number, run in enumerate(runs)}
    lines: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for point in points:
        lines.setdefault((point["run"], point["beam"]), []).append(point)
    axes = Axes.around(points)
    shapes, legend = [*axes.grid()], []
    for number, ((run, beam), own) in enumerate(lines.items()):
        y = TOP + LINE * number
        name = f"{run} ({own[0]['layers']} layers), {decoding_name(beam)}"
        legend += [
            marker(LEFT, y - 4, colours[run], beam),
            f'<text x="{LEFT + 12}" y="{y}">{name}</text>',
        ]
        shapes += curve(own, points, axes, colours[run], beam)
    top = TOP + LINE * (len(lines) + 1)
    width, height = LEFT + WIDTH + 30, top + HEIGHT + 50
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n'
        + "\n".join([*legend, f'<g transform="translate({LEFT} {top})">', *shapes, "</g>"])
        + "\n</svg>\n"
    )


def curve(
    own: Sequence[dict[str, Any]],
    points: Sequence[dict[str, Any]],
    axes: Axes,
    colour: str,
    beam: int,
) -> Iterator[str]:
    """The precisions of one run and beam size. A label is above its point, or below it if another point is there."""
    own_positions = [
        axes.position(point["sentences_per_cpu_second"], point["bleu"]) for point in own
    ]
    positions = [
        axes.position(point["sentences_per_cpu_second"], point["bleu"]) for point in points
    ]
    path = " ".join(f"{x},{y}" for x, y in own_positions)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}"/>'
    for (x, y), point in zip(own_positions, own, strict=True):
        yield marker(x, y, colour, beam)
        crowded = any(abs(x - other) < 40 and 5 < y - above < 30 for other, above in positions)
        label_y = y + 18 if crowded else y - 9
        yield f'<text x="{x}" y="{label_y}" {MIDDLE} fill="{colour}">{point["precision"]}</text>'


def marker(x: float, y: float, colour: str, beam: int) -> str:
    """Filled for beam search, hollow for greedy."""
    inside = colour if beam > 1 else "white"
    return f'<circle cx="{x}" cy="{y}" r="4" fill="{inside}" stroke="{colour}" stroke-width="2"/>'


def decoding_name(beam: int) -> str:
    return f"beam {beam}" if beam > 1 else "greedy"


# ---------------------------------------------------------------------------------------------
# The command


def table(points: Sequence[dict[str, Any]]) -> str:
    head = ["run", "layers", "precision", "decoding", "BLEU", "sentences/s", "per CPU second"]
    rows = [
        [
            *(point["run"], point["layers"], point["precision"], decoding_name(point["beam"])),
            f"{point['bleu']:.1f}",
            f"{point['sentences_per_second']:.0f}",
            f"{point['sentences_per_cpu_second']:.0f}",
        ]
        for point in points
    ]
    return "\n".join(markdown_table(head, rows, left=4))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--precision", nargs="+", choices=get_args(Precision), default=PRECISIONS)
    parser.add_argument(
        "--sentences", type=int, help="test sentences that are scored (default: all)"
    )
    parser.add_argument("--timed", type=int, default=300, help="sentences that are timed")
    parser.add_argument("--repeats", type=int, default=3, help="timed repetitions")
    parser.add_argument("--json", type=Path, default=HERE.with_suffix(".json"))
    parser.add_argument("--plot", type=Path, default=HERE.parents[1] / "docs/images/cpu_speed.svg")
    parser.add_argument("--only-plot", action="store_true", help="only plot the JSON file")
    given = parser.parse_args(arguments)
    if not given.only_plot:
        if not given.runs:
            parser.error("give at least one run")
        load = os.getloadavg()[0]
        runs = load_runs(given.runs, given.precision, given.sentences)
        result = {
            "hardware": hardware(torch.device("cpu")),
            "batches_at_once": runs[0].model.engine.threads,
            "load_before": round(load, 2),
            "torch": torch.__version__,
            "repeats": given.repeats,
            "points": measure(runs, given.repeats, given.timed),
        }
        write_text(given.json, json.dumps(result, indent=1) + "\n")
    result = json.loads(given.json.read_text(encoding="utf-8"))
    write_text(given.plot, plot(result["points"]))
    print(table(result["points"]))


if __name__ == "__main__":
    main()
