"""benchmarks/autoconfig.py and autoconfig_experiments.py: the data, the steps and the table."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import load_script


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/autoconfig.py")


def test_test_pairs_that_share_a_side_with_training_pairs_are_left_out(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    (tmp_path / "train.xx").write_text("a\nb\nc\n")
    (tmp_path / "train.yy").write_text("A\nB\nC\n")
    (tmp_path / "one.xx").write_text("a\nd\n")
    (tmp_path / "one.yy").write_text("X\nD\n")
    (tmp_path / "two.xx").write_text("e\nf\n")
    (tmp_path / "two.yy").write_text("B\nF\n")
    corpus = benchmark.Corpus("train", "one two", "xx", "yy")
    monkeypatch.setitem(benchmark.CORPORA, "corpus", corpus)
    out = tmp_path / "out"
    out.mkdir()
    benchmark.write_data("corpus", out)
    assert (out / "corpus.xx").read_text() == "a\nb\nc\n"
    assert (out / "corpus.test.xx").read_text() == "d\nf\n"
    assert (out / "corpus.test.yy").read_text() == "D\nF\n"


def test_sources_of_text_repair_are_damaged_targets(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGARD_DATA", str(tmp_path))
    (tmp_path / "train.yy").write_text("ọ bụ eziokwu\n" * 40)
    (tmp_path / "test.yy").write_text("Ị na-aga\n")

    def sources(damage: str, part: str) -> list[str]:
        corpus = benchmark.Corpus("train", "test", "xx", "yy", damage=getattr(benchmark, damage))
        monkeypatch.setitem(benchmark.CORPORA, damage, corpus)
        benchmark.write_data(damage, tmp_path)
        assert (tmp_path / f"{damage}.yy").read_text() == (tmp_path / "train.yy").read_text()
        return (tmp_path / f"{damage}{part}.xx").read_text().splitlines()

    assert sources("without_diacritics", "") == ["o bu eziokwu"] * 40
    assert sources("without_diacritics", ".test") == ["I na-aga"]
    assert 1 < len(set(sources("with_typos", ""))) < 40, "some sentences have no typo"


def test_the_table_compares_with_the_best_hand_set_recipe(benchmark: ModuleType) -> None:
    common = {"device": "H200", "minutes": 5.0, "jobs": 6, "corpus": "c", "seconds": 300.0}
    bleu = {"auto": 20.0, "wide": 20.5, "tiny": 11.0}
    table = benchmark.table(
        [{**common, "recipe": name, "bleu": value} for name, value in bleu.items()]
    )
    assert "| auto | 20.0 | 20.5 (wide, of 2) | -0.5 | 300 |" in table
    assert "Mean gap of auto: -0.50 BLEU, worst -0.50." in table


def test_experiments_of_a_group_take_the_same_time() -> None:
    module = load_script("benchmarks/autoconfig_experiments.py")
    wide, small = module.on_gpu("c", 10, ["wide-r2", "small-r5"])
    speeds = {"wide-r2": 400_000.0, "small-r5": 800_000.0}
    assert wide.group == small.group
    assert wide.steps(speeds) * 4_096 / 400_000 == pytest.approx(10, rel=0.01)
    assert small.steps(speeds) * 8_192 / 800_000 == pytest.approx(10, rel=0.01)
    tiny, shallow = module.on_cpu("c", 10, ["tiny", "shallow"])
    cost = module.SETTINGS["shallow"].cpu_cost
    assert tiny.steps({}) == pytest.approx(cost * shallow.steps({}), rel=0.01)
