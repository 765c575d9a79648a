"""What a recipe may contain: the base class of its sections, registered names, and what must not be combined.

Each problem is one line that says what to do. All problems are reported at once.

The general rule comes first: **an option without effect is an error** (``_unused_options``). Which options a component
reads is stated where the component is registered. The other functions check values that contradict each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from regard.recipe.registry import CHECKED_NAMES, LOCATIONS, Choice, allowed_names, find_registry

if TYPE_CHECKING:
    from regard.recipe.schema import ModelConfig, Recipe

PACKED_CHUNKS = 4
"""The number of padded chunks that a packed batch is split into where it cannot be packed."""


class Section(BaseModel):
    """A section of a recipe. Unknown keys are refused; the docstring of a field is its description."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
    )


def registered(key: str) -> AfterValidator:
    """A validator that accepts the names registered for a recipe key."""

    def check(name: str) -> str:
        if (key, name) in CHECKED_NAMES:
            return name
        allowed = allowed_names(key)
        if name not in allowed:
            *most, last = [f"'{choice}'" for choice in allowed]
            expected = f"{', '.join(most)} or {last}" if most else last
            raise PydanticCustomError(
                "choice", "Input should be {expected}", {"expected": expected}
            )
        return name

    return AfterValidator(check)


def find_problems(recipe: Recipe) -> list[str]:
    """All problems of a recipe whose sections are valid by themselves."""
    return [
        *_unused_options(recipe),
        *_task(recipe),
        *_unsupported_by_task(recipe),
        *_files(recipe),
        *_tags(recipe),
        *_mixing(recipe),
        *_bidirectional(recipe),
        *_tokenizer(recipe),
        *_regularization(recipe),
        *_distillation(recipe),
        *_fine_tuning(recipe),
        *_schedule(recipe),
        *_positions(recipe),
        *_context(recipe),
        *_trees(recipe),
        *_attention(recipe.model),
        *_batch_norm(recipe),
        *_architecture(recipe.model),
        *_activation_checkpointing(recipe),
    ]


