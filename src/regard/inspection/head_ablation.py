"""The contribution and the behaviour of each attention head.

``ablate_heads`` replaces the output of one head at a time by its mean over many sentences (mean ablation) and measures
what is lost: BLEU, the probability of the reference, and any yes-or-no property of a translation, each with a 95%
bootstrap interval. ``describe_heads`` names each head by what its attention was measured to do. A head may also be
ablated at one token only (``HeadOutput``): wherever the model reads this token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.data.special_tokens import BOS, EOS
from regard.errors import RegardError
from regard.inspection.display_tables import Cell, heat_table, scaled, text_table
from regard.inspection.hooks import Floats, Head, attentions, observe
from regard.inspection.teacher_forcing import (
    ForcedTranslation,
    check_supported,
    force,
    token_log_probabilities,
)
from regard.inspection.trace import is_punctuation
from regard.metrics.bootstrap import resample
from regard.nn.multi_head_attention import MultiHeadAttention
from regard.nn.transformer import Transformer
from regard.recipe import AttentionSite
from regard.tasks import Translator

CLEAR = 0.4
"""a head is named after what it does with at least this share of its attention"""
HEAD_NAMES = "A head is STACK.LAYER.HEAD, counted from 0. The page counts layers and heads from 1."
Doubles = npt.NDArray[np.float64]
Correct = Callable[[int, str], bool | None]
"""whether the translation of sentence number n is correct in some respect; None if the sentence does not test it"""
Links = Sequence[Mapping[AttentionSite, Sequence[tuple[int, int]]]]
"""for each sentence, query and key positions that belong together: a pronoun and what it refers to"""


class HeadOutput(NamedTuple):
    """The output of one head, everywhere or only where the model reads one token."""

    site: AttentionSite
    layer: int
    """layer and head are counted from 0"""
    head: int
    token: int | None = None
    """id of the token: of the source for the encoder, else of the decoder input"""


# ---------------------------------------------------------------------------------------------
# Mean ablation


@torch.inference_mode()
def mean_outputs(
    model: Translator, places: Iterable[HeadOutput], forced: Sequence[ForcedTranslation]
) -> dict[HeadOutput, Float[Tensor, " dv"]]:
    """The mean output of the head at each place, over all positions of all translations."""
    network, sites = check_supported(model), attentions(model)
    places = list(places)
    sums: dict[HeadOutput, Tensor] = {}
    counts: Counter[HeadOutput] = Counter()
    for translation in forced:
        with head_outputs(network) as outputs:
            network(*translation.batch(model))
        for place in places:
            output = outputs[sites[place.site][place.layer]][0, :, place.head]
            if place.token is not None:
                tokens = translation.source if place.site == "encoder" else translation.inputs
                output = output[[i for i, token in enumerate(tokens) if token.id == place.token]]
            sums[place] = sums.get(place, 0) + output.sum(0)
            counts[place] += len(output)
    if missing := [place for place in places if not counts[place]]:
        raise RegardError(f"token {missing[0].token}: does not occur in any of the sentences")
    return {place: sums[place] / counts[place] for place in places}


@contextmanager
def head_outputs(network: Transformer) -> Iterator[dict[nn.Module, Float[Tensor, "B Q h dv"]]]:
    """The latest outputs of the heads of each attention, before the output projection."""
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: MultiHeadAttention) -> Callable[..., None]:
        return lambda _, inputs: outputs.__setitem__(module, by_head(inputs[0], module.heads))

    modules = [module for layers in network.attentions().values() for module in layers]
    handles = [module.output.register_forward_pre_hook(keep(module)) for module in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def by_head(joined: Float[Tensor, "B Q hdv"], heads: int) -> Float[Tensor, "B Q h dv"]:
    """The outputs of all heads side by side, split."""
    return joined.view(*joined.shape[:2], heads, -1)


@contextmanager
def mean_ablated(
    model: Translator, means: Mapping[HeadOutput, Float[Tensor, " dv"]]
) -> Iterator[None]:
    """Inside the with-block, the outputs of heads at these places are replaced by their means, also while decoding.

    Decode with ``plain=True``: the packed network has no hooks.
    """
    network, sites = check_supported(model), attentions(model)
    ids: dict[str, Tensor] = {}

    def remember(stack: str) -> Callable[..., None]:
        return lambda _, inputs, __: ids.__setitem__(stack, inputs[0])

    def edit(place: HeadOutput, mean: Tensor) -> Callable[..., Tensor]:
        stack = "encoder" if place.site == "encoder" else "decoder"

        def replace(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
            heads = sites[place.site][place.layer].heads
            output = by_head(inputs[0], heads).clone()
            at: Bool[Tensor, "B Q"] | slice = slice(None)
            if place.token is not None:
                at = ids[stack].reshape(output.shape[:2]) == place.token
            output[:, :, place.head][at] = mean.to(output.dtype)
            return output.reshape(inputs[0].shape)

        return replace

    # Encoder and decoder may share one embedding; either calls it right before its own layers.
    handles = [network.decoder.embedding.register_forward_hook(remember("decoder"))]
    handles.append(network.encoder.embedding.register_forward_hook(remember("encoder")))
    for place, mean in means.items():
        module = sites[place.site][place.layer].output
        handles.append(module.register_forward_pre_hook(edit(place, mean)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------------------------------
# What a head is worth


class Change(NamedTuple):
    """The change of a score by an ablation, with a 95% bootstrap interval over sentences."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


