"""Confidence (quality estimation): the probability that a translation is good, from its token probabilities.

A translation is called *good* if its sentence chrF against a reference is at least ``GOOD_CHRF``. At the end of
training the validation set is translated, and a logistic regression on a few features of the decoder's output
(``features``) learns the probability that a translation is good. It is stored in the card. A model without it uses the
geometric mean of the token probabilities, which ranks translations but is not a calibrated probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, log
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from regard.errors import RegardError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

GOOD_CHRF = 30.0
"""a translation is good if its sentence chrF is at least this"""
MIN_EXAMPLES = 20
"""A calibration needs this many good and this many bad translations."""
MAX_SENTENCES = 1000
"""validation sentences that are translated to calibrate"""
FOLDS = 5
"""for the ROC-AUC that is reported"""

FEATURES = (
    "mean_log_probability",
    "mean_probability",
    "log_probability",
    "log_length",
    "log_length_ratio",
    "absolute_log_length_ratio",
)
FLOOR = -20.0
"""Lower log-probabilities count as this one; a forced token can have minus infinity."""
PENALTY = 1.0
"""weight of the squared coefficients in the logistic regression, whose features have unit variance"""
NEWTON_STEPS = 50

Floats: TypeAlias = "npt.NDArray[np.float64]"


def features(token_log_probabilities: Sequence[float], source_length: int) -> list[float]:
    """The features of one translation, in the order of ``FEATURES``.

    token_log_probabilities: of each token of the translation, EOS included. source_length: in tokens.
    """
    values = [max(value, FLOOR) for value in token_log_probabilities] or [0.0]
    total, length = sum(values), len(values)
    ratio = log(length / (source_length + 1))
    return [total / length, sum(map(exp, values)) / length, total, log(length), ratio, abs(ratio)]


def geometric_mean(token_log_probabilities: Sequence[float]) -> float:
    """The geometric mean of the token probabilities, EOS included: the confidence without calibration."""
    count = len(token_log_probabilities)
    return exp(max(sum(token_log_probabilities) / count, FLOOR)) if count else 1.0


@dataclass(frozen=True)
class ConfidenceCalibration:
    """A logistic regression: the features of a translation in, the probability that it is good out."""

    coefficients: tuple[float, ...]
    """of the features, in the order of ``FEATURES``"""
    intercept: float
    sentences: int
    """validation sentences it was fitted to"""
    good: int
    """number of good translations among them"""
    auc: float
    """ROC-AUC in cross-validation: the probability that a good translation gets a higher confidence than a bad one"""
    good_chrf: float = GOOD_CHRF
    """what the probability is about: sentence chrF of at least this value"""

    @classmethod
    def fit(cls, rows: Sequence[Sequence[float]], chrf: Sequence[float]) -> Self | None:
        """Fit the features of translations to their sentence chrF; None if too few are good, or too few are bad."""
        import numpy as np

        matrix, is_good = np.array(rows, np.float64), np.array(chrf) >= GOOD_CHRF
        if min(is_good.sum(), (~is_good).sum()) < MIN_EXAMPLES:
            return None
        coefficients, intercept = fit_logistic(matrix, is_good)
        return cls(
            tuple(coefficients.tolist()),
            intercept,
            sentences=len(is_good),
            good=int(is_good.sum()),
            auc=roc_auc(cross_validated(matrix, is_good), is_good),
        )

    def __call__(self, token_log_probabilities: Sequence[float], source_length: int) -> float:
        values = features(token_log_probabilities, source_length)
        total = self.intercept + sum(map(float.__mul__, self.coefficients, values))
        return 1 / (1 + exp(-min(max(total, -500.0), 500.0)))

    # In the card

    def to_json(self) -> dict[str, Any]:
        coefficients = dict(zip(FEATURES, self.coefficients, strict=True))
        return {**asdict(self), "coefficients": coefficients}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], where: str) -> Self:
        """Read what ``to_json`` returned. ``where`` names the file in an error message."""
        try:
            coefficients = stored["coefficients"]
            if list(coefficients) != list(FEATURES):
                raise ValueError
            numbers = tuple(float(coefficients[name]) for name in FEATURES)
            return cls(
                **{**stored, "coefficients": numbers, "intercept": float(stored["intercept"])}
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise RegardError(
                f"{where}: damaged, its confidence section is not a calibration"
            ) from None

    @property
    def summary(self) -> str:
        return (
            f"the probability that sentence chrF is at least {self.good_chrf:g}, calibrated on "
            f"{self.sentences:,} validation sentences (ROC-AUC {self.auc:.2f})"
        )


# ---------------------------------------------------------------------------------------------
# Statistics


def fit_logistic(matrix: Floats, positive: npt.NDArray[np.bool_]) -> tuple[Floats, float]:
    """Ridge-penalized logistic regression by Newton's method: coefficients and intercept.

    matrix: [examples, features]. The penalty applies to standardized features; the result is for the given ones.
    """
    import numpy as np

    means, scales = matrix.mean(0), matrix.std(0)
    scales[scales < 1e-9] = 1.0  # a constant feature
    design = np.column_stack([np.ones(len(matrix)), (matrix - means) / scales])
    penalty = np.diag([1e-9, *[PENALTY] * matrix.shape[1]])
    weights = np.zeros(design.shape[1])
    for _ in range(NEWTON_STEPS):
        probabilities = sigmoid(design @ weights)
        gradient = design.T @ (probabilities - positive) + penalty @ weights
        curvature = (design * (probabilities * (1 - probabilities))[:, None]).T @ design + penalty
        step = np.linalg.solve(curvature, gradient)
        weights -= step
        if np.abs(step).max() < 1e-10:
            break
    coefficients = weights[1:] / scales
    return coefficients, float(weights[0] - coefficients @ means)


def cross_validated(matrix: Floats, positive: npt.NDArray[np.bool_]) -> Floats:
    """The predicted probability of each example by a regression that was fitted without it."""
    import numpy as np

    predicted = np.empty(len(matrix))
    folds = np.arange(len(matrix)) % FOLDS
    for fold in range(FOLDS):
        held_out = folds == fold
        coefficients, intercept = fit_logistic(matrix[~held_out], positive[~held_out])
        predicted[held_out] = sigmoid(matrix[held_out] @ coefficients + intercept)
    return predicted


def sigmoid(values: Floats) -> Floats:
    import numpy as np

    return 1 / (1 + np.exp(-np.clip(values, -500, 500)))


def roc_auc(scores: Sequence[float] | Floats, positive: npt.NDArray[np.bool_]) -> float:
    """The probability that a positive example has a higher score than a negative one; ties count half."""
    import numpy as np

    values = np.asarray(scores, np.float64)
    assert positive.any()
    assert not positive.all(), "one class: the area is not defined"
    _, groups, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[groups]  # mean ranks of equal values, from 1
    positives, negatives = int(positive.sum()), int((~positive).sum())
    wins = ranks[positive].sum() - positives * (positives + 1) / 2
    return float(wins / (positives * negatives))
