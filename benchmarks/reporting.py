"""What several benchmarks need: Markdown tables in documentation pages, statistics, and the test pairs of a run."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from regard.data.corpus import read_pairs
from regard.data.pairs import Pair
from regard.errors import RegardError
from regard.experiments.results import student_t as student_t
from regard.storage.run_dir import RunDir


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table. The first ``left`` columns are left-aligned, the others right-aligned."""
    alignment = "|---" * left + "|--:" * (len(head) - left) + "|"
    return [f"| {' | '.join(head)} |", alignment, *(f"| {' | '.join(row)} |" for row in rows)]


def replace_section(page: Path, text: str, begin: str, end: str, content: str) -> str:
    """The text of a page with the content between the markers ``begin`` and ``end`` replaced.

    Long lines of prose are wrapped; rows of tables are not.
    """
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    assert found_begin, f"{page} has no line {begin}"
    assert found_end, f"{page} has no line {end}"
    return f"{before}{begin}{wrap_prose(content)}{end}{after}"


def wrap_prose(markdown: str) -> str:
    """The text with at most 120 characters in each line that is not a row of a table."""
    return "\n".join(
        line
        if line.startswith("|") or len(line) <= 120
        else textwrap.fill(
            line,
            120,
            subsequent_indent="  " if line.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in markdown.split("\n")
    )


def growth_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log value over log size, by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def read_test_pairs(run: Path, limit: int | None = None) -> list[Pair]:
    """The first pairs of the test data of a run's recipe; None: all."""
    data = RunDir(run).recipe().data
    if data.test is None:
        raise RegardError(f"{run}: its recipe has no data.test to translate")
    return list(islice(read_pairs(data.test, data, "data.test"), limit))
