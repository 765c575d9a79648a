"""A score with all it takes to say what it means."""

from dataclasses import asdict, dataclass
from typing import Any

SIGNIFICANT = 0.05
"""p-values below this are called significant"""


@dataclass(frozen=True)
class Result:
    """One measure of one system."""

    measure: str
    """as recipes name it: bleu, chrf …"""
    name: str
    """as people write it: BLEU, chrF2 …"""
    value: float
    low: float | None
    """the 95 % interval, by bootstrap; None if not computed"""
    high: float | None
    signature: str
    """how it was computed, so that others can compute the same"""
    higher_is_better: bool

    def __str__(self) -> str:
        interval = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.name} {self.value:.2f}{interval}  {self.signature}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """One measure of a system and of a baseline on the same sentences."""

    measure: str
    name: str
    system: float
    baseline: float
    p_value: float
    """chance of a difference as large as this if the two were equally good: paired bootstrap"""
    signature: str
    higher_is_better: bool

    @property
    def difference(self) -> float:
        return self.system - self.baseline

    @property
    def significant(self) -> bool:
        return self.p_value < SIGNIFICANT

    @property
    def better(self) -> bool:
        """The system's value is the better one, significantly or not."""
        return self.difference > 0 if self.higher_is_better else self.difference < 0

    def __str__(self) -> str:
        word = "better" if self.better else "worse"
        verdict = f"significantly {word}" if self.significant else "no significant difference"
        return (
            f"{self.name} {self.system:.2f} against {self.baseline:.2f} "
            f"({self.difference:+.2f}, p = {self.p_value:.4f}: {verdict})  {self.signature}"
        )

    def to_json(self) -> dict[str, Any]:
        found = {"difference": self.difference, "significant": self.significant}
        return asdict(self) | found
