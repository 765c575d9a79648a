"""What is measured: a run of one's own, or a model of random weights that all sides are given."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from regard.data.corpus import Pair, read_pairs
from regard.data.special_tokens import EOS, SPECIAL_TOKENS
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.nn.state_dict import named_weights
from regard.nn.transformer import Transformer
from regard.recipe import Preset, make_recipe
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

WORDS = 8_000
"""entries of the vocabulary of a random model"""
TOKENS = 20
"""of each of its sources, and of each translation: the same for all sides, whatever the weights would say"""
SEED = 1
NEG_INF = -1e4
"""the logit of what a random model never says: EOS, so that all translations have one length, and marks"""


@dataclass(frozen=True)
class Subject:
    """A run folder and what it is to translate."""

    run: Path
    sources: list[list[int]]
    longest: int | None
    """tokens of every translation, exactly; None: as the model likes"""


def of_run(run: Path, sentences: int) -> Subject:
    """A run and the first sentences of its test."""
    recipe = RunDir(run).recipe()
    if recipe.task != "translate":
        raise RegardError(f"{run}: a model to {recipe.task}; bench translate is for translators")
    if recipe.data.test is None:
        raise RegardError(f"{run}: its recipe has no data.test to take sentences from")
    if recipe.data.targets:
        raise RegardError(f"{run}: a model of several languages; bench translate is for one")
    pairs = islice(read_pairs(recipe.data.test, recipe.data, "data.test"), sentences)
    texts = [pair.source for pair in pairs]
    tokenizer = RunDir(run).tokenizer(recipe)
    return Subject(run, tokenizer.source.encode(texts), None)


def of_preset(folder: Path, preset: Preset, sentences: int, vocabulary: int = WORDS) -> Subject:
    """Random weights of a preset's sizes, in a run folder like any other."""
    words = [f"w{number}" for number in range(vocabulary - len(SPECIAL_TOKENS))]
    shape = {"preset": preset, "output_bias": True}
    recipe = make_recipe(
        {
            "data": {"train": {"pairs": ["none.tsv"]}, "languages": ["source", "target"]},
            "tokenizer": {"kind": "word", "vocab_size": vocabulary},
            "model": shape,
            "decoding": {"max_length": TOKENS},
        },
        "bench",
    )
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: (Pair(word, word) for word in words))
    torch.manual_seed(SEED)
    network = Translator.build(recipe, tokenizer)
    assert isinstance(network, Transformer)
    assert network.projection.bias is not None
    with torch.no_grad():
        network.projection.bias[[EOS, *tokenizer.target.suppressed_tokens]] = NEG_INF
    folder.mkdir()
    run = RunDir(folder)
    run.write_recipe(recipe)
    tokenizer.save(folder)
    run.write_weights(named_weights(network))
    draw = random.Random(SEED)
    sources = [
        [draw.randrange(len(SPECIAL_TOKENS), tokenizer.source.size) for _ in range(TOKENS)]
        for _ in range(sentences)
    ]
    return Subject(folder, sources, TOKENS)
