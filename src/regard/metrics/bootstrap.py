"""Bootstrap resampling: how certain a score is, from scores on sentences drawn at random with replacement."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
SEED = 12345
"""sacreBLEU's default"""

Floats = npt.NDArray[np.float64]
Counts = Floats
"""[sentence, count]: values whose sums over the sentences determine the score"""
Statistic = Callable[[Floats], float]
"""the score as a function of the summed counts"""


def resample(systems: Sequence[Counts], statistic: Statistic) -> list[Floats]:
    """The scores of each system on ``RESAMPLES`` resamples; all systems are scored on the same ones."""
    rng = np.random.default_rng(SEED)
    count = len(systems[0])
    resamples = (rng.integers(count, size=count) for _ in range(RESAMPLES))
    scores = [[statistic(counts[rows].sum(axis=0)) for counts in systems] for rows in resamples]
    return list(np.array(scores).T)


def confidence_interval(counts: Counts, statistic: Statistic) -> tuple[float, float]:
    """The interval that 95% of the resampled scores lie in."""
    low, high = np.percentile(resample([counts], statistic)[0], [2.5, 97.5]).tolist()
    return low, high


def paired_bootstrap_p_value(system: Counts, baseline: Counts, statistic: Statistic) -> float:
    """Significance test: paired bootstrap resampling (Koehn 2004), as sacreBLEU computes it.

    The fraction of resamples whose difference deviates from the mean difference by more than the observed one.
    """
    difference = abs(statistic(system.sum(axis=0)) - statistic(baseline.sum(axis=0)))
    if difference == 0:
        return 1.0  # no resample can differ by less
    ours, theirs = resample([system, baseline], statistic)
    differences = np.abs(ours - theirs)
    exceeding = int(np.sum(differences - differences.mean() > difference))
    return (exceeding + 1) / (len(differences) + 1)


def percentage(sums: Floats) -> float:
    """The first sum as a percentage of the second."""
    part, total = sums.tolist()
    return float(100 * part / max(total, 1))