@dataclass(frozen=True)
class HeadEffect:
    """One head: what it does, and what is lost without it."""

    head: Head
    behaviour: Behaviour
    bleu: Change
    log_probability: Change
    """mean change per token of the reference"""
    correct: Change | None
    """percentage points of correct translations among those tested, if a test was given"""

    @property
    def changes(self) -> list[Change]:
        """Of every score that was measured."""
        return [self.bleu, self.log_probability, *([self.correct] if self.correct else [])]


@dataclass(frozen=True)
class HeadTable:
    """The effect of every head."""

    effects: list[HeadEffect]
    bleu: float
    """with all heads"""
    sentences: int
    correct: tuple[int, int] | None = None
    """with all heads: the number of correct translations and of those tested, if a test was given"""
    tested: str = "translations"
    """what the test is about, such as pronouns"""

    def to_json(self) -> dict[str, Any]:
        return {
            "bleu": self.bleu,
            "sentences": self.sentences,
            "correct": self.correct and list(self.correct),
            "tested": self.tested if self.correct else None,
            "heads": [
                {
                    "head": str(effect.head),
                    "behaviour": effect.behaviour._asdict(),
                    "bleu": list(effect.bleu),
                    "log_probability": list(effect.log_probability),
                    "correct": None if effect.correct is None else list(effect.correct),
                }
                for effect in self.effects
            ],
        }

    @property
    def ranked(self) -> list[HeadEffect]:
        """Effects on the log-probability of the reference, largest loss first; BLEU does not change with every head."""
        return sorted(self.effects, key=lambda effect: effect.log_probability.value)

    @property
    def title(self) -> str:
        scores = f"BLEU {self.bleu:.1f}"
        if self.correct:
            correct, tested = self.correct
            scores += f" and {correct} of {tested} {self.tested} correct"
        return f"Without each head: {self.sentences} sentences, {scores} with all"

    @property
    def columns(self) -> list[str]:
        correct = [f"correct {self.tested}, points"] if self.correct else []
        return ["what it does", "BLEU", "log-probability", *correct]

    def __str__(self) -> str:
        """A table for terminals, the most important head first."""
        rows = [
            [str(effect.head), str(effect.behaviour), *map(str, effect.changes)]
            for effect in self.ranked
        ]
        table = text_table([["head", *self.columns], *rows])
        return f"{self.title}\n{HEAD_NAMES}\n\n{table}"

    def _repr_html_(self) -> str:
        """A table for notebooks: one row for each head."""
        changes = [effect.changes for effect in self.effects]
        strengths = [
            scaled([change.value for change in column]) for column in zip(*changes, strict=True)
        ]
        cells = [
            [Cell(str(effect.behaviour), 0.0)]
            + [
                Cell(str(change), column[row])
                for change, column in zip(changes[row], strengths, strict=True)
            ]
            for row, effect in enumerate(self.effects)
        ]
        names = [str(effect.head) for effect in self.effects]
        return heat_table(self.title, names, self.columns, cells)


class AblationOptions(TypedDict, total=False):
    """What ``ablate_heads`` measures besides BLEU and the probability of the reference, and for which heads."""

    correct: Correct | None
    """a test of each translation, such as whether its pronoun is right"""
    tested: str
    """what ``correct`` is about, such as pronouns"""
    links: Links | None
    """pairs of positions that show whether a head does coreference"""
    heads: Sequence[Head] | None
    """the heads to ablate; all by default"""


