"""How a translator guides its search: texts, and the names of a recipe, become guides over tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.fast import Fast
from regard.marks import END, PAD, START, UNKNOWN
from regard.nn.heads import watching
from regard.nn.network import Network
from regard.recipe import Search
from regard.search import (
    Borders,
    Constraints,
    Coverage,
    Diversity,
    Guide,
    NoRepeat,
    Phrase,
    Spelling,
)
from regard.text.kept import Kept
from regard.text.tokenizer import Vocabulary
from regard.text.words import unspaced


@dataclass(frozen=True)
class Guiding:
    """What guides the search of a batch, to be made anew for each."""

    options: Search
    borders: Borders | None = None
    """where there are phrases"""

    @contextmanager
    def of(
        self, network: Network | Fast, batch: Tensor, phrases: Sequence[Sequence[Phrase]]
    ) -> Iterator[list[Guide]]:
        """The guides of a batch of source ids, for the time of the with-block."""
        options = self.options
        guides: list[Guide] = []
        with ExitStack() as watched:
            if any(phrases):
                # First: what leads on to a phrase it must see before others forbid it.
                assert self.borders is not None
                guides.append(Constraints(phrases, self.borders, END))
            if options.no_repeat:
                guides.append(NoRepeat(options.no_repeat))
            if options.groups > 1:
                guides.append(Diversity(options.groups, options.diversity))
            if options.coverage:
                assert not isinstance(network, Fast), (
                    "who looks where is seen in the plain network only"
                )
                cross = network.attentions().get("cross", [])
                if not cross or not all(part.pattern.keeps_words for part in cross):
                    raise RegardError(
                        f"coverage {options.coverage}: this model does not look at the words of its "
                        "source, so it cannot be said which of them it has covered"
                    )
                shown = watched.enter_context(watching(cross))

                def looked() -> Tensor:
                    """The mean of all layers and heads; a sentence's beams are queries side by side."""
                    return torch.stack(
                        [one.weights.float().mean(1) for one in shown.values()]
                    ).mean(0)

                words = (batch != PAD) & (batch != END)
                guides.append(Coverage(options.coverage, words, looked))
            yield guides


def borders(vocabulary: Vocabulary, device: torch.device) -> Borders:
    opens, closes = (torch.tensor(marks, device=device) for marks in vocabulary.borders())
    opens[END] = closes[START] = True
    return Borders(opens, closes)


def phrase_of(
    text: str,
    vocabulary: Vocabulary,
    times: int = 1,
    touches_before: bool = False,
    touches_after: bool = False,
    free: bool = False,
) -> Phrase | None:
    """A text as a phrase that stands by itself, unless it may touch a word; None: it cannot be said."""
    (alone,) = vocabulary.encode([text])
    if vocabulary.decode([alone]) != [text]:
        return None
    border_before = not touches_before and not unspaced(text[0])
    border_after = not touches_after and not unspaced(text[-1])
    spellings = [Spelling(tuple(alone), before_border=border_after)]
    inside = tuple(vocabulary.inside(text))
    if inside and inside != tuple(alone):
        spellings.append(Spelling(inside, border_before, border_after))
    never = {*vocabulary.never_said, UNKNOWN, END}
    sayable = tuple(one for one in spellings if never.isdisjoint(one.tokens))
    return Phrase(sayable, times, free) if any(not one.after_border for one in sayable) else None


def phrases_of(
    source: str, constraints: Sequence[str], kept: Kept, vocabulary: Vocabulary
) -> list[Phrase]:
    """What the translation of a source must say: the constraints, and what is to be kept of it.

    What is kept and cannot be said is left to be found missing; a constraint that cannot be said is refused.
    """
    asked = dict.fromkeys(text.strip() for text in constraints if text.strip())
    found = {text: phrase_of(text, vocabulary) for text in asked}
    if lost := [text for text, phrase in found.items() if phrase is None]:
        which = repr(lost[0]) + (f" and {len(lost) - 1} more" if len(lost) > 1 else "")
        raise RegardError(f"{which} cannot be guaranteed: this model's tokenizer cannot spell it")
    found |= {
        text: phrase_of(text, vocabulary, *how, free=True)
        for text, how in kept.occurrences(source).items()
    }
    return [phrase for phrase in found.values() if phrase is not None]
