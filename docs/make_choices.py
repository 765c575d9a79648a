"""Writes docs/choices.md: every name a recipe may choose, one row each.

    python docs/make_choices.py

Names come from ``regard.recipe.choices``, what a key means from the sections of a recipe, what a name is from the first
line of its class. Formula, place and cost stand here. A test fails when the file is not what this script writes.
"""

# ruff: noqa: E501 (tables)

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

from regard import recipe as recipes
from regard.nn.architectures import ARCHITECTURES
from regard.nn.attention import SCORES, WEIGHTINGS
from regard.nn.feed_forward import ACTIVATIONS
from regard.nn.layers import RESIDUALS
from regard.nn.loss import SMOOTHINGS
from regard.nn.norms import NORMS
from regard.nn.positions import POSITIONS, AttentionPosition, NoPosition, PositionSpec
from regard.nn.sparse_attention import PATTERNS
from regard.tasks import TASKS
from regard.training.optimizers import OPTIMIZERS, SCHEDULES

FILE = Path(__file__).parent / "choices.md"
HEAD = """# Choices

Every name that a recipe may choose; change one word in a recipe, or say it on the command line:

    regard train multi30k --set model.position=rotary

MultiwordToken by `python docs/make_choices.py`; what each part does, with shapes, is in [parts.md](parts.md). T is the length of
a text, d the width, d_k and d_v the widths of a head, h the heads. Costs are of one layer and one text, beyond the default's
where that is said.
"""


class Fact(NamedTuple):
    formula: str
    where: str
    cost: str
    what: str = ""
    """where no class tells it"""


class BeamSelection(NamedTuple):
    keys: tuple[str, ...]
    names: Any
    """the Literal"""
    classes: Mapping[Any, Any]
    facts: dict[str, Fact]


EVERYWHERE = "encoder, decoder, memory; cached"
BOTH = "encoder and decoder self-attention; cached"
LAYERS = "every sub-layer"

CHOICES = [
    BeamSelection(
        ("model.attention.score",),
        recipes.Score,
        SCORES,
        {
            "scaled": Fact("q·k / √d_k", EVERYWHERE, "T² d_k h; fused kernel"),
            "unscaled": Fact("q·k", EVERYWHERE, "as scaled"),
            "additive": Fact("v·tanh(q + k + b)", EVERYWHERE, "T² d_k h, and as much memory: no kernel"),
        },
    ),
    BeamSelection(
        ("model.attention.weighting",),
        recipes.Weighting,
        WEIGHTINGS,
        {
            "softmax": Fact("exp(e_ij) / Σ_j exp(e_ij)", EVERYWHERE, "T² h; fused with the scaled score"),
            "relu": Fact("max(0, e_ij) / n_i", EVERYWHERE, "T² h time and memory: no kernel"),
        },
    ),
    BeamSelection(
        ("model.attention.encoder", "model.attention.decoder", "model.attention.cross_attention"),
        recipes.Pattern,
        PATTERNS,
        {
            "full": Fact("all j (decoder: j ≤ i)", "", "T² d"),
            "window": Fact("|i - j| ≤ reach", "", "T · reach · d"),
            "linformer": Fact("softmax(Q (E K)ᵀ / √d_k) F V", "", "T · rows · d"),
            "bigbird": Fact("own block, its neighbours, global and random blocks", "", "T · block · (3 + global + random) · d"),
        },
    ),
    BeamSelection(
        ("model.attention.key_value_heads",),
        None,
        {},
        {
            "null": Fact("h heads of keys and values", EVERYWHERE, "cache: T h (d_k + d_v)", "every query head has its own"),
            "g": Fact("head i reads keys and values ⌊i g / h⌋", EVERYWHERE, "cache: T g (d_k + d_v)", "h / g query heads share one (Ainslie et al. 2023); 1: all share one (Shazeer 2019)"),
        },
    ),
    BeamSelection(
        ("model.position",),
        recipes.Position,
        POSITIONS,
        {
            "none": Fact("x", "nowhere", "nothing"),
            "index": Fact("x + pos", "embeddings; cached", "T d"),
            "sinusoidal": Fact("x + PE(pos)", "embeddings; cached", "T d"),
            "learned": Fact("x + P[pos]", "embeddings; cached; to max_length", "T d, max_length · d weights"),
            "rotary": Fact("(R_i q)·(R_j k) = q·R_(j-i) k", BOTH, "T d"),
            "relative": Fact("q_i·(k_j + a_clip(j-i)), Σ w_ij (v_j + b_clip(j-i))", BOTH, "T² h time and memory: no kernel"),
            "tree": Fact("x + tanh(U PE(pos) + V PE(depth)); a, b of the distance along the tree", "source embeddings, encoder; target: sinusoidal", "as relative, in the encoder"),
        },
    ),
    BeamSelection(
        ("model.norm",),
        recipes.Norm,
        NORMS,
        {
            "layer": Fact("(x - mean) / √(var + ε) · g + b", LAYERS, "T d"),
            "rms": Fact("x / √(mean(x²) + ε) · g", LAYERS, "T d, less than layer"),
            "batch": Fact("as layer, mean and var of each feature over the words of the batch", LAYERS, "T d"),
            "none": Fact("x", LAYERS, "nothing"),
        },
    ),
    BeamSelection(
        ("model.norm_order",),
        recipes.NormOrder,
        RESIDUALS,
        {
            "after": Fact("Norm(x + Sublayer(x))", LAYERS, "nothing more"),
            "before": Fact("x + Sublayer(Norm(x))", LAYERS, "one norm more for each stack"),
        },
    ),
    BeamSelection(
        ("model.activation",),
        recipes.Activation,
        ACTIVATIONS,
        {
            "relu": Fact("max(0, x W1 + b1) W2 + b2", "feed-forward", "T d d_ff", "the paper's"),
            "gelu": Fact("z Φ(z) in place of max(0, z)", "feed-forward", "as relu", "smooth (Hendrycks and Gimpel 2016)"),
            "swish": Fact("z / (1 + e^-z) in place of max(0, z)", "feed-forward", "as relu", "smooth (Ramachandran et al. 2017)"),
            "swiglu": Fact("(swish(x W1) ⊙ x V) W2", "feed-forward", "as relu: inner width 2/3 d_ff"),
        },
    ),
    BeamSelection(
        ("training.optimizer",),
        recipes.Optimizer,
        OPTIMIZERS,
        {
            "adam": Fact("w -= η m̂ / (√v̂ + ε)", "training", "2 numbers a weight", "moments with bias correction: the paper's"),
            "adamw": Fact("as adam, and w -= η λ w", "training", "2 numbers a weight", "weight decay apart from the moments"),
            "sgd": Fact("w -= η g", "training", "nothing", "the gradient alone"),
            "momentum": Fact("m = 0.9 m + g; w -= η m", "training", "1 number a weight", "the gradient with inertia"),
            "adagrad": Fact("s += g²; w -= η g / (√s + ε)", "training", "1 number a weight", "each weight its own, ever smaller rate"),
            "rmsprop": Fact("s = 0.99 s + 0.01 g²; w -= η g / (√s + ε)", "training", "1 number a weight", "the same with a memory that fades"),
        },
    ),
    BeamSelection(
        ("training.schedule",),
        recipes.Schedule,
        SCHEDULES,
        {
            "paper": Fact("d^-0.5 min(step^-0.5, step · warmup^-1.5)", "training", "nothing"),
            "constant": Fact("rate · min(1, step / warmup)", "training", "nothing", "a rise, then level"),
            "cosine": Fact("rate · (1 + cos(π done)) / 2 after the rise", "training", "nothing"),
        },
    ),
    BeamSelection(
        ("training.label_smoothing_over",),
        recipes.Smoothing,
        SMOOTHINGS,
        {
            "all": Fact("right: 1 - ε + ε/K, others: ε/K", "loss", "nothing", "ε over all K classes: torch's"),
            "others": Fact("right: 1 - ε, others: ε/(K - 1)", "loss", "nothing", "ε over the others: some textbooks'"),
        },
    ),
    BeamSelection(("model.architecture",), recipes.Architecture, ARCHITECTURES, {}),
    BeamSelection(("task",), recipes.Task, MODELS, {}),
]  # fmt: skip

