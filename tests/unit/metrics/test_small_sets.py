"""Confidence intervals of sacreBLEU's metrics on very few lines."""

import pytest

from regard.metrics import score

METRICS = ("bleu", "bleu_lc", "chrf", "ter")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_tiny_test_set_has_a_valid_interval(count: int) -> None:
    # The second has no character in common with its reference: drawn alone, its chrF is 0.
    hypotheses = ["a dog runs over the grass", "x", "hello there you"][:count]
    references = ["a dog runs over grass", "y", "hello there me"][:count]
    for one in score(METRICS, hypotheses, references, [""] * count):
        assert one.low is not None
        assert one.high is not None
        # sacreBLEU resamples in float32.
        assert 0 <= one.low <= one.value + 1e-4 <= one.high + 2e-4
        assert one.high <= 100.001 or one.metric == "ter"
        assert "bs:1000|seed:12345" in one.signature
        assert (one.low < one.high) == (count > 1)


def test_the_interval_equals_sacrebleus() -> None:
    from sacrebleu.metrics.bleu import BLEU

    hypotheses = [f"the {i} dogs run over the green grass {i % 7}" for i in range(40)]
    references = [f"the {i} dogs ran over the green grass {i % 5}" for i in range(40)]
    found = BLEU().corpus_score(hypotheses, [references], n_bootstrap=1000)
    (one,) = score(["bleu"], hypotheses, references, [""] * 40)
    assert one.low is not None
    assert one.high is not None
    assert one.value == pytest.approx(found.score)
    assert one.high - one.low == pytest.approx(2 * found._ci, abs=1e-4)
