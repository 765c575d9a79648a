"""Write the tables of results from the cards of runs: all rows in docs/results.md, a few in README.md.

    python benchmarks/results.py                                # after a change of cards/ or published.json
    python benchmarks/results.py runs/multi30k runs/g2p         # copy the cards of these runs first

A card holds the scores, the hardware, the time and the command of a run. What a card cannot know, such as published
results, is in ``published.json``: its order is the order of the rows, ``readme`` also puts a row into README.md, and
``command`` is shown instead of the card's. Cards it does not name get rows at the end of docs/results.md. A test fails
if one of the two pages differs from what this script writes.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from reporting import replace_section

from regard.metrics import METRICS
from regard.recipe import load_recipe

HERE = Path(__file__).parent
ROOT = HERE.parent
README = ROOT / "README.md"
ALL = ROOT / "docs/results.md"
CARDS = HERE / "cards"
PUBLISHED = HERE / "published.json"

BEGIN = "<!-- results: written by python benchmarks/results.py -->\n"
END = "<!-- end of results -->\n"
HEAD = """\
| task | model | result | published | hardware, training time | command |
|---|---|---|---|---|---|
"""
LOCAL_OPTIONS = {"--out"}
"""options of train that matter on one machine only"""
TIME_OPTIONS = {"--minutes"}
"""options of train that do not change the model, unless they ended the training: then the row says so"""
OUT_OF_TIME = "the time limit was reached"
BOOTSTRAP = ("bs:", "seed:")
"""parts of a signature that concern the interval, not the score"""

Card = Mapping[str, Any]
Published = Mapping[str, Any]


def section(cards: Mapping[str, Card], published: Mapping[str, Published]) -> str:
    """The table and the note about BLEU; links are relative to the root of the repository."""
    names = [*(name for name in published if name in cards), *sorted(cards.keys() - published)]
    rows = [row(name, cards[name], published.get(name, {})) for name in names]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    return f"{HEAD}{table}\n{signatures({name: cards[name] for name in names})}\n"


def row(name: str, card: Card, entry: Published) -> list[str]:
    what = f": {entry['what']}" if "what" in entry else ""
    commands = [*entry.get("before", []), entry.get("command") or without_time(card["command"])]
    return [
        f"[{name}](recipes/{name}.yaml){what}",
        model(card),
        result(card, entry.get("metrics")),
        entry.get("published", ""),
        where(name, card),
        ", ".join(f"`{command}`" for command in commands),
    ]


def model(card: Card) -> str:
    millions = card["parameters"] / 1e6
    size = f"{millions:.{1 if millions >= 1 else 2}f} M"
    if "layers" not in card:
        return size
    layers = "+".join(map(str, card["layers"].values()))
    return f"{layers} layers of {card['d_model']}, {size}"


def result(card: Card, metrics: Sequence[str] | None) -> str:
    """The test scores with their intervals; without a test set, the validation score."""
    test = card["test"]
    if not test:
        found = {key.removeprefix("best_"): value for key, value in card["valid"].items()}
        found.pop("loss")
        *_, (metric, value) = found.items()
        name = METRICS[metric].display_name if metric in METRICS else metric
        return f"validation: {name} {value:.1f}"
    shown = metrics or [test[0]["metric"]]
    scores = [score(one) for one in test if one["metric"] in shown]
    if "challenge" in card:
        challenge = card["challenge"]
        scores.append(f"{challenge['correct']} of {challenge['total']} pronouns correct")
    return ", ".join(scores)


def score(one: Mapping[str, Any]) -> str:
    interval = "" if one["low"] is None else f" ({one['low']:.1f}–{one['high']:.1f})"
    return f"{one['name']} {one['value']:.1f}{interval}"


def where(name: str, card: Card) -> str:
    many = f"{card['processes']} x " if card["processes"] > 1 else ""
    training = card["seconds"]
    text = f"{many}{card['hardware'].removeprefix('NVIDIA ')}, {training / 60:.1f} min"
    before, after = card.get("preparing_seconds"), card.get("scoring_seconds")
    if before is not None and after is not None:
        text += f" ({(before + training + after) / 60:.1f} in total)"
    if card["reason_stopped"] == OUT_OF_TIME:
        text += f"; stopped at step {card['steps']:,} of {steps(name, card['command']):,}"
    return text + (f"; {card['note']}" if "note" in card else "")


def steps(name: str, command: str) -> int:
    """The training steps of the recipe, with the changes of the command."""
    words = pairwise(shlex.split(command))
    changes = [value for option, value in words if option == "--set"]
    return load_recipe(ROOT / f"recipes/{name}.yaml", changes).training.steps


def signatures(cards: Mapping[str, Card]) -> str:
    """The usual BLEU signature, and the recipes that have a different one."""
    by_signature: dict[str, list[str]] = {}
    for name, card in cards.items():
        for one in card["test"]:
            if one["metric"] == "bleu":
                parts = one["signature"].split("|")
                signature = "|".join(part for part in parts if not part.startswith(BOOTSTRAP))
                by_signature.setdefault(signature, []).append(name)
    usual = max(by_signature, key=lambda one: len(by_signature[one]), default="")
    others = [
        f"; {', '.join(dict.fromkeys(names))}: `{signature}`"
        for signature, names in by_signature.items()
        if signature != usual
    ]
    return f"BLEU is computed with sacreBLEU, `{usual}`{''.join(others)}."


def document(page: Path) -> str:
    """The text of a page with its table."""
    return replace_section(page, page.read_text("utf-8"), BEGIN, END, table(page))


def table(page: Path) -> str:
    cards = {path.stem: json.loads(path.read_text("utf-8")) for path in CARDS.glob("*.json")}
    published: dict[str, Published] = json.loads(PUBLISHED.read_text("utf-8"))
    if page == ALL:
        return (
            section(cards, published)
            .replace("](recipes/", "](../recipes/")
            .replace("](docs/", "](")
        )
    shown = {name for name, entry in published.items() if entry.get("readme")}
    return section({name: card for name, card in cards.items() if name in shown}, published)


def copy_card(run: Path) -> Path:
    """Copy the card of a finished run, its command without options that matter on one machine only."""
    card = json.loads((run / "card.json").read_text("utf-8"))
    words = list(without_options(shlex.split(card["command"]), LOCAL_OPTIONS))
    for word in words:
        if Path(word.partition("=")[2] or word).is_absolute():
            raise SystemExit(f"{run}: the command contains an absolute path: {word}")
    path = CARDS / f"{run.resolve().name}.json"
    text = json.dumps({**card, "command": shlex.join(words)}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def without_time(command: str) -> str:
    return shlex.join(without_options(shlex.split(command), TIME_OPTIONS))


def without_options(words: Sequence[str], options: set[str]) -> Iterator[str]:
    """The words of a command without these options and their values."""
    remaining = iter(words)
    for word in remaining:
        name, equals, _ = word.partition("=")
        if name not in options:
            yield word
        elif not equals:
            next(remaining, None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", nargs="*", type=Path, help="run folders, named like their recipes")
    for run in parser.parse_args(arguments).runs:
        print(copy_card(run))
    for page in (README, ALL):
        page.write_text(document(page), encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
