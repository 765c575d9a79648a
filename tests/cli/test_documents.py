"""``regard translate RUN report.docx``: documents in, documents out; resumable; files that are no lines are refused."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.cli import documents
from regard.documents.base import read_archive
from regard.recipe import DataConfig, DataFiles, DecodingConfig
from regard.tasks import Translation, Translator
from tests.cli.commands import Done, inside, succeeds_inside
from tests.unit.documents import samples


class Capitals:
    """A translator that writes capitals, and records its calls."""

    runs = (SimpleNamespace(fingerprint=lambda: "capitals"),)
    language = None
    needs_trees = non_autoregressive = False
    precision, threads, device = "fp32", 1, torch.device("cpu")
    engine = SimpleNamespace(summary="fp32 on no device")
    max_text_tokens = 4096
    calibration = None

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    def count_unknown(self, text: str) -> tuple[int, int]:
        return 0, len(text.split())

    def __init__(self) -> None:
        train = DataFiles(source=("train.en",), target=("train.de",))
        self.recipe = SimpleNamespace(decoding=DecodingConfig(), data=DataConfig(train=train))
        self.texts: list[str] = []
        self.options: dict[str, Any] = {}
        self.seen: dict[str, tuple[str, ...]] = {}
        self.fails_after = sys.maxsize

    def contexts(self, *arguments: object, cwd: Path) -> dict[str, tuple[str, ...]]:
        """The context of each text of a command."""
        self.seen = {}
        translate(*arguments, cwd=cwd)
        return {text: context for text, context in self.seen.items() if text}

    def start_workers(self) -> None:
        """It has none."""

    def with_target_language(self, language: str | None) -> "Capitals":
        return self

    def decoding_for(self, options: dict[str, Any], nbest: int = 1) -> DecodingConfig:
        return DecodingConfig(**options)

    def output_checker(self) -> SimpleNamespace:
        """All of its translations are good."""
        return SimpleNamespace(problems=lambda *arguments: [])

    def search(self, texts: Sequence[str], **options: Any) -> list[list[Translation]]:
        self.options = options
        self.texts += [text for text in texts if text]
        self.seen |= dict(zip(texts, options.get("context") or [()] * len(texts), strict=True))
        if len(self.texts) > self.fails_after:
            raise KeyboardInterrupt
        return [[Translation(text.upper(), -1.0, -1.0, text.split(), [], True)] for text in texts]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Capitals:
    model = Capitals()
    monkeypatch.setattr(Translator, "load", lambda run, **options: model)
    monkeypatch.setattr("regard.inspection.alignment.align", lambda *given: None)
    return model


def refused(*arguments: object, cwd: Path) -> str:
    """The one line with which a command is refused."""
    done = inside(*arguments, cwd=cwd)
    assert done.returncode == 2, done.stdout
    lines = done.stderr.strip().split("\n")
    assert len(lines) == 1, done.stderr
    return lines[0].removeprefix("regard: ")


def translate(*arguments: object, cwd: Path) -> Done:
    return succeeds_inside("translate", "run", *arguments, cwd=cwd)


def test_a_word_document_is_written_with_its_formats(model: Capitals, tmp_path: Path) -> None:
    (tmp_path / "report.docx").write_bytes(samples.docx())
    done = translate("report.docx", "--output", "bericht.docx", cwd=tmp_path)
    assert done.stdout == ""
    assert "bericht.docx: 10 sentences" in done.stderr
    archive = read_archive((tmp_path / "bericht.docx").read_bytes())
    parts = {info.filename: data for info, data in archive}
    assert b"THE BIG DOG" in parts["word/document.xml"]
    assert model.options["protect"] == ("placeholders",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bericht.docx", "report.docx"]


def test_several_documents_or_a_pattern_go_to_a_folder(model: Capitals, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.md").write_text("# A dog\n")
    (tmp_path / "in/b.md").write_text("A *cat*.\n")
    (tmp_path / "c.srt").write_text(samples.SRT)
    translate("in/*.md", "c.srt", "-o", "out/de", cwd=tmp_path)
    assert (tmp_path / "out/de/a.md").read_text() == "# A DOG\n"
    assert (tmp_path / "out/de/b.md").read_text() == "A *CAT*.\n"
    assert "00:00:01,000 -->" in (tmp_path / "out/de/c.srt").read_text()
    (tmp_path / "in/a.srt").write_text(samples.SRT)
    translate("in/a.*", "-o", "out/every", cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / "out/every").iterdir()) == ["a.md", "a.srt"]
    for text in ("**bold**", "2*3", "none/*"):
        assert documents.find_documents([text]) == []
    (tmp_path / "in/a.png").write_text("")
    assert refused("translate", "run", "in/*", "-o", "out", cwd=tmp_path) == (
        "in/a.png: matches in/* but is not a document; add a suffix to the pattern"
    )
    (tmp_path / "a.md").write_text("x y")
    assert refused("translate", "run", "a.md", "in/a.md", "-o", "out", cwd=tmp_path) == (
        "in/a.md and a.md would both be written to out/a.md"
    )
    assert refused("translate", "run", "in/a.md", "-o", "in", cwd=tmp_path) == (
        "--output in/a.md: is also an input; choose another name or folder"
    )
    assert "needs --output FILE" in refused("translate", "run", "in/*.md", cwd=tmp_path)
    assert refused("translate", "run", "a.md", "-o", "a.html", cwd=tmp_path) == (
        "--output a.html: must end in .md, as a.md does"
    )


def test_a_text_document_is_printed_without_output(
    model: Capitals, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: Any
) -> None:
    (tmp_path / "a.md").write_text("A *cat*.\r\n", newline="")
    (tmp_path / "a.docx").write_bytes(samples.docx())
    assert "a.docx: needs --output FILE" in refused("translate", "run", "a.docx", cwd=tmp_path)
    monkeypatch.setattr(sys, "argv", ["regard", "translate", "run", str(tmp_path / "a.md")])
    from regard.cli.main import main

    with pytest.raises(SystemExit):
        main()
    assert capfdbinary.readouterr().out == b"A *CAT*.\r\n"


def test_an_interrupted_document_is_resumed(
    model: Capitals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "CHUNK_SENTENCES", 10)
    text = "".join(f"Sentence *number {n}*.\n\n" for n in range(35))
    (tmp_path / "a.md").write_text(text)
    model.fails_after = 25
    done = inside("translate", "run", "a.md", "-o", "b.md", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        130,
        "Interrupted; 20 sentences of b.md are kept. To resume, run the same command again",
    )
    assert not (tmp_path / "b.md").exists()
    model.fails_after, model.texts = sys.maxsize, []
    done = inside("translate", "run", "a.md", "-o", "b.md", "--beam", 2, cwd=tmp_path)
    assert done.returncode == 2
    assert (
        "b.md: started with different options (20 sentences are done); use the same ones to resume"
        in done.stderr
    )
    done = translate("a.md", "-o", "b.md", cwd=tmp_path)
    assert "b.md: resuming after sentence 20" in done.stderr
    assert len(model.texts) == 15
    assert (tmp_path / "b.md").read_text() == text.upper()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.md", "b.md"]


def test_a_crash_before_the_last_step_is_repaired(
    model: Capitals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.md").write_text("A *cat*.\n")
    with monkeypatch.context() as patch:
        patch.setattr("regard.storage.resumable_output.write_bytes", _interrupt)
        assert inside("translate", "run", "a.md", "-o", "b.md", cwd=tmp_path).returncode == 130
    model.texts = []
    translate("a.md", "-o", "b.md", cwd=tmp_path)
    assert (tmp_path / "b.md").read_text() == "A *CAT*.\n"
    assert model.texts == []


def _interrupt(path: Path, content: bytes) -> None:
    raise KeyboardInterrupt


def test_long_documents_show_progress(
    model: Capitals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "CHUNK_SENTENCES", 2)
    monkeypatch.setattr("regard.training.progress.SECONDS_BETWEEN_LINES", 0)
    (tmp_path / "a.txt").write_text("A dog.\nA cat.\nA cow.\n")
    done = translate("a.txt", "-o", "b.txt", cwd=tmp_path)
    assert "a.txt, sentences: 2 of 3, " in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (
            "film.srt",
            samples.SRT,
            "time stamps would be translated; use  regard translate run film.srt --output FILE",
        ),
        ("page.html", "<p>x", "its tags would be translated; use  regard translate run page.html"),
        (
            "a.csv",
            "a,b\n",
            "its columns would be translated as one text; use  regard translate run a.csv --columns",
        ),
        (
            "README",
            samples.MARKDOWN,
            "code blocks and links would be translated; rename it to README.md, then use",
        ),
        (
            "lines.txt",
            samples.SRT,
            "rename it to lines.srt, then use  regard translate run lines.srt --output FILE",
        ),
        ("some file", "<!doctype html>", "regard translate run 'some file.html' --output FILE"),
    ],
)
def test_a_document_is_refused_as_lines(
    model: Capitals, tmp_path: Path, name: str, content: str, problem: str
) -> None:
    (tmp_path / name).write_text(content)
    line = refused("translate", "run", "--input", name, "--output", "out", cwd=tmp_path)
    assert line.startswith(f"--input {name}: if translated line by line, ")
    assert problem in line
    assert not (tmp_path / "out").exists()


def test_lines_are_translated_as_before(model: Capitals, tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("a dog\n- a *cat*\n")
    assert translate("--input", "lines.txt", cwd=tmp_path).stdout == "A DOG\n- A *CAT*\n"
    assert translate("I use a.md and b.md", cwd=tmp_path).stdout == "I USE A.MD AND B.MD\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["none.md"], "none.md: no such file"),
        (
            ["a.md", "A dog."],
            "cannot mix documents and texts: 'A dog.' is not a document",
        ),
        (
            ["a.md", "--nbest", "2"],
            "documents: cannot be combined with --nbest, which apply to whole lines",
        ),
        (["a.md", "--columns", "x"], "--columns x: only for CSV and TSV documents"),
        (
            ["A dog.", "--columns", "x"],
            "--columns x: only for CSV and TSV documents, and for Parquet",
        ),
        (["A dog.", "--fuzzy", "0.5"], "--fuzzy 0.5: has no effect without --memory"),
        (["A dog.", "--memory", "no.tmx"], "--memory no.tmx: no such file"),
        (
            ["bad.json", "-o", "c.json"],
            "bad.json: not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
    ],
)
def test_mistakes_are_one_line(
    model: Capitals, tmp_path: Path, arguments: list[str], problem: str
) -> None:
    (tmp_path / "a.md").write_text("x y\n")
    (tmp_path / "bad.json").write_text("")
    assert refused("translate", "run", *arguments, cwd=tmp_path) == problem


MEMORY = "The dog was tired.\tDer Hund war müde.\n"


def test_exact_matches_of_the_memory_are_taken_and_fuzzy_ones_reported(
    model: Capitals, tmp_path: Path
) -> None:
    (tmp_path / "tm.tsv").write_text(MEMORY)
    (tmp_path / "a.md").write_text("The *dog* was tired. The dog was hungry. A cow.\n")
    done = translate("a.md", "--memory", "tm.tsv", "-o", "b.md", cwd=tmp_path)
    assert (tmp_path / "b.md").read_text() == "Der *Hund* war müde. THE DOG WAS HUNGRY. A COW.\n"
    assert model.texts == ["The dog was hungry.", "A cow."]
    report = "80% match in the translation memory: The dog was tired. => Der Hund war müde."
    assert f"a.md, sentence 2: {report}" in done.stderr
    lines = ["The dog was tired.", "The dog was hungry."]
    done = translate(*lines, "--memory", "tm.tsv", cwd=tmp_path)
    assert done.stdout == "Der Hund war müde.\nTHE DOG WAS HUNGRY.\n"
    assert f"line 2: {report}" in done.stderr
    assert (
        "match" not in translate(*lines, "--memory", "tm.tsv", "--fuzzy", 0.9, cwd=tmp_path).stderr
    )
    done = translate(*lines, "--memory", "tm.tsv", "--json", cwd=tmp_path)
    first, second = map(json.loads, done.stdout.strip().split("\n"))
    assert first["memory"]["score"] == 1
    assert second["memory"] == {
        "score": pytest.approx(0.8),
        "source": "The dog was tired.",
        "target": "Der Hund war müde.",
    }
    done = translate("a.md", "--memory", "tm.tsv", "-o", "c.md", "--json", cwd=tmp_path)
    assert [json.loads(line)["source"] for line in done.stdout.strip().split("\n")] == [
        *lines,
        "A cow.",
    ]


def test_a_model_with_context_gets_the_sentences_before(
    model: Capitals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.text_io.CHUNK_LINES", 2)
    data = model.recipe.data
    model.recipe.data = data.model_copy(update={"context": 1})
    (tmp_path / "lines").write_text("A.\nB.\nC.\n\nD.\n")
    (tmp_path / "a.md").write_text("# One\n\nTwo. *Three.*\n")
    (tmp_path / "a.json").write_text('{"a": "One. Two.", "b": "Three."}')
    assert model.contexts("--input", "lines", cwd=tmp_path) == {
        "A.": (),
        "B.": ("A.",),
        "C.": ("B.",),
        "D.": (),
    }
    assert model.contexts("a.md", "-o", "b.md", cwd=tmp_path) == {
        "One": (),
        "Two.": ("One",),
        "Three.": ("Two.",),
    }
    assert model.contexts("a.json", "-o", "b.json", cwd=tmp_path) == {
        "One.": (),
        "Two.": ("One.",),
        "Three.": (),
    }
