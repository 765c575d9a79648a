"""benchmarks/cpu_decoding.py: ratios are those to the faster configuration of CTranslate2, in each turn."""

import json
import sys
from pathlib import Path

import pytest

from regard.bench.translate import TranslateRow
from tests.scripts import load_script


def row(name: str, speed: float, cpu_speed: float) -> TranslateRow:
    return TranslateRow(name, "int8", 5, 4, 2, speed, cpu_speed, 1.0, "")


def test_each_turn_has_its_own_ratio_to_the_fastest_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("benchmarks/cpu_decoding.py")
    speeds = iter([30.0, 60.0, 90.0, 120.0])

    def measure(*_: object) -> list[TranslateRow]:
        return [
            row("regard", next(speeds), 20.0),
            row("ctranslate2", 30.0, 5.0),
            row("ctranslate2 (inter_threads 2, intra_threads 1)", 20.0, 10.0),
        ]

    monkeypatch.setattr(script, "measure", measure)
    out = tmp_path / "out.json"
    options = ["--presets", "tiny", "--beams", "5", "--batch", "4", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", ["cpu_decoding.py", *options, "--out", str(out)])
    script.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(one["turn"], one["name"], one["ratio"]) for one in rows] == [
        (0, "tiny, beam 5, 4 sentences", 1.0),
        (0, "tiny, beam 5, 1 sentences", 2.0),
        (1, "tiny, beam 5, 4 sentences", 3.0),
        (1, "tiny, beam 5, 1 sentences", 4.0),
    ]
    assert {one["cpu_ratio"] for one in rows} == {2.0}
    line = "| tiny, beam 5, 4 sentences | 60.0 | 30.0 | 1.00, 3.00 | 2.00, 2.00 |"
    assert line in capsys.readouterr().out