def as_written(value: object) -> str:
    """A value as it is written in a recipe: null, true, [0.9, 0.98]."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_written(item)}" for key, item in value.items()) + "}"
    return str(value)


# ---------------------------------------------------------------------------------------------
# Options without effect


def selected_choices(recipe: Recipe) -> list[tuple[str, Choice[Any]]]:
    """The registered choices that a recipe selects, each with its key."""
    selected = []
    for key in LOCATIONS:
        value = attrgetter(key)(recipe)
        names = value if isinstance(value, tuple) else (value,)
        choices = find_registry(key).choices
        selected += [(key, choices[name]) for name in names]
    return selected


def model_choices(model: ModelConfig) -> Iterator[tuple[str, Choice[Any]]]:
    """The choices of a model section that its architecture uses, each with its key."""
    architecture = find_registry("model.architecture").choices[model.architecture]
    for key in LOCATIONS:
        section, _, name = key.partition(".")
        optional = key == "model.non_autoregressive.length" and key not in architecture.options
        if section == "model" and key not in architecture.ignores and not optional:
            yield key, find_registry(key).choices[attrgetter(name)(model)]


def _unused_options(recipe: Recipe) -> Iterator[str]:
    """Options that differ from their default although nothing reads them."""
    defaults = _defaults(recipe)
    selected = selected_choices(recipe)
    ignored = {
        option: f"{key}: {choice.name}" for key, choice in selected for option in choice.ignores
    }
    readers: dict[str, list[str]] = {}
    for key in LOCATIONS:
        site = key.rpartition(".")[2]
        for choice in find_registry(key).choices.values():
            for option in choice.options if not choice.sites or site in choice.sites else ():
                readers.setdefault(option, []).append(f"{key}: {choice.name}")
    # A choice reads its options only if its own key is in use.
    active_options: set[str] = set()
    for _ in range(2):
        active_options = {
            option
            for key, choice in selected
            if key not in ignored and (key not in readers or key in active_options)
            for option in choice.options
        }
    for option in dict.fromkeys([*readers, *ignored]):
        value, default = attrgetter(option)(recipe), attrgetter(option)(defaults)
        if option == "model.norm_order":  # other defaults depend on it
            default = type(recipe.model).model_fields["norm_order"].default
        if value == default:
            continue
        if option in ignored:
            yield f"{option}: {as_written(value)} has no effect with {ignored[option]}; remove it"
        elif option not in active_options:
            *others, last = dict.fromkeys(readers[option])
            requirement = f"{', '.join(others)} or {last}" if others else last
            yield f"{option}: {as_written(value)} has no effect; it only applies to {requirement}"
    yield from _switched_off(recipe, defaults, {*ignored})


def _switched_off(recipe: Recipe, defaults: Recipe, ignored: set[str]) -> Iterator[str]:
    """Options of features that are turned off by another option."""
    training, decoding, data = recipe.training, recipe.decoding, recipe.data
    tokenizes = not {"bleu", "bleu_lc", "ter"}.isdisjoint(recipe.evaluation.metrics)
    fine_tuning = ("fine-tuning (training.init_from)", training.init_from is not None)
    requirements = {
        "training.mix": fine_tuning,
        "training.freeze": fine_tuning,
        "training.extend_vocab": fine_tuning,
        "data.other_targets": fine_tuning,
        "training.subword_copies": (
            "training.subword_sampling or training.augment",
            training.copies > 0,
        ),
        "training.teacher_weight": ("training.teacher", training.teacher is not None),
        "training.label_smoothing_over": ("training.label_smoothing", training.label_smoothing > 0),
        "training.keep_checkpoints": ("training.average: best or last", training.average != "none"),
        **{
            f"decoding.{key}": (requirement, False)
            for key, requirement in decoding.unused_options.items()
        },
        "data.hold_out": ("a recipe without data.valid", data.valid is None),
        "evaluation.tokenize": ("the metrics bleu, bleu_lc and ter", tokenizes),
    }
    for option, (requirement, is_met) in requirements.items():
        value = attrgetter(option)(recipe)
        if not is_met and option not in ignored and value != attrgetter(option)(defaults):
            yield f"{option}: {as_written(value)} has no effect; it only applies to {requirement}"


def _defaults(recipe: Recipe) -> Recipe:
    """The recipe with the same choices and otherwise default values; it is not checked."""
    model = recipe.model
    determining_keys = ("preset", "architecture", "norm_order", "dropout")
    determining_values = {name: getattr(model, name) for name in determining_keys}
    default_model = type(model).model_validate(
        {**determining_values, "tie_embeddings": recipe.tokenizer.shared}
    )
    task = find_registry("task")[recipe.task].defaults
    training = type(recipe.training).model_validate(
        {"schedule": recipe.training.schedule, **task.get("training", {})}
    )
    data = type(recipe.data).model_validate({"train": recipe.data.train})
    return recipe.model_copy(
        update={
            "model": default_model,
            "training": training,
            "data": data,
            "tokenizer": type(recipe.tokenizer).model_validate(task.get("tokenizer", {})),
            "decoding": type(recipe.decoding)(),
            "evaluation": type(recipe.evaluation).model_validate(task.get("evaluation", {})),
        }
    )


# ---------------------------------------------------------------------------------------------
# Values that contradict each other


def _task(recipe: Recipe) -> Iterator[str]:
    task, architecture = find_registry("task")[recipe.task], recipe.model.architecture
    unsupported = [metric for metric in recipe.evaluation.metrics if metric not in task.metrics]
    if unsupported:
        yield (
            f"evaluation.metrics: {', '.join(unsupported)} cannot be computed for task {recipe.task}; "
            f"allowed: {', '.join(task.metrics)}"
        )
    if architecture not in task.architectures:
        allowed = " or ".join(task.architectures)
        yield f"task {recipe.task} needs model.architecture: {allowed}, not {architecture}"
    if task.has_labels and recipe.tokenizer.shared:
        yield f"task {recipe.task} has labels as targets, so it needs tokenizer.shared: false"
    if task.text_only and not recipe.tokenizer.shared:
        yield f"task {recipe.task} has no targets, so it needs tokenizer.shared: true"
    if task.text_only and recipe.training.best_checkpoint_metric == "score":
        yield f"task {recipe.task} is validated by its loss: set training.best_checkpoint_metric: loss"
    if architecture == "decoder_only" and not recipe.tokenizer.shared:
        yield "model.architecture: decoder_only has one vocabulary, so it needs tokenizer.shared: true"


def task_options(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The options in use that not every task supports: the name in ``Task.supports``, and the option as written."""
    data, training = recipe.data, recipe.training
    for name, files in data.splits.items():
        for key in ("conllu", "to", "tag"):
            if getattr(files, key) is not None:
                yield f"data.{key}", f"data.{name}.{key}"
    values = {
        **{
            f"training.{key}": getattr(training, key) for key in ("word_dropout", "rdrop", "simcut")
        },
        **{f"training.{key}": getattr(training, key) for key in ("target_word_dropout", "teacher")},
        "training.subword_sampling": training.subword_sampling,
        "training.augment": training.augment.enabled,
        "model.output_bias": recipe.model.output_bias,
        "data.bidirectional": data.bidirectional,
        "data.context": data.context,
        "data.clean.truncate": data.clean.truncate,
    }
    for key, value in values.items():
        if value:
            yield key, key if key == "training.augment" else f"{key}: {as_written(value)}"
    for choice, is_set in (
        ("model.position: tree", recipe.model.position == "tree"),
        ("training.batching: packed", training.batching == "packed"),
    ):
        if is_set:
            yield choice, choice


