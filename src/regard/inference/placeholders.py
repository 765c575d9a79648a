"""Placeholders: a placeholder is translated as a word that the model copies, and restored afterwards.

A model that has never seen ``{name}`` translates the sentence around it badly. Around a word that it copies, such as
the name of a city, it translates well. The model itself determines which words it copies.

Which parts of a text become placeholders (numbers, URLs, tags) is in ``data/protected_spans.py``;
``decoding/constraints.py`` makes sure that the translation contains each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from regard.data.protected_spans import ProtectedSpans
from regard.data.special_tokens import BOS, EOS, SPACE_SYMBOL
from regard.data.tokenizer import Tokenizer, Vocabulary
from regard.data.words import whole_word_pattern
from regard.inference.network_decoder import pad_rows
from regard.nn.network import Network

TRIES = 4
"""substitutions tried for each text; more cost as much again and gain little"""
MIN_LETTERS = 3
"""shorter words are often the beginning of others"""
WORDS_PER_BATCH = 512


class Substitution(NamedTuple):
    """A text with words in place of its placeholders."""

    text: str
    placeholders: dict[str, str]
    """the placeholder of each word"""
    times: dict[str, int]
    """how often each word occurs"""

    def restore(self, text: str) -> str:
        """A translation of it, with the placeholders restored."""
        for word in self.placeholders:
            text = whole_word_pattern(word).sub(lambda match: self.placeholders[match[0]], text)
        return text

    def restore_token(self, piece: str) -> str:
        """The same for one token; each word is one token."""
        bare = piece.removeprefix(SPACE_SYMBOL)
        if bare not in self.placeholders:
            return piece
        return piece.removesuffix(bare) + self.placeholders[bare]


@torch.inference_mode()
def copied_words(
    network: Network, tokenizer: Tokenizer, tags: Sequence[int], device: torch.device
) -> list[str]:
    """The words of one token each that the network most surely copies. tags: the tags before a source."""
    source, target = tokenizer.source, tokenizer.target
    words = name_like_words(target)
    source_ids, ids = source.encode(words), [i for (i,) in target.encode(words)]
    opens = torch.tensor(target.word_boundaries()[0], device=device)
    opens[EOS] = True
    scores: list[float] = []
    for start in range(0, len(words), WORDS_PER_BATCH):
        batch = slice(start, start + WORDS_PER_BATCH)
        sources = pad_rows(
            [[*tags, *ids_of_word, EOS] for ids_of_word in source_ids[batch]], device
        )
        copied = torch.tensor(ids[batch], device=device)
        decoder_inputs = torch.stack([torch.full_like(copied, BOS), copied], dim=1)
        log_probabilities = network(sources, decoder_inputs).float().log_softmax(-1)
        word_scores, next_scores = log_probabilities.unbind(1)
        # The probability of the word, and that it ends there.
        ends = next_scores[:, opens].logsumexp(-1)
        scores += (word_scores.gather(1, copied[:, None])[:, 0] + ends).tolist()
    ranking = sorted(range(len(words)), key=scores.__getitem__, reverse=True)
    return [words[row] for row in ranking[: 2 * TRIES]]


def name_like_words(vocabulary: Vocabulary) -> list[str]:
    """The title-cased words of one token each."""
    pieces = [
        piece.removeprefix(SPACE_SYMBOL) for piece in vocabulary.pieces(range(vocabulary.size))
    ]
    titled = [
        word for word in pieces if word.istitle() and word.isalpha() and len(word) >= MIN_LETTERS
    ]
    words = list(dict.fromkeys(titled))
    ids = vocabulary.encode(words)
    decoded = vocabulary.decode(ids)
    return [
        word
        for word, tokens, decoded_word in zip(words, ids, decoded, strict=True)
        if len(tokens) == 1 and word == decoded_word
    ]


def substitutions(
    text: str, words: Sequence[str], protected: ProtectedSpans, other_texts: Sequence[str] = ()
) -> Iterator[Substitution]:
    """The text with words in place of its placeholders, for several choices of words.

    Words that occur in the text or in ``other_texts`` are not used. There is no substitution for a text with a
    placeholder that touches a word, as a tag may.
    """
    occurrences = protected.occurrences(text)
    if not occurrences or any(
        occurrence.touches_before or occurrence.touches_after for occurrence in occurrences.values()
    ):
        return
    used_text = "\n".join([text, *other_texts])
    candidates = [
        word for word in words if not whole_word_pattern(word, ignore_case=True).search(used_text)
    ]
    if len(occurrences) > len(candidates):
        return
    for start in range(min(TRIES, len(candidates))):
        placeholders = dict(
            zip([*candidates[start:], *candidates[:start]], occurrences, strict=False)
        )
        names = {placeholder: word for word, placeholder in placeholders.items()}
        times = {
            names[placeholder]: occurrence.times for placeholder, occurrence in occurrences.items()
        }
        yield Substitution(protected.replace(text, names), placeholders, times)
