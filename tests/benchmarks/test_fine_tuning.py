"""The benchmark of fine-tuning."""

from pathlib import Path

from tests.scripts import load_script


def test_training_pairs_are_spread_over_the_corpus(tmp_path: Path) -> None:
    benchmark = load_script("benchmarks/fine_tuning.py")
    pairs = iter([(str(number), "x") for number in range(100)] + [("", "blank"), ("a\tb", "tab")])
    path = benchmark._write(tmp_path, "some.tsv", pairs, 4)
    assert path.read_text() == "0\tx\n25\tx\n50\tx\n75\tx\n"


def test_the_table_has_the_scores_before_and_after() -> None:
    benchmark = load_script("benchmarks/fine_tuning.py")
    scores = {
        "old": {"before": {"bleu": 30.0, "chrf": 50.0}, "after": {"bleu": 20.0, "chrf": 40.0}},
        "new": {"before": {"bleu": 10.0, "chrf": 30.0}, "after": {"bleu": 35.0, "chrf": 55.0}},
        "steps": 1_200,
        "seconds": 90.0,
    }
    lines = benchmark.table({"experiments": {"a-to-b": {"default": scores}}}).splitlines()
    assert lines[-2:] == [
        "| before | 30.0 | 50.0 | 10.0 | 30.0 |  |  |",
        "| default | 20.0 | 40.0 | 35.0 | 55.0 | 1,200 | 1.5 |",
    ]