def ablate_heads(
    model: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    progress: Callable[[int, int], object] | None = None,
    **options: Unpack[AblationOptions],
) -> HeadTable:
    """What each head is worth on these sentences: all heads by default, each ablated by itself.

    progress: called with the number of heads done and that of all. Translations are greedy.
    """
    ablation = HeadAblation(model, sources, references, **options)
    effects = []
    for head in ablation.heads:
        effects.append(ablation.effect(head))
        if progress is not None:
            progress(len(effects), len(ablation.heads))
    return ablation.table(effects)


class HeadAblation:
    """The steps of ``ablate_heads``, for a caller that has other work between two heads."""

    def __init__(
        self,
        model: Translator,
        sources: Sequence[str],
        references: Sequence[str],
        **options: Unpack[AblationOptions],
    ) -> None:
        if len(sources) != len(references) or not sources:
            raise RegardError(
                f"{len(sources)} sources and {len(references)} references: expected equal numbers, at least one"
            )
        self.model, self.sources, self.references = model, sources, references
        self.correct, self.tested = options.get("correct"), options.get("tested", "translations")
        heads = options.get("heads")
        self.heads = all_heads(model) if heads is None else heads
        self.forced = [force(model, *pair) for pair in zip(sources, references, strict=True)]
        self.means = mean_outputs(model, [HeadOutput(*head) for head in self.heads], self.forced)
        self.behaviours = describe_heads(model, self.forced, options.get("links"))
        self.whole = self._measure()

    def effect(self, head: Head) -> HeadEffect:
        """What is lost without this head."""
        place, baseline = HeadOutput(*head), self.whole
        with mean_ablated(self.model, {place: self.means[place]}):
            ablated = self._measure()
        return HeadEffect(
            head,
            self.behaviours[head],
            _change(ablated.bleu, baseline.bleu, bleu_of),
            _change(ablated.log_probabilities, baseline.log_probabilities, _ratio),
            None
            if ablated.correct is None or baseline.correct is None
            else _change(ablated.correct, baseline.correct, lambda sums: 100 * _ratio(sums)),
        )

    def table(self, effects: list[HeadEffect]) -> HeadTable:
        correct = None
        if self.whole.correct is not None:
            correct_count, tested = map(int, self.whole.correct.sum(0))
            correct = correct_count, tested
        bleu = bleu_of(self.whole.bleu.sum(0))
        return HeadTable(effects, bleu, len(self.sources), correct, self.tested)

    def _measure(self) -> Measured:
        return _measure(self.model, self.sources, self.references, self.forced, self.correct)


def all_heads(model: Translator) -> list[Head]:
    return [
        Head(site, layer, head)
        for site, modules in attentions(model).items()
        for layer, module in enumerate(modules)
        for head in range(module.heads)
    ]


class Measured(NamedTuple):
    """[sentence, count] for each score; a score is a function of the summed counts."""

    bleu: Doubles
    log_probabilities: Doubles
    correct: Doubles | None


@torch.inference_mode()
def _measure(
    model: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    forced: Sequence[ForcedTranslation],
    correct: Correct | None,
) -> Measured:
    translations = [
        nbest[0].translation.text if nbest else ""
        for nbest in model.generate(sources, plain=True, beam=1)
    ]
    logs = token_log_probabilities(model, forced)
    correct_counts = None
    if correct is not None:
        verdicts = [correct(i, text) for i, text in enumerate(translations)]
        correct_counts = np.array(
            [[verdict or 0.0, verdict is not None] for verdict in verdicts], dtype=float
        )
    return Measured(
        bleu_counts(translations, references),
        np.array(
            [[float(log_probabilities.sum()), len(log_probabilities)] for log_probabilities in logs]
        ),
        correct_counts,
    )


def bleu_counts(translations: Sequence[str], references: Sequence[str]) -> Doubles:
    """[sentence, count]: sacreBLEU's lengths, matches and totals, which add up to those of the corpus."""
    from sacrebleu.metrics.bleu import BLEU

    scorer = BLEU(effective_order=True)
    scores = [
        scorer.sentence_score(*pair)
        for pair in zip(translations, [[reference] for reference in references], strict=True)
    ]
    return np.array(
        [[score.sys_len, score.ref_len, *score.counts, *score.totals] for score in scores], float
    )


def bleu_of(sums: Doubles) -> float:
    from sacrebleu.metrics.bleu import BLEU

    orders = (len(sums) - 2) // 2
    system, reference, *counts = map(int, sums.tolist())
    return float(BLEU.compute_bleu(counts[:orders], counts[orders:], system, reference).score)


