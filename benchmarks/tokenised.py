"""BLEU as papers on Multi30k count it, of lower-cased text tokenised by Moses, beside sacreBLEU's own.

    python benchmarks/tokenised.py runs/multi30k-enfr
    python benchmarks/tokenised.py runs/my --source test.en --reference test.fr --language fr

sacreBLEU's 13a is no such tokeniser: in French it leaves *l'homme* one word, of which Moses makes two. The run
translates its recipe's test, or the files given, as its recipe searches, in fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sacrebleu.metrics import BLEU
from sacremoses import MosesTokenizer

from regard.data.corpus import Pair, language_of, read_pairs
from regard.errors import RegardError
from regard.recipe import Data, DataFiles
from regard.tasks import Translator

NAMELESS = "target"
"""how a recipe calls a language whose code nobody told"""


def written(data: Data, asked: str | None) -> str:
    """The language that is written, for Moses: the one asked for, or the only one that the recipe names."""
    named = sorted({code for _, code in data.language_pairs} - {NAMELESS})
    if asked is None and len(named) != 1:
        raise RegardError(
            f"the recipe names {len(named)} languages to write {named or ''}; say --language CODE"
        )
    return asked or named[0]


def pairs_of(data: Data, files: Sequence[str], language: str) -> list[Pair]:
    if files:
        texts = DataFiles.model_validate(dict(zip(("source", "target"), files, strict=True)))
        return list(read_pairs(texts, Data(root=".", train=texts), ""))
    if data.test is None:
        raise RegardError("the recipe has no data.test; give --source and --reference")
    pairs = read_pairs(data.test, data, "data.test")
    return [pair for pair in pairs if language_of(pair) in (None, language)]


def scores(said: Sequence[str], right: Sequence[str], language: str) -> Iterator[tuple[str, float]]:
    moses = MosesTokenizer(language)

    def cut(text: str) -> str:
        return str(moses.tokenize(text.lower(), return_str=True, escape=False))

    yield "sacreBLEU (13a)", BLEU().corpus_score(said, [right]).score
    yield "sacreBLEU (13a), lower case", BLEU(lowercase=True).corpus_score(said, [right]).score
    whole = BLEU(tokenize="none", force=True)  # which would warn that the text is tokenised
    tokenised = whole.corpus_score([*map(cut, said)], [[*map(cut, right)]])
    yield f"lower case, tokenised by Moses ({language})", tokenised.score


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--source")
    parser.add_argument("--reference")
    parser.add_argument("--language", help="that is written; the recipe's unless given")
    given = parser.parse_args(arguments)
    if (given.source is None) != (given.reference is None):
        parser.error("--source and --reference go together")
    model = Translator.load(given.run, precision="fp32")
    data = model.recipe.data
    language = written(data, given.language)
    pairs = pairs_of(data, [given.source, given.reference] if given.source else [], language)
    said = (model.into(language) if data.targets else model).answer_to(pairs)
    for name, value in scores(said, [pair.target for pair in pairs], language):
        print(f"{value:6.2f}  {name}")


if __name__ == "__main__":
    try:
        main()
    except RegardError as error:
        sys.exit(f"tokenised: {error}")
