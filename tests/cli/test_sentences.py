"""``regard translate --sentences`` translates the sentences of a line separately; without it, there is a warning."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.inference.hallucinations import OutputChecker, OutputStatistics
from regard.recipe import DataConfig, DataFiles, DecodingConfig
from regard.recipe.schema import CleaningConfig
from regard.tasks import Translation, Translator
from tests.cli.commands import inside, regard, write

WARNING = (
    "line 2 has 2 sentences and is translated as one; use --sentences to translate each separately"
)
LINES = ["One dog.", "  A dog came.  No cat left! ", "", "***", "It is 3.5. Yes? No."]


class OneSentence:
    """A translator that returns the first sentence of a text in capitals, and records its calls."""

    runs = (SimpleNamespace(fingerprint=lambda: "capitals"),)
    language = None
    precision, threads, device = "fp32", 1, torch.device("cpu")
    engine = SimpleNamespace(summary="fp32 on no device")
    max_text_tokens = 4096
    calibration = None

    def __init__(self, truncate: bool = False) -> None:
        train = DataFiles(source=("train.en",), target=("train.de",))
        data = DataConfig(train=train, clean=CleaningConfig(truncate=truncate))
        self.recipe = SimpleNamespace(decoding=DecodingConfig(), data=data)
        self.calls: list[tuple[str, Sequence[str]]] = []
        """each text with its constraints"""

    def start_workers(self) -> None:
        """It has none."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def count_unknown(self, text: str) -> tuple[int, int]:
        return 0, len(text.split())

    def with_target_language(self, language: str | None) -> "OneSentence":
        return self

    def output_checker(self) -> OutputChecker:
        return OutputChecker(OutputStatistics((0.0, 1e9), copied=1.0))

    def search(
        self, texts: list[str], *, constraints: Any = None, **options: Any
    ) -> list[list[Translation]]:
        self.calls += zip(texts, constraints or [()] * len(texts), strict=True)
        outputs = [text.split(". ")[0].upper() for text in texts]
        return [[Translation(text, -1.0, -2.0, [text], [-2.0], True)] for text in outputs]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> OneSentence:
    model = OneSentence()
    monkeypatch.setattr(Translator, "load", lambda run, **options: model)
    return model


def test_each_line_keeps_the_text_between_its_sentences(model: OneSentence, tmp_path: Path) -> None:
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


def test_sentences_are_split_by_the_rules_of_the_source_language(
    model: OneSentence, tmp_path: Path
) -> None:
    inside("translate", "run", "--sentences", "Mr. No came. Hr. No left.", cwd=tmp_path)
    assert [text for text, _ in model.calls[1:]] == ["Mr. No came.", "Hr.", "No left."]


def test_each_sentence_is_constrained_by_its_own_terms(model: OneSentence, tmp_path: Path) -> None:
    write(tmp_path / "terms.tsv", ["dog\tHUND", "yes\tYES"])
    done = inside(
        *("translate", "run", "--sentences", "--glossary", "terms.tsv", "--protect", "numbers"),
        *("A dog. Yes, 3.", "No 4 dog."),
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == ["A DOG. YES, 3.", "NO 4 DOG."]
    assert model.calls[1:] == [("A dog.", ["HUND"]), ("Yes, 3.", ["YES"]), ("No 4 dog.", ["HUND"])]
    assert done.stderr.splitlines()[1:] == [
        "line 1: glossary term HUND is missing",
        "line 2: glossary term HUND is missing",
    ]


def test_json_has_the_line_and_each_sentence(model: OneSentence, tmp_path: Path) -> None:
    done = inside("translate", "run", "--sentences", "--json", "A dog. No.", cwd=tmp_path)
    output = json.loads(done.stdout)
    (translation,) = output["translations"]
    assert (output["source"], translation["text"]) == ("A dog. No.", "A DOG. NO.")
    sources = [(one["source"], one["text"], one["score"]) for one in translation["sentences"]]
    assert sources == [("A dog.", "A DOG.", -1.0), ("No.", "NO.", -1.0)]


def test_without_it_there_is_one_warning_of_a_line_with_several_sentences(
    model: OneSentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.text_io.CHUNK_LINES", 2)
    write(tmp_path / "in", LINES)
    done = inside("translate", "run", "--input", "in", cwd=tmp_path)
    assert done.stdout.splitlines() == ["ONE DOG.", "  A DOG CAME", "", "***", "IT IS 3.5"]
    assert done.stderr.splitlines() == ["Computing in fp32 on no device.", WARNING]


def test_no_warning_of_a_single_sentence_or_with_a_model_of_long_texts(
    model: OneSentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = inside("translate", "run", "dog " * 250, "Mr. No.", cwd=tmp_path)
    assert done.stderr == "Computing in fp32 on no device.\n"
    monkeypatch.setattr(Translator, "load", lambda run, **options: OneSentence(truncate=True))
    done = inside("translate", "run", *LINES, cwd=tmp_path)
    assert done.stderr == "Computing in fp32 on no device.\n"


def test_resuming_needs_the_same_options(
    model: OneSentence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.text_io.CHUNK_LINES", 2)
    write(tmp_path / "in", LINES)
    files = ["--input", "in", "--output", "out"]
    search = model.search

    def interrupted(texts: list[str], **options: Any) -> list[list[Translation]]:
        if "Yes?" in texts:
            raise KeyboardInterrupt
        return search(texts, **options)

    monkeypatch.setattr(model, "search", interrupted)
    done = inside("translate", "run", "--sentences", *files, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        130,
        "Interrupted; 4 lines of out are kept. To resume, run the same command again",
    )
    monkeypatch.setattr(model, "search", search)
    done = inside("translate", "run", *files, cwd=tmp_path)
    assert done.returncode == 2
    assert "started with different options (4 lines are done)" in done.stderr
    done = inside("translate", "run", "--sentences", *files, cwd=tmp_path)
    assert "resuming after line 4" in done.stderr
    assert (tmp_path / "out").read_text().splitlines()[4] == "IT IS 3.5. YES? NO."


def test_options_about_whole_lines_are_refused(model: OneSentence, tmp_path: Path) -> None:
    options = ["--nbest", "2", "--alignment", "al", "--parses", "x", "--length", "3"]
    options += ["--prefix", "A"]
    done = inside("translate", "run", "--sentences", *options, "A dog.", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "regard: --sentences: cannot be combined with --nbest, --alignment, --parses, --length, --prefix, "
        "which apply to whole lines\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_trained_model_reads_standard_input(finished_run: Path, tmp_path: Path) -> None:
    """Two sentences of a line are translated like two lines; a line without words is copied."""
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
