"""Write the training data of the back-translation rows of ablation.py, next to the files of multi30k.

    python benchmarks/back_translation_data.py
    python benchmarks/ablation.py --only "half of the pairs" "half, the rest back-translated"

Every other pair stays a pair: ``half.jsonl``. Of the rest only the German is used, as if it had never been translated.
A model trained on the first half translates it into English: the English of ``rest-back.jsonl`` is machine output, the
German is human text.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from regard.data.corpus import train_pairs
from regard.data.pairs import Pair
from regard.errors import RegardError
from regard.recipe import load_recipe
from regard.storage.atomic_files import write_text
from regard.tasks import Translator
from regard.training.distillation import distill
from regard.training.run import train

RECIPE = "multi30k-tiny"
REVERSE = [
    "data.train={pairs: multi30k/half-reversed.jsonl}",
    "data.valid={source: multi30k/valid.de, target: multi30k/valid.en}",
    "data.test=null",
]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "--run", type=Path, default=Path("runs/back"), help="run folder of the German-English model"
    )
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar="A.B=C")
    options = parser.parse_args(arguments)
    data = load_recipe(RECIPE, options.changes).data
    pairs = list(train_pairs(data))
    half, rest = pairs[::2], pairs[1::2]
    write_pairs(Path(data.location("multi30k/half.jsonl")), half)
    write_pairs(
        Path(data.location("multi30k/half-reversed.jsonl")), [Pair(de, en) for en, de in half]
    )
    write_text(Path(data.location("multi30k/rest.de")), "".join(f"{de}\n" for _, de in rest))
    model = train(load_recipe(RECIPE, [*REVERSE, *options.changes]), options.run)
    assert isinstance(model, Translator)
    output = Path(data.location("multi30k/rest-back.jsonl"))
    count = distill(
        model, output, Path(data.location("multi30k/rest.de")), print, back_translation=True
    )
    print(f"{output}: {count:,} pairs")


def write_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """In JSONL format, because a text of multi30k contains a tab."""
    lines = (json.dumps(pair._asdict(), ensure_ascii=False) for pair in pairs)
    write_text(path, "".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    try:
        main()
    except RegardError as error:
        sys.exit(f"back_translation_data: {error}")
