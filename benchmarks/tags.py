"""Where the tags of a sentence go: ``the <b>dog</b>`` should become ``der <b>Hund</b>``, and nothing more or less.

    python benchmarks/tags.py runs/demo         # writes benchmarks/tags.json

Test sentences of the built-in grammar, translated by the model; each noun that stands once in a sentence, and whose
German stands once in the translation, is tagged by itself. CountMetric is how often the tag holds exactly that word.
"""

import argparse
import json
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from regard import align
from regard.demo.grammar import generate
from regard.demo.lexicon import NOUNS
from regard.inspection.hooks import Floats
from regard.server.html_markup import split_html
from regard.tasks import Translator

Item = tuple[str, str, str, str]
"""sentence, translation, English noun, German noun"""


def tagged(model: Translator, sentences: int) -> list[Item]:
    nouns = {noun.english: noun.german for noun in NOUNS}
    texts = [pair.source for pair in islice(generate("test", sentences), sentences)]
    return [
        (text, translation, word, nouns[word])
        for text, translation in zip(texts, model.translate(texts), strict=True)
        for word in re.findall(r"\w+", text)
        if word in nouns
        and len(re.findall(rf"\b{word}\b", text)) == 1
        and len(re.findall(rf"{nouns[word]}\w*", translation)) == 1
    ]


def right(item: Item, alignment: Callable[[str, str], Floats | None]) -> bool:
    text, translation, english, german = item
    document = split_html(re.sub(rf"\b{english}\b", r"<b>\g<0></b>", text), "en")
    (found,) = re.findall("<b>(.*?)</b>", document.join([translation], [alignment(*item[:2])]))
    return re.fullmatch(rf"{german}\w*", found) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--sentences", type=int, default=300)
    given = parser.parse_args()
    model = Translator.load(given.run)
    items = tagged(model, given.sentences)

    def share(alignment: Callable[[str, str], Floats | None]) -> float:
        return round(sum(right(item, alignment) for item in items) / len(items), 3)

    def attention(rounds: int) -> float:
        align.ROUNDS = rounds
        return share(lambda *texts: align.align(model, *texts))

    results = {
        "nouns tagged": len(items),
        "right by place alone": share(lambda *_: None),
        "right by attention": attention(0),
        "right by attention, balanced": attention(10),
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
