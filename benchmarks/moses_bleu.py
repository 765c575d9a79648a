"""BLEU as papers on Multi30k report it, of lower-cased text tokenized by Moses, next to sacreBLEU's own.

    python benchmarks/moses_bleu.py runs/multi30k-enfr
    python benchmarks/moses_bleu.py runs/my --source test.en --reference test.fr --language fr

sacreBLEU's 13a tokenizer differs: in French it leaves *l'homme* one word, where Moses makes two. The run translates its
recipe's test data, or the given files, with the decoding options of its recipe, in fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sacrebleu.metrics import BLEU
from sacremoses import MosesTokenizer

from regard.data.corpus import read_pairs
from regard.data.pairs import Pair, language_of
from regard.errors import RegardError
from regard.recipe import DataConfig, DataFiles
from regard.tasks import Translator

UNKNOWN_LANGUAGE = "target"
"""the language code in recipes that do not name the language"""


def target_language(data: DataConfig, requested: str | None) -> str:
    """The language for Moses: the requested one, or the only target language of the recipe."""
    named = sorted({code for _, code in data.language_pairs} - {UNKNOWN_LANGUAGE})
    if requested is None and len(named) != 1:
        raise RegardError(
            f"the recipe names {len(named)} target languages {named or ''}: give --language CODE"
        )
    return requested or named[0]


def load_pairs(data: DataConfig, files: Sequence[str], language: str) -> list[Pair]:
    if files:
        texts = DataFiles.model_validate(dict(zip(("source", "target"), files, strict=True)))
        return list(read_pairs(texts, DataConfig(root=".", train=texts), ""))
    if data.test is None:
        raise RegardError("the recipe has no data.test; give --source and --reference")
    pairs = read_pairs(data.test, data, "data.test")
    return [pair for pair in pairs if language_of(pair) in (None, language)]


def scores(
    translations: Sequence[str], references: Sequence[str], language: str
) -> Iterator[tuple[str, float]]:
    moses = MosesTokenizer(language)

    def tokenize(text: str) -> str:
        return str(moses.tokenize(text.lower(), return_str=True, escape=False))

    yield "sacreBLEU (13a)", BLEU().corpus_score(translations, [references]).score
    yield (
        "sacreBLEU (13a), lower case",
        BLEU(lowercase=True).corpus_score(translations, [references]).score,
    )
    bleu = BLEU(tokenize="none", force=True)  # force: no warning that the text is tokenized
    tokenized = [[*map(tokenize, texts)] for texts in (translations, references)]
    yield (
        f"lower case, tokenized by Moses ({language})",
        bleu.corpus_score(tokenized[0], [tokenized[1]]).score,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--source")
    parser.add_argument("--reference")
    parser.add_argument("--language", help="target language code (default: that of the recipe)")
    given = parser.parse_args(arguments)
    if (given.source is None) != (given.reference is None):
        parser.error("give both --source and --reference")
    model = Translator.load(given.run, precision="fp32")
    data = model.recipe.data
    language = target_language(data, given.language)
    pairs = load_pairs(data, [given.source, given.reference] if given.source else [], language)
    translations = (model.with_target_language(language) if data.targets else model).predict_pairs(
        pairs
    )
    for name, value in scores(translations, [pair.target for pair in pairs], language):
        print(f"{value:6.2f}  {name}")


if __name__ == "__main__":
    try:
        main()
    except RegardError as error:
        sys.exit(f"moses_bleu: {error}")
