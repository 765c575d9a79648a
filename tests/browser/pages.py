"""Synthetic traces, and helpers that read what the page shows."""

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
OUTPUTS = ["▁Der", "▁Hund", "▁schläf", "t", "▁."]
Open = Callable[..., "Page"]


def synthetic(
    source: Sequence[str] = SOURCE,
    outputs: Sequence[str] = OUTPUTS,
    layers: int = 2,
    heads: int = 3,
) -> Trace:
    """A trace with random weights whose rows sum to 1, and a beam of two whose better hypothesis has these outputs."""
    random = np.random.default_rng(1)
    start, end = Token(BOS, "<s>", True), Token(EOS, "</s>", True)
    names = {text: Token(10 + i, text, False) for i, text in enumerate(dict.fromkeys(outputs))}
    sources = [*(Token(500 + i, text, False) for i, text in enumerate(source)), end]
    tokens = [*(names[text] for text in outputs), end]
    S, T = len(sources), len(tokens)

    def weights(queries: int, keys: int, visible: npt.NDArray[np.bool_] | bool = True) -> Any:
        raw = np.where(visible, random.random((layers, heads, queries, keys)) ** 6 + 1e-3, 0)
        return (raw / raw.sum(-1, keepdims=True)).astype(np.float32)

    other = Token(400, "▁anders", False)
    probabilities = [0.2, *random.uniform(0.5, 1, T - 1)]
    nodes, at, total = [Node(0, None, BOS, 0.0, 0.0, 0.0, "kept")], 0, 0.0
    for step, (token, probability) in enumerate(zip(tokens, probabilities, strict=True), 1):
        penalty = ((5 + step) / 6) ** 0.6
        best, rest = math.log(probability), math.log(0.01)
        total, parent = total + best, at
        at = len(nodes)
        state: Any = "finished" if token is end else "kept"
        nodes.append(Node(at, parent, token.id, best, total, total / penalty, state))
        less = total - best + rest
        early: Any = "finished" if step == 2 else "pruned"
        for i, (worse, outcome) in enumerate([(end, early), (other, "pruned")]):
            if worse is not token:
                nodes.append(
                    Node(at + 1 + i, parent, worse.id, rest, less, less / penalty, outcome)
                )
        nodes = [replace(node, id=i) for i, node in enumerate(nodes)]
    return Trace(
        text=" ".join(source).replace("▁", ""),
        translation=" ".join(outputs).replace("▁", ""),
        source=sources,
        inputs=[start, *tokens[:-1]],
        outputs=tokens,
        encoder=weights(S, S),
        decoder=weights(T, T, np.tri(T, dtype=bool)),
        cross_attention=weights(T, S),
        probabilities=probabilities,
        candidates=[
            [Candidate(token, probability), Candidate(other, 0.01)]
            for token, probability in zip(tokens, probabilities, strict=True)
        ],
        beam=nodes,
        tokens={token.id: token for token in [start, other, *tokens]},
        options={"beam": 1, "length_penalty": 0.6},
    )


def rows_of(page: Page) -> list[list[str]]:
    """The cells of the visible table, header row first."""
    page.locator("button:visible", has_text="Show as table").first.click()
    script = "table => [...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    rows: list[list[str]] = page.locator("table:visible").evaluate(script)
    return rows


def until(page: Page, condition: str) -> None:
    """Wait for a JavaScript condition. Playwright's own function is blocked by the content security policy."""
    check = f"const check = () => {condition} ? done() : requestAnimationFrame(check)"
    page.evaluate(f"new Promise(done => {{ {check}; check(); }})")


def wait_for_text(page: Page, selector: str, text: str) -> None:
    """Wait until an element contains a text: values that are fetched or computed are drawn later."""
    page.locator(selector, has_text=text).first.wait_for()


def texts(page: Page, selector: str) -> list[str]:
    return page.locator(selector).all_text_contents()


def patience(seconds: float) -> float:
    """A time limit that grows with the load of the machine."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
