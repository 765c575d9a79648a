"""What does not go together in a recipe, each with what would work. All of them are told at once."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, get_args

from regard.recipe.names import (
    Architecture,
    LabelMeasure,
    Likelihood,
    Measure,
    Overlap,
    Position,
    Task,
    TokenizerKind,
)

if TYPE_CHECKING:
    from regard.recipe.sections import Model, Recipe

_ON_EMBEDDINGS: tuple[Position, ...] = ("none", "index", "sinusoidal", "learned")
_SELF_ATTENTION = ("attention.encoder", "attention.decoder")
_FEEDFORWARD = ("feedforward", "activation", "feedforward_dropout")
UNUSED: dict[Architecture, tuple[str, ...]] = {
    "transformer": ("kernel",),
    "parallel": ("kernel",),
    "decoder": ("kernel", "encoder_layers", "attention.encoder", "attention.memory", "output_bias"),
    "recurrent": (*_SELF_ATTENTION, *_FEEDFORWARD, "kernel"),
    "convolution": (*_SELF_ATTENTION, *_FEEDFORWARD),
}
"""what an architecture has no use for; whoever sets it expects what will not happen"""


def refused(recipe: Recipe) -> list[str]:
    return [
        *_task(recipe),
        *_chance(recipe),
        *_tags(recipe),
        *_embeddings(recipe),
        *_positions(recipe),
        *_trees(recipe),
        *_attention(recipe.model),
        *_norms(recipe),
        *_architecture(recipe.model),
        *_parallel(recipe),
        *_packed(recipe),
    ]


MEASURES: dict[Task, tuple[Measure, ...]] = {
    "translate": get_args(Overlap),
    "tag": get_args(LabelMeasure),
    "classify": get_args(LabelMeasure),
    "mask": ("accuracy", "perplexity"),
    "continue": get_args(Likelihood),
}
"""what can be measured of each task"""

ENCODERS: tuple[Architecture, ...] = ("transformer",)
"""architectures with an encoder that can stand alone"""
DECODERS: tuple[Architecture, ...] = ("decoder",)
"""architectures with a decoder that can stand alone"""


def _task(recipe: Recipe) -> Iterator[str]:
    task, architecture = recipe.task, recipe.model.architecture
    unfit = [measure for measure in recipe.score.measures if measure not in MEASURES[task]]
    if unfit:
        allowed = ", ".join(MEASURES[task])
        yield f"score.measures: {', '.join(unfit)} cannot be had of task {task}; allowed: {allowed}"
    if task in ("tag", "classify", "mask") and architecture not in ENCODERS:
        yield f"task {task} needs model.architecture: {' or '.join(ENCODERS)}, not {architecture}"
    if task == "continue" and architecture not in DECODERS:
        yield f"task continue needs model.architecture: {' or '.join(DECODERS)}, not {architecture}"
    if architecture in DECODERS and not recipe.tokenizer.shared:
        yield f"model.architecture: {architecture} reads both sides alike and needs tokenizer.shared: true"
    yield from _two_kinds(recipe)
    if recipe.labelled and recipe.tokenizer.shared:
        yield f"task {task} has labels as its target and needs tokenizer.shared: false"
    if task == "mask" and not recipe.tokenizer.shared:
        yield "task mask has one side only and needs tokenizer.shared: true"
    if task in ("mask", "continue") and recipe.training.choose_by == "score":
        yield f"task {task} is validated by its loss: training.choose_by: loss"
    if recipe.data.clean.cut and task == "tag":
        yield "data.clean.cut: true would leave words without a tag; task tag needs cut: false"
    yield from _texts(recipe)


def _two_kinds(recipe: Recipe) -> Iterator[str]:
    """What a target that is cut in another way than its source asks for."""
    kind = recipe.tokenizer.target_kind
    if kind and recipe.tokenizer.shared:
        yield (
            f"tokenizer.target_kind {kind} with tokenizer.shared: true: two kinds are two "
            "vocabularies; leave out one of the two"
        )
    if kind and recipe.labelled:
        yield f"tokenizer.target_kind: task {recipe.task} has labels as its target, each an entry as it stands"
    if kind == "marian":
        yield "tokenizer.target_kind marian: such a tokenizer comes with an imported model, for both sides"


CAN_SAMPLE: tuple[TokenizerKind, ...] = ("unigram", "bpe")
"""tokenizers that know more than one way to cut a text"""


def _chance(recipe: Recipe) -> Iterator[str]:
    """What is drawn at random while it learns."""
    training, task, tokenizer = recipe.training, recipe.task, recipe.tokenizer
    whole = task == "translate" and recipe.model.architecture != "parallel"
    if training.word_dropout and not (recipe.labelled or whole):
        yield (
            "training.word_dropout is for the tasks tag, classify and translate (but not for "
            "architecture: parallel); here it must be 0"
        )
    if training.target_word_dropout and not whole:
        yield (
            "training.target_word_dropout is for task translate (but not for architecture: parallel); "
            "here it must be 0"
        )
    if training.sampling and tokenizer.kind not in CAN_SAMPLE:
        yield (
            f"training.sampling: tokenizer.kind {tokenizer.kind} knows one way only to cut a text; "
            f"allowed: {', '.join(CAN_SAMPLE)}"
        )
    if training.sampling and tokenizer.target_kind:
        yield "training.sampling cuts both sides in one way: leave out tokenizer.target_kind"
    if training.sampling and task in ("mask", "continue"):
        yield f"training.sampling is for the tasks translate, tag and classify, not for {task}"
    if training.sampling and recipe.model.position == "tree":
        yield "training.sampling cuts across the words of a tree: model.position must not be tree"
    if training.rdrop and (task == "mask" or recipe.model.architecture == "parallel"):
        yield (
            "training.rdrop compares two answers to one question; task mask and architecture: parallel "
            "ask another one each time, so here it must be 0"
        )
    model = recipe.model
    dropouts = (model.dropout, model.attention_dropout, model.feedforward_dropout)
    words = (training.word_dropout, training.target_word_dropout)
    if training.rdrop and not any((*dropouts, *words)):
        yield "training.rdrop without any dropout compares a pass with itself: give model.dropout"


def _texts(recipe: Recipe) -> Iterator[str]:
    """Whether the data are of the kind that the task needs."""
    alone = recipe.task in ("mask", "continue")
    for name, texts in recipe.data.texts.items():
        if alone and texts.text is None:
            yield f"data.{name}: task {recipe.task} needs text: file(s) without a target"
        if not alone and texts.text is not None:
            yield f"data.{name}: task {recipe.task} needs a target for each text: source and target, or pairs"
        if texts.conllu is not None and recipe.task != "tag":
            yield f"data.{name}.conllu is for task tag, not for {recipe.task}"


def _tags(recipe: Recipe) -> Iterator[str]:
    """What stands before sources must have been learned, and there is no source where there is no translation."""
    data = recipe.data
    for name, texts in data.texts.items():
        keys = [key for key in ("to", "tag") if getattr(texts, key)]
        if keys and recipe.task != "translate":
            yield f"data.{name}.{keys[0]} is for task translate, not for {recipe.task}"
        if keys and recipe.model.position == "tree":
            yield f"data.{name}.{keys[0]}: model.position: tree has no place for it; leave it out"
        if data.targets and not texts.to:
            yield f"data.{name}.to is missing: one of {', '.join(data.targets)}"
        unknown = sorted({tag for tags in texts.tags for tag in tags} - {*data.tags})
        if unknown:
            learned = ", ".join(f"<{tag}>" for tag in data.tags) or "none"
            yield f"data.{name}: <{unknown[0]}> does not occur in data.train; what occurs there: {learned}"


def _embeddings(recipe: Recipe) -> Iterator[str]:
    if recipe.model.output_bias and recipe.task != "translate":
        yield f"model.output_bias: true is for task: translate, not {recipe.task}; leave it out"
    if recipe.model.tie_embeddings and not recipe.tokenizer.shared:
        yield "model.tie_embeddings: true needs tokenizer.shared: true"


def _positions(recipe: Recipe) -> Iterator[str]:
    model, longest = recipe.model, recipe.data.clean.max_tokens + 1  # the text and its END or START
    counted = "data.clean.max_tokens and one mark"
    if model.position in ("sinusoidal", "tree") and model.width % 2:
        yield f"model.position: {model.position}: waves come in twos: model.width {model.width} must be even"
    if model.position == "rotary" and model.key_width % 2:
        yield f"model.position: rotary turns features in twos: model.key_width {model.key_width} must be even"
    if model.architecture == "decoder" and recipe.task == "translate":
        longest *= 2  # source and target stand in one row
        counted += ", of source and target"
    if model.longest is not None and model.longest < longest:
        yield (
            f"model.max_length {model.max_length} is shorter than the data may be: "
            f"{longest} ({counted})"
        )


def _trees(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    for name, texts in recipe.data.texts.items():
        if model.position == "tree" and texts.parses is None:
            yield f"model.position: tree needs data.{name}.parses, a CoNLL-U file with the tree of each source"
        if model.position != "tree" and texts.parses is not None:
            yield f"data.{name}.parses is for model.position: tree, not {model.position}: leave it out"
    if model.position == "tree" and model.attention.encoder != "full":
        yield (
            "model.position: tree measures all with all: model.attention.encoder must be full, "
            f"not {model.attention.encoder}"
        )
    if model.position == "tree" and recipe.task != "translate":
        yield f"model.position: tree is for task: translate, not {recipe.task}"
    if model.position == "tree" and model.architecture != "transformer":
        yield f"model.position: tree is for architecture: transformer, not {model.architecture}"


def _attention(model: Model) -> Iterator[str]:
    attention = model.attention
    if attention.key_value_heads and model.heads % attention.key_value_heads:
        allowed = [str(n) for n in range(1, model.heads + 1) if model.heads % n == 0]
        yield (
            f"model.attention.key_value_heads {attention.key_value_heads} does not divide "
            f"{model.heads} heads; allowed: {', '.join(allowed)}"
        )

    if attention.encoder == "linformer" and model.position in ("rotary", "relative"):
        yield (
            f"model.position: {model.position} needs the distance of two words, but linformer mixes the words "
            "before they are compared: take position: sinusoidal or learned, or attention.encoder: window or bigbird"
        )


PARTS = 4
"""in which a packed batch is worked on where it cannot be packed: each has less padding than the whole"""


def _norms(recipe: Recipe) -> Iterator[str]:
    room, text = recipe.training.tokens_per_batch, recipe.data.clean.max_tokens + 1
    least = 2 * text * (PARTS if recipe.training.batches == "packed" else 1)
    if recipe.model.norm == "batch" and room < least:
        yield (
            f"model.norm: batch needs batches of several texts: training.tokens_per_batch {room} must be at "
            f"least {least} for texts of {text} tokens; or take norm: layer"
        )


def _architecture(model: Model) -> Iterator[str]:
    kind = model.architecture
    follow_from = model.model_dump(include={"preset", "dropout", "tie_embeddings"})
    plain = type(model).model_validate(follow_from)
    for key in UNUSED[kind]:
        given, usual = attrgetter(key)(model), attrgetter(key)(plain)
        if given != usual:
            yield f"model.{key}: {given} is of no use to architecture: {kind}; leave it out"
    if kind == "recurrent" and model.position != "none":
        yield (
            f"model.position: {model.position} is of no use to architecture: recurrent, which reads the "
            "words in their order; leave it out"
        )
    if kind == "recurrent" and model.width % 2:
        yield (
            "model.architecture: recurrent reads in two directions, each with half the features: "
            f"model.width {model.width} must be even"
        )
    if kind == "convolution" and model.position not in _ON_EMBEDDINGS:
        yield (
            f"model.position: {model.position} acts inside self-attention, which architecture: convolution "
            f"has not; allowed: {', '.join(_ON_EMBEDDINGS)}"
        )


def _parallel(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    places = recipe.data.clean.max_tokens + model.parallel.spare
    cuts = model.architecture == "parallel" and model.parallel.length == "cut"
    if cuts and model.position == "learned" and model.max_length < places:
        yield (
            f"model.max_length {model.max_length} is shorter than the places of length: cut: {places} "
            "(data.clean.max_tokens and model.parallel.spare)"
        )


def _packed(recipe: Recipe) -> Iterator[str]:
    if recipe.training.batches == "packed" and recipe.task != "translate":
        yield f"training.batches: packed is for task: translate, not {recipe.task}"
