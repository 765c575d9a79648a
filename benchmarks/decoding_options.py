"""What each decoding option costs and gains: BLEU, chrF, and CPU time relative to plain beam search.

    python benchmarks/decoding_options.py RUN SOURCE REFERENCE [--sentences 1000] [--only mbr]

Constraints are words of the references that plain beam search does not produce: one per sentence, chosen at random.
They stand for what a glossary knows and a model does not; the gain shows whether they end up in the right position.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sacrebleu

import regard
import regard.recipe
from regard.data.text_files import read_lines
from regard.data.words import whole_word_pattern

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "no_repeat_ngram 3": {"no_repeat_ngram": 3},
    "coverage_penalty 0.01": {"coverage_penalty": 0.01},
    "coverage_penalty 0.2": {"coverage_penalty": 0.2},
    "beam_groups 5": {"beam_groups": 5},
    "mbr 8": {"mbr": 8},
    "mbr 32": {"mbr": 32},
    "constraints, beam 5": {"constrained_beam": 5},
    "constraints, beam 10": {"constrained_beam": 10},
    "constraints, beam 20": {"constrained_beam": 20},
    "protect numbers": {"protect": ("numbers",)},
}


def missing_word(reference: str, translation: str, rng: random.Random) -> list[str]:
    """A random word of the reference that is not in the translation, if there is one."""
    missing = [
        word
        for word in re.findall(r"\w{4,}", reference)
        if not whole_word_pattern(word).search(translation)
    ]
    return rng.sample(missing, 1) if missing else []


def distinct(found: Sequence[Sequence[str]]) -> float:
    """Distinct words over all words of the translations of a text, in percent, averaged over texts."""
    fractions = [
        len({w for t in one for w in t.split()}) / sum(len(t.split()) for t in one) for one in found
    ]
    return 100 * sum(fractions) / len(fractions)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("source")
    parser.add_argument("reference")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        help="another option to measure, such as coverage_penalty=0.1",
    )
    given = parser.parse_args()
    sources = list(read_lines(Path(given.source)))[: given.sentences]
    references = list(read_lines(Path(given.reference)))[: given.sentences]
    model = regard.load(given.run)
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
    rng = random.Random(1)
    constraints = [missing_word(*both, rng) for both in zip(references, plain, strict=True)]
    more = {one: regard.recipe.decoding_overrides(one.split()) for one in given.set}
    for name, options in {**OPTIONS, **more}.items():
        if given.only not in name:
            continue
        if name.startswith("constraints"):
            options = {**options, "constraints": constraints}
        found, took = timed(**options)
        satisfied = ""
        if name.startswith("constraints"):
            contained = [
                bool(whole_word_pattern(word).search(text))
                for text, some in zip(found, constraints, strict=True)
                for word in some
            ]
            satisfied = f"   {sum(contained)} of {len(contained)} satisfied"
        print(
            f"{name:24} {scores(found)}   {took:6.1f} s   {took / seconds:.2f}{satisfied}",
            flush=True,
        )
    if not given.only or "nbest" in given.only:
        for groups in (1, 5):
            lists = model.search(sources[:200], nbest=5, beam_groups=groups)
            best = [[one.text for one in some] for some in lists]
            print(f"5 best, beam_groups {groups}: {distinct(best):.1f}% distinct words")


if __name__ == "__main__":
    main()
