"""Hallucination-like output is found, and ordinary output is not flagged."""

import pytest

from regard.data import language_identification
from regard.data.language_identification import identify_among
from regard.data.pairs import Pair
from regard.errors import RegardError
from regard.inference.hallucinations import (
    OutputChecker,
    OutputStatistics,
    is_copied,
    longest_run,
    main_script,
)

GERMAN = OutputChecker(OutputStatistics((0.6, 1.6), ("Latin",)), "de", ["en"])
SOURCE = "A man in a blue shirt is standing on a ladder."
TARGET = "Ein Mann in einem blauen Hemd steht auf einer Leiter."


def kinds(
    source: str, translation: str, checker: OutputChecker = GERMAN, finished: bool = True
) -> list[str]:
    lengths = len(source.split()), len(translation.split())
    return [problem.kind for problem in checker.problems(source, translation, lengths, finished)]


@pytest.mark.parametrize(
    ("source", "translation", "kind"),
    [
        (SOURCE, "Ein Mann Mann Mann Mann steht auf einer Leiter.", "repetition"),
        (SOURCE, "Ein Mann in einem Hemd in einem Hemd in einem Hemd.", "repetition"),
        (SOURCE, "auf der Leiter und der rot auf der Leiter und der blau auf der Leiter und", "repetition"),
        (SOURCE, SOURCE, "copied source"),
        (SOURCE, "A man in a blue shirt is standing on a Leiter.", "copied source"),
        (SOURCE, "Мужчина в синей рубашке стоит на лестнице.", "wrong script"),
        (SOURCE, "The person wearing something has been climbing those stairs.", "wrong language"),
        (SOURCE, " ".join(f"w{n}ort" for n in range(60)), "too long"),
        (" ".join(f"w{n}" for n in range(60)), "Ein Mann.", "too short"),
        ("Hi.", "", "empty"),
    ],
)  # fmt: skip
def test_a_hallucination_is_found(source: str, translation: str, kind: str) -> None:
    pytest.importorskip("py3langid")
    assert kinds(source, translation)[0] == kind


@pytest.mark.parametrize(
    ("source", "translation"),
    [
        (SOURCE, TARGET),
        ("No, no, no, no, no!", "Nein, nein, nein, nein, nein!"),
        ("Tom Jones", "Tom Jones"),
        ("https://example.org/a/b 1000000", "https://example.org/a/b 1000000"),
        ("- - - - - - - -", "- - - - - - - -"),
        ("", ""),
        ("Hi.", "Hallo zusammen, wie geht es euch?"),
    ],
)
def test_ordinary_output_is_not_flagged(source: str, translation: str) -> None:
    assert kinds(source, translation) == []


def test_output_that_was_cut_off_is_flagged() -> None:
    assert kinds(SOURCE, TARGET, finished=False) == ["cut off"]


def test_a_chinese_translation_may_contain_latin_names() -> None:
    chinese = OutputChecker(OutputStatistics((0.2, 5), ("Chinese",)), "zh", ["en"])
    assert kinds("Tom has been wounded.", "Tom负伤了。", chinese) == []
    assert kinds("Tom has been wounded.", "Thomas wurde verletzt heute", chinese) == [
        "wrong script"
    ]


def test_what_references_look_like_decides() -> None:
    pairs = [Pair("a long text with words", "a long text with words")] * 5
    pairs += [Pair("a", "Это предложение")] * 5
    statistics = OutputStatistics.of(pairs, [(9, 1)] * 50 + [(9, 39)] * 50)
    assert statistics.length_ratio[0] == pytest.approx(0.2)
    assert statistics.scripts == ("Cyrillic", "Latin")
    assert statistics.copied == 0.5
    copying = OutputChecker(statistics)
    assert kinds(SOURCE, SOURCE, copying) == []
    stored = {"length_ratio": [0.2, 4], "scripts": ["Latin"], "copied": 0}
    assert OutputStatistics.from_json(stored, "card.json").scripts == ("Latin",)
    with pytest.raises(RegardError, match=r"^card\.json: damaged"):
        OutputStatistics.from_json({"scripts": []}, "card.json")


def test_languages_are_not_checked_without_py3langid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_identification, "identify_among", lambda *languages: None)
    assert kinds(SOURCE, "The person wearing something has been climbing those stairs.") == []


def test_unknown_languages_are_not_checked() -> None:
    pytest.importorskip("py3langid")
    assert identify_among("xx", "yy") is None


def test_runs_and_scripts() -> None:
    assert longest_run([*"xabababy"], 2) == (3, ["a", "b"])
    assert longest_run([*"aaa"], 1)[0] == 3
    assert longest_run([*"1111"], 1)[0] == 0
    assert longest_run([], 2)[0] == 0
    assert main_script("abc") == ""
    assert main_script("これはペンです") == "Chinese"
    assert is_copied("the cat sat down", "The cat sat down!")
    assert not is_copied("the cat sat down", "die Katze setzte sich")


def test_one_more_repetition_than_in_the_source_is_allowed() -> None:
    assert kinds("no no no, he said", "nein nein nein nein, sagte er") == []
    assert kinds("no no, he said", "nein nein nein nein, sagte er") == ["repetition"]


@pytest.mark.parametrize(("unknown", "kind"), [(2, []), (3, ["unknown source"])])
def test_a_source_of_unknown_words_is_reported(unknown: int, kind: list[str]) -> None:
    problems = GERMAN.problems("x y z w", "Ein Mann.", (4, 2), unknown=(unknown, 4))
    assert [problem.kind for problem in problems] == kind
    assert not kind or "(3 of 4 tokens)" in problems[0].message
