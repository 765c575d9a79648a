"""Model: a run folder opened for use. Text enters and leaves here; everything below speaks ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from regard.errors import RegardError
from regard.marks import END, PAD, START, UNKNOWN
from regard.nn.transformer import Transformer
from regard.recipe import Device, Precision, Recipe
from regard.run import Run
from regard.score import Result, score
from regard.search import Hypothesis, beam_search, greedy, sample
from regard.search.tree import Looked
from regard.text.batches import plan_in_order
from regard.text.corpus import Pair
from regard.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from regard.trace import Trace

TOKENS_AT_ONCE = {"cpu": 8_192, "cuda": 131_072}
"""source tokens, padding included, times beam: what is translated in one batch"""


def choose_device(device: Device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise RegardError("device cuda: torch sees no GPU here; use device cpu or auto")
    return torch.device(device)


def arithmetic(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The number format matrix products run in; weights and sums stay in float32."""
    if precision == "auto":
        gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
        precision = "bf16" if gpu else "fp32"
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


class Translation(NamedTuple):
    """One translation of one text."""

    text: str
    score: float
    """log-probability over length penalty: what beam search ranks by"""
    log_probability: float
    tokens: list[str]
    token_log_probabilities: list[float]
    finished: bool
    """False: cut at the greatest length before the end was said"""


EMPTY = Translation("", 0.0, 0.0, [], [], True)
"""A blank line has a blank translation."""

Way = Callable[..., list[list[Hypothesis]]]
"""A search: step function, state and limits in, hypotheses for each sentence out."""