def _unsupported_by_task(recipe: Recipe) -> Iterator[str]:
    tasks = find_registry("task")
    task = tasks[recipe.task]
    ignored = {key for _, choice in selected_choices(recipe) for key in choice.ignores}
    for key, written in task_options(recipe):
        if key not in task.supports and key not in ignored:
            *most, last = [name for name in tasks if key in tasks[name].supports]
            supporting_tasks = f"{', '.join(most)} or {last}" if most else last
            reason = f", because {task.reasons[key]}" if key in task.reasons else ""
            yield f"{written} needs task: {supporting_tasks}, not {recipe.task}{reason}; remove it"


def _files(recipe: Recipe) -> Iterator[str]:
    """Whether the files are of the kind that the task needs."""
    task = find_registry("task")[recipe.task]
    for name, files in recipe.data.splits.items():
        if task.text_only and files.text is None:
            yield f"data.{name}: task {recipe.task} needs text, that is, file(s) without targets"
        if not task.text_only and files.text is not None:
            yield f"data.{name}: task {recipe.task} needs targets: set source and target, or pairs"


def _tags(recipe: Recipe) -> Iterator[str]:
    """Tags before sources must occur in the training data."""
    from regard.data.special_tokens import SPECIAL_TOKENS

    data = recipe.data
    for name, files in data.splits.items():
        keys = [key for key in ("to", "tag") if getattr(files, key)]
        if keys and recipe.model.position == "tree":
            yield f"data.{name}.{keys[0]}: model.position: tree does not support tags; remove it"
        if data.targets and not files.to:
            yield f"data.{name}.to is missing; allowed: {', '.join(data.targets)}"
        if reserved := {f"<{tag}>" for tag in files.tag or ()} & {*SPECIAL_TOKENS.values()}:
            yield f"data.{name}.tag: {min(reserved)} is a special token of the vocabulary; choose another name"
        unknown = sorted({tag for tags in files.tags for tag in tags} - {*data.tags})
        if unknown:
            known_tags = ", ".join(f"<{tag}>" for tag in data.tags) or "none"
            yield f"data.{name}: <{unknown[0]}> does not occur in data.train; tags that do: {known_tags}"


