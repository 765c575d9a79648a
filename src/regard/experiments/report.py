"""How an experiment is shown: a table in the terminal, SVG figures, and one HTML file without scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from regard.errors import shorten
from regard.experiments.results import Estimate, estimate_of, number_of_runs
from regard.storage.atomic_files import write_text

REPORT = "report.html"
STYLE = """
:root { color-scheme: light dark; --text: #1c2026; --dim: #5d6673; --back: #fff; --card: #f5f6f8; --line: #d9dde3; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ee; --dim: #9aa4b2; --back: #14171c; --card: #1d2229;
  --line: #333a45; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
.dim { color: var(--dim); } .scroll { overflow-x: auto; }
figure { margin: 1rem 0; background: var(--card); border-radius: 0.5rem; padding: 0.75rem; }
svg { width: 100%; height: auto; display: block; }
code, pre { background: var(--card); border-radius: 0.3rem; padding: 0.1rem 0.3rem; }
pre { padding: 0.75rem; white-space: pre-wrap; }
table { border-collapse: collapse; } th { text-align: left; border-bottom: 1px solid var(--line); }
td, th { padding: 0.3rem 1rem 0.3rem 0; overflow-wrap: normal; }
td:first-child { min-width: 16rem; overflow-wrap: anywhere; }
td.number, th.number { text-align: right; white-space: nowrap; }
"""
Content = Mapping[str, Any]
"""the contents of results.json"""


# ---------------------------------------------------------------------------------------------
# Tables


def format_estimate(estimate: Estimate | None, sign: str = "") -> str:
    """A value with its interval: 38.1 (37.4 to 38.8)."""
    if estimate is None:
        return "-"
    text = f"{estimate.value:{sign}.2f}"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({estimate.low:{sign}.2f} to {estimate.high:{sign}.2f})"


def table_of(content: Content) -> list[list[str]]:
    """The head and the rows of the table of variants."""
    metric = content["metric"]["name"]
    head = [
        "variant",
        "seeds",
        metric,
        "against the first",
        "paired p",
        "loss",
        "weights",
        "seconds",
    ]
    rows = []
    for variant in content["summary"]["variants"]:
        seeds = f"{variant['seeds']}" + (
            f", {variant['diverged']} diverged" if variant["diverged"] else ""
        )
        paired = "-" if variant["paired_p"] is None else f"{variant['paired_p']:.3f}"
        rows.append(
            [
                variant["name"],
                seeds,
                format_estimate(estimate_of(variant["mean"])),
                format_estimate(estimate_of(variant["difference"]), "+"),
                paired,
                "-" if variant["loss"] is None else f"{variant['loss']:.3f}",
                "-" if variant["parameters"] is None else f"{variant['parameters']:,}",
                "-" if variant["seconds"] is None else f"{variant['seconds']:.0f}",
            ]
        )
    return [head, *rows]


def verdicts(content: Content) -> list[str]:
    """The verdicts, effects of a grid first."""
    summary = content["summary"]
    lines = []
    for effect in summary["effects"]:
        line = f"{effect['verdict']}, against {effect['baseline']}"
        smallest, largest = (round(effect[end], 1) + 0.0 for end in ("smallest", "largest"))
        lines.append(f"{line}; {smallest:+.1f} to {largest:+.1f} in single combinations")
    lines += [variant["verdict"] for variant in summary["variants"] if variant["verdict"]]
    return lines


def notes(content: Content) -> list[str]:
    """What a reader of the table needs to know."""
    done, planned = number_of_runs(content)
    metric, summary = content["metric"]["name"], content["summary"]
    where = ", ".join(
        dict.fromkeys(
            run["details"]["hardware"]
            for run in content["trainings"]
            if "hardware" in run["details"]
        )
    )
    state = (
        f"{done} of {planned} training runs are done"
        if done < planned
        else f"{done} training run{'s' * (done != 1)}"
    )
    data = "test" if content["split"] == "test" else "validation"
    lines = [
        f"{state}{f' on {where}' if where else ''}; {metric} on the {data} data, "
        f"{'higher' if content['metric']['higher_is_better'] else 'lower'} is better.",
        "Intervals are 95%, over seeds (Student's t; Welch's t for differences). Paired p: bootstrap test on the "
        "same sentences, outputs of all seeds together; it ignores the variation between seeds.",
    ]
    if summary["deviation"] is not None and summary["detectable"] is not None:
        lines.append(
            f"The standard deviation between seeds is {summary['deviation']:.2f} {metric}, so two variants must differ "
            f"by about {summary['detectable']:.1f} {metric} to be significantly different."
        )
    tests = sum(variant["difference"] is not None for variant in summary["variants"])
    if tests > 5:
        lines.append(
            f"With {tests} comparisons, about {0.05 * tests:.1f} intervals exclude 0 by chance alone."
        )
    return lines


def text_report(content: Content) -> list[str]:
    """The lines of ``regard experiment show``."""
    rows = table_of(content)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [*lines, "", *(f"- {line}" for line in verdicts(content)), "", *notes(content)]


# ---------------------------------------------------------------------------------------------
# Figures


def figures(content: Content) -> dict[str, str]:
    """The SVG figures by file name; those without data are left out."""
    svgs = {}
    metric, rows = content["metric"]["name"], content["summary"]["variants"]
    scored = [row for row in rows if row["mean"] is not None]
    if scored:
        svgs["scores.svg"] = interval_plot(
            f"{metric} of each variant: seeds, mean and 95% interval",
            metric,
            [
                IntervalRow(row["name"], Estimate(**row["mean"]), scores_of(content, row["name"]))
                for row in scored
            ],
        )
    compared = [row for row in rows if row["difference"] is not None]
    if compared:
        svgs["differences.svg"] = interval_plot(
            f"Difference from {rows[0]['name']}: mean and 95% interval",
            f"{metric} difference",
            [IntervalRow(row["name"], Estimate(**row["difference"])) for row in compared],
            zero=True,
        )
    if effects := content["summary"]["effects"]:
        svgs["effects.svg"] = interval_plot(
            "Effect of each value, mean over all combinations of the others, with 95% interval",
            f"{metric} difference",
            [
                IntervalRow(
                    f"{effect['level']} against {effect['baseline']}",
                    Estimate(**effect["difference"]),
                )
                for effect in effects
            ],
            zero=True,
        )
    curves = [Curve(row["name"], mean_curve(content, row["name"])) for row in rows]
    curves = [curve for curve in curves if len(curve.points) > 1]
    if curves:
        svgs["curves.svg"] = curve_plot("Validation loss, mean over seeds", "step", "loss", curves)
    return svgs


def scores_of(content: Content, variant: str) -> list[float]:
    return [
        run["score"]
        for run in content["trainings"]
        if run["variant"] == variant and run["score"] is not None
    ]


def mean_curve(content: Content, variant: str) -> list[tuple[float, float]]:
    """The mean loss at the steps that all seeds of a variant have validated."""
    curves = [
        dict(run["details"]["curve"])
        for run in content["trainings"]
        if run["variant"] == variant and run["details"].get("curve")
    ]
    if not curves:
        return []
    common = set.intersection(*(set(curve) for curve in curves))
    return [(step, fmean(curve[step] for curve in curves)) for step in sorted(common)]


# ---------------------------------------------------------------------------------------------
# HTML


def html_report(content: Content, plots: Sequence[str]) -> str:
    """The whole report as one file without scripts."""
    title = f"Experiment: {content['base']}"
    items = "".join(f"<li>{escape(line)}</li>" for line in verdicts(content))
    remarks = "".join(f"<p class='dim'>{escape(line)}</p>" for line in notes(content))
    figures_html = "".join(f"<figure>{plot}</figure>" for plot in plots)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="content-security-policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<pre>{escape(content["command"])}</pre>
<h2>Verdicts</h2>
<ul>{items or "<li>No variant is scored yet.</li>"}</ul>
{figures_html}
<h2>Variants</h2>
<div class="scroll">{_html_table(table_of(content))}</div>
{remarks}
<h2>Training runs</h2>
<div class="scroll">{_html_table(_run_rows(content))}</div>
</main>
</body>
</html>
"""


def _run_rows(content: Content) -> list[list[str]]:
    head = ["variant", "seed", content["metric"]["name"], "loss", "steps", "seconds", "run folder"]
    rows = []
    for run in content["trainings"]:
        details = run["details"]
        score = "diverged" if run["score"] is None else f"{run['score']:.2f}"
        loss = details.get("loss")
        rows.append(
            [
                run["variant"],
                str(run["seed"]),
                score,
                "-" if loss is None else f"{loss:.3f}",
                f"{details.get('steps', '-')}",
                f"{details.get('seconds', '-')}",
                f"runs/{run['run']}",
            ]
        )
    return [head, *rows]


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    """The first column is text, as are cells with a path; the others are numbers."""

    def cells(row: Sequence[str], tag: str) -> str:
        text = [index == 0 or "/" in cell for index, cell in enumerate(row)]
        kinds = ["" if is_text else " class='number'" for is_text in text]
        return "".join(
            f"<{tag}{attributes}>{escape(cell)}</{tag}>"
            for attributes, cell in zip(kinds, row, strict=True)
        )

    head, *body = rows
    return (
        f"<table><thead><tr>{cells(head, 'th')}</tr></thead><tbody>"
        + "".join(f"<tr>{cells(row, 'td')}</tr>" for row in body)
        + "</tbody></table>"
    )


def write_report(out: Path, content: Content) -> None:
    """Write the figures and the HTML file into the folder of an experiment."""
    plots = figures(content)
    for name, plot in plots.items():
        write_text(out / name, plot)
    write_text(out / REPORT, html_report(content, list(plots.values())))


# ---------------------------------------------------------------------------------------------
# SVG: intervals of several variants, and curves, in the reader's light or dark colour scheme


WIDTH, ROW, LEFT_PER_LETTER = 760, 30, 7.4
TOP, BOTTOM, RIGHT = 34, 46, 24
MAX_LABEL = 46
COLOURS = ("#3b6fd4", "#c2571a", "#2f8f5b", "#8a4fc0", "#b3261e", "#6b7280", "#0e8fa3", "#a38500")
FIGURE_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1c2026; } .dim { fill: #5d6673; }
.grid { stroke: #d9dde3; } .zero { stroke: #5d6673; } .title { font-weight: 600; font-size: 13px; }
.bar { stroke: #3b6fd4; stroke-width: 2.5; } .mean { fill: #3b6fd4; } .seed { fill: #5d6673; opacity: 0.55; }
@media (prefers-color-scheme: dark) { text { fill: #e6e9ee; } .dim { fill: #9aa4b2; } .grid { stroke: #333a45; }
.zero { stroke: #9aa4b2; } .bar { stroke: #7aa5ff; } .mean { fill: #7aa5ff; } .seed { fill: #9aa4b2; } }
"""


@dataclass(frozen=True)
class IntervalRow:
    """One line of an interval plot: a mean with its interval, and the values of the seeds."""

    label: str
    estimate: Estimate
    values: Sequence[float] = ()


@dataclass(frozen=True)
class Curve:
    """A line through points."""

    label: str
    points: Sequence[tuple[float, float]]


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers that cover the range from low to high."""
    if high - low < 1e-6 * max(abs(low), abs(high), 1e-6):  # one value
        half = max(abs(low) / 10, 0.5)
        low, high = low - half, high + half
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Exponents of 10 that cover the range: whole ones, and those of 2 and 5 in a short range."""
    first, last = math.floor(low + 1e-9), math.ceil(high - 1e-9)
    exponents = range(first, max(last, first + 1) + 1)
    if len(exponents) > 4:
        return [float(exponent) for exponent in exponents]
    marks = [exponent + math.log10(factor) for exponent in exponents for factor in (1, 2, 5)]
    inner = [mark for mark in marks if low + 1e-9 < mark < high - 1e-9]
    lower_marks = [mark for mark in marks if mark <= low + 1e-9]
    upper_marks = [mark for mark in marks if mark >= high - 1e-9]
    return list(dict.fromkeys([*lower_marks[-1:], *inner, *upper_marks[:1]]))


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _shorten(label: str) -> str:
    return shorten(label, MAX_LABEL)


def _svg(width: float, height: float, title: str, parts: Iterator[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">\n<style>{FIGURE_STYLE}</style>\n'
        f'<text class="title" x="8" y="18">{escape(title)}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def interval_plot(title: str, axis: str, rows: Sequence[IntervalRow], zero: bool = False) -> str:
    """A row for each variant: small dots are seeds, the large dot is the mean, the bar is the 95% interval.

    ``zero``: the axis includes 0, with a line.
    """
    ends = [
        end
        for row in rows
        for end in (row.estimate.value, row.estimate.low, row.estimate.high, *row.values)
        if end is not None
    ]
    marks = ticks(min([*ends, *([0.0] * zero)]), max([*ends, *([0.0] * zero)]))
    left = 16 + LEFT_PER_LETTER * max(len(_shorten(row.label)) for row in rows)
    height = TOP + ROW * len(rows) + BOTTOM

    def x(value: float) -> float:
        return left + (value - marks[0]) / (marks[-1] - marks[0]) * (WIDTH - left - RIGHT)

    def parts() -> Iterator[str]:
        bottom = TOP + ROW * len(rows)
        for mark in marks:
            css_class = "zero" if zero and mark == 0 else "grid"
            yield f'<line class="{css_class}" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP}" y2="{bottom}"/>'
            yield f'<text class="dim" x="{x(mark):.1f}" y="{bottom + 16}" text-anchor="middle">{_number(mark)}</text>'
        middle = (left + WIDTH - RIGHT) / 2
        yield f'<text class="dim" x="{middle:.1f}" y="{bottom + 36}" text-anchor="middle">{escape(axis)}</text>'
        for index, row in enumerate(rows):
            yield from _interval_row(row, left, TOP + ROW * (index + 0.5), x)

    return _svg(WIDTH, height, title, parts())


def _interval_row(
    row: IntervalRow, left: float, y: float, x: Callable[[float], float]
) -> Iterator[str]:
    low, high, value = row.estimate.low, row.estimate.high, row.estimate.value
    yield (
        f'<text x="{left - 10:.1f}" y="{y + 4:.1f}" text-anchor="end">'
        f"<title>{escape(row.label)}</title>{escape(_shorten(row.label))}</text>"
    )
    for seed in row.values:
        yield f'<circle class="seed" cx="{x(seed):.1f}" cy="{y:.1f}" r="3"/>'
    if low is not None and high is not None:
        yield f'<line class="bar" x1="{x(low):.1f}" x2="{x(high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
    shown = "" if low is None else f" ({low:.2f} to {high:.2f})"
    yield (
        f'<circle class="mean" cx="{x(value):.1f}" cy="{y:.1f}" r="5">'
        f"<title>{value:.2f}{shown}</title></circle>"
    )


@dataclass(frozen=True)
class PlotArea:
    """The rectangle of a curve plot, and where values lie in it."""

    across: Sequence[float]
    """marks of the x axis"""
    up: Sequence[float]
    """marks of the y axis"""
    log: bool
    """both axes are logarithmic; marks are then exponents of 10"""
    left: float = 64.0
    bottom: float = TOP + 260.0

    def x(self, value: float) -> float:
        share = (value - self.across[0]) / ((self.across[-1] - self.across[0]) or 1)
        return self.left + share * (WIDTH - self.left - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.up[0]) / ((self.up[-1] - self.up[0]) or 1)
        return self.bottom - share * (self.bottom - TOP)

    def scale(self, value: float) -> float:
        return math.log10(value) if self.log else float(value)

    def label(self, mark: float) -> str:
        return _number(float(f"{10**mark:.3g}")) if self.log else _number(mark)


def curve_plot(
    title: str,
    x_axis: str,
    y_axis: str,
    curves: Sequence[Curve],
    log: bool = False,
    zero: bool = False,
) -> str:
    """Lines in one coordinate system, with a legend below.

    ``log``: both axes are logarithmic. ``zero``: both axes begin at 0.
    """
    scale = math.log10 if log else float
    xs = [scale(x) for curve in curves for x, _ in curve.points] + [0.0] * zero
    ys = [scale(y) for curve in curves for _, y in curve.points] + [0.0] * zero
    marks = log_ticks if log else ticks
    area = PlotArea(marks(min(xs), max(xs)), marks(min(ys), max(ys)), log)
    height = area.bottom + BOTTOM + 18 * len(curves)

    def parts() -> Iterator[str]:
        yield from _axes(area, x_axis, y_axis)
        for index, curve in enumerate(curves):
            hidden = any(curve.points == earlier.points for earlier in curves[:index])
            yield from _curve(area, curve, index, dashed=hidden or index >= len(COLOURS))

    return _svg(WIDTH, height, title, parts())


def _axes(area: PlotArea, x_axis: str, y_axis: str) -> Iterator[str]:
    left, right, bottom = area.left, WIDTH - RIGHT, area.bottom
    for mark in area.up:
        y = area.y(mark)
        yield f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="dim" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{area.label(mark)}</text>'
    for mark in area.across:
        x = area.x(mark)
        yield f'<text class="dim" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{area.label(mark)}</text>'
    middle = (left + right) / 2
    yield f'<text class="dim" x="{middle}" y="{bottom + 34}" text-anchor="middle">{escape(x_axis)}</text>'
    yield f'<text class="dim" x="{right}" y="18" text-anchor="end">{escape(y_axis)}</text>'


def _curve(area: PlotArea, curve: Curve, index: int, dashed: bool) -> Iterator[str]:
    """A line with its points and its entry in the legend."""
    dash = ' stroke-dasharray="7 7"' if dashed else ""
    stroke = f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2"{dash}'
    placed = [(area.x(area.scale(x)), area.y(area.scale(y))) for x, y in sorted(curve.points)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    yield f'<polyline points="{line}" fill="none" {stroke}/>'
    for x, y in placed:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLOURS[index % len(COLOURS)]}"/>'
    left, y = area.left, area.bottom + BOTTOM + 18 * index + 6
    yield f'<line x1="{left}" x2="{left + 22}" y1="{y}" y2="{y}" {stroke}/>'
    yield f'<text x="{left + 30}" y="{y + 4}">{escape(curve.label)}</text>'
