"""BLEU, chrF and TER, by sacreBLEU alone, so that they compare with everyone else's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from regard.errors import RegardError
from regard.metrics.base import Comparison, Result
from regard.metrics.bootstrap import RESAMPLES
from regard.recipe import suggest

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

NAMES: dict[str, str] = {
    "bleu": "BLEU",
    "bleu_lc": "BLEU (lower case)",
    "chrf": "chrF2",
    "ter": "TER",
}
UNSPACED = ("zh", "ja-mecab")
"""BLEU's tokenizers for writing without spaces between words"""


def result(
    measure: str,
    hypotheses: Sequence[str],
    references: Sequence[str],
    tokenize: str,
    interval: bool,
) -> Result:
    metric = _metric(measure, tokenize)
    value = metric.corpus_score(hypotheses, [references]).score
    low, high = _interval(metric, hypotheses, references) if interval else (None, None)
    return Result(
        measure=measure,
        name=NAMES[measure],
        value=float(value),
        low=low,
        high=high,
        signature=str(metric.get_signature()),
        higher_is_better=measure != "ter",
    )


def _interval(
    metric: "Metric", hypotheses: Sequence[str], references: Sequence[str]
) -> tuple[float, float]:
    """What 95% of sacreBLEU's draws lie between.

    Its own summary is their mean and half this width, which in a small set can lie above 100; and it fails where a
    draw has no letter right, since chrF is then a number of another type.
    """
    from sacrebleu.significance import _bootstrap_resample

    counts = metric._extract_corpus_statistics(hypotheses, [references])
    metric.seed, drawn = _bootstrap_resample(counts, metric, RESAMPLES)
    metric.n_bootstrap = RESAMPLES  # for the signature
    scores = sorted(float(one.score) for one in drawn)
    outside = RESAMPLES // 40
    return scores[outside], scores[-1 - outside]


def comparison(
    measure: str,
    system: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    tokenize: str,
) -> Comparison:
    from sacrebleu.significance import PairedTest, Result as Tested

    named = [("baseline", baseline), ("system", system)]
    metrics: dict[str, Metric] = {measure: _metric(measure, tokenize)}
    signatures, scores = PairedTest(named, metrics, [references], "bs", RESAMPLES)()
    [(name, signature)] = signatures.items()
    first, second = scores[name]
    assert isinstance(first, Tested)
    assert isinstance(second, Tested)
    assert second.p_value is not None
    return Comparison(
        measure=measure,
        name=NAMES[measure],
        system=second.score,
        baseline=first.score,
        # sacreBLEU gives equal systems its smallest p, though no resample differs by less.
        p_value=1.0 if first.score == second.score else second.p_value,
        signature=str(signature),
        higher_is_better=measure != "ter",
    )


def _metric(measure: str, tokenize: str) -> "Metric":
    # Importing sacreBLEU takes a while, and only scoring needs it.
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if tokenize not in BLEU.TOKENIZERS:
        known = list(BLEU.TOKENIZERS)
        raise RegardError(f"sacreBLEU has no tokenizer {tokenize}{suggest(tokenize, known)}")
    if measure == "chrf":
        return CHRF()
    if measure == "ter":
        # Never minds case, as sacreBLEU's does by default; without spaces, a word is a character.
        unspaced = tokenize in UNSPACED
        return TER(normalized=unspaced, asian_support=unspaced)
    try:
        # force: do not warn of text that looks tokenized; it may well be.
        return BLEU(tokenize=tokenize, lowercase=measure == "bleu_lc", force=True)
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise RegardError(
            f"sacreBLEU's tokenizer {tokenize} does not work here: {reason}"
        ) from None
