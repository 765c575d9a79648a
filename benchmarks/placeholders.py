"""What a placeholder costs the sentence around it: verified, BLEU of the rest, CPU time; by stand-ins and without.

    python benchmarks/placeholders.py RUN SOURCE REFERENCE [--sentences 200]

A placeholder is put between two words of each source, drawn at random; it is taken out of the translation again before
that is scored. The last line is of the sources as they are, which no way can hope to surpass.
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
from regard.data.corpus import read_lines
from regard.data.protected_spans import Kept
from regard.tasks import Translator

PLACEHOLDERS = [
    *("{name}", "%s", "{0}", "${user}", "%(count)d", "{{ title }}"),
    *("https://a.example/page", "bob@mail.example"),
]


def with_placeholder(text: str, draw: random.Random) -> tuple[str, str]:
    words = text.split()
    place, placeholder = draw.randint(1, max(1, len(words) - 1)), draw.choice(PLACEHOLDERS)
    return " ".join([*words[:place], placeholder, *words[place:]]), placeholder


def without(text: str, placeholder: str) -> str:
    return re.sub(r" +(?=[.,]|$)", "", " ".join(text.replace(placeholder, " ").split()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("source", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--sentences", type=int, default=200)
    asked = parser.parse_args()
    plain = list(read_lines(asked.source))[: asked.sentences]
    references = list(read_lines(asked.reference))[: asked.sentences]
    draw, kept = random.Random(1), Kept(("placeholders",))
    sources, placeholders = zip(*(with_placeholder(text, draw) for text in plain), strict=True)
    model = regard.load(asked.run)

    def tell(name: str, texts: list[str], **options: Any) -> None:
        start = time.process_time()
        found = model.translate(texts, **options)
        took = time.process_time() - start
        whole = sum(not kept.lost(*both) for both in zip(texts, found, strict=True)) / len(texts)
        rest = [without(*both) for both in zip(found, placeholders, strict=True)]
        bleu = sacrebleu.corpus_bleu(rest, [references]).score
        print(f"{name:16s}  verified {whole:6.1%}  BLEU {bleu:5.1f}  {took:6.1f} s", flush=True)

    tell("stand-ins", list(sources), keep=("placeholders",))
    with patch.object(Translator, "_in_disguise", return_value={}):
        tell("search alone", list(sources), keep=("placeholders",))
    tell("no placeholder", plain)


if __name__ == "__main__":
    main()
