"""BLEU, chrF and TER, by sacreBLEU alone, so that they compare with everyone else's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from regard.errors import RegardError
from regard.recipe import Measure, nearest
from regard.score.result import Comparison, Result

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric

RESAMPLES = 1000
NAMES: dict[Measure, str] = {
    "bleu": "BLEU",
    "bleu_lc": "BLEU (lower case)",
    "chrf": "chrF2",
    "ter": "TER",
}
UNSPACED = ("zh", "ja-mecab")
"""BLEU's tokenizers for writing without spaces between words"""


def result(
    measure: Measure,
    hypotheses: Sequence[str],
    references: Sequence[str],
    tokenize: str,
    interval: bool,
) -> Result:
    metric = _metric(measure, tokenize)
    resamples = RESAMPLES if interval else 1
    found = metric.corpus_score(hypotheses, [references], n_bootstrap=resamples)
    return Result(
        measure=measure,
        name=NAMES[measure],
        value=float(found.score),
        low=float(found._mean - found._ci) if interval else None,
        high=float(found._mean + found._ci) if interval else None,
        signature=str(metric.get_signature()),
        higher_is_better=measure != "ter",
    )


def comparison(
    measure: Measure,
    system: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    tokenize: str,
) -> Comparison:
    from sacrebleu.significance import PairedTest
    from sacrebleu.significance import Result as Tested

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


def _metric(measure: Measure, tokenize: str) -> "Metric":
    # Importing sacreBLEU takes a while, and only scoring needs it.
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER

    if tokenize not in BLEU.TOKENIZERS:
        known = list(BLEU.TOKENIZERS)
        raise RegardError(f"sacreBLEU has no tokenizer {tokenize}{nearest(tokenize, known)}")
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
