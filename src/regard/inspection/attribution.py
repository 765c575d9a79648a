"""Contrastive attribution: which words of the source and of the translation so far made it choose *er*, not *sie*.

What is explained is one number: the logit of the generated token minus the logit of another one, the foil (Yin and
Neubig 2022). Each method gives every word that the model has read a share of it. The words are those of the source and
those of the translation before this token.

- ``gradient_x_input``: the gradient of the difference, times the embedding.
- ``integrated_gradients`` (Sundararajan et al. 2017): the gradient averaged on the way from a neutral sentence to this
  one. The shares add up to the change of the difference between the two sentences (completeness).
- ``occlusion``: the change of the difference if a word becomes neutral.
- ``attention_rollout`` (Abnar and Zuidema 2020): attention followed through all layers, with half of each layer passed
  on by the residual connection.
- ``alti`` (ALTI+, Ferrando et al. 2022): the same, with the actual contributions of the vectors instead of attention
  weights and of one half.
- ``attention``: cross-attention and decoder self-attention, averaged over layers and heads.

The last three do not depend on the foil, and their shares are never negative. A neutral word is the mean of all
embeddings of its vocabulary; EOS and BOS, which every sentence has, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.inspection.display_tables import Cell, heat_table, scaled, text_table
from regard.inspection.hooks import Floats, attentions, observe
from regard.inspection.teacher_forcing import (
    ForcedTranslation,
    check_supported,
    find_word,
    force,
    replace_output,
)
from regard.inspection.trace import Token, to_tokens
from regard.nn.attention import AttentionIntermediates
from regard.nn.layers import (
    DecoderLayer,
    Embedding,
    EncoderLayer,
    PreNorm,
    SublayerConnection,
    add_residual,
)
from regard.nn.multi_head_attention import MultiHeadAttention, record_attention
from regard.nn.norms import LayerNorm
from regard.nn.transformer import Transformer
from regard.tasks import Translator

Method = Literal[
    "gradient_x_input",
    "integrated_gradients",
    "occlusion",
    "attention_rollout",
    "alti",
    "attention",
]
METHODS: tuple[Method, ...] = get_args(Method)
FIRST_STEPS, MOST_STEPS, ROWS = 16, 512, 32
"""integrated gradients: points on the path, doubled until the shares add up; and points in one batch"""
SMALL_SUM = 0.01
"""a sum of shares of both signs counts as at least this fraction of the sum of their sizes"""
COMPLETENESS = 0.005
"""integrated gradients stop at this error of the sum, see ``Attribution.completeness``"""

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Attribution:
    """What each word contributed to the choice of one token."""

    token: Token
    """the generated token"""
    foil: Token
    """the token that it is compared with"""
    position: int
    """the position of the token in the translation"""
    difference: float
    """logit of the token minus logit of the foil"""
    source_words: list[str]
    target_words: list[str]
    """the words of the translation before the token"""
    scores: dict[Method, Floats]
    """[word]: source words, then target words"""
    completeness: float
    """Relative error of the sum of integrated gradients: at most 0.01, unless the number of steps did not suffice.

    If the shares cancel to less than 1% of their sizes, the error is relative to this 1%.
    """

    @property
    def words(self) -> list[str]:
        return [*self.source_words, *self.target_words]

    def agreement(self) -> dict[tuple[Method, Method], float]:
        """Spearman's rank correlation of the sizes of the words' shares, for each pair of methods.

        Signs are left out, because attention has none.
        """
        names = list(self.scores)
        ranks = {name: _ranks(np.abs(self.scores[name])) for name in names}
        return {
            (first, second): _correlation(ranks[first], ranks[second])
            for i, first in enumerate(names)
            for second in names[i + 1 :]
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values, as the page reads them."""
        return {
            "token": self.token._asdict(),
            "foil": self.foil._asdict(),
            "position": self.position,
            "difference": self.difference,
            "source_words": self.source_words,
            "target_words": self.target_words,
            "scores": {name: values.tolist() for name, values in self.scores.items()},
            "agreement": [[*pair, value] for pair, value in self.agreement().items()],
            "completeness": self.completeness,
        }

    def strongest_words(self, method: Method, count: int = 2) -> list[tuple[str, float]]:
        """The words with the largest shares in favour of the token."""
        shares = zip(self.words, map(float, self.scores[method]), strict=True)
        positive = (share for share in shares if share[1] > 0)
        return sorted(positive, key=lambda share: -share[1])[:count]

    def __str__(self) -> str:
        """A table for terminals: words in rows, methods in columns."""
        head = ["word", *(_title(name) for name in self.scores)]
        rows = [
            [word, *(f"{values[i]:.2f}" for values in self.scores.values())]
            for i, word in enumerate(self.words)
        ]
        return f"{self._heading()}\n{text_table([head, *rows])}"

    def _heading(self) -> str:
        return f"{self.token.text} and not {self.foil.text}: logit difference {self.difference:.2f}"

    def _repr_html_(self) -> str:
        """A table for notebooks: methods in rows, words in columns."""
        cells = [
            [
                Cell(f"{value:.2f}", strength)
                for value, strength in zip(values, scaled(values.tolist()), strict=True)
            ]
            for values in self.scores.values()
        ]
        return heat_table(
            self._heading(), [_title(name) for name in self.scores], self.words, cells
        )


