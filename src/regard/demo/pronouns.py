"""Whether the demo's model translates pronouns correctly, as a test for head ablation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.inspection.head_ablation import Correct
    from regard.tasks import Translator


def reason_pronoun(german: str) -> str | None:
    """The pronoun of a clause with *weil* or *obwohl*; None if the sentence has none."""
    match = re.search(r"\b(?:weil|obwohl)\b.*?\b(er|sie|es)\b", german)
    return match[1] if match else None


def pronoun_test(model: Translator, references: Sequence[str]) -> Correct | None:
    """A test of translations for ``ablate_heads``: whether each has the pronoun of its reference in the reason clause.

    None if the model is not the demo's, or if no reference has such a pronoun. Sentences without one are not tested.
    """
    if model.run is None or "challenge" not in model.run.card():
        return None
    expected = [*map(reason_pronoun, references)]

    def correct(number: int, translation: str) -> bool | None:
        pronoun = expected[number]
        return None if pronoun is None else reason_pronoun(translation) == pronoun

    return correct if any(expected) else None
