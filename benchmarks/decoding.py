"""What each way to decode costs and brings: BLEU, chrF, and CPU time over that of plain beam search.

    python benchmarks/decoding.py RUN SOURCE REFERENCE [--sentences 1000] [--only mbr]

Constraints are words of the references that plain beam search does not say: one a sentence, drawn at random. That is
what a glossary knows that a model does not; the gain shows whether they come to stand in the right place.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import sacrebleu

import regard
import regard.recipe
from regard.data.corpus import read_lines
from regard.data.words import as_words

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "no_repeat_ngram 3": {"no_repeat_ngram": 3},
    "coverage 0.01": {"coverage": 0.01},
    "coverage 0.2": {"coverage": 0.2},
    "groups 5": {"beam_groups": 5},
    "mbr 8": {"mbr": 8},
    "mbr 32": {"mbr": 32},
    "constraints, beam 5": {"constrained_beam": 5},
    "constraints, beam 10": {"constrained_beam": 10},
    "constraints, beam 20": {"constrained_beam": 20},
    "keep numbers": {"keep": ("numbers",)},
}


def missing(reference: str, translation: str, draw: random.Random) -> list[str]:
    lacking = [
        word for word in re.findall(r"\w{4,}", reference) if not as_words(word).search(translation)
    ]
    return draw.sample(lacking, 1) if lacking else []


def distinct(found: Sequence[Sequence[str]]) -> float:
    """Of five translations of a text, how many different words over how many words, in percent."""
    shares = [
        len({w for t in one for w in t.split()}) / sum(len(t.split()) for t in one) for one in found
    ]
    return 100 * sum(shares) / len(shares)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("source")
    parser.add_argument("reference")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument("--set", action="append", default=[], help="one more way, as coverage=0.1")
    asked = parser.parse_args()
    from pathlib import Path

    sources = list(read_lines(Path(asked.source)))[: asked.sentences]
    references = list(read_lines(Path(asked.reference)))[: asked.sentences]
    model = regard.load(asked.run)
    model.translate(sources[:50])

    def timed(**options: Any) -> tuple[list[str], float]:
        start = time.process_time()
        found = model.translate(sources, **options)
        return found, time.process_time() - start

    def scores(found: list[str]) -> str:
        bleu = sacrebleu.corpus_bleu(found, [references]).score
        return f"BLEU {bleu:5.1f}  chrF {sacrebleu.corpus_chrf(found, [references]).score:5.1f}"

    plain, seconds = timed()
    seconds = min(seconds, timed()[1])
    print(f"load {os.getloadavg()[0]:.1f}, {len(sources)} sentences")
    print(f"{'beam search':24} {scores(plain)}   {seconds:6.1f} s   1.00")
    draw = random.Random(1)
    constraints = [missing(*both, draw) for both in zip(references, plain, strict=True)]
    more = {one: regard.recipe.decoding_overrides(one.split()) for one in asked.set}
    for name, options in {**WAYS, **more}.items():
        if asked.only not in name:
            continue
        if name.startswith("constraints"):
            options = {**options, "constraints": constraints}
        found, took = timed(**options)
        said = ""
        if name.startswith("constraints"):
            kept = [
                bool(as_words(word).search(text))
                for text, some in zip(found, constraints, strict=True)
                for word in some
            ]
            said = f"   {sum(kept)} of {len(kept)} said"
        print(
            f"{name:24} {scores(found)}   {took:6.1f} s   {took / seconds:.2f}{said}",
            flush=True,
        )
    if not asked.only or "nbest" in asked.only:
        for groups in (1, 5):
            lists = model.search(sources[:200], nbest=5, groups=groups)
            best = [[one.text for one in some] for some in lists]
            print(
                f"five best, groups {groups}: {distinct(best):.1f}% of the words of a list differ"
            )


if __name__ == "__main__":
    main()