def attribute(
    model: Translator,
    text: str,
    word: str | int,
    foil: str | None = None,
    translation: str | None = None,
    methods: Sequence[Method] = METHODS,
) -> Attribution:
    """Why the model says ``word`` and not ``foil``.

    word: a word of the translation, or the position of a token. foil: another word in its place; by default the token
    that is second best. translation: a translation of the text; by default the model's own.
    """
    forced = force(model, text, translation)
    return attribute_token(model, forced, find_word(forced, word), foil, methods)


def attribute_token(
    model: Translator,
    forced: ForcedTranslation,
    position: int,
    foil: str | int | None = None,
    methods: Sequence[Method] = METHODS,
) -> Attribution:
    """Like ``attribute``, for the output token at a position; the foil is a word or a token id."""
    check_supported(model)
    if unknown := [name for name in methods if name not in METHODS]:
        raise RegardError(f"method {unknown[0]!r}: must be one of {', '.join(METHODS)}")
    choice = _choice(model, forced, position, foil)
    # The decoder is causal: nothing after this position matters.
    read = ForcedTranslation(
        forced.request,
        forced.source,
        forced.inputs[: choice.position + 1],
        forced.outputs[: choice.position + 1],
    )
    difference = _Difference(model, read, choice)
    words = _words(read)
    scores: dict[Method, Floats] = {}
    completeness = 0.0
    for name in methods:
        if name == "integrated_gradients":
            shares, completeness = difference.integrated_gradients()
        elif name == "occlusion":
            scores[name] = np.asarray(difference.occlusion(words), dtype=np.float32)
            continue
        elif name == "gradient_x_input":
            shares = difference.gradient_x_input()
        else:
            attention_shares = _attention_shares(model, read, name)
            if attention_shares is None:
                continue
            shares = attention_shares
        scores[name] = np.array([shares[word].sum() for word in words], dtype=np.float32)
    texts = [token.text for token in (*read.source, *read.inputs)]
    names = ["".join(texts[position] for position in word).lstrip("▁") for word in words]
    count = len(read.source_words)
    return Attribution(
        token=read.outputs[choice.position],
        foil=to_tokens(model.tokenizer.target, [choice.foil])[0],
        position=choice.position,
        difference=difference.value,
        source_words=names[:count],
        target_words=names[count:],
        scores=scores,
        completeness=completeness,
    )


# ---------------------------------------------------------------------------------------------
# The token and its foil


class TokenChoice(NamedTuple):
    """A choice between two tokens at a position."""

    position: int
    token: int
    foil: int


