"""How an experiment is shown: a table in the terminal, SVG figures, and one HTML file without scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from regard.experiments.figures import Curve, IntervalRow, curve_plot, interval_plot
from regard.experiments.results import estimate_of, number_of_trainings
from regard.experiments.statistics import Estimate
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
    for one in content["summary"]["variants"]:
        seeds = f"{one['seeds']}" + (f", {one['diverged']} diverged" if one["diverged"] else "")
        paired = "-" if one["paired_p"] is None else f"{one['paired_p']:.3f}"
        rows.append(
            [
                one["name"],
                seeds,
                format_estimate(estimate_of(one["mean"])),
                format_estimate(estimate_of(one["difference"]), "+"),
                paired,
                "-" if one["loss"] is None else f"{one['loss']:.3f}",
                "-" if one["parameters"] is None else f"{one['parameters']:,}",
                "-" if one["seconds"] is None else f"{one['seconds']:.0f}",
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
    lines += [one["verdict"] for one in summary["variants"] if one["verdict"]]
    return lines


def notes(content: Content) -> list[str]:
    """What a reader of the table needs to know."""
    done, planned = number_of_trainings(content)
    metric, summary = content["metric"]["name"], content["summary"]
    where = ", ".join(
        dict.fromkeys(
            one["details"]["hardware"]
            for one in content["trainings"]
            if "hardware" in one["details"]
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
        "same sentences, outputs of all seeds together; it ignores that other seeds give other models.",
    ]
    if summary["deviation"] is not None and summary["detectable"] is not None:
        lines.append(
            f"The standard deviation between seeds is {summary['deviation']:.2f} {metric}, so two variants must differ "
            f"by about {summary['detectable']:.1f} {metric} to be told apart."
        )
    tests = sum(one["difference"] is not None for one in summary["variants"])
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
    found = {}
    metric, rows = content["metric"]["name"], content["summary"]["variants"]
    scored = [one for one in rows if one["mean"] is not None]
    if scored:
        found["scores.svg"] = interval_plot(
            f"{metric} of each variant: seeds, mean and 95% interval",
            metric,
            [
                IntervalRow(one["name"], Estimate(**one["mean"]), scores_of(content, one["name"]))
                for one in scored
            ],
        )
    compared = [one for one in rows if one["difference"] is not None]
    if compared:
        found["differences.svg"] = interval_plot(
            f"Difference from {rows[0]['name']}: mean and 95% interval",
            f"{metric} difference",
            [IntervalRow(one["name"], Estimate(**one["difference"])) for one in compared],
            zero=True,
        )
    if effects := content["summary"]["effects"]:
        found["effects.svg"] = interval_plot(
            "Effect of each value, mean over all combinations of the others, with 95% interval",
            f"{metric} difference",
            [
                IntervalRow(
                    f"{one['level']} against {one['baseline']}", Estimate(**one["difference"])
                )
                for one in effects
            ],
            zero=True,
        )
    curves = [Curve(one["name"], mean_curve(content, one["name"])) for one in rows]
    curves = [curve for curve in curves if len(curve.points) > 1]
    if curves:
        found["curves.svg"] = curve_plot("Validation loss, mean over seeds", "step", "loss", curves)
    return found


def scores_of(content: Content, variant: str) -> list[float]:
    return [
        one["score"]
        for one in content["trainings"]
        if one["variant"] == variant and one["score"] is not None
    ]


def mean_curve(content: Content, variant: str) -> list[tuple[float, float]]:
    """The mean loss at the steps that all seeds of a variant have validated."""
    curves = [
        dict(one["details"]["curve"])
        for one in content["trainings"]
        if one["variant"] == variant and one["details"].get("curve")
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
    drawn = "".join(f"<figure>{plot}</figure>" for plot in plots)
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
{drawn}
<h2>Variants</h2>
<div class="scroll">{_html_table(table_of(content))}</div>
{remarks}
<h2>Trainings</h2>
<div class="scroll">{_html_table(_trainings(content))}</div>
</main>
</body>
</html>
"""


def _trainings(content: Content) -> list[list[str]]:
    head = ["variant", "seed", content["metric"]["name"], "loss", "steps", "seconds", "run folder"]
    rows = []
    for one in content["trainings"]:
        details = one["details"]
        score = "diverged" if one["score"] is None else f"{one['score']:.2f}"
        loss = details.get("loss")
        rows.append(
            [
                one["variant"],
                str(one["seed"]),
                score,
                "-" if loss is None else f"{loss:.3f}",
                f"{details.get('steps', '-')}",
                f"{details.get('seconds', '-')}",
                f"runs/{one['run']}",
            ]
        )
    return [head, *rows]


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    """The first column is text, as are cells with a path; the others are numbers."""

    def cells(row: Sequence[str], tag: str) -> str:
        text = [index == 0 or "/" in cell for index, cell in enumerate(row)]
        kinds = ["" if is_text else " class='number'" for is_text in text]
        return "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True)
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