def _mixing(recipe: Recipe) -> Iterator[str]:
    """Only training files are mixed, and only by one rule."""
    for name, files in recipe.data.splits.items():
        key = "weights" if files.weights else "temperature"
        if name != "train" and files.mixed:
            yield f"data.{name}.{key}: only for data.train; all pairs of data.{name} are used once"
        elif files.mixed and recipe.training.mix:
            yield f"data.train.{key} cannot be combined with training.mix, which mixes new and old pairs"


def _bidirectional(recipe: Recipe) -> Iterator[str]:
    """Pairs can be swapped if both sides are plain text of one vocabulary."""
    data, key = recipe.data, "data.bidirectional: true"
    if not data.bidirectional:
        return
    if not recipe.tokenizer.shared:
        yield f"{key} needs tokenizer.shared: true, because both languages are source and target"
    for name, values in (("to", data.train.to), ("tag", data.train.tag)):
        if values:
            yield (
                f"{key} swaps pairs without a tag, so it cannot be combined with data.train.{name}; to train both "
                "directions with tags, list the files in both orders, each with its data.train.to"
            )
    if data.context or recipe.model.position == "tree":
        option = "data.context" if data.context else "model.position: tree"
        yield f"{key} cannot be combined with {option}: only sources have it"


def _tokenizer(recipe: Recipe) -> Iterator[str]:
    target_kind, task = recipe.tokenizer.target_kind, find_registry("task")[recipe.task]
    if target_kind and recipe.tokenizer.shared:
        yield f"tokenizer.target_kind: {target_kind} needs tokenizer.shared: false"
    if target_kind and task.has_labels:
        yield (
            f"tokenizer.target_kind: task {recipe.task} has labels as targets, so it has no target tokenizer; remove it"
        )
    if target_kind == "marian":
        yield "tokenizer.target_kind: marian comes with an imported model and applies to both sides; remove it"
    if recipe.model.tie_embeddings and not recipe.tokenizer.shared:
        yield "model.tie_embeddings: true needs tokenizer.shared: true"


def _regularization(recipe: Recipe) -> Iterator[str]:
    training, model, tokenizer = recipe.training, recipe.model, recipe.tokenizer
    mask_predict = model.architecture == "non_autoregressive"
    for key in ("word_dropout", "target_word_dropout"):
        if getattr(training, key) and mask_predict:
            yield f"training.{key} does not support architecture: non_autoregressive; set it to 0"
    if training.subword_sampling and tokenizer.kind not in ("unigram", "bpe"):
        yield f"training.subword_sampling needs tokenizer.kind: unigram or bpe, not {tokenizer.kind}"
    if training.subword_sampling and tokenizer.target_kind:
        yield "training.subword_sampling cannot be combined with tokenizer.target_kind; remove one of them"
    if training.subword_sampling and model.position == "tree":
        yield "training.subword_sampling cannot be combined with model.position: tree; remove one of them"
    if training.augment.enabled and model.position == "tree":
        yield "training.augment cannot be combined with model.position: tree; remove one of them"
    for key in ("rdrop", "simcut"):
        if getattr(training, key) and mask_predict:
            yield (
                f"training.{key} compares two passes over the same input, but architecture: non_autoregressive masks "
                "different tokens in each; set it to 0"
            )
    if training.rdrop and training.simcut:
        yield "training.rdrop and training.simcut both compare two passes; set one of them to 0"
    dropouts = (model.dropout, model.attention_dropout, model.activation_dropout)
    word_dropouts = (training.word_dropout, training.target_word_dropout)
    if training.rdrop and not any((*dropouts, *word_dropouts)):
        yield "training.rdrop needs dropout, because otherwise both passes are the same: set model.dropout"