@torch.inference_mode()
def _choice(
    model: Translator, forced: ForcedTranslation, position: int, foil: str | int | None
) -> TokenChoice:
    outputs = [token.id for token in forced.outputs]
    if not isinstance(foil, str):
        if foil is None:
            logits = model.network(*forced.batch(model))[0, position].clone()
            logits[outputs[position]] = -torch.inf
            foil = int(logits.argmax())
        if foil == outputs[position] or not 0 <= foil < model.tokenizer.target.size:
            raise RegardError(
                f"foil {foil}: must differ from the generated token, and be "
                f"from 0 to {model.tokenizer.target.size - 1}"
            )
        return TokenChoice(position, outputs[position], foil)
    (ids,) = model.tokenizer.target.encode([foil])
    here = outputs[position:]
    # Words may begin with the same tokens.
    common = next((i for i, (a, b) in enumerate(zip(ids, here, strict=False)) if a != b), None)
    if common is None:
        raise RegardError(f"foil {foil!r}: is the generated token at this position")
    return TokenChoice(position + common, here[common], ids[common])


def _words(read: ForcedTranslation) -> list[list[int]]:
    """The positions of each word: in the source, then in the decoder input, counted on from the source."""
    offset = len(read.source)
    targets = [[offset + position for position in word] for word in read.input_words]
    return [*read.source_words, *targets]


# ---------------------------------------------------------------------------------------------
# Gradients and occlusion


class _Difference:
    """The difference of two logits as a function of the embeddings of the source and of the decoder input."""

    def __init__(self, model: Translator, read: ForcedTranslation, choice: TokenChoice) -> None:
        self.model, self.read, self.choice = model, read, choice
        network = check_supported(model)
        self.network = network
        embeddings = (network.encoder.embedding, network.decoder.embedding)
        with torch.no_grad():
            self.embeddings: tuple[Tensor, ...] = tuple(
                embedding(ids) for embedding, ids in zip(embeddings, read.batch(model), strict=True)
            )
            self.neutral = tuple(
                self._neutral(embedding, embedded, tokens)
                for embedding, embedded, tokens in zip(
                    embeddings, self.embeddings, (read.source, read.inputs), strict=True
                )
            )

    @staticmethod
    def _neutral(embedding: Embedding, embedded: Tensor, tokens: Sequence[Token]) -> Tensor:
        weight = embedding.weight
        special = torch.tensor([token.special for token in tokens], device=weight.device)
        mean = weight.mean(0) * weight.shape[1] ** 0.5
        return torch.where(special[:, None], embedded, mean)

    def at(
        self, source: Float[Tensor, "n S d"], inputs: Float[Tensor, "n T d"]
    ) -> Float[Tensor, " n"]:
        ids = self.read.batch(self.model, len(source))
        with replace_output(self.network.encoder.embedding, source):
            memory = self.network.encode(ids[0])
        with replace_output(self.network.decoder.embedding, inputs):
            states = self.network.decode(ids[1], memory)
        logits = self.network.project(states[:, self.choice.position])
        return logits[:, self.choice.token] - logits[:, self.choice.foil]

    @cached_property
    def value(self) -> float:
        """The difference for the sentence as it is."""
        return float(self.at(*self.embeddings)[0].detach())

    def gradients(self, points: Sequence[Tensor]) -> list[Tensor]:
        """[n, token, d] of source and decoder input, at n points."""
        leaves = [point.detach().requires_grad_() for point in points]
        with torch.enable_grad():
            difference = self.at(*leaves)
        return list(torch.autograd.grad(difference.sum(), leaves))

    def gradient_x_input(self) -> Doubles:
        """[source and decoder token]"""
        gradients = self.gradients(self.embeddings)
        return _concatenate(
            [(g * e).sum(-1)[0] for g, e in zip(gradients, self.embeddings, strict=True)]
        )

    def integrated_gradients(self) -> tuple[Doubles, float]:
        """[source and decoder token], and the error of their sum, see ``Attribution.completeness``."""
        total = self.value - float(self.at(*self.neutral)[0].detach())
        steps = FIRST_STEPS
        while True:
            shares = self._integrate(steps)
            # In float32 a sum near 0 cannot be met to a fraction of itself.
            size = max(abs(total), SMALL_SUM * float(np.abs(shares).sum()), 1e-6)
            error = abs(float(shares.sum()) - total) / size
            if error <= COMPLETENESS or steps >= MOST_STEPS:
                return shares, error
            steps *= 2

    def _integrate(self, steps: int) -> Doubles:
        """The path integral by Gauss-Legendre quadrature."""
        nodes, weights = np.polynomial.legendre.leggauss(steps)
        differences = [e - n for e, n in zip(self.embeddings, self.neutral, strict=True)]
        sums = [torch.zeros_like(embedding[0]) for embedding in differences]
        for start in range(0, steps, ROWS):
            like = partial(torch.tensor, dtype=differences[0].dtype, device=differences[0].device)
            at = like((nodes[start : start + ROWS] + 1) / 2)[:, None, None]
            weight = like(weights[start : start + ROWS] / 2)[:, None, None]
            points = [n + at * w for n, w in zip(self.neutral, differences, strict=True)]
            for sum_, gradient in zip(sums, self.gradients(points), strict=True):
                sum_ += (weight * gradient).sum(0)
        return _concatenate([(s * w[0]).sum(-1) for s, w in zip(sums, differences, strict=True)])

    @torch.no_grad()
    def occlusion(self, words: Sequence[Sequence[int]]) -> Doubles:
        """[word]: the difference, minus the difference with a neutral word in its place."""
        offset = self.embeddings[0].shape[1]
        points = [embedding.repeat(len(words), 1, 1) for embedding in self.embeddings]
        for row, word in enumerate(words):
            side, first = (0, 0) if word[0] < offset else (1, offset)
            positions = [position - first for position in word]
            points[side][row, positions] = self.neutral[side][0, positions]
        ablated = torch.cat(
            [
                self.at(*(point[start : start + ROWS] for point in points))
                for start in range(0, len(words), ROWS)
            ]
            if words
            else [torch.zeros(0)]
        )
        return self.value - ablated.double().cpu().numpy()


