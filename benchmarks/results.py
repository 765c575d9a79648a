"""Makes the table of results in README.md from the cards that runs wrote themselves.

    python benchmarks/results.py                                # after a change of cards/ or published.json
    python benchmarks/results.py runs/multi30k runs/g2p         # take the cards of these runs, then the same

A card says what came out, where, in what time and by which command. What no card can know, such as what others have
published, is in ``published.json``; its order is that of the rows, and a card it does not name gets a row at the end. A
test fails when README.md is not what this script writes.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
CARDS = HERE / "cards"
PUBLISHED = HERE / "published.json"

BEGIN = "<!-- results: written by python benchmarks/results.py -->\n"
END = "<!-- end of results -->\n"
HEAD = """\
| task | model | result | published | where, how long | command |
|---|---|---|---|---|---|
"""
PLACES = {"--out", "--minutes"}
"""options of train that make no other model"""
OUT_OF_TIME = "the minutes given are over"
LUCK = ("bs:", "seed:")
"""parts of a signature that tell of the interval, not of the score"""

Card = Mapping[str, Any]


def section(cards: Mapping[str, Card], published: Mapping[str, Mapping[str, Any]]) -> str:
    """The table and what is to be said of all its rows."""
    names = [*(name for name in published if name in cards), *sorted(cards.keys() - published)]
    rows = [row(name, cards[name], published.get(name, {})) for name in names]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    return f"{HEAD}{table}\n{signatures({name: cards[name] for name in names})}\n"


def row(name: str, card: Card, said: Mapping[str, Any]) -> list[str]:
    what = f": {said['what']}" if "what" in said else ""
    commands = [*said.get("before", []), card["command"]]
    return [
        f"[{name}](recipes/{name}.yaml){what}",
        model(card),
        result(card, said.get("measures")),
        said.get("published", ""),
        where(card),
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
        return f"validation: {measure} {value:.1f}"
    shown = measures or [test[0]["measure"]]
    told = [score(one) for one in test if one["measure"] in shown]
    if "challenge" in card:
        told.append(f"{card['challenge']['right']} of {card['challenge']['asked']} pronouns right")
    return ", ".join(told)


def score(one: Mapping[str, Any]) -> str:
    interval = "" if one["low"] is None else f" ({one['low']:.1f}–{one['high']:.1f})"
    return f"{one['name']} {one['value']:.1f}{interval}"


def where(card: Card) -> str:
    many = f"{card['processes']} x " if card["processes"] > 1 else ""
    learning = card["seconds"]
    told = f"{many}{card['hardware'].removeprefix('NVIDIA ')}, {learning / 60:.1f} min"
    before, after = card.get("preparing_seconds"), card.get("scoring_seconds")
    if before is not None and after is not None:
        told += f" ({(before + learning + after) / 60:.1f} in all)"
    return told + (f"; {card['note']}" if "note" in card else "")


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


def document(readme: str) -> str:
    """README with the table that the cards make."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"README.md has no line {BEGIN}"
    assert end, f"README.md has no line {END}"
    cards = {path.stem: json.loads(path.read_text("utf-8")) for path in CARDS.glob("*.json")}
    published = json.loads(PUBLISHED.read_text("utf-8"))
    return f"{before}{begin}{section(cards, published)}{end}{after}"


def take(run: Path) -> Path:
    """The card of a finished run among ours, its command without what tells of one machine only."""
    card = json.loads((run / "card.json").read_text("utf-8"))
    timed = card["reason_stopped"] == OUT_OF_TIME
    words = list(kept(shlex.split(card["command"]), PLACES - ({"--minutes"} if timed else set())))
    for word in words:
        if Path(word.partition("=")[2] or word).is_absolute():
            raise SystemExit(f"{run}: the command names a place of this machine: {word}")
    path = CARDS / f"{run.resolve().name}.json"
    text = json.dumps({**card, "command": shlex.join(words)}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
    return path


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
    README.write_text(document(README.read_text("utf-8")), encoding="utf-8")
    print(README)


if __name__ == "__main__":
    main()
