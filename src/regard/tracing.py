"""How a trace is made: one sentence is translated while it is watched, and read again to look inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from regard.errors import RegardError
from regard.marks import END, MARKS, MASK, START
from regard.model import Translator
from regard.model.ways import AT_ONCE, ONE_BY_ONE, refuse
from regard.model.writer import Asked
from regard.nn.heads import watching
from regard.probe import (
    Floats,
    Head,
    Reading,
    Rows,
    Seen,
    attentions,
    muting,
    observe,
    occlude,
)
from regard.search import MANNERS, Hypothesis, Node, Tree
from regard.text.conllu import Parsed
from regard.text.tokenizer import SILENT, Vocabulary
from regard.trace import Candidate, Occlusion, Round, Token, Trace, words_of

CANDIDATES = 8
"""the most probable tokens kept for each row"""
OCCLUSION_WORK = {"cpu": 5e10, "cuda": 5e12}
"""the network's parameters times the tokens it reads, with each word left out: some two seconds on two cores"""


@torch.inference_mode()
def trace(
    model: Translator,
    text: str,
    *,
    mute: Sequence[Head] = (),
    parse: Parsed | None = None,
    **options: Any,
) -> Trace:
    """Translate one text and keep everything. The heads in ``mute`` say nothing; parse is for ``position: tree``.

    options are those of ``along``, or, where all words are said at once, of ``at_once``.
    """
    asked = model.asked(text, parse)
    with muting(model, mute):
        way = at_once if model.at_once else partial(along, parse=parse)
        found = way(model, text, **options)
        seen = [observe(model, asked, one.read) for one in found.readings]
        occlusion = _occlusion(model, asked, found.readings)
    last, passed = found.readings[-1], seen[-1]
    shares = _shares(found.readings, seen)
    rows = found.rows
    if found.drawn and passed.weights["cross"].size:
        rows = {node: passed.weights["cross"][:, :, node] for node in range(len(last.said))}
    source, target = model.tokenizer.source, model.tokenizer.target
    return Trace(
        text=text,
        translation=target.decode([found.tokens])[0],
        source=named(source, [*asked.source, END]),
        read=named(target, last.read),
        said=named(target, last.said),
        encoder=passed.weights["encoder"],
        decoder=passed.weights["decoder"],
        cross=passed.weights["cross"],
        probabilities=shares[range(len(last.said)), last.said].tolist(),
        candidates=_candidates(shares, target),
        beam=found.beam,
        tokens={i: named(target, [i])[0] for i in {node.token for node in found.beam}},
        options=found.options,
        rounds=[Round(named(target, one.read), named(target, one.said)) for one in found.readings]
        if model.at_once
        else [],
        muted=list(mute),
        rows=rows,
        parts=passed.parts,
        mixed=passed.mixed,
        occlusion=occlusion,
    )


@dataclass(frozen=True)
class Found:
    """A translation, and how it came about."""

    tokens: list[int]
    readings: list[Reading]
    """the last is the one that is looked at"""
    options: dict[str, float]
    beam: list[Node] = field(default_factory=list)
    rows: dict[int, Floats] = field(default_factory=dict)
    drawn: bool = False
    """at random: there was no beam to watch"""


def along(
    model: Translator,
    text: str,
    parse: Parsed | None = None,
    *,
    beam: int | None = None,
    alpha: float | None = None,
    prefix: str = "",
    forced: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 1,
    **others: Any,
) -> Found:
    """Word after word. The translation must begin with the tokens ``forced`` and then the text ``prefix``.

    With a ``temperature`` it is drawn at random by ``seed``.
    """
    refuse(ONE_BY_ONE, **others)
    target, options = model.tokenizer.target, model.recipe.search
    search = Search(
        beam=options.beam if beam is None else beam,
        alpha=options.alpha if alpha is None else alpha,
        temperature=temperature,
        seed=seed,
        forced=[*_checked(forced, target), *target.encode([prefix])[0]],
    )
    hypothesis, tree, rows = _search(model, text, search, parse)
    said = [*hypothesis.tokens, END] if hypothesis.finished else hypothesis.tokens
    reading = Reading(model.network.reading(said), said, list(range(len(said))))
    told = {**search._asdict(), "forced": len(search.forced)}
    return Found(hypothesis.tokens, [reading], told, tree.nodes, rows, temperature > 0)


