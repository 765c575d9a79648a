"""Distillation writes a teacher's translations as pairs, all of them or none."""

import json
from pathlib import Path

import pytest

from regard.errors import RegardError
from regard.tasks import Translator
from regard.training.distillation import distill

TEXTS = ["a dog", "a dog", "", "ein\tHund"]


@pytest.fixture
def teacher(finished_run: Path) -> Translator:
    return Translator.load(finished_run, "cpu")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


def test_every_source_gives_one_pair_in_order_including_duplicates(
    teacher: Translator, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.training.distillation.CHUNK_SIZE", 3)
    lines: list[str] = []
    output = tmp_path / "pairs.jsonl"
    assert distill(teacher, output, sources, lines.append, beam=2) == 4
    pairs = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [pair["source"] for pair in pairs] == TEXTS
    assert [pair["target"] for pair in pairs] == teacher.translate(TEXTS, beam=2)
    assert lines[0] == "4 sources to translate"
    assert lines[-1].startswith("4 of 4, ")


def test_a_tab_is_refused_in_tsv_output(teacher: Translator, sources: Path, tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"some.txt:4: the text contains a tab.*\.jsonl"):
        distill(teacher, tmp_path / "pairs.tsv", sources)
    assert list(tmp_path.iterdir()) == [sources], "all pairs or none"


def test_the_output_name_must_have_a_known_suffix(teacher: Translator, sources: Path) -> None:
    with pytest.raises(RegardError, match=r"pairs.de: .* must end in .tsv or .jsonl"):
        distill(teacher, Path("pairs.de"), sources)
