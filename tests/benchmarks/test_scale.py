"""benchmarks/scale.py: the command line, the file of results, and the table of docs/scale.md."""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import ROOT, load_script


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return load_script("benchmarks/scale.py")


def test_the_table_of_the_page_is_up_to_date(scale: ModuleType) -> None:
    written = scale.PAGE.read_text(encoding="utf-8")
    assert written == scale.page(), "run  python benchmarks/scale.py report"


def test_every_measurement_has_command_and_hardware(scale: ModuleType) -> None:
    results = scale.read(scale.RESULTS)
    assert list(results) == [part for part in scale.PARTS if part in results]
    for part, records in results.items():
        for record in records:
            assert f" benchmarks/scale.py {part}" in record["command"]
            assert record["hardware"]


def test_every_part_has_a_module_with_options(
    scale: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """And there is no module that is not a part or used by one."""
    helpers = {"__init__", "random_model", "usage"}
    files = {path.stem for path in (ROOT / "benchmarks" / "scaling").glob("*.py")}
    assert files - helpers == {part.replace("-", "_") for part in scale.PARTS}
    for part in scale.PARTS:
        with pytest.raises(SystemExit, match="0"):
            scale.main([part, "--help"])
        assert "--json" in capsys.readouterr().out


def test_the_report_prints_the_table_and_writes_the_page(
    scale: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "scale.md"
    page.write_text(f"before\n{scale.BEGIN}old\n{scale.END}after\n")
    results = tmp_path / "scale.json"
    rate = {"pairs_per_cpu_second": 3000, "command": "python benchmarks/scale.py rate"}
    rate |= {"pairs_per_cpu_second_tokenizing": 4000, "pairs_per_cpu_second_merging": 12000}
    results.write_text(json.dumps({"rate": [{**rate, "hardware": "a machine", "load": 1.5}]}))
    monkeypatch.setattr(scale, "PAGE", page)
    monkeypatch.setattr(scale, "RESULTS", results)
    scale.main(["report"])
    table = capsys.readouterr().out.rstrip("\n")
    assert "| **rate**: `python benchmarks/scale.py rate`; a machine, load 1.5 |  |" in table
    assert "| pairs per CPU second, tokenizing | 4,000 |" in table
    assert page.read_text() == f"before\n{scale.BEGIN}{table}\n{scale.END}after\n"


def test_a_measurement_replaces_that_of_the_same_command(scale: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "scale.json"
    records = [
        {"command": command, "hardware": hardware, "value": value}
        for value, (command, hardware) in enumerate(
            [("a", "x"), ("b", "x"), ("a", "y"), ("a", "x")]
        )
    ]
    for record in records:
        scale.store(path, "rate", record)
    scale.store(path, "plan", records[0])
    assert scale.read(path) == {"rate": records[1:], "plan": [records[0]]}


@pytest.mark.parametrize(
    ("words", "processes", "expected"),
    [
        (["r", "--set", "a=b"], None, "python benchmarks/scale.py step r --set a=b"),
        (["--folder", "/x/y/", "r"], None, "python benchmarks/scale.py step --folder FOLDER r"),
        (
            ["--json", "/x/z", "--folder=/x/y"],
            None,
            "python benchmarks/scale.py step --folder=FOLDER",
        ),
        (["--json=/x/z", "r"], "2", "torchrun --nproc-per-node 2 benchmarks/scale.py step r"),
    ],
)
def test_a_recorded_command_has_no_paths_of_the_machine(
    scale: ModuleType,
    words: list[str],
    processes: str | None,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if processes:
        monkeypatch.setenv("WORLD_SIZE", processes)
    options = argparse.Namespace(folder=Path("/x/y"), json=Path("/x/z"), recipe="r")
    assert scale.command("step", words, options) == expected


def test_a_part_is_measured_and_stored(
    scale: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sharded step in one process, whose weights are all there."""
    path = tmp_path / "scale.json"
    scale.main(["sharded", "--preset", "tiny", "--steps", "1", "--json", str(path)])
    (record,) = scale.read(path)["sharded"]
    assert record["command"] == "python benchmarks/scale.py sharded --preset tiny --steps 1"
    assert record["hardware"]
    (held,) = record["processes"]
    assert held["weights"] == 4 * record["parameters"]
    assert held["optimizer"] >= 8 * record["parameters"]
    figures = dict(sys.modules["scaling.sharded"].figures(record))
    assert figures["processes"] == "1"
    assert figures["weights of a process"] == f"{held['weights'] / 1e9:.2f} GB"


def test_the_largest_model_is_found_by_bisection(
    scale: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("scaling.largest")
    monkeypatch.setattr(module, "WIDTH", 64)
    real = module.train_steps

    def train_steps(layers: int, sentences: int, checkpointing: bool, device: object) -> object:
        if layers > 2 + checkpointing:
            raise RuntimeError("out of memory")
        return real(layers, sentences, checkpointing, device)

    monkeypatch.setattr(module, "train_steps", train_steps)
    monkeypatch.setattr(module, "is_out_of_memory", lambda error: "out of memory" in str(error))
    path = tmp_path / "scale.json"
    options = ["--device", "cpu", "--sentences", "2", "--most", "5", "--json", str(path)]
    scale.main(["largest", *options])
    (record,) = scale.read(path)["largest"]
    assert record["without activation checkpointing"]["layers"] == 2
    assert record["with activation checkpointing"]["layers"] == 3