def _concatenate(parts: Sequence[Tensor]) -> Doubles:
    return np.asarray(torch.cat(list(parts)).double().cpu().numpy(), dtype=np.float64)


# ---------------------------------------------------------------------------------------------
# Attention, rollout, ALTI+


@torch.inference_mode()
def _attention_shares(model: Translator, read: ForcedTranslation, name: Method) -> Doubles | None:
    """[source and decoder token] at the last position; None if the method does not support the network."""
    if name == "alti":
        contributions = alti(model, read)
        return None if contributions is None else contributions[-1]
    observation = observe(model, read.request, [token.id for token in read.inputs])
    if observation.compressed:
        return None
    weights = {
        site: layer_weights.mean(1).astype(np.float64)
        for site, layer_weights in observation.weights.items()
    }
    if name == "attention":
        sites = (weights["cross_attention"], weights["decoder"])
        return np.concatenate([site_weights.mean(0)[-1] for site_weights in sites])
    halves = {site: 0.5 * layer_weights for site, layer_weights in weights.items()}
    rollout = follow(
        [layer + 0.5 * np.eye(layer.shape[1]) for layer in halves["encoder"]],
        [layer + 0.5 * np.eye(layer.shape[1]) for layer in halves["decoder"]],
        list(halves["cross_attention"]),
    )
    last: Doubles = rollout[-1]
    return last


def follow(
    encoder: Sequence[Doubles], decoder: Sequence[Doubles], cross: Sequence[Doubles]
) -> Doubles:
    """[decoder position, source and decoder token]: the contributions of all layers, multiplied.

    encoder, decoder: [query, key] of each layer, with the residual connection on the diagonal. cross: [query, key] of
    each layer; what is missing to 1 comes from the residual connection.
    """
    relevance = np.eye(len(encoder[0]))
    for layer in encoder:
        relevance = layer @ relevance
    targets = len(decoder[0])
    contributions = np.concatenate([np.zeros((targets, len(relevance))), np.eye(targets)], axis=1)
    for layer, to_source in zip(decoder, cross, strict=True):
        contributions = layer @ contributions
        # Rounding may make it negative.
        contributions *= np.maximum(0, 1 - to_source.sum(1, keepdims=True))
        contributions[:, : len(relevance)] += to_source @ relevance
    return contributions


