"""regard data check, clean, convert and score."""

import json
from pathlib import Path

import pytest

from regard.demo.corpus import generate
from regard.training import pair_scoring
from tests.cli.commands import inside, succeeds_inside

PAIRS = list(generate("train", 700))


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    rows = [f"{source}\t{target}" for source, target in PAIRS]
    rows[10:10] = [
        "The dog sleeps.\t",
        "The dog sleeps.\tDer <br/> Hund schläft.",
        rows[0],
        "A dog.\tA dog.",
    ]
    (tmp_path / "my.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return tmp_path


def test_check_reports_and_recommends(noisy: Path) -> None:
    done = succeeds_inside("data", "check", "my.tsv", "--html", "r.html", cwd=noisy)
    assert "704 pairs" in done.stdout
    for line in ("empty: 1 (0.14%)", "html: 1 (0.14%)", "duplicate: 1 (0.14%)", "copy: 1 (0.14%)"):
        assert line in done.stdout
    assert "regard data clean my.tsv --output clean.tsv --report rejected.tsv" in done.stdout
    assert "A dog." in (noisy / "r.html").read_text(encoding="utf-8")
    report = json.loads(succeeds_inside("data", "check", "my.tsv", "--json", cwd=noisy).stdout)
    assert report["pairs"] == 704
    assert {"empty", "html", "duplicate", "copy"} <= {one["rule"] for one in report["findings"]}


def test_the_commands_of_a_report_read_the_files_in_the_same_way(tmp_path: Path) -> None:
    rows = [f"{number}\t{source}\t{target}\n" for number, (source, target) in enumerate(PAIRS)]
    (tmp_path / "three.tsv").write_text("".join([*rows, "9\tA dog.\t\n"]), encoding="utf-8")
    for side in (0, 1):
        text = "".join(f"{pair[side]}\n" for pair in PAIRS[:9])
        (tmp_path / f"test.{side}").write_text(text, encoding="utf-8")
    options = (
        "--columns",
        "2,3",
        "--test",
        "test.0",
        "--test",
        "test.1",
        "--set",
        "ratio.max_ratio=4",
    )
    done = succeeds_inside("data", "check", "three.tsv", *options, "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert report["held_out"][0]["overlap"] == 9
    given = "regard data {} three.tsv --columns 2,3 "
    clean, _, *_, score = report["next_steps"]
    expected = (
        given.format("clean") + "--test test.0 --test test.1 --set ratio.max_ratio=4 --output "
    )
    assert clean.startswith(expected)
    assert score.startswith(given.format("score") + "--output ")
    command = clean.partition("  ")[0].split()[1:]
    done = succeeds_inside(*command, cwd=tmp_path)
    assert f"{report['pairs'] - report['rejected']:,} of 701 pairs kept" in done.stdout


def test_clean_keeps_the_rejected_pairs_with_the_reason(noisy: Path) -> None:
    command = ("data", "clean", "my.tsv", "--output", "clean.tsv", "--report", "no.tsv")
    done = succeeds_inside(*command, cwd=noisy)
    kept, rejected = (
        (noisy / name).read_text(encoding="utf-8") for name in ("clean.tsv", "no.tsv")
    )
    lines = rejected.splitlines()
    assert lines[:4] == [
        "reason\tnumber\tsource\ttarget",
        "empty\t11\tThe dog sleeps.\t",
        "html\t12\tThe dog sleeps.\tDer <br/> Hund schläft.",
        f"duplicate\t13\t{PAIRS[0].source}\t{PAIRS[0].target}",
    ]
    assert len(kept.splitlines()) + len(lines) - 1 == 704
    assert f"{len(kept.splitlines()):,} of 704 pairs kept" in done.stdout
    succeeds_inside(*command, cwd=noisy)
    assert kept == (noisy / "clean.tsv").read_text(encoding="utf-8")
    # What is left is clean, and the held-out sources can be dropped from it.
    again = succeeds_inside(
        "data", "clean", "clean.tsv", "--output", "all.jsonl", "--test", "clean.tsv", cwd=noisy
    )
    assert "0 of" in again.stdout
    assert "overlap" in again.stdout


def test_an_error_leaves_the_previous_output(noisy: Path) -> None:
    (noisy / "out.tsv").write_text("before")
    (noisy / "bad.tsv").write_bytes(b"a\tb\n" * 3 + b"\xff\n")
    done = inside("data", "clean", "bad.tsv", "--output", "out.tsv", cwd=noisy)
    assert done.returncode == 2
    assert "bad.tsv:4: not UTF-8" in done.stderr
    assert (noisy / "out.tsv").read_text() == "before"
    assert not [path for path in noisy.iterdir() if path.name.startswith(".")]
    succeeds_inside(
        "data", "clean", "bad.tsv", "--output", "out.tsv", "--on-bad-line", "skip", cwd=noisy
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("data clean my.tsv --output my.tsv", "--output my.tsv: same file as input file 1"),
        ("data clean my.tsv --output my.doc", "--output my.doc: unknown format"),
        ("data clean my.tsv --output x/my.tsv", "x is not a folder"),
        ("data check none.tsv", "none.tsv: no such file"),
        ("data check my.tsv --skip nothing", "unknown rule nothing"),
        ("data convert my.tsv --output my.tmx", "TMX needs language codes"),
        ("data convert my.tsv --output a --output b --output c", "3 files; expected one, or two"),
        ("data check my.tsv --html x/r.html", "x is not a folder"),
    ],
)
def test_mistakes_are_one_line(arguments: str, message: str, noisy: Path) -> None:
    done = inside(*arguments.split(), cwd=noisy)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_convert_to_other_formats_and_back(noisy: Path) -> None:
    names = ("--languages", "en,de")
    succeeds_inside(
        "data",
        "convert",
        "my.tsv",
        "--output",
        "my.tmx",
        *names,
        "--on-bad-line",
        "skip",
        cwd=noisy,
    )
    succeeds_inside("data", "convert", "my.tmx", "--output", "a.en", "--output", "a.de", cwd=noisy)
    assert (noisy / "a.en").read_text().splitlines()[:10] == [pair.source for pair in PAIRS[:10]]
    done = succeeds_inside("data", "convert", "a.en", "a.de", "--output", "b.parquet", cwd=noisy)
    assert done.stdout == "b.parquet: 703 pairs\n"  # TMX has no units with an empty side


def test_score_ranks_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_scoring, "MIN_STEPS", 2)
    rows = [f"{source}\t{target}" for source, target in PAIRS[:120]]
    (tmp_path / "my.tsv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    done = succeeds_inside(
        *("data", "score", "my.tsv", "--output", "s.tsv", "--epochs", 0.1, "--device", "cpu"),
        cwd=tmp_path,
    )
    assert done.stdout == "s.tsv: 120 pairs, best first\n"
    header, *lines = (tmp_path / "s.tsv").read_text(encoding="utf-8").splitlines()
    assert header == "score\tsource\ttarget"
    assert {line.split("\t", 1)[1] for line in lines} == {*rows}
    scores = [float(line.split("\t")[0]) for line in lines]
    assert scores == sorted(scores, reverse=True)
    assert 0 < scores[-1] < scores[0] < 1
