"""The languages a model translates to, asked for by an entry before the source, as <2de>."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from regard.errors import RegardError
from regard.recipe import language_tag

Languages = str | Sequence[str | None] | None
"""the language wanted: of all texts, or of each"""


def of_each(to: Languages, count: int) -> Sequence[str | None]:
    if to is None or isinstance(to, str):
        return [to] * count
    if len(to) != count:
        raise RegardError(f"{len(to)} languages (to) for {count} texts: give one for each, or one")
    return to


@dataclass(frozen=True)
class Targets:
    """Those a model knows; none where all its pairs were of the same two languages."""

    known: Sequence[str]
    usual: str | None
    """the one to translate to where nothing else is said"""

    def tags(self, count: int, to: Languages) -> list[tuple[str, ...]]:
        """What stands before each of so many texts."""
        usual = self.usual or (self.known[0] if len(self.known) == 1 else None)
        wanted = [code or usual for code in of_each(to, count)]
        # A language for all is looked at even where there is no text.
        self._check([*wanted, to] if isinstance(to, str) else wanted)
        return [(language_tag(code),) if code else () for code in wanted]

    def _check(self, wanted: Sequence[str | None]) -> None:
        allowed: list[str | None] = [*self.known] or [None]
        if wrong := [code for code in wanted if code not in allowed]:
            can = "translates to one language only, so leave it out"
            if self.known:
                can = f"translates to {', '.join(self.known)}"
            said = f"language {wrong[0]}" if wrong[0] else "no language is asked for"
            raise RegardError(
                f"{said}: this model {can} (--to on the command line, to=… in Python)"
            )
