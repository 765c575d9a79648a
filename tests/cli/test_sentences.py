"""``regard translate --sentences``: each sentence of a line by itself, and one line again; without it, one notice."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.recipe import Data, DataFiles, Search
from regard.recipe.schema import Cleaning
from regard.tasks import Translation, Translator
from tests.cli.commands import inside, regard, write

NOTICE = "line 2 has 2 sentences and is translated as one; --sentences translates each by itself"
LINES = ["One dog.", "  A dog came.  No cat left! ", "", "***", "It is 3.5. Yes? No."]


class OneSentence:
    """Says the words in capitals up to the first full stop, and notes what it was asked."""

    run = SimpleNamespace(fingerprint=lambda: "capitals")
    language = None
    precision, threads, device, summary = "fp32", 1, torch.device("cpu"), "its head"
    words = SimpleNamespace(encode=lambda texts: [text.split() for text in texts])
    tokenizer = SimpleNamespace(source=words)

    def __init__(self, cut: bool = False) -> None:
        train = DataFiles(source=("train.en",), target=("train.de",))
        data = Data(train=train, clean=Cleaning(cut=cut))
        self.recipe = SimpleNamespace(search=Search(), data=data)
        self.asked: list[tuple[str, Sequence[str]]] = []

    def start_worker_pool(self) -> None:
        """It does not."""

    def into(self, language: str | None) -> "OneSentence":
        return self

    def search(
        self, texts: list[str], *, constraints: Any = None, **options: Any
    ) -> list[list[Translation]]:
        self.asked += zip(texts, constraints or [()] * len(texts), strict=True)
        said = [text.split(". ")[0].upper() for text in texts]
        return [[Translation(text, -1.0, -2.0, [text], [-2.0], True)] for text in said]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> OneSentence:
    model = OneSentence()
    monkeypatch.setattr(Translator, "load", lambda run, **options: model)
    return model


def test_one_line_in_one_line_out_with_what_stood_between(
    model: OneSentence, tmp_path: Path
) -> None:
    write(tmp_path / "in", LINES)
    done = inside(
        *("translate", "run", "--sentences", "--input", "in", "--output", "out"), cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert (tmp_path / "out").read_text().split("\n") == [
        "ONE DOG.",
        "  A DOG CAME.  NO CAT LEFT! ",
        "",
        "***",
        "IT IS 3.5. YES? NO.",
        "",
    ]
    assert "sentences" not in done.stderr


def test_the_language_of_the_source_says_where_a_sentence_ends(
    model: OneSentence, tmp_path: Path
) -> None:
    inside("translate", "run", "--sentences", "Mr. No came. Hr. No left.", cwd=tmp_path)
    assert [text for text, _ in model.asked[1:]] == ["Mr. No came.", "Hr.", "No left."]


def test_each_sentence_is_asked_for_its_own_terms(model: OneSentence, tmp_path: Path) -> None:
    write(tmp_path / "terms.tsv", ["dog\tHUND", "yes\tYES"])
    done = inside(
        *("translate", "run", "--sentences", "--glossary", "terms.tsv", "--keep", "numbers"),
        *("A dog. Yes, 3.", "No 4 dog."),
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == ["A DOG. YES, 3.", "NO 4 DOG."]
    assert model.asked[1:] == [("A dog.", ["HUND"]), ("Yes, 3.", ["YES"]), ("No 4 dog.", ["HUND"])]
    assert done.stderr.splitlines()[1:] == ["line 1: HUND is missing", "line 2: HUND is missing"]


def test_json_tells_of_the_line_and_of_each_sentence(model: OneSentence, tmp_path: Path) -> None:
    done = inside("translate", "run", "--sentences", "--json", "A dog. No.", cwd=tmp_path)
    told = json.loads(done.stdout)
    (translation,) = told["translations"]
    assert (told["source"], translation["text"]) == ("A dog. No.", "A DOG. NO.")
    sources = [(one["source"], one["text"], one["score"]) for one in translation["sentences"]]
    assert sources == [("A dog.", "A DOG.", -1.0), ("No.", "NO.", -1.0)]


def test_without_it_the_first_line_of_several_sentences_is_told_once(
    model: OneSentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.text_io.LINES_AT_ONCE", 2)
    write(tmp_path / "in", LINES)
    done = inside("translate", "run", "--input", "in", cwd=tmp_path)
    assert done.stdout.splitlines() == ["ONE DOG.", "  A DOG CAME", "", "***", "IT IS 3.5"]
    assert done.stderr.splitlines() == ["Computing in its head.", NOTICE]


def test_a_long_line_of_one_sentence_and_a_model_of_long_texts_are_not_told(
    model: OneSentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = inside("translate", "run", "dog " * 250, "Mr. No.", cwd=tmp_path)
    assert done.stderr == "Computing in its head.\n"
    monkeypatch.setattr(Translator, "load", lambda run, **options: OneSentence(cut=True))
    done = inside("translate", "run", *LINES, cwd=tmp_path)
    assert done.stderr == "Computing in its head.\n"


def test_whoever_goes_on_must_ask_for_the_same(
    model: OneSentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.text_io.LINES_AT_ONCE", 2)
    write(tmp_path / "in", LINES)
    files = ["--input", "in", "--output", "out"]
    searched = model.search

    def dies(texts: list[str], **options: Any) -> list[list[Translation]]:
        if "Yes?" in texts:
            raise KeyboardInterrupt
        return searched(texts, **options)

    monkeypatch.setattr(model, "search", dies)
    inside("translate", "run", "--sentences", *files, cwd=tmp_path)
    monkeypatch.setattr(model, "search", searched)
    done = inside("translate", "run", *files, cwd=tmp_path)
    assert done.returncode == 2
    assert "begun with other options (4 lines are done)" in done.stderr
    done = inside("translate", "run", "--sentences", *files, cwd=tmp_path)
    assert "goes on after line 4" in done.stderr
    assert (tmp_path / "out").read_text().splitlines()[4] == "IT IS 3.5. YES? NO."


def test_what_is_of_a_whole_line_is_refused_at_once(model: OneSentence, tmp_path: Path) -> None:
    options = ["--nbest", "2", "--alignment", "al", "--parses", "x", "--length", "3"]
    done = inside("translate", "run", "--sentences", *options, "A dog.", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "regard: --sentences: does not go with --nbest, --alignment, --parses, --length, "
        "made for a line as a whole\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_real_model_by_standard_input(finished_run: Path, tmp_path: Path) -> None:
    """Two sentences of a line are what they are as two lines; a line without words needs no model."""
    options = ["--set", "extra_length=3", "--precision", "fp32"]
    apart = inside("translate", finished_run, *options, "a dog.", "Ein Hund!", cwd=tmp_path)
    first, second = apart.stdout.splitlines()
    done = regard(
        *("translate", finished_run, "--sentences", *options),
        cwd=tmp_path,
        stdin="a dog. Ein Hund!\n***\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{first} {second}\n***\n"
