"""Figures as SVG: intervals of several variants, and curves. They follow the reader's light or dark colour scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from regard.experiments.statistics import Estimate

WIDTH, ROW, LEFT_PER_LETTER = 760, 30, 7.4
TOP, BOTTOM, RIGHT = 34, 46, 24
MAX_LABEL = 46
COLOURS = ("#3b6fd4", "#c2571a", "#2f8f5b", "#8a4fc0", "#b3261e", "#6b7280", "#0e8fa3", "#a38500")
STYLE = """
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
    whole = range(first, max(last, first + 1) + 1)
    if len(whole) > 4:
        return [float(one) for one in whole]
    marks = [one + math.log10(factor) for one in whole for factor in (1, 2, 5)]
    inner = [one for one in marks if low + 1e-9 < one < high - 1e-9]
    below = [one for one in marks if one <= low + 1e-9]
    above = [one for one in marks if one >= high - 1e-9]
    return list(dict.fromkeys([*below[-1:], *inner, *above[:1]]))


def _number(value: float) -> str:
    return f"{value:g}" if abs(value) < 10_000 else f"{value:,.0f}"


def _shorten(label: str) -> str:
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"


def _svg(width: float, height: float, title: str, parts: Iterator[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(title)}">\n<style>{STYLE}</style>\n'
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
            kind = "zero" if zero and mark == 0 else "grid"
            yield f'<line class="{kind}" x1="{x(mark):.1f}" x2="{x(mark):.1f}" y1="{TOP}" y2="{bottom}"/>'
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
            hidden = any(curve.points == one.points for one in curves[:index])
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
