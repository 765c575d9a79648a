"""How often ``/detect`` is right, with the languages restricted to those that a server translates.

    python benchmarks/language_detection.py $REGARD_DATA       # writes benchmarks/language_detection.json

Each line of the test sets is detected on its own, by ``Service.detect``, which the route uses. Lines that are equal in
two languages and lines without letters are left out: nothing can tell their language. Lines of fewer than 20 characters
("Attack!") have a figure of their own.
"""

import argparse
import asyncio
import gzip
import json
from pathlib import Path

from regard.server.service import Service

SETS = {
    "multi30k 2016": ("en de fr cs", "multi30k/test_2016_flickr.{}"),
    "multi30k 2017": ("en de fr", "multi30k/test_2017_mscoco.{}"),
    "newstest2014": ("en de", "wmt_news_ende/newstest2014.{}.gz"),
    "newstest2017": ("en zh", "wmt_news_enzh/newstest2017.{}.gz"),
    "3am": ("en zh", "3am_enzh/test.{}"),
    "tatoeba en-de": ("en de", "tatoeba_ende/valid.{}"),
    "tatoeba en-fr": ("en fr", "tatoeba_enfr/test.{}"),
    "tatoeba en-zh": ("en zh", "tatoeba_enzh/valid.{}"),
}
SHORT = 20


def read_lines(path: Path) -> list[str]:
    with (
        gzip.open(path, "rt", encoding="utf-8")
        if path.suffix == ".gz"
        else path.open(encoding="utf-8") as file
    ):
        return [line.strip() for line in file]


async def accuracy(folder: Path, languages: list[str], pattern: str) -> dict[str, float]:
    columns = [read_lines(folder / pattern.format(language)) for language in languages]
    right: dict[bool, list[bool]] = {False: [], True: []}
    for row in zip(*columns, strict=True):
        for language, text in zip(languages, row, strict=True):
            if row.count(text) > 1 or not any(map(str.isalpha, text)):
                continue
            best, *_ = await Service.detect(text, languages)
            right[len(text) < SHORT].append(best.language == language)
    every = right[False] + right[True]
    return {
        "lines": len(every),
        "right_percent": round(100 * sum(every) / len(every), 2),
        "lines_of_20_characters": len(right[False]),
        "right_percent_of_20_characters": round(100 * sum(right[False]) / len(right[False]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    given = parser.parse_args()
    results = {
        name: asyncio.run(accuracy(given.data, languages.split(), pattern))
        for name, (languages, pattern) in SETS.items()
    }
    given.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(given.out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