def _ratio(sums: Doubles) -> float:
    return float(sums[0] / max(sums[1], 1))


def _change(without: Doubles, baseline: Doubles, statistic: Callable[[Doubles], float]) -> Change:
    ablated, unablated = resample([without, baseline], statistic)
    low, high = np.percentile(ablated - unablated, [2.5, 97.5]).tolist()
    return Change(statistic(without.sum(0)) - statistic(baseline.sum(0)), low, high)


# ---------------------------------------------------------------------------------------------
# What a head does


class Behaviour(NamedTuple):
    """What a head's attention was measured to do."""

    name: str
    """previous token, next token, same token, first token, same position, end of sentence, punctuation, rare
    token, coreference, or mixed"""
    share: float
    """the mean share of its attention that goes there"""
    shares: dict[str, float]
    """of every behaviour"""

    def __str__(self) -> str:
        return f"{self.name} {self.share:.0%}"


@torch.inference_mode()
def describe_heads(
    model: Translator, forced: Sequence[ForcedTranslation], links: Links | None = None
) -> dict[Head, Behaviour]:
    """What each head attends to, averaged over all queries of all sentences.

    A head is named after the behaviour with the largest share if that is at least ``CLEAR``, else it is mixed. Rare is
    the token of the source that these sentences have least often.
    """
    check_supported(model)
    frequency = Counter(token.id for translation in forced for token in translation.source)
    shares: dict[tuple[AttentionSite, str], list[Floats]] = {}
    for number, translation in enumerate(forced):
        weights = observe(
            model, translation.request, [token.id for token in translation.inputs]
        ).weights
        for site, array in weights.items():
            if array.shape[3] != len(
                translation.source if site != "decoder" else translation.inputs
            ):
                continue  # keys that are not tokens (Linformer)
            for name, cells in _cells(
                site, translation, frequency, None if links is None else links[number]
            ).items():
                rows, columns = zip(*cells, strict=True) if cells else ((), ())
                if rows:
                    # each query counts once, however many of its keys belong to the behaviour
                    total = array[:, :, rows, columns].sum(-1) / len(set(rows))
                    shares.setdefault((site, name), []).append(total)
    behaviours: dict[Head, Behaviour] = {}
    for site, modules in attentions(model).items():
        means = {
            name: np.mean(site_shares, axis=0)
            for (share_site, name), site_shares in shares.items()
            if share_site == site
        }
        for layer, module in enumerate(modules):
            for head in range(module.heads):
                values = {name: float(mean[layer, head]) for name, mean in means.items()}
                best = max(values, key=values.__getitem__, default="mixed")
                share = values.get(best, 0.0)
                name = best if share >= CLEAR else "mixed"
                behaviours[Head(site, layer, head)] = Behaviour(name, share, values)
    return behaviours


def _cells(
    site: AttentionSite,
    translation: ForcedTranslation,
    frequency: Counter[int],
    links: Mapping[AttentionSite, Sequence[tuple[int, int]]] | None,
) -> dict[str, list[tuple[int, int]]]:
    """The query and key positions of each behaviour."""
    queries = translation.source if site == "encoder" else translation.inputs
    keys = translation.inputs if site == "decoder" else translation.source
    size, width = len(queries), len(keys)
    end = [j for j, token in enumerate(keys) if token.id == EOS]
    ordinary = [j for j, token in enumerate(keys) if token.id not in (BOS, EOS)]
    punctuation = [j for j, token in enumerate(keys) if is_punctuation(token)]
    cells = {"end of sentence": [(i, j) for i in range(size) for j in end]}
    cells["punctuation"] = [(i, j) for i in range(size) for j in punctuation]
    if site == "cross_attention":
        diagonal = [(i, round(i * (width - 1) / max(1, size - 1))) for i in range(size)]
        cells["same position"] = diagonal
    else:
        cells["previous token"] = [(i, i - 1) for i in range(1, size)]
        cells["same token"] = [(i, i) for i in range(size)]
    if site == "encoder":
        cells["next token"] = [(i, i + 1) for i in range(size - 1)]
    if site == "decoder":
        cells["first token"] = [(i, 0) for i in range(1, size)]
    elif ordinary:
        rare = min(ordinary, key=lambda j: frequency[keys[j].id])
        cells["rare token"] = [(i, rare) for i in range(size)]
    if links:
        cells["coreference"] = list(links.get(site, ()))
    return cells
