"""Makes the tables of results from the cards that runs wrote: all rows in docs/results.md, a few in README.md.

    python benchmarks/results.py                                # after a change of cards/ or published.json
    python benchmarks/results.py runs/multi30k runs/g2p         # take the cards of these runs, then the same

A card says what came out, where, in what time and by which command. What no card can know, such as what others have
published, is in ``published.json``: its order is that of the rows, ``readme`` puts a row into README.md as well, and
``command`` is shown in place of the card's. A card it does not name gets a row at the end of docs/results.md. A test
fails when one of the two pages is not what this script writes.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from regard.metrics.sacrebleu import NAMES
from regard.recipe import load_recipe

HERE = Path(__file__).parent
ROOT = HERE.parent
README = ROOT / "README.md"
ALL = ROOT / "docs/results.md"
CARDS = HERE / "cards"
PUBLISHED = HERE / "published.json"

BEGIN = "<!-- results: written by python benchmarks/results.py -->\n"
EOS = "<!-- end of results -->\n"
HEAD = """\
| task | model | result | published | where, how long | command |
|---|---|---|---|---|---|
"""
PLACES = {"--out"}
"""options of train that tell of one machine only"""
TIMES = {"--minutes"}
"""options of train that make no other model, unless they ended the training: then the row says so"""
OUT_OF_TIME = "the minutes given are over"
LUCK = ("bs:", "seed:")
"""parts of a signature that tell of the interval, not of the score"""

Card = Mapping[str, Any]
Said = Mapping[str, Any]


def section(cards: Mapping[str, Card], published: Mapping[str, Said]) -> str:
    """The table and what is to be said of all its rows; links are those of a page in the root."""
    names = [*(name for name in published if name in cards), *sorted(cards.keys() - published)]
    rows = [row(name, cards[name], published.get(name, {})) for name in names]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    return f"{HEAD}{table}\n{signatures({name: cards[name] for name in names})}\n"


def row(name: str, card: Card, said: Said) -> list[str]:
    what = f": {said['what']}" if "what" in said else ""
    commands = [*said.get("before", []), said.get("command") or timeless(card["command"])]
    return [
        f"[{name}](recipes/{name}.yaml){what}",
        model(card),
        result(card, said.get("metrics")),
        said.get("published", ""),
        where(name, card),
        ", ".join(f"`{command}`" for command in commands),
    ]


def model(card: Card) -> str:
    millions = card["parameters"] / 1e6
    size = f"{millions:.{1 if millions >= 1 else 2}f} M"
    if "layers" not in card:
        return size
    layers = "+".join(map(str, card["layers"].values()))
    return f"{layers} layers of {card['width']}, {size}"


def result(card: Card, measures: Sequence[str] | None) -> str:
    """Scores on the test, each with its interval; without a test what validation said, which chose the weights."""
    test = card["test"]
    if not test:
        found = {key.removeprefix("best_"): value for key, value in card["valid"].items()}
        found.pop("loss")
        *_, (measure, value) = found.items()
        return f"validation: {NAMES.get(measure, measure)} {value:.1f}"
    shown = measures or [test[0]["measure"]]
    told = [score(one) for one in test if one["measure"] in shown]
    if "challenge" in card:
        told.append(f"{card['challenge']['right']} of {card['challenge']['asked']} pronouns right")
    return ", ".join(told)


def score(one: Mapping[str, Any]) -> str:
    interval = "" if one["low"] is None else f" ({one['low']:.1f}–{one['high']:.1f})"
    return f"{one['name']} {one['value']:.1f}{interval}"


def where(name: str, card: Card) -> str:
    many = f"{card['processes']} x " if card["processes"] > 1 else ""
    learning = card["seconds"]
    told = f"{many}{card['hardware'].removeprefix('NVIDIA ')}, {learning / 60:.1f} min"
    before, after = card.get("preparing_seconds"), card.get("scoring_seconds")
    if before is not None and after is not None:
        told += f" ({(before + learning + after) / 60:.1f} in all)"
    if card["reason_stopped"] == OUT_OF_TIME:
        told += f"; stopped at step {card['steps']:,} of {steps(name, card['command']):,}"
    return told + (f"; {card['note']}" if "note" in card else "")


def steps(name: str, command: str) -> int:
    """How many the recipe asks for, with the changes of the command."""
    words = pairwise(shlex.split(command))
    changes = [value for option, value in words if option == "--set"]
    return load_recipe(ROOT / f"recipes/{name}.yaml", changes).training.steps


def signatures(cards: Mapping[str, Card]) -> str:
    """How BLEU was computed, for each way the recipes that took it."""
    ways: dict[str, list[str]] = {}
    for name, card in cards.items():
        for one in card["test"]:
            if one["measure"] == "bleu":
                parts = one["signature"].split("|")
                kept = "|".join(part for part in parts if not part.startswith(LUCK))
                ways.setdefault(kept, []).append(name)
    usual = max(ways, key=lambda way: len(ways[way]), default="")
    others = [
        f"; {', '.join(dict.fromkeys(names))}: `{way}`"
        for way, names in ways.items()
        if way != usual
    ]
    return f"BLEU is sacreBLEU's, `{usual}`{''.join(others)}."


def document(page: Path) -> str:
    """This page with the table that the cards make."""
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(EOS)
    assert begin, f"{page.name} has no line {BEGIN}"
    assert end, f"{page.name} has no line {EOS}"
    return f"{before}{begin}{table(page)}{end}{after}"


def table(page: Path) -> str:
    cards = {path.stem: json.loads(path.read_text("utf-8")) for path in CARDS.glob("*.json")}
    published: dict[str, Said] = json.loads(PUBLISHED.read_text("utf-8"))
    if page == ALL:
        return (
            section(cards, published)
            .replace("](recipes/", "](../recipes/")
            .replace("](docs/", "](")
        )
    shown = {name for name, said in published.items() if said.get("readme")}
    return section({name: card for name, card in cards.items() if name in shown}, published)


def take(run: Path) -> Path:
    """The card of a finished run among ours, its command without what tells of one machine only."""
    card = json.loads((run / "card.json").read_text("utf-8"))
    words = list(kept(shlex.split(card["command"]), PLACES))
    for word in words:
        if Path(word.partition("=")[2] or word).is_absolute():
            raise SystemExit(f"{run}: the command names a place of this machine: {word}")
    path = CARDS / f"{run.resolve().name}.json"
    text = json.dumps({**card, "command": shlex.join(words)}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def timeless(command: str) -> str:
    return shlex.join(kept(shlex.split(command), TIMES))


def kept(words: Sequence[str], without: set[str]) -> Iterator[str]:
    """The words of a command but for these options and their values."""
    some = iter(words)
    for word in some:
        name, equals, _ = word.partition("=")
        if name not in without:
            yield word
        elif not equals:
            next(some, None)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", nargs="*", type=Path, help="run folders, named as their recipes")
    for run in parser.parse_args(arguments).runs:
        print(take(run))
    for page in (README, ALL):
        page.write_text(document(page), encoding="utf-8")
        print(page)


if __name__ == "__main__":
    main()