CACHED = {"encoder": "", "decoder": "; cached", "memory": "; computed once for a source"}
PLACES: dict[str, Any] = {
    "encoder": recipes.EncoderPattern,
    "decoder": recipes.DecoderPattern,
    "memory": recipes.CrossAttentionPattern,
}


def document() -> str:
    return HEAD + "".join("\n" + "\n".join(section(choice)) + "\n" for choice in CHOICES)


def section(choice: BeamSelection) -> Iterator[str]:
    yield f"## {', '.join(f'`{key}`' for key in choice.keys)}"
    yield ""
    for key in choice.keys:
        yield f"{explain(key)}  "
    yield ""
    names = names_of(choice)
    if not choice.facts:
        yield "| name | what it is |"
        yield "|---|---|"
        yield from (f"| `{name}` | {told(choice.classes[name])} |" for name in names)
        return
    yield "| name | what it is | formula | where | cost |"
    yield "|---|---|---|---|---|"
    for name in names:
        fact = choice.facts.get(name, Fact("–", "–", "–"))
        where = places(name) if choice.classes is PATTERNS else fact.where
        what = fact.what or told(choice.classes[name])
        yield f"| `{name}` | {what} | {fact.formula} | {where} | {fact.cost} |".replace(
            "|i - j|", "\\|i - j\\|"
        )


def names_of(choice: BeamSelection, key: str | None = None) -> list[str]:
    """The names of a choice, each once; of a pattern, those that may stand at this key."""
    if choice.names is None:
        return list(choice.facts)
    place = None if key is None else key.rpartition(".")[2]
    names = PLACES[place] if choice.classes is PATTERNS and place else choice.names
    return list(dict.fromkeys(get_args(names)))


def explain(key: str) -> str:
    """A key as its section explains it, with its default."""
    section: Any = recipes.Recipe
    *outer, last = key.split(".")
    for name in outer:
        section = section.model_fields[name].annotation
    field = section.model_fields[last]
    default = (
        ""
        if field.is_required()
        else f" (default `{'null' if field.default is None else field.default}`)"
    )
    return f"`{last}`: {field.description or 'its kind'}{default}"


def told(kind: Any) -> str:
    """The first line of what a class or function says of itself."""
    if isinstance(kind, PositionSpec):
        parts = [
            part
            for part in (kind.embedding, kind.attention)
            if part not in (NoPosition, AttentionPosition)
        ]
        return " ".join(told(part) for part in parts or [NoPosition])
    speaker: type | Callable[..., Any] = kind.func if isinstance(kind, partial) else kind
    first, *_ = (speaker.__doc__ or "–").strip().split("\n")
    return first


def places(name: str) -> str:
    """Where a pattern may stand."""
    found = [place + CACHED[place] for place, names in PLACES.items() if name in get_args(names)]
    return ", ".join(found)


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
    print(FILE)
