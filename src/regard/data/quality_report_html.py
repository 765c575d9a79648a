"""The report of ``regard data check`` as one self-contained HTML file, without scripts."""

from __future__ import annotations

from html import escape

from regard.data.quality_report import Finding, HeldOutSplit, Histogram, NoiseExample, QualityReport

STYLE = """
:root { color-scheme: light dark; --text: #1c2026; --dim: #5d6673; --back: #fff; --card: #f5f6f8; --line: #d9dde3;
  --bar: #3b6fd4; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9ee; --dim: #9aa4b2; --back: #14171c; --card: #1d2229;
  --line: #333a45; --bar: #7aa5ff; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; }
.dim { color: var(--dim); }
.total { display: flex; flex-wrap: wrap; gap: 0.75rem; padding: 0; list-style: none; }
.total li { background: var(--card); border-radius: 0.5rem; padding: 0.5rem 1rem; }
.total b { display: block; font-size: 1.4rem; }
details { background: var(--card); border-radius: 0.5rem; margin: 0.5rem 0; padding: 0.5rem 1rem; }
summary { cursor: pointer; } summary b { display: inline-block; min-width: 9rem; }
.share { display: inline-block; height: 0.6rem; background: var(--bar); border-radius: 0.3rem; }
.rejects .share { background: var(--bad); }
dl { margin: 0.5rem 0; border-top: 1px solid var(--line); padding-top: 0.5rem; }
dt { color: var(--dim); font-size: 0.85rem; } dd { margin: 0 0 0.25rem; white-space: pre-wrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: 0.5rem; padding: 0.75rem; }
figcaption { font-size: 0.9rem; color: var(--dim); }
svg { width: 100%; height: auto; display: block; } rect { fill: var(--bar); } text { fill: var(--dim); font-size: 9px; }
code { background: var(--card); border-radius: 0.3rem; padding: 0.1rem 0.3rem; }
table { border-collapse: collapse; } td, th { padding: 0.25rem 0.75rem 0.25rem 0; text-align: left; }
"""


def page(report: QualityReport) -> str:
    """The report as HTML."""
    languages = f", {report.languages[0]} to {report.languages[1]}" if report.languages else ""
    share = report.rejected / max(1, report.pairs)
    files = escape(", ".join(report.files))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="content-security-policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Data report: {files}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>Data report</h1>
<p class="dim">{files}{escape(languages)}</p>
<ul class="total">
<li><b>{report.pairs:,}</b> pairs</li>
<li><b>{report.rejected:,}</b> would be dropped ({share:.1%})</li>
<li><b>{report.pairs - report.rejected:,}</b> would be kept</li>
</ul>
<h2>What to do</h2>
<ul>{"".join(f"<li>{_step(step)}</li>" for step in report.next_steps)}</ul>
<h2>What was found</h2>
{"".join(map(_finding, report.findings)) or "<p>Nothing.</p>"}
{_held_out(report.held_out)}
<h2>Lengths</h2>
<div class="plots">{"".join(map(_plot, report.histograms))}</div>
{_not_applied(report)}
</main>
</body>
</html>
"""


def _step(step: str) -> str:
    command, separator, rest = step.partition("  ")
    if separator and command.startswith("regard "):
        return f"<code>{escape(command)}</code> {escape(rest)}"
    return escape(step)


def _finding(finding: Finding) -> str:
    action = "dropped by regard data clean" if finding.rejects else "only reported"
    width = max(0.3, 12 * finding.share)
    return f"""<details class="{"rejects" if finding.rejects else "reports"}">
<summary><b>{escape(finding.rule)}</b> {finding.count:,} ({finding.share:.2%})
<span class="share" style="width:{width:.2f}rem"></span><br>
<span class="dim">{escape(finding.meaning)}</span></summary>
<p>{escape(finding.advice)} <span class="dim">({action})</span></p>
{"".join(map(_example, finding.examples))}
</details>
"""


def _example(example: NoiseExample) -> str:
    why = f"<dt>why</dt><dd>{escape(example.explanation)}</dd>" if example.explanation else ""
    return (
        f"<dl><dt>pair {example.number:,}</dt><dd>{escape(_visible(example.source))}</dd>"
        f"<dd>{escape(_visible(example.target))}</dd>{why}</dl>"
    )


def _visible(text: str) -> str:
    """A text in which control characters are shown as escapes."""
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[:400])
    return shown or "(empty)"


def _held_out(splits: list[HeldOutSplit]) -> str:
    if not splits:
        return ""
    rows = "".join(
        f"<tr><td>{escape(split.name)}</td><td>{split.overlap:,} of {split.sources:,}</td>"
        f"<td>{split.unknown_words:.1%}</td><td>{split.distance:.3f}</td></tr>"
        for split in splits
    )
    return (
        "<h2>Validation and test data</h2><table><tr><th>split</th><th>sources also in the training data</th>"
        f"<th>unknown words</th><th>distance of the words (0 to 1)</th></tr>{rows}</table>"
    )


def _plot(histogram: Histogram) -> str:
    """A histogram as an SVG."""
    highest = max(1, *histogram.counts)
    step = 300 / len(histogram.counts)
    bars, labels = [], []
    bounds = [f"{bound:g}" for bound in histogram.bounds]
    for number, count in enumerate(histogram.counts):
        height = 90 * count / highest
        last = number == len(bounds) - 1
        title = f"{bounds[number]} or more" if last else f"{bounds[number]} to {bounds[number + 1]}"
        bars.append(
            f'<rect x="{number * step + 1:.1f}" y="{95 - height:.1f}" width="{step - 2:.1f}" '
            f'height="{height:.1f}"><title>{title}: {count:,}</title></rect>'
        )
        if number % 3 == 0:
            labels.append(f'<text x="{number * step + 1:.1f}" y="107">{bounds[number]}</text>')
    return (
        f'<figure><svg viewBox="0 0 300 110" role="img" aria-label="{escape(histogram.name)}">'
        f"{''.join(bars)}{''.join(labels)}</svg><figcaption>{escape(histogram.name)}</figcaption></figure>"
    )


def _not_applied(report: QualityReport) -> str:
    items = [f"<b>{escape(rule)}</b>: {escape(why)}" for rule, why in report.not_applied.items()]
    items += map(escape, report.skipped_lines)
    if not items:
        return ""
    return f"<h2>Not checked</h2><ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
