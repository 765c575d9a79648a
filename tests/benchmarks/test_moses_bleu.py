"""benchmarks/moses_bleu.py: three kinds of BLEU, and the target language."""

from types import ModuleType

import pytest

from regard.errors import RegardError
from regard.recipe import DataConfig
from tests.scripts import load_script


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/moses_bleu.py")


def test_only_moses_splits_at_apostrophes(benchmark: ModuleType) -> None:
    """Two of the three ignore case."""

    def scores(translation: str) -> list[float]:
        found = benchmark.scores([translation], ["l'homme dort bien ici."], "fr")
        return [value for _, value in found]

    first_of_five = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25  # is wrong
    second_of_six = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert scores("l'enfant dort bien ici.") == pytest.approx(
        [first_of_five, first_of_five, second_of_six]
    )
    assert scores("L'homme dort bien ici.") == pytest.approx([first_of_five, 100.0, 100.0])


@pytest.mark.parametrize(
    ("train", "requested", "found"),
    [
        ({"source": "train.en.gz", "target": "train.fr.gz"}, None, "fr"),
        ({"source": "train.en.gz", "target": "train.fr.gz"}, "de", "de"),
        ({"pairs": "x.tsv", "to": "cs"}, None, "cs"),
        ({"pairs": "x.tsv"}, None, None),
        ({"pairs": ["x.tsv", "y.tsv"], "to": ["cs", "de"]}, None, None),
    ],
)
def test_the_language_is_the_requested_or_the_only_one(
    benchmark: ModuleType, train: dict[str, str], requested: str | None, found: str | None
) -> None:
    data = DataConfig.model_validate({"train": train})
    if found:
        assert benchmark.target_language(data, requested) == found
        return
    with pytest.raises(RegardError, match="give --language CODE"):
        benchmark.target_language(data, requested)