class Model:
    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        network: Transformer,
        device: torch.device,
        precision: Precision = "fp32",
        run: Run | None = None,
    ) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.network = network
        self.device = device
        self.precision = precision
        self.run = run
        """the folder it was opened from, if it was"""

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], device: Device = "auto", precision: Precision = "fp32"
    ) -> Model:
        run = Run(Path(folder))
        recipe = run.recipe()
        weights = run.weights()
        tokenizer = run.tokenizer(recipe)
        network = build(recipe, tokenizer)
        put_weights(network, weights, str(run.weights_file))
        place = choose_device(device)
        return cls(recipe, tokenizer, network.to(place).eval(), place, precision, run)

    def translate(
        self, texts: Sequence[str], *, beam: int | None = None, alpha: float | None = None
    ) -> list[str]:
        """The best translation of each text."""
        if isinstance(texts, str):
            raise RegardError("translate takes a list of texts: translate([text])")
        return [best.text for best, *_ in self.search(texts, beam=beam, alpha=alpha)]

    def search(
        self,
        texts: Sequence[str],
        *,
        beam: int | None = None,
        alpha: float | None = None,
        nbest: int = 1,
        prefixes: Sequence[str] | None = None,
    ) -> list[list[Translation]]:
        """The nbest translations of each text, best first. prefixes: how each translation must begin."""
        options = self.recipe.search
        beam = options.beam if beam is None else beam
        alpha = options.alpha if alpha is None else alpha
        if beam < 1 or alpha < 0 or not 1 <= nbest <= beam:
            raise RegardError(
                f"beam {beam}, alpha {alpha}, nbest {nbest}: beam must be at least 1, "
                "alpha at least 0, nbest between 1 and beam"
            )
        way = partial(beam_search, beam=beam, alpha=alpha, nbest=nbest)
        if beam == 1:
            way = partial(_greedy, alpha=alpha)
        return self._run(texts, prefixes, way, beam)

    @torch.inference_mode()
    def find(
        self,
        text: str,
        forced: Sequence[int] = (),
        *,
        beam: int,
        alpha: float,
        temperature: float = 0.0,
        seed: int = 1,
        watch: Callable[[Looked], None] | None = None,
    ) -> Hypothesis:
        """The best hypothesis for one text, by beam search that may be watched; forced: how it begins.

        With a temperature it is not the best but drawn at random, and there is no beam to watch.
        """
        (source,) = self.tokenizer.source.encode([text])
        way: Way = partial(beam_search, beam=beam, alpha=alpha, watch=watch)
        if temperature:
            way = partial(_sample, temperature=temperature, seed=seed)
        ((best, *_),) = self._search([source], [list(forced)], way)
        return best

    def trace(self, text: str, **options: Any) -> Trace:
        """Everything seen while one text passes; in a notebook it shows itself. options: see ``traced``."""
        from regard.course import traced

        return traced(self, text, **options)

    def sample(
        self,
        texts: Sequence[str],
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
        prefixes: Sequence[str] | None = None,
    ) -> list[Translation]:
        """One translation of each text drawn at random, as likely as the model thinks it."""
        way = partial(_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        return [drawn for (drawn,) in self._run(texts, prefixes, way, 1)]

    def evaluate(
        self, pairs: Sequence[Pair], *, beam: int | None = None, alpha: float | None = None
    ) -> list[Result]:
        """Translate the sources and score them against the targets, as the recipe says."""
        sources = [pair.source for pair in pairs]
        return score(
            self.recipe.score.measures,
            self.translate(sources, beam=beam, alpha=alpha),
            [pair.target for pair in pairs],
            sources,
            tokenize=self.recipe.score.tokenize,
        )

    @torch.inference_mode()
    def _run(
        self, texts: Sequence[str], prefixes: Sequence[str] | None, way: Way, beam: int
    ) -> list[list[Translation]]:
        """Batches of like length through the network; results in the order of the texts."""
        if prefixes is not None and len(prefixes) != len(texts):
            raise RegardError(f"{len(prefixes)} prefixes for {len(texts)} texts: give one for each")
        sources = self.tokenizer.source.encode(texts)
        forced = self.tokenizer.target.encode(prefixes or [""] * len(texts))
        results = [[EMPTY] for _ in texts]
        filled = [row for row, text in enumerate(texts) if text.strip()]
        lengths = np.array([len(sources[row]) for row in filled])
        for part in plan_in_order(lengths, lengths, TOKENS_AT_ONCE[self.device.type] // beam):
            rows = [filled[index] for index in part]
            found = self._search([sources[row] for row in rows], [forced[row] for row in rows], way)
            for row, hypotheses in zip(rows, found, strict=True):
                results[row] = [self._read(hypothesis) for hypothesis in hypotheses]
        return results

    def _search(
        self, sources: Sequence[list[int]], prefixes: Sequence[list[int]], way: Way
    ) -> list[list[Hypothesis]]:
        options = self.recipe.search
        limits = [len(source) + options.extra_length for source in sources]
        if self.network.longest is not None:
            limits = [min(limit, self.network.longest - 1) for limit in limits]
        ids = [torch.tensor([*source, END]) for source in sources]
        batch = pad_sequence(ids, batch_first=True, padding_value=PAD).to(self.device)
        with arithmetic(self.precision, self.device):
            return way(
                self.network.step,
                self.network.start(self.network.encode(batch)),
                limits=limits,
                start=START,
                end=END,
                prefixes=prefixes,
                banned=(PAD, START, UNKNOWN, *self.tokenizer.target.line_breaks),
                device=self.device,
            )

    def _read(self, hypothesis: Hypothesis) -> Translation:
        (text,) = self.tokenizer.target.decode([hypothesis.tokens])
        return Translation(
            text,
            hypothesis.score,
            hypothesis.log_probability,
            self.tokenizer.target.pieces(hypothesis.tokens),
            hypothesis.token_log_probabilities,
            hypothesis.finished,
        )


def _greedy(*arguments: Any, **options: Any) -> list[list[Hypothesis]]:
    return [[hypothesis] for hypothesis in greedy(*arguments, **options)]


def _sample(*arguments: Any, **options: Any) -> list[list[Hypothesis]]:
    return [[hypothesis] for hypothesis in sample(*arguments, **options)]


def build(recipe: Recipe, tokenizer: Tokenizer) -> Transformer:
    return Transformer(recipe.model, tokenizer.source.size, tokenizer.target.size)


def weights_of(network: torch.nn.Module) -> dict[str, Tensor]:
    """Every weight and statistic once, by name: tied ones under the first of their names."""
    named = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    kept = network.state_dict().keys()  # leaves out what can be computed, such as sinusoids
    return {name: tensor.detach() for name, tensor in named.items() if name in kept}


@torch.no_grad()
def put_weights(network: torch.nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Copy weights into the network; each name and shape must fit."""
    own = weights_of(network)
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{name} is {list(weights[name].shape)}, not {list(own[name].shape)}"
        for name in own.keys() & weights.keys()
        if weights[name].shape != own[name].shape
    ]
    if missing or extra or shapes:
        problems = (
            [f"no {name}" for name in missing] + [f"unknown {name}" for name in extra] + shapes
        )
        raise RegardError(f"{where}: not the weights of this recipe: {'; '.join(problems[:4])}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])
