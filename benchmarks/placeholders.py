"""What a placeholder costs the sentence around it: BLEU of the rest and CPU time, with and without substitution.

    python benchmarks/placeholders.py RUN SOURCE REFERENCE [--sentences 200]

A placeholder is inserted between two random words of each source, and removed from the translation before scoring. The
last line is for the unchanged sources, an upper bound.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sacrebleu

import regard
from regard.data.protected_spans import ProtectedSpans
from regard.data.text_files import read_lines
from regard.tasks import Translator

PLACEHOLDERS = [
    *("{name}", "%s", "{0}", "${user}", "%(count)d", "{{ title }}"),
    *("https://a.example/page", "bob@mail.example"),
]


def with_placeholder(text: str, rng: random.Random) -> tuple[str, str]:
    words = text.split()
    position, placeholder = rng.randint(1, max(1, len(words) - 1)), rng.choice(PLACEHOLDERS)
    return " ".join([*words[:position], placeholder, *words[position:]]), placeholder


def without(text: str, placeholder: str) -> str:
    return re.sub(r" +(?=[.,]|$)", "", " ".join(text.replace(placeholder, " ").split()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("source", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--sentences", type=int, default=200)
    given = parser.parse_args()
    plain = list(read_lines(given.source))[: given.sentences]
    references = list(read_lines(given.reference))[: given.sentences]
    rng, protected = random.Random(1), ProtectedSpans(("placeholders",))
    sources, placeholders = zip(*(with_placeholder(text, rng) for text in plain), strict=True)
    model = regard.load(given.run)

    def report(name: str, texts: list[str], **options: Any) -> None:
        start = time.process_time()
        found = model.translate(texts, **options)
        took = time.process_time() - start
        preserved = sum(
            not protected.mismatches(*both) for both in zip(texts, found, strict=True)
        ) / len(texts)
        rest = [without(*both) for both in zip(found, placeholders, strict=True)]
        bleu = sacrebleu.corpus_bleu(rest, [references]).score
        print(
            f"{name:16s}  preserved {preserved:6.1%}  BLEU {bleu:5.1f}  {took:6.1f} s", flush=True
        )

    report("substitution", list(sources), protect=("placeholders",))
    with patch.object(Translator, "_with_substitutes", return_value={}):
        report("constraints only", list(sources), protect=("placeholders",))
    report("no placeholder", plain)


if __name__ == "__main__":
    main()
