"""benchmarks/tokenised.py: three ways to count the same words, and which language is written."""

from types import ModuleType

import pytest

from regard.errors import RegardError
from regard.recipe import Data
from tests.scripts import load_script


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load_script("benchmarks/tokenised.py")


def test_only_moses_parts_what_an_apostrophe_joins(benchmark: ModuleType) -> None:
    """And lower case is what two of the three count by."""

    def scores(said: str) -> list[float]:
        found = benchmark.scores([said], ["l'homme dort bien ici."], "fr")
        return [value for _, value in found]

    first_of_five = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25  # that is wrong
    second_of_six = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert scores("l'enfant dort bien ici.") == pytest.approx(
        [first_of_five, first_of_five, second_of_six]
    )
    assert scores("L'homme dort bien ici.") == pytest.approx([first_of_five, 100.0, 100.0])


@pytest.mark.parametrize(
    ("train", "asked", "found"),
    [
        ({"source": "train.en.gz", "target": "train.fr.gz"}, None, "fr"),
        ({"source": "train.en.gz", "target": "train.fr.gz"}, "de", "de"),
        ({"pairs": "x.tsv", "to": "cs"}, None, "cs"),
        ({"pairs": "x.tsv"}, None, None),
        ({"pairs": ["x.tsv", "y.tsv"], "to": ["cs", "de"]}, None, None),
    ],
)
def test_the_language_is_the_one_asked_for_or_the_only_one(
    benchmark: ModuleType, train: dict[str, str], asked: str | None, found: str | None
) -> None:
    data = Data.model_validate({"train": train})
    if found:
        assert benchmark.written(data, asked) == found
        return
    with pytest.raises(RegardError, match="say --language CODE"):
        benchmark.written(data, asked)
