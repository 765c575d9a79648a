"""Stand-ins: a placeholder travels through a model as a word that the model knows, and is put back afterwards.

A model that has never seen ``{name}`` makes little of the sentence around it. A word that it copies, such as the name
of a city, it translates around well. Which words those are the model tells itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from regard.marks import BLANK, END, START
from regard.model.writer import Writer
from regard.text.kept import Kept
from regard.text.tokenizer import Vocabulary
from regard.text.words import as_words

TRIES = 4
"""stand-ins that are tried for each placeholder; more cost as much again, and gain little"""
SHORTEST = 3
"""letters: a shorter word is often the beginning of others"""
AT_ONCE = 512
"""words whose chance to be copied is computed together"""


class Disguise(NamedTuple):
    """A text with stand-ins in place of its placeholders."""

    text: str
    hidden: dict[str, str]
    """the placeholder behind each stand-in"""
    times: dict[str, int]
    """how often each stand-in occurs"""

    def lifted(self, text: str) -> str:
        """A translation of it with the placeholders put back."""
        for word in self.hidden:
            text = as_words(word).sub(lambda found: self.hidden[found[0]], text)
        return text

    def lifted_piece(self, piece: str) -> str:
        """The same of one token: a stand-in is one."""
        bare = piece.removeprefix(BLANK)
        return piece.removesuffix(bare) + self.hidden[bare] if bare in self.hidden else piece


@torch.inference_mode()
def copied(model: Writer, tags: Sequence[int]) -> list[str]:
    """The words, one token each, that the model is surest to give back as they are; the tags stand before a source."""
    source, target = model.tokenizer.source, model.tokenizer.target
    words = names(target)
    read, ids = source.encode(words), [i for (i,) in target.encode(words)]
    opens = torch.tensor(target.borders()[0], device=model.device)
    opens[END] = True
    sure: list[float] = []
    for start in range(0, len(words), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        sources = model.padded([[*tags, *of, END] for of in read[part]])
        said = torch.tensor(ids[part], device=model.device)
        both = torch.stack([torch.full_like(said, START), said], dim=1)
        first, then = model.network(sources, both).float().log_softmax(-1).unbind(1)
        # It says the word, and the word ends there.
        sure += (first.gather(1, said[:, None])[:, 0] + then[:, opens].logsumexp(-1)).tolist()
    best = sorted(range(len(words)), key=sure.__getitem__, reverse=True)
    return [words[row] for row in best[: 2 * TRIES]]


def names(vocabulary: Vocabulary) -> list[str]:
    """The words, each one token, that are written like names."""
    pieces = [piece.removeprefix(BLANK) for piece in vocabulary.pieces(range(vocabulary.size))]
    like = [word for word in pieces if word.istitle() and word.isalpha() and len(word) >= SHORTEST]
    words = list(dict.fromkeys(like))
    ids = vocabulary.encode(words)
    spelled = vocabulary.decode(ids)
    return [
        word
        for word, of, same in zip(words, ids, spelled, strict=True)
        if len(of) == 1 and word == same
    ]


def disguises(
    text: str, words: Sequence[str], kept: Kept, besides: Sequence[str] = ()
) -> Iterator[Disguise]:
    """The text with one stand-in after another, none of which may be said for another reason.

    There is none where a placeholder is part of a word, as a tag may be.
    """
    found = kept.occurrences(text)
    if not found or any(how.touches_before or how.touches_after for how in found.values()):
        return
    others = "\n".join([text, *besides])
    usable = [word for word in words if not as_words(word, any_case=True).search(others)]
    if len(found) > len(usable):
        return
    for first in range(min(TRIES, len(usable))):
        hidden = dict(zip([*usable[first:], *usable[:first]], found, strict=False))
        names = {placeholder: word for word, placeholder in hidden.items()}
        times = {names[placeholder]: how.times for placeholder, how in found.items()}
        yield Disguise(kept.replaced(text, names), hidden, times)
