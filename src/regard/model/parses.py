"""The parses that come with texts, for a model with ``position: tree``."""

from __future__ import annotations

from collections.abc import Sequence

from regard.errors import RegardError
from regard.recipe import Position
from regard.text.conllu import Parsed
from regard.text.tokenizer import Vocabulary
from regard.text.trees import TokenTree, check_parse, token_tree

Parses = Sequence[Parsed | None] | None
"""the tree of each text; a blank one has none"""


def trees_of(
    texts: Sequence[str],
    parses: Parses,
    sources: Sequence[list[int]],
    vocabulary: Vocabulary,
    position: Position,
) -> list[TokenTree | None]:
    """The trees of the texts in pieces; None where the model asks for none."""
    if parses is None and position != "tree":
        return [None] * len(texts)
    if parses is None:
        raise RegardError(
            "this model has position: tree, so it needs the parse of every text: "
            "--parses F.conllu on the command line, parses=… in Python"
        )
    if position != "tree":
        raise RegardError(
            f"parses are for a model with position: tree; this one has position: {position}"
        )
    _check(texts, parses)
    return [
        token_tree(text, parse, vocabulary).cut(len(source))
        for text, parse, source in zip(texts, parses, sources, strict=True)
    ]


def _check(texts: Sequence[str], parses: Sequence[Parsed | None]) -> None:
    if len(parses) != len(texts):
        raise RegardError(f"{len(parses)} parses for {len(texts)} texts: give one for each")
    for number, (text, parse) in enumerate(zip(texts, parses, strict=True), 1):
        if parse is not None:
            check_parse(text, parse, f"text {number}")
        elif text.strip():
            raise RegardError(f"text {number} has no parse; only a blank one may go without")
