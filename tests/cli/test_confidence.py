"""``regard translate``: confidence, and suspicious translations on standard error."""

import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import regard
from regard.cli.translation_job import TranslationJob
from regard.inference.confidence import FEATURES, ConfidenceCalibration
from tests.cli.commands import succeeds_inside


@pytest.fixture(scope="module")
def calibrated(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run with a calibration, and with references that are three times as long as the sources."""
    folder = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(workshop / "run", folder)
    card: dict[str, Any] = json.loads((folder / "card.json").read_text())
    card["confidence"] = ConfidenceCalibration(
        (0.5,) * len(FEATURES), -0.25, 400, 300, 0.8
    ).to_json()
    card["references"] = {"length_ratio": [3.0, 3.0], "scripts": ["Latin"], "copied": 0.5}
    (folder / "card.json").write_text(json.dumps(card))
    return folder


def test_without_calibration_it_is_the_geometric_mean(workshop: Path) -> None:
    done = succeeds_inside("translate", "run", "a b c", "--confidence", cwd=workshop)
    confidence, _, text = done.stdout.rstrip("\n").partition("\t")
    model = regard.load(workshop / "run", precision="auto")
    ((best,),) = model.search(["a b c"])
    assert model.calibration is None
    assert text == best.text
    mean = sum(best.token_log_probabilities) / len(best.token_log_probabilities)
    assert best.confidence == pytest.approx(2.718281828**mean)
    assert float(confidence) == pytest.approx(best.confidence, abs=1e-3)
    assert "not calibrated" in done.stderr
    plain = succeeds_inside("translate", "run", "a b c", cwd=workshop)
    assert plain.stdout == f"{text}\n"
    assert "calibrated" not in plain.stderr


def test_a_calibrated_confidence_is_explained(calibrated: Path) -> None:
    done = succeeds_inside("translate", calibrated, "a b c", "", "--json", cwd=calibrated)
    assert "probability that sentence chrF is at least 30" in done.stderr
    first, blank = map(json.loads, done.stdout.splitlines())
    model = regard.load(calibrated)
    assert model.calibration is not None
    (best,) = first["translations"]
    expected = model.calibration(best["token_log_probabilities"], 3)
    assert best["confidence"] == pytest.approx(expected)
    assert blank["translations"][0]["confidence"] == 1.0
    assert blank["problems"] == []


def test_columns_of_nbest_and_sentences(workshop: Path) -> None:
    done = succeeds_inside("translate", "run", "a b", "--nbest", "2", "--confidence", cwd=workshop)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [len(row) for row in rows] == [4, 4]
    assert [row[0] for row in rows] == ["1", "1"]
    done = succeeds_inside("translate", "run", "a b", "--sentences", "--confidence", cwd=workshop)
    assert len(done.stdout.rstrip("\n").split("\t")) == 2


def test_suspicious_translations_are_reported_up_to_a_limit(
    workshop: Path, calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.translation_job.MAX_FLAGGED_LINES", 2)
    monkeypatch.setattr("regard.inference.hallucinations.EXTRA_TOKENS", 0)
    lines = ["a b c d e f", "b c d e f a", "c d e f a b", "d e f a b c"]
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
    done = succeeds_inside("translate", calibrated, "--input", tmp_path / "lines", cwd=tmp_path)
    found = [line for line in done.stderr.splitlines() if "suspicious" in line]
    assert len(done.stdout.splitlines()) == 4
    assert found[0].startswith("line 1: suspicious translation: far too short: ")
    assert found[1].startswith("line 2: ")
    assert found[2] == "4 of 4 translations look suspicious: 4 too short"
    assert len(found) == 3
    quiet = succeeds_inside("translate", "run", "a b c", cwd=workshop)
    assert "suspicious" not in quiet.stderr


def test_suspicious_translations_are_counted_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    counts = Counter({"repetition": 269, "cut off": 74, "wrong language": 1})
    job: Any = SimpleNamespace(flagged=counts, lines=1_000)
    TranslationJob.report_flagged_lines(job)
    assert capsys.readouterr().err == (
        "344 of 1,000 translations look suspicious: 269 with repetition, 74 cut off, 1 in the wrong language\n"
    )


def test_a_source_of_unknown_words_is_reported(workshop: Path) -> None:
    done = succeeds_inside("translate", "run", "犬 猫", "--json", cwd=workshop)
    (problem, *_) = json.loads(done.stdout)["problems"]
    assert problem.startswith("most of the source is not in the vocabulary (")
    assert f"line 1: suspicious translation: {problem}" in done.stderr