def _distillation(recipe: Recipe) -> Iterator[str]:
    if recipe.training.teacher is None:
        return
    if recipe.model.architecture == "non_autoregressive":
        yield (
            "training.teacher needs an autoregressive model, not architecture: non_autoregressive; "
            "train on the translations of the teacher instead (regard distill)"
        )
    if recipe.model.position == "tree":
        yield "training.teacher cannot be combined with model.position: tree; remove one of them"
    if recipe.training.extend_vocab:
        yield "training.extend_vocab would change the vocabulary, which is that of training.teacher; set it to 0"


def _fine_tuning(recipe: Recipe) -> Iterator[str]:
    training, task = recipe.training, recipe.task
    has_labels = find_registry("task")[task].has_labels
    if training.mix and has_labels:
        yield f"training.mix: task {task} has labels, which the other run's data may not have; set it to 0"
    if training.extend_vocab and has_labels:
        yield f"training.extend_vocab: not supported for task {task}; set it to 0"
    if training.extend_vocab and recipe.tokenizer.kind == "marian":
        yield "training.extend_vocab: the tokenizer of an imported Marian model cannot be extended; set it to 0"
    if training.extend_vocab and "embeddings" in training.freeze:
        yield "training.freeze: embeddings would leave the entries of training.extend_vocab untrained; remove one"
    if len(training.freeze) > 1 and any(name.startswith("all-but-") for name in training.freeze):
        yield f"training.freeze: {', '.join(training.freeze)}: all-but-… must be the only group"
    if recipe.data.other_targets and not recipe.data.train.to:
        yield "data.other_targets needs data.train.to, the target language of the new data"


def _schedule(recipe: Recipe) -> Iterator[str]:
    training = recipe.training
    reads_warmup = find_registry("training.schedule").choices[training.schedule].options
    if "training.warmup" in reads_warmup and training.warmup > training.steps:
        fields, fields_set = type(training).model_fields, training.model_fields_set
        # The recipe of a run has every key, so there the default is not known from a given value.
        explicit = "warmup" in fields_set and fields_set != fields.keys()
        if explicit or training.warmup != fields["warmup"].default:
            yield (
                f"training.warmup: {training.warmup:,} is longer than training.steps: {training.steps:,}, so the "
                "learning rate would never reach its peak; set a smaller training.warmup, for example "
                f"{training.steps // 10}"
            )


def _positions(recipe: Recipe) -> Iterator[str]:
    model, longest = recipe.model, recipe.data.clean.max_tokens + 1  # the text and EOS or BOS
    counted = "data.clean.max_tokens and one special token"
    if model.position in ("sinusoidal", "tree") and model.d_model % 2:
        yield f"model.position: {model.position} needs an even model.d_model, not {model.d_model}"
    if model.position == "rotary" and model.d_k % 2:
        yield f"model.position: rotary rotates pairs of features and needs an even model.d_k, not {model.d_k}"
    if model.architecture == "decoder_only" and not recipe.text_only:
        longest *= 2  # source and target share one sequence
        counted += ", for source and target"
    limit = max_sequence_length(model)
    if limit is not None and limit < longest:
        yield (
            f"model.max_length: {limit} is shorter than the longest training text: {longest} ({counted})"
        )
    extra = recipe.data.clean.max_tokens + model.non_autoregressive.extra_positions
    eos = model.architecture == "non_autoregressive" and model.non_autoregressive.length == "eos"
    if eos and model.position == "learned" and model.max_length < extra:
        yield (
            f"model.max_length: {model.max_length} is shorter than the {extra} decoder positions of "
            "length: eos (data.clean.max_tokens and model.non_autoregressive.extra_positions)"
        )


