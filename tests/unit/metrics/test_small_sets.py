"""Scores of very few lines: an interval that can be, or none."""

import pytest

from regard.metrics import score
from regard.recipe import MetricName

MEASURES: tuple[MetricName, ...] = ("bleu", "bleu_lc", "chrf", "ter")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_tiny_test_set_has_a_score_and_an_interval_that_can_be(count: int) -> None:
    # The second has no letter right: drawn alone, its chrF is 0.
    said = ["a dog runs over the grass", "x", "hello there you"][:count]
    right = ["a dog runs over grass", "y", "hello there me"][:count]
    for one in score(MEASURES, said, right, [""] * count):
        assert one.low is not None
        assert one.high is not None
        # sacreBLEU draws in float32.
        assert 0 <= one.low <= one.value + 1e-4 <= one.high + 2e-4
        assert one.high <= 100.001 or one.measure == "ter"
        assert "bs:1000|seed:12345" in one.signature
        assert (one.low < one.high) == (count > 1)


def test_the_interval_is_that_of_sacrebleus_draws() -> None:
    from sacrebleu.metrics.bleu import BLEU

    said = [f"the {i} dogs run over the green grass {i % 7}" for i in range(40)]
    right = [f"the {i} dogs ran over the green grass {i % 5}" for i in range(40)]
    found = BLEU().corpus_score(said, [right], n_bootstrap=1000)
    (one,) = score(["bleu"], said, right, [""] * 40)
    assert one.low is not None
    assert one.high is not None
    assert one.value == pytest.approx(found.score)
    assert one.high - one.low == pytest.approx(2 * found._ci, abs=1e-4)
