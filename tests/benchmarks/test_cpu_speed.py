"""benchmarks/cpu_speed.py: every run, precision and beam size becomes a point."""

import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from regard.errors import RegardError
from regard.recipe import load_recipe
from regard.storage.run_dir import RunDir
from tests.scripts import load_script


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/cpu_speed.py")


def test_a_run_becomes_points(
    benchmark: ModuleType, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = RunDir(run_folder), tmp_path / "cpu_speed.json"
    options = ["--repeats", "1", "--json", str(out), "--plot", str(tmp_path / "cpu_speed.svg")]
    with pytest.raises(RegardError, match=r"no data\.test"):
        benchmark.main([str(run_folder), *options])
    (tmp_path / "test.tsv").write_text("ein Hund\ta dog\n" * 3)
    changes = [f"data.root={tmp_path}", "data.test.pairs=test.tsv", "decoding.max_length=4"]
    run.write_recipe(load_recipe(run.recipe_file, changes))
    run.card_file.unlink()  # it holds the hash of the old recipe
    benchmark.main([str(run_folder), *options, "--precision", "fp32", "int8"])
    points = json.loads(out.read_text())["points"]
    settings = [(point["precision"], point["beam"]) for point in points]
    assert settings == [("fp32", 1), ("fp32", 5), ("int8", 1), ("int8", 5)]
    assert all(point["sentences_per_cpu_second"] > 0 for point in points)
    assert f"| {run_folder.name} | 2+2 | int8 | beam 5 | " in capsys.readouterr().out
    plot = ElementTree.parse(tmp_path / "cpu_speed.svg")
    markers = plot.findall(".//{*}g/{*}circle")
    assert len(markers) == len(points)


def test_faster_is_right_and_better_is_up(benchmark: ModuleType) -> None:
    points = [
        {"sentences_per_cpu_second": speed, "bleu": bleu}
        for speed, bleu in ((50.0, 41.0), (200.0, 39.5))
    ]
    axes = benchmark.Axes.around(points)
    (slow, good), (fast, worse) = (axes.position(*point.values()) for point in points)
    assert 0 < slow < fast < benchmark.WIDTH
    assert 0 < good < worse < benchmark.HEIGHT
    middle, _ = axes.position(100.0, 40.0)
    assert middle == pytest.approx((slow + fast) / 2, abs=0.1)