def at_once(
    model: Translator,
    text: str,
    *,
    rounds: int | None = None,
    candidates: int | None = None,
    length: int | None = None,
    **others: Any,
) -> Found:
    """All words at once, in rounds."""
    refuse(AT_ONCE, **{name: value or None for name, value in others.items() if name != "seed"})
    filling = model.find_at_once(text, rounds=rounds, candidates=candidates, length=length)
    readings: list[Reading] = []
    later: set[int] = set()
    for read, said in reversed([*zip(filling.read, filling.said, strict=True)]):
        hidden = {place for place, token in enumerate(read) if token == MASK}
        readings.insert(0, Reading(read, said, sorted(hidden - later)))
        later |= hidden
    return Found(filling.hypothesis.tokens, readings, {"rounds": len(readings), "forced": 0})


class Search(NamedTuple):
    """How the translation is looked for, word after word."""

    beam: int
    alpha: float
    temperature: float
    """0: the best; else drawn at random"""
    seed: int
    forced: list[int]


def _checked(forced: Sequence[int], vocabulary: Vocabulary) -> Sequence[int]:
    for token in forced:
        if not 0 <= token < vocabulary.size or token in SILENT:
            raise RegardError(
                f"forced token {token}: must be from 0 to {vocabulary.size - 1}, "
                "and neither padding nor start nor end"
            )
    return forced


def _search(
    model: Translator, text: str, search: Search, parse: Parsed | None
) -> tuple[Hypothesis, Tree, dict[int, Floats]]:
    """What was found, the way there as a tree, and where its nodes looked."""
    tree = Tree(START)
    if search.temperature:
        hypothesis = model.find(text, **search._asdict(), parse=parse)
        penalty = MANNERS[model.recipe.search.manner].penalty
        _add_way(tree, hypothesis, lambda length: penalty(length, search.alpha))
        return hypothesis, tree, {}
    cross = attentions(model)["cross"]
    with watching(cross) as shown:
        rows = Rows(tree, cross, shown)
        hypothesis = model.find(text, **search._asdict(), watch=rows, parse=parse)
    return hypothesis, tree, rows.rows


def _add_way(tree: Tree, hypothesis: Hypothesis, penalty: Callable[[int], float]) -> None:
    """A drawn hypothesis is a tree of one branch."""
    tokens = [*hypothesis.tokens, END] if hypothesis.finished else hypothesis.tokens
    total = 0.0
    for step, part in enumerate(hypothesis.token_log_probabilities, 1):
        total += part
        state: Literal["finished", "kept"] = "finished" if tokens[step - 1] == END else "kept"
        score = total / penalty(step)
        tree.nodes.append(Node(step, step - 1, tokens[step - 1], part, total, score, state))


def _occlusion(model: Translator, asked: Asked, readings: Sequence[Reading]) -> Occlusion | None:
    words = words_of(named(model.tokenizer.source, asked.source))
    tokens = len(words) * (len(asked.source) + 1 + sum(len(one.read) for one in readings))
    work = tokens * sum(part.numel() for part in model.network.parameters())
    if work > OCCLUSION_WORK[model.device.type]:
        return None
    return Occlusion(words, occlude(model, asked, words, readings))


def _shares(readings: Sequence[Reading], seen: Sequence[Seen]) -> torch.Tensor:
    """[target, V]: the probabilities at each place, in the pass that said what stands there."""
    shares = seen[-1].logits.float().softmax(-1)
    for reading, this in zip(readings, seen, strict=True):
        shares[reading.places] = this.logits[reading.places].float().softmax(-1)
    return shares


def _candidates(shares: torch.Tensor, vocabulary: Vocabulary) -> list[list[Candidate]]:
    best = shares.topk(min(CANDIDATES, shares.shape[1]))
    return [
        [Candidate(*one) for one in zip(named(vocabulary, ids), values, strict=True)]
        for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def named(vocabulary: Vocabulary, ids: Sequence[int]) -> list[Token]:
    """Ids as something to look at."""
    pieces = vocabulary.pieces(ids)
    return [Token(i, text, i in MARKS) for i, text in zip(ids, pieces, strict=True)]
