"""Writes what the rows of ablation.py on back-translation learn from, beside the text of multi30k.

    python benchmarks/back.py
    python benchmarks/ablation.py --only "half of the pairs" "half, the rest back-translated"

Of every two pairs the first stays a pair: ``half.jsonl``. Of the second only the German is taken, as if nobody had ever
translated it. A model that learned German to English from the first ones translates it: ``rest-back.jsonl``, whose
English a model wrote and whose German people did.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from regard.data.corpus import Pair, train_pairs
from regard.errors import RegardError
from regard.recipe import load_recipe
from regard.storage.run_dir import write_text
from regard.tasks import Translator
from regard.training.distillation import distill
from regard.training.run import train

RECIPE = "multi30k-tiny"
REVERSE = [
    "data.train={pairs: multi30k/half-turned.jsonl}",
    "data.valid={source: multi30k/valid.de, target: multi30k/valid.en}",
    "data.test=null",
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--run", type=Path, default=Path("runs/back"), help="of German to English")
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="A.B=C")
    given = parser.parse_args(arguments)
    data = load_recipe(RECIPE, given.changes).data
    pairs = list(train_pairs(data))
    half, rest = pairs[::2], pairs[1::2]
    write_pairs(data.path("multi30k/half.jsonl"), half)
    write_pairs(data.path("multi30k/half-turned.jsonl"), [Pair(de, en) for en, de in half])
    write_text(data.path("multi30k/rest.de"), "".join(f"{de}\n" for _, de in rest))
    model = train(load_recipe(RECIPE, [*REVERSE, *given.changes]), given.run)
    assert isinstance(model, Translator)
    output = data.path("multi30k/rest-back.jsonl")
    count = distill(model, output, data.path("multi30k/rest.de"), print, turned=True)
    print(f"{output}: {count:,} pairs")


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """As JSON: a text of multi30k has a tab in it."""
    lines = (json.dumps(pair._asdict(), ensure_ascii=False) for pair in pairs)
    write_text(path, "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    try:
        main()
    except RegardError as wrong:
        sys.exit(f"back: {wrong}")
