"""Where HTML tags are placed: ``the <b>dog</b>`` should become ``der <b>Hund</b>``, with nothing more or less inside.

    python benchmarks/html_tag_placement.py runs/demo         # writes benchmarks/html_tag_placement.json

Test sentences of the built-in grammar are translated by the model. Each noun that occurs once in a sentence, and whose
German occurs once in the translation, is tagged alone. Counted is how often the tag holds exactly that word.
"""

import argparse
import json
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from regard.demo.corpus import generate
from regard.demo.lexicon import NOUNS
from regard.documents.markup import split_html
from regard.inspection import alignment
from regard.inspection.hooks import Floats
from regard.tasks import Translator

TaggedNoun = tuple[str, str, str, str]
"""sentence, translation, English noun, German noun"""


def tagged_nouns(model: Translator, sentences: int) -> list[TaggedNoun]:
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


def is_correct(item: TaggedNoun, align: Callable[[str, str], Floats | None]) -> bool:
    text, translation, english, german = item
    document = split_html(re.sub(rf"\b{english}\b", r"<b>\g<0></b>", text), "en")
    (found,) = re.findall("<b>(.*?)</b>", document.join([translation], [align(*item[:2])]))
    return re.fullmatch(rf"{german}\w*", found) is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--sentences", type=int, default=300)
    given = parser.parse_args()
    model = Translator.load(given.run)
    items = tagged_nouns(model, given.sentences)

    def accuracy(align: Callable[[str, str], Floats | None]) -> float:
        return round(sum(is_correct(item, align) for item in items) / len(items), 3)

    def attention(iterations: int) -> float:
        alignment.BALANCE_ITERATIONS = iterations
        return accuracy(lambda *texts: alignment.align(model, *texts))

    results = {
        "tagged nouns": len(items),
        "correct by position": accuracy(lambda *_: None),
        "correct by attention": attention(0),
        "correct by balanced attention": attention(10),
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
