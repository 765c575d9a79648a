"""benchmarks/noise.py: the planted noise, on a corpus from the demo's grammar."""

from collections import Counter
from types import ModuleType

import pytest

from regard.data.pairs import Pair
from regard.demo.corpus import generate
from tests.scripts import load_script


@pytest.fixture(scope="module")
def noise() -> ModuleType:
    return load_script("benchmarks/noise.py")


@pytest.fixture(scope="module")
def corpus(noise: ModuleType) -> list[tuple[Pair, str]]:
    others = ["Le chien dort parce qu'il est très fatigué.", "这条狗今天没有过马路。"]
    labelled: list[tuple[Pair, str]] = noise.noisy_corpus(list(generate("train", 4_000)), others)
    return labelled


def test_thirty_percent_are_noise_of_equal_kinds(
    noise: ModuleType, corpus: list[tuple[Pair, str]]
) -> None:
    kinds = Counter(kind for _, kind in corpus)
    clean = kinds.pop("")
    assert len(kinds) == 13
    assert len({*kinds.values()}) == 1
    assert clean / len(corpus) == pytest.approx(0.7, abs=0.01)
    assert corpus == noise.noisy_corpus(
        list(generate("train", 4_000)),
        ["Le chien dort parce qu'il est très fatigué.", "这条狗今天没有过马路。"],
    )


def test_most_of_it_is_found(noise: ModuleType, corpus: list[tuple[Pair, str]]) -> None:
    reasons = noise.rejects([pair for pair, _ in corpus])
    results = [(kind, bool(reason)) for (_, kind), reason in zip(corpus, reasons, strict=True)]
    found = [rejected for kind, rejected in results if kind]
    lost = [rejected for kind, rejected in results if kind == ""]
    assert sum(found) / len(found) > 0.95
    assert sum(lost) / len(lost) < 0.01