@torch.inference_mode()
def alti(model: Translator, read: ForcedTranslation) -> Doubles | None:
    """[decoder position, source and decoder token]: ALTI+ contributions; each row sums to 1.

    None if the network has no residual connections, a norm after them that is not LayerNorm, or keys that are not
    tokens.
    """
    network = check_supported(model)
    residuals = _residuals(network)
    if not all(
        module.pattern.keeps_tokens
        and residual.add is add_residual
        and (isinstance(residual, PreNorm) or isinstance(residual.norm, LayerNorm))
        for module, residual in residuals.items()
    ):
        return None
    with _record(residuals) as sums, record_attention(residuals) as recorded:
        network(*read.batch(model))
    contributions = {
        site: [
            _contributions(
                module,
                recorded[module],
                *sums[module],
                residuals[module],
                site != "cross_attention",
            )
            for module in modules
        ]
        for site, modules in attentions(model).items()
    }
    # The first column is that of the residual.
    cross = [layer[:, 1:] for layer in contributions["cross_attention"]]
    return follow(contributions["encoder"], contributions["decoder"], cross)


def _residuals(network: Transformer) -> dict[MultiHeadAttention, SublayerConnection]:
    """The residual connection around each attention."""
    residuals: dict[MultiHeadAttention, SublayerConnection] = {}
    for stack in (network.encoder, network.decoder):
        for layer in stack.layers:
            assert isinstance(layer, EncoderLayer)
            residuals[layer.attention] = layer.attention_residual
            if isinstance(layer, DecoderLayer):
                residuals[layer.cross_attention] = layer.cross_attention_residual
    return residuals


@contextmanager
def _record(
    residuals: Mapping[MultiHeadAttention, SublayerConnection],
) -> Iterator[dict[nn.Module, tuple[Tensor, Tensor]]]:
    """The vectors before and after each residual connection, by attention module."""
    recorded: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def keep(module: nn.Module) -> Callable[..., None]:
        return lambda _, inputs, output: recorded.__setitem__(module, (inputs[0][0], output[0]))

    handles = [
        residual.register_forward_hook(keep(module)) for module, residual in residuals.items()
    ]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _contributions(
    module: MultiHeadAttention,
    recorded: AttentionIntermediates,
    before: Float[Tensor, "Q d"],
    after: Float[Tensor, "Q d"],
    residual: SublayerConnection,
    is_self: bool,
) -> Doubles:
    """[query, key]: how much each key's vector contributes to the vector after the residual connection.

    The residual connection counts as the query's own key in self-attention, and is the first column otherwise. A
    contribution is the part of the L1 norm of the result that vanishes without the vector.
    """
    weights, value, before = (
        recorded.weights[0].double(),
        recorded.value[0].double(),
        before.double(),
    )
    output = module.output.weight.double().view(before.shape[1], module.heads, -1)
    parts = torch.einsum("hqk,hkv,dhv->qkd", weights, value, output)
    total = before + parts.sum(1)
    if module.output.bias is not None:
        total = total + module.output.bias
    if is_self:
        indices = torch.arange(len(parts))
        parts[indices, indices] += before
    else:
        parts = torch.cat([before[:, None], parts], dim=1)
    if not isinstance(residual, PreNorm):  # LayerNorm is linear once its variance is known
        norm = residual.norm
        assert isinstance(norm, LayerNorm)
        deviation = (total.var(-1, unbiased=False) + norm.eps).sqrt()
        parts = (parts - parts.mean(-1, keepdim=True)) / deviation[:, None, None] * norm.weight
    after = after.double()
    size = after.abs().sum(-1, keepdim=True)
    shares = (size - (after[:, None] - parts).abs().sum(-1)).clamp(min=0)
    shares = shares / shares.sum(1, keepdim=True).clamp(min=1e-12)
    return np.asarray(shares.cpu().numpy(), dtype=np.float64)


# ---------------------------------------------------------------------------------------------
# Agreement


def _ranks(values: Floats) -> Doubles:
    """Ranks from 0; equal values share the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return np.asarray((ends - (counts + 1) / 2)[group], dtype=np.float64)


def _correlation(first: Doubles, second: Doubles) -> float:
    """Pearson's correlation; 0 if one side is constant, or if there are no words."""
    if not first.size:
        return 0.0
    a, b = first - first.mean(), second - second.mean()
    size = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / size if size else 0.0


def _title(name: Method) -> str:
    return name.replace("_", " ")
