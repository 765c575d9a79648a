"""Traces made up for the page, and how to read what it shows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from regard.data.special_tokens import BOS, EOS
from regard.decoding.beam_tree import Node
from regard.inspection.trace import Candidate, Token, Trace

if TYPE_CHECKING:
    from playwright.sync_api import Page

SOURCE = ["▁The", "▁dog", "▁sleep", "s", "▁."]
SAID = ["▁Der", "▁Hund", "▁schläf", "t", "▁."]
Open = Callable[..., "Page"]


def synthetic(
    source: Sequence[str] = SOURCE, said: Sequence[str] = SAID, layers: int = 2, heads: int = 3
) -> Trace:
    """Any weights, rows summing to 1; a beam of two of which the better says what was said."""
    random = np.random.default_rng(1)
    start, end = Token(BOS, "<s>", True), Token(EOS, "</s>", True)
    names = {text: Token(10 + i, text, False) for i, text in enumerate(dict.fromkeys(said))}
    sources = [*(Token(500 + i, text, False) for i, text in enumerate(source)), end]
    says = [*(names[text] for text in said), end]
    S, T = len(sources), len(says)

    def weights(queries: int, keys: int, seen: npt.NDArray[np.bool_] | bool = True) -> Any:
        raw = np.where(seen, random.random((layers, heads, queries, keys)) ** 6 + 1e-3, 0)
        return (raw / raw.sum(-1, keepdims=True)).astype(np.float32)

    other = Token(400, "▁anders", False)
    probabilities = [0.2, *random.uniform(0.5, 1, T - 1)]
    nodes, at, total = [Node(0, None, BOS, 0.0, 0.0, 0.0, "kept")], 0, 0.0
    for step, (token, probability) in enumerate(zip(says, probabilities, strict=True), 1):
        penalty = ((5 + step) / 6) ** 0.6
        best, rest = math.log(probability), math.log(0.01)
        total, parent = total + best, at
        at = len(nodes)
        state: Any = "finished" if token is end else "kept"
        nodes.append(Node(at, parent, token.id, best, total, total / penalty, state))
        less = total - best + rest
        early: Any = "finished" if step == 2 else "pruned"
        for i, (looser, fate) in enumerate([(end, early), (other, "pruned")]):
            if looser is not token:
                nodes.append(Node(at + 1 + i, parent, looser.id, rest, less, less / penalty, fate))
        nodes = [replace(node, id=i) for i, node in enumerate(nodes)]
    return Trace(
        text=" ".join(source).replace("▁", ""),
        translation=" ".join(said).replace("▁", ""),
        source=sources,
        read=[start, *says[:-1]],
        said=says,
        encoder=weights(S, S),
        decoder=weights(T, T, np.tri(T, dtype=bool)),
        cross=weights(T, S),
        probabilities=probabilities,
        candidates=[
            [Candidate(token, probability), Candidate(other, 0.01)]
            for token, probability in zip(says, probabilities, strict=True)
        ],
        beam=nodes,
        tokens={token.id: token for token in [start, other, *says]},
        options={"beam": 1, "length_penalty": 0.6},
    )


def rows_of(page: Page) -> list[list[str]]:
    """The cells of the table that is shown, its head first."""
    page.locator("button:visible", has_text="Show as table").first.click()
    script = "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    rows: list[list[str]] = page.locator("table:visible").evaluate(script)
    return rows


def until(page: Page, holds: str) -> None:
    """Wait; Playwright's own way to is forbidden by the page's policy."""
    look = f"const look = () => {holds} ? done() : requestAnimationFrame(look)"
    page.evaluate(f"new Promise(done => {{ {look}; look(); }})")


def says(page: Page, where: str, text: str) -> None:
    """A place of the page says so, now or soon: what has to be fetched or reckoned is drawn when it is there."""
    page.locator(where, has_text=text).first.wait_for()


def texts(page: Page, where: str) -> list[str]:
    return page.locator(where).all_text_contents()


def patience(seconds: float) -> float:
    """How long it may take here and now: as long on a machine of one's own, longer where others work."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
