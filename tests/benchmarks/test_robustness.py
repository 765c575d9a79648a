"""The benchmark of augmentation."""

import pytest

from regard.data.pairs import Pair
from tests.scripts import load_script


class Copies:
    """A model that returns its sources."""

    def translate(self, texts: list[str]) -> list[str]:
        return texts


def test_references_change_with_the_case_only(capsys: pytest.CaptureFixture[str]) -> None:
    benchmark = load_script("benchmarks/robustness.py")
    pairs = [Pair("this is a sentence of seven words.", "this is a sentence of seven words.")] * 3
    found = benchmark.bleu_of_variants(Copies(), pairs, "13a")
    assert [found[name] for name in ("plain", "upper", "title")] == pytest.approx([100.0] * 3)
    assert found["typos"] < 100
    assert found["no_final_punctuation"] < 100
    benchmark.report({"plain": [found, found], "augmented": [found, found]})
    printed = capsys.readouterr().out
    assert "plain      upper                  100.00 ± 0.00  +0.00" in printed
    assert "augmented - plain, typos                  +0.00" in printed