def max_sequence_length(model: ModelConfig) -> int | None:
    """The longest sequence a model can read, special tokens included; None if there is no limit."""
    keys = ("position", "attention.encoder", "attention.cross_attention")
    bounded = (
        find_registry(f"model.{key}").choices[attrgetter(key)(model)].options for key in keys
    )
    return model.max_length if any("model.max_length" in options for options in bounded) else None


def _context(recipe: Recipe) -> Iterator[str]:
    if not recipe.data.context:
        return
    if recipe.model.position == "tree" or recipe.model.architecture == "decoder_only":
        yield "data.context cannot be combined with model.position: tree or model.architecture: decoder_only"


def _trees(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    for name, files in recipe.data.splits.items():
        if model.position == "tree" and files.parses is None:
            yield f"model.position: tree needs data.{name}.parses, a CoNLL-U file with the tree of each source"
        if model.position != "tree" and files.parses is not None:
            yield f"data.{name}.parses needs model.position: tree, not {model.position}; remove it"
    if model.position == "tree" and model.attention.encoder != "full":
        yield f"model.position: tree needs model.attention.encoder: full, not {model.attention.encoder}"
    if model.position == "tree" and model.architecture != "transformer":
        yield f"model.position: tree needs architecture: transformer, not {model.architecture}"


def _position_in_attention(model: ModelConfig) -> bool:
    """Whether self-attention encodes positions. Trees do, too, but ``_trees`` reports what they need."""
    positions = find_registry("model.position")
    return model.position != "tree" and positions[model.position].in_attention


def _attention(model: ModelConfig) -> Iterator[str]:
    attention = model.attention
    if attention.key_value_heads and model.heads % attention.key_value_heads:
        allowed = [str(n) for n in range(1, model.heads + 1) if model.heads % n == 0]
        yield (
            f"model.attention.key_value_heads: {attention.key_value_heads} does not divide "
            f"{model.heads} heads; allowed: {', '.join(allowed)}"
        )
    if attention.encoder == "linformer" and _position_in_attention(model):
        yield (
            f"model.position: {model.position} needs the distance between two tokens, which linformer does not keep; "
            "set position: sinusoidal or learned, or attention.encoder: window or bigbird"
        )


def _batch_norm(recipe: Recipe) -> Iterator[str]:
    tokens, longest = recipe.batch_tokens, recipe.data.clean.max_tokens + 1
    min_tokens = 2 * longest * (PACKED_CHUNKS if recipe.training.batching == "packed" else 1)
    if recipe.model.norm != "batch":
        return
    if recipe.training.tokens_per_batch == "auto":
        yield (
            "training.tokens_per_batch: auto may split a batch, and model.norm: batch computes statistics of the "
            "whole batch; set a number, or norm: layer"
        )
    elif tokens < min_tokens:
        yield (
            f"model.norm: batch needs several texts per batch: training.tokens_per_batch {tokens} must be at "
            f"least {min_tokens} for texts of {longest} tokens; or set norm: layer"
        )


def _architecture(model: ModelConfig) -> Iterator[str]:
    architecture = model.architecture
    if architecture == "lstm" and model.d_model % 2:
        yield f"model.architecture: lstm is bidirectional and needs an even model.d_model, not {model.d_model}"
    if architecture == "convolution" and _position_in_attention(model):
        positions = find_registry("model.position")
        allowed = ", ".join(name for name, spec in positions.items() if not spec.in_attention)
        yield (
            f"model.position: {model.position} is part of self-attention, which architecture: convolution "
            f"does not have; allowed: {allowed}"
        )


def _activation_checkpointing(recipe: Recipe) -> Iterator[str]:
    if not recipe.training.activation_checkpointing:
        return
    if recipe.training.batching == "packed":
        yield (
            "training.activation_checkpointing: true needs batching: padded; packed batches are captured as one CUDA "
            "graph, or use kernels of their own"
        )
    if recipe.model.norm == "batch":
        yield (
            "training.activation_checkpointing: true would count every batch twice in the statistics of "
            "model.norm: batch; set norm: layer"
        )
