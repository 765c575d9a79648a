"""benchmarks/fast.py: every run in every precision and way becomes a figure and a point."""

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
    return load_script("benchmarks/fast.py")


def test_a_run_becomes_points(
    benchmark: ModuleType, run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = RunDir(run_folder), tmp_path / "fast.json"
    options = ["--repeats", "1", "--json", str(out), "--plot", str(tmp_path / "fast.svg")]
    with pytest.raises(RegardError, match=r"no data\.test"):
        benchmark.main([str(run_folder), *options])
    (tmp_path / "test.tsv").write_text("ein Hund\ta dog\n" * 3)
    changes = [f"data.root={tmp_path}", "data.test.pairs=test.tsv", "search.max_length=4"]
    run.write_recipe(load_recipe(run.recipe_file, changes))
    run.card_file.unlink()  # it names the recipe as it was
    benchmark.main([str(run_folder), *options, "--precision", "fp32", "int8"])
    points = json.loads(out.read_text())["points"]
    ways = [(point["precision"], point["beam"]) for point in points]
    assert ways == [("fp32", 1), ("fp32", 5), ("int8", 1), ("int8", 5)]
    assert all(point["sentences_per_cpu_second"] > 0 for point in points)
    assert f"| {run_folder.name} | 2+2 | int8 | beam 5 | " in capsys.readouterr().out
    drawn = ElementTree.parse(tmp_path / "fast.svg")
    marks = drawn.findall(".//{*}g/{*}circle")
    assert len(marks) == len(points)


def test_faster_stands_to_the_right_and_better_above(benchmark: ModuleType) -> None:
    points = [
        {"sentences_per_cpu_second": speed, "bleu": bleu}
        for speed, bleu in ((50.0, 41.0), (200.0, 39.5))
    ]
    axes = benchmark.Axes.around(points)
    (slow, good), (fast, worse) = (axes.place(*point.values()) for point in points)
    assert 0 < slow < fast < benchmark.WIDTH
    assert 0 < good < worse < benchmark.HEIGHT
    middle, _ = axes.place(100.0, 40.0)
    assert middle == pytest.approx((slow + fast) / 2, abs=0.1)
