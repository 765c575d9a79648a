"""BLEU, chrF and TER, computed by sacreBLEU itself, so that scores are comparable with published ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from regard.errors import RegardError
from regard.metrics.base import Comparison, Lines, Metric, MetricResult, register_metric
from regard.metrics.bootstrap import RESAMPLES
from regard.recipe import suggest

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric as Scorer

UNSPACED_TOKENIZERS = ("zh", "ja-mecab")
"""BLEU's tokenizers for scripts without spaces between words"""

# Importing sacreBLEU is slow, and only scoring needs it: so all imports are local.


@dataclass(frozen=True)
class SacreBleuMetric(Metric):
    """A metric of sacreBLEU."""

    build: Callable[[str], Scorer]
    """sacreBLEU's scorer for the name of a tokenizer"""
    higher_is_better: bool = True
    scored_on: Literal["text", "labels", "model"] = "text"

    def score(
        self,
        hypotheses: Lines,
        references: Lines,
        sources: Lines,
        *,
        tokenize: str = "13a",
        intervals: bool = True,
    ) -> MetricResult:
        scorer = self._scorer(tokenize)
        value = scorer.corpus_score(hypotheses, [references]).score
        low, high = _interval(scorer, hypotheses, references) if intervals else (None, None)
        return MetricResult(
            metric=self.name,
            name=self.display_name,
            value=float(value),
            low=low,
            high=high,
            signature=str(scorer.get_signature()),
            higher_is_better=self.higher_is_better,
        )

    def compare(
        self,
        system: Lines,
        baseline: Lines,
        references: Lines,
        sources: Lines,
        *,
        tokenize: str = "13a",
    ) -> Comparison:
        from sacrebleu.significance import PairedTest, Result as PairedResult

        systems = [("baseline", baseline), ("system", system)]
        scorers = {self.name: self._scorer(tokenize)}
        signatures, scores = PairedTest(systems, scorers, [references], "bs", RESAMPLES)()
        [(name, signature)] = signatures.items()
        first, second = scores[name]
        assert isinstance(first, PairedResult)
        assert isinstance(second, PairedResult)
        assert second.p_value is not None
        return Comparison(
            metric=self.name,
            name=self.display_name,
            system=second.score,
            baseline=first.score,
            # sacreBLEU gives equal systems its smallest p, though no resample can differ by less.
            p_value=1.0 if first.score == second.score else second.p_value,
            signature=str(signature),
            higher_is_better=self.higher_is_better,
        )

    def _scorer(self, tokenize: str) -> Scorer:
        from sacrebleu.metrics.bleu import BLEU

        if tokenize not in BLEU.TOKENIZERS:
            tokenizers = list(BLEU.TOKENIZERS)
            raise RegardError(
                f"sacreBLEU has no tokenizer {tokenize}{suggest(tokenize, tokenizers)}"
            )
        return self.build(tokenize)


def _interval(
    scorer: Scorer, hypotheses: Sequence[str], references: Sequence[str]
) -> tuple[float, float]:
    """The interval that 95% of sacreBLEU's resampled scores lie in.

    sacreBLEU itself reports the mean and half the width, which for small sets can exceed 100. It also fails if a
    resample has no matching character, because chrF then returns another type.
    """
    from sacrebleu.significance import _bootstrap_resample

    statistics = scorer._extract_corpus_statistics(hypotheses, [references])
    scorer.seed, resampled = _bootstrap_resample(statistics, scorer, RESAMPLES)
    scorer.n_bootstrap = RESAMPLES  # for the signature
    scores = sorted(float(score.score) for score in resampled)
    outside = RESAMPLES // 40
    return scores[outside], scores[-1 - outside]


def _bleu(tokenize: str, lowercase: bool = False) -> Scorer:
    from sacrebleu.metrics.bleu import BLEU

    try:
        # force: do not warn about text that looks tokenized; it may be.
        return BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    except (ImportError, RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise RegardError(
            f"sacreBLEU's tokenizer {tokenize} does not work here: {reason}"
        ) from None


def _lowercase_bleu(tokenize: str) -> Scorer:
    return _bleu(tokenize, lowercase=True)


def _chrf(tokenize: str) -> Scorer:
    from sacrebleu.metrics.chrf import CHRF

    return CHRF()


@lru_cache(maxsize=1)
def _sentence_chrf_scorer() -> Scorer:
    return _chrf("13a")


def sentence_chrf(hypothesis: str, reference: str) -> float:
    """chrF2 of one sentence."""
    return float(_sentence_chrf_scorer().sentence_score(hypothesis, [reference]).score)


def _ter(tokenize: str) -> Scorer:
    """Case-insensitive, which is sacreBLEU's default; in scripts without spaces every character is a word."""
    from sacrebleu.metrics.ter import TER

    unspaced = tokenize in UNSPACED_TOKENIZERS
    return TER(normalized=unspaced, asian_support=unspaced)


register_metric(SacreBleuMetric("bleu", "BLEU", _bleu))
register_metric(SacreBleuMetric("bleu_lc", "BLEU (lower case)", _lowercase_bleu))
register_metric(SacreBleuMetric("chrf", "chrF2", _chrf))
register_metric(SacreBleuMetric("ter", "TER", _ter, higher_is_better=False))
