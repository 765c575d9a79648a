"""Pronouns across sentences: a model that also reads the previous sentence, against one that does not.

    python benchmarks/context.py runs/context          # trains both models, writes benchmarks/context.json

Documents of two sentences come from the built-in grammar: "The dog was tired. It was very hungry." The German pronoun
(er, sie, es) depends on the noun of the first sentence. No noun of the test data occurs in training with the same
adjective in the second sentence. Counted are translations of the second sentence that begin with the right pronoun.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple
from zlib import crc32

from regard.data.pairs import Pair
from regard.demo.grammar import Clause, Degree, NounPhrase, phrase, predicate, sentence, statement
from regard.demo.lexicon import ADJECTIVES, BE, NOUNS, Adjective, Noun, fits, personal_pronoun
from regard.recipe import make_recipe
from regard.tasks import Translator
from regard.training.run import train

OUTPUT = Path(__file__).with_suffix(".json")
SIZES = {"train": 12_000, "valid": 100, "test": 300}
"""documents"""


class Document(NamedTuple):
    """Two sentences, and the pronoun that the second one begins with in German."""

    first: Pair
    second: Pair
    pronoun: str


def documents(split: str, count: int, seed: int = 1) -> Iterator[Document]:
    """Documents of a split; a noun and the adjective of the second sentence decide which one they belong to."""
    rng = Random(f"{split} {seed}")
    found = 0
    while found < count:
        noun = rng.choice(NOUNS)
        adjectives = [one for one in ADJECTIVES if fits(one, noun)]
        if noun.is_person or len(adjectives) < 2:
            continue
        first, second = rng.sample(adjectives, 2)
        if _split_of(noun, second) == split:
            found += 1
            yield _document(rng, noun, first, second)


def _split_of(noun: Noun, adjective: Adjective) -> str:
    number = crc32(f"{noun.english} {adjective.english}".encode()) % 10
    return {0: "test", 1: "valid"}.get(number, "train")


def _document(rng: Random, noun: Noun, first: Adjective, second: Adjective) -> Document:
    pronoun = personal_pronoun(noun.gender)
    it = NounPhrase("it", {"nom": pronoun})
    past = rng.random() < 0.5
    pairs = [
        _description(rng, who, one, past)
        for who, one in ((phrase(noun, "the"), first), (it, second))
    ]
    return Document(pairs[0], pairs[1], pronoun)


def _description(rng: Random, who: NounPhrase, adjective: Adjective, past: bool) -> Pair:
    degrees: tuple[Degree, ...] = ("",) if adjective.is_absolute else ("", "very", "too")
    tail = predicate(adjective, rng.choice(degrees))
    negated = rng.random() < 0.3
    return sentence(*statement(Clause(who, BE, past, negated=negated, tail=tail)))


def write_corpus(folder: Path) -> None:
    """One sentence per line, a blank line between documents."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in SIZES.items():
        every = list(documents(split, count))
        for side, suffix in enumerate(("en", "de")):
            text = "".join(f"{one.first[side]}\n{one.second[side]}\n\n" for one in every)
            (folder / f"{split}.{suffix}").write_text(text, encoding="utf-8")


def recipe_values(folder: Path, context: int, steps: int) -> dict[str, object]:
    files = {split: {"source": f"{split}.en", "target": f"{split}.de"} for split in SIZES}
    return {
        "data": {
            "root": str(folder),
            **files,
            "context": context,
            "clean": {"keep_duplicates": True},
        },
        "tokenizer": {"kind": "word", "vocab_size": 600},
        "model": {
            "preset": "tiny",
            "encoder_layers": 2,
            "decoder_layers": 2,
            "d_model": 64,
            "d_ff": 256,
            "norm_order": "pre",
            "dropout": 0.1,
        },
        "training": {
            "steps": steps,
            "tokens_per_batch": 1024,
            "learning_rate": 0.003,
            "warmup": 100,
            "schedule": "cosine",
            "validate_every": steps,
            "validate_sentences": 50,
            "checkpoint_every": steps,
        },
        "decoding": {"beam": 4},
    }


def accuracy(model: Translator, test: list[Document]) -> float:
    """How often the translation of the second sentence begins with the right pronoun."""
    context = [[one.first.source] for one in test] if model.recipe.data.context else None
    translations = model.translate([one.second.source for one in test], context=context)
    right = [
        text.split()[:1] == [one.pronoun.capitalize()]
        for text, one in zip(translations, test, strict=True)
    ]
    return round(sum(right) / len(right), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    write_corpus(given.out / "text")
    test = list(documents("test", SIZES["test"]))
    most_common = Counter(one.pronoun for one in test).most_common(1)[0][1] / len(test)
    results: dict[str, object] = {
        "documents": len(test),
        "most frequent pronoun": round(most_common, 3),
    }
    for name, context in (("sentence", 0), ("context", 1)):
        start = time.monotonic()
        recipe = make_recipe(recipe_values(given.out / "text", context, given.steps), name)
        model = train(recipe, given.out / name)
        assert isinstance(model, Translator)
        results[name] = {
            "pronouns correct": accuracy(model, test),
            "minutes": round((time.monotonic() - start) / 60, 1),
        }
    OUTPUT.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
