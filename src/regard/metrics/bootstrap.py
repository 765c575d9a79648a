"""How sure a score is: it is computed again on sentences drawn at random from the same ones."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

RESAMPLES = 1000
SEED = 12345
"""sacreBLEU's own"""

Floats = npt.NDArray[np.float64]
Counts = Floats
"""one line a sentence: numbers whose sums over the sentences make the score"""
Statistic = Callable[[Floats], float]
"""the sums of the columns to the score"""


def resampled(systems: Sequence[Counts], statistic: Statistic) -> list[Floats]:
    """The scores of each system on the same random draws of sentences."""
    chance = np.random.default_rng(SEED)
    count = len(systems[0])
    draws = (chance.integers(count, size=count) for _ in range(RESAMPLES))
    found = [[statistic(counts[drawn].sum(axis=0)) for counts in systems] for drawn in draws]
    return list(np.array(found).T)


def interval(counts: Counts, statistic: Statistic) -> tuple[float, float]:
    """What 95% of the draws lie between."""
    low, high = np.percentile(resampled([counts], statistic)[0], [2.5, 97.5]).tolist()
    return low, high


def p_value(system: Counts, baseline: Counts, statistic: Statistic) -> float:
    """The share of draws that stray from their mean by more than the difference, as sacreBLEU's."""
    difference = abs(statistic(system.sum(axis=0)) - statistic(baseline.sum(axis=0)))
    if difference == 0:
        return 1.0  # no draw differs by less
    ours, theirs = resampled([system, baseline], statistic)
    differences = np.abs(ours - theirs)
    strayed = int(np.sum(differences - differences.mean() > difference))
    return (strayed + 1) / (len(differences) + 1)


def percentage(sums: Floats) -> float:
    """So many in a hundred: the first column over the second."""
    part, whole = sums.tolist()
    return float(100 * part / max(whole, 1))
