"""Tables with coloured cells, for notebooks, and tables of plain text, for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from rich.cells import cell_len

POSITIVE, NEGATIVE = "64, 120, 220", "214, 122, 20"
"""blue and amber, visible on light and dark backgrounds"""


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    value: float
    """the strength of its colour, from -1 (amber) to 1 (blue)"""


def heat_table(
    title: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[Cell]]
) -> str:
    """A table with names on its rows and columns and coloured cells, as HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in ("", *columns))
    body = "".join(
        f"<tr><th style='text-align: left'>{escape(name)}</th>{''.join(map(_cell, row))}</tr>"
        for name, row in zip(rows, cells, strict=True)
    )
    return (
        "<div style='overflow-x: auto'><table><caption style='text-align: left'>"
        f"{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell) -> str:
    strength = min(1.0, abs(cell.value))
    colour = f"rgba({POSITIVE if cell.value >= 0 else NEGATIVE}, {0.6 * strength:.2f})"
    return f"<td style='background: {colour}' title='{cell.value:.4f}'>{escape(cell.text)}</td>"


def scaled(values: Sequence[float]) -> list[float]:
    """Values divided by the largest absolute value."""
    largest = max(map(abs, values), default=0.0) or 1.0
    return [value / largest for value in values]


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of plain text, with aligned columns."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True)
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
