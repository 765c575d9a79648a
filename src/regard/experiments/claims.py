"""Common claims about the Transformer, each with an experiment that can confirm or contradict it.

A claim is one entry of ``CLAIMS``. Its experiment changes the recipe of the lab (``claim_verdicts.py``), a small
Transformer on the built-in corpus, and its expectations say which variant should be better. Some claims also have
evidence from a benchmark of the repository, whose committed numbers are judged by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Relation = Literal["better than", "worse than", "equal to", "no worse than"]
ClaimMetric = Literal["loss", "BLEU"]
"""validation loss (mean negative log-likelihood per token, without label smoothing), or BLEU on the validation data"""
MARGINS: dict[ClaimMetric, float] = {"loss": math.log(1.1), "BLEU": 1.0}
"""differences up to this size count as equal; those of losses are differences of their logarithms: 10%"""


@dataclass(frozen=True)
class Expectation:
    """What a claim says about two variants."""

    system: str
    relation: Relation
    baseline: str
    metric: ClaimMetric = "loss"

    @property
    def margin(self) -> float:
        """For "equal to" and "no worse than": the largest difference that does not count."""
        return MARGINS[self.metric]


@dataclass(frozen=True)
class AblationScores:
    """Scores of benchmarks/ablation.json: multi30k, English to German, three seeds on an H200."""

    variants: Mapping[str, str]
    """label -> name of the row of the benchmark"""
    expectations: tuple[Expectation, ...]


@dataclass(frozen=True)
class Claim:
    """One claim and how it is checked."""

    name: str
    question: str
    told: str
    """the claim as it is usually told"""
    source: str
    variants: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """label -> changes of the recipe of the lab; empty: the recipe itself"""
    expectations: tuple[Expectation, ...] = ()
    ablation: AblationScores | None = None
    measurement: str | None = None
    """name of a function of ``lab.MEASUREMENTS`` that judges the numbers of a benchmark"""
    see: str = ""
    """where the topic is explained, relative to docs/lab"""


VASWANI = "Vaswani et al. 2017, Attention Is All You Need"
POST = "model.norm_order=post"
FEW_PAIRS = ("data.train.source=few.en", "data.train.target=few.de")
"""the first pairs of the training data, see ``lab.FEW``"""

_CLAIMS = (
    Claim(
        "scale-by-sqrt-dk",
        "Why divide by sqrt(d_k)?",
        "Dot products grow with d_k and push the softmax into regions with small gradients. Dividing by sqrt(d_k) "
        "prevents that; without it, training is worse.",
        f"{VASWANI}, section 3.2.1",
        {"scaled": (), "not scaled": ("model.attention.score=dot_product",)},
        (Expectation("not scaled", "worse than", "scaled"),),
        see="../parts.md",
    ),
    Claim(
        "several-heads",
        "Why several heads?",
        "Several heads attend to different things at the same time. One head averages them and is worse.",
        f"{VASWANI}, section 3.2.2 and table 3 (A)",
        {"1 head": ("model.heads=1",), "4 heads": ()},
        (Expectation("4 heads", "better than", "1 head"),),
        see="../parts.md",
    ),
    Claim(
        "small-keys",
        "Does a small d_k hurt?",
        "Reducing the size of the keys hurts quality, because comparing queries and keys is not easy.",
        f"{VASWANI}, table 3 (B)",
        {"d_model / heads": (), "4": ("model.d_k=4",)},
        (Expectation("4", "worse than", "d_model / heads"),),
    ),
    Claim(
        "one-key-value-head",
        "Is one key-value head enough?",
        "Multi-query attention shares one head of keys and values between all query heads and loses little.",
        "Shazeer 2019, Fast Transformer Decoding",
        {"4": (), "1": ("model.attention.key_value_heads=1",)},
        (Expectation("1", "no worse than", "4"),),
        see="../parts.md",
    ),
    Claim(
        "softmax-weights",
        "Must attention weights be a softmax?",
        "The softmax makes weights compete. Other weightings, such as relu divided by the length, are worse.",
        f"{VASWANI}, equation 1",
        {"softmax": (), "relu": ("model.attention.weighting=relu",)},
        (Expectation("relu", "worse than", "softmax"),),
        see="../parts.md",
    ),
    Claim(
        "layer-or-batch-norm",
        "Why layer norm and not batch norm?",
        "Statistics of batches of text vary too much, so batch norm is worse than layer norm in Transformers.",
        "Shen et al. 2020, PowerNorm",
        {"layer norm": (), "batch norm": ("model.norm=batch",)},
        (Expectation("batch norm", "worse than", "layer norm"),),
        see="../parts.md",
    ),
    Claim(
        "normalization-needed",
        "Is normalization needed at all?",
        "Without normalization of each sub-layer, Transformers train worse.",
        f"{VASWANI}, section 3.1; Ba et al. 2016, Layer Normalization",
        {"layer norm": (), "no norm": ("model.norm=none", POST)},
        (Expectation("no norm", "worse than", "layer norm"),),
        see="../parts.md",
    ),
    Claim(
        "pre-or-post-norm",
        "Post-norm or pre-norm?",
        "Pre-norm has well-behaved gradients at initialization and trains more easily than the paper's post-norm.",
        "Xiong et al. 2020, On Layer Normalization in the Transformer Architecture",
        {"post-norm": (POST,), "pre-norm": ()},
        (Expectation("pre-norm", "better than", "post-norm"),),
        AblationScores(
            {"post-norm": "post-norm", "pre-norm": "the recipe"},
            (Expectation("pre-norm", "better than", "post-norm", "BLEU"),),
        ),
        see="../parts.md",
    ),
    Claim(
        "residual-connections",
        "Why residual connections?",
        "Residual connections carry the input past each sub-layer. Without them, a deep network hardly trains.",
        f"{VASWANI}, section 3.1; He et al. 2016, Deep Residual Learning",
        {"residual": (POST,), "no residual": (POST, "model.residual=none")},
        (Expectation("no residual", "worse than", "residual"),),
        see="../parts.md",
    ),
    Claim(
        "positions-needed",
        "Why positions?",
        "Attention does not see the order of its inputs. Without positional encodings, translation is worse.",
        f"{VASWANI}, section 3.5",
        {"sinusoidal": (), "none": ("model.position=none",)},
        (Expectation("none", "worse than", "sinusoidal"),),
        see="../parts.md",
    ),
    Claim(
        "sinusoidal-or-learned",
        "Sinusoidal or learned positions?",
        "Learned positions give nearly identical results to sinusoidal ones.",
        f"{VASWANI}, section 3.5 and table 3 (E)",
        {"sinusoidal": (), "learned": ("model.position=learned",)},
        (Expectation("learned", "equal to", "sinusoidal"),),
        see="../parts.md",
    ),
    Claim(
        "rotary-positions",
        "Are rotary positions better?",
        "Rotary positions encode distances inside attention and are better than sinusoidal ones.",
        "Su et al. 2021, RoFormer",
        {"sinusoidal": (), "rotary": ("model.position=rotary",)},
        (Expectation("rotary", "better than", "sinusoidal"),),
        see="../parts.md",
    ),
    Claim(
        "label-smoothing",
        "Why label smoothing?",
        "Label smoothing hurts perplexity but improves accuracy and BLEU.",
        f"{VASWANI}, section 5.4",
        {"0.1": (), "none": ("training.label_smoothing=0",)},
        (
            Expectation("0.1", "worse than", "none"),
            Expectation("0.1", "better than", "none", "BLEU"),
        ),
        AblationScores(
            {"0.1": "the recipe", "none": "no label smoothing"},
            (Expectation("0.1", "better than", "none", "BLEU"),),
        ),
        see="../parts.md",
    ),
    Claim(
        "warm-up",
        "Why warm-up?",
        "Post-norm Transformers need a learning rate that rises slowly. Without warm-up, training is worse or "
        "diverges.",
        f"{VASWANI}, section 5.3; Xiong et al. 2020",
        {"warm-up": (POST,), "no warm-up": (POST, "training.warmup=0")},
        (Expectation("no warm-up", "worse than", "warm-up"),),
        see="../parts.md",
    ),
    Claim(
        "adam-or-sgd",
        "Why Adam and not SGD?",
        "Transformers train much better with Adam than with stochastic gradient descent, even with momentum.",
        "Zhang et al. 2020, Why are Adaptive Methods Good for Attention Models?",
        {
            "Adam": (),
            "SGD": ("training.optimizer=sgd", "training.learning_rate=1.0"),
            "momentum": ("training.optimizer=momentum", "training.learning_rate=0.3"),
        },
        (Expectation("SGD", "worse than", "Adam"), Expectation("momentum", "worse than", "Adam")),
        see="../parts.md",
    ),
    Claim(
        "tied-embeddings",
        "Does tying the embeddings cost quality?",
        "Using the target embedding as output projection saves weights and does not hurt.",
        "Press and Wolf 2017, Using the Output Embedding to Improve Language Models",
        {"tied": (), "not tied": ("model.tie_output=false",)},
        (Expectation("tied", "no worse than", "not tied"),),
        AblationScores(
            {"tied": "the recipe", "not tied": "output not tied"},
            (Expectation("tied", "no worse than", "not tied", "BLEU"),),
        ),
        see="../parts.md",
    ),
    Claim(
        "depth-or-width",
        "Deep or wide?",
        "With the same number of weights, a deeper Transformer is better than a wider one.",
        f"{VASWANI}, table 3 (C); Tay et al. 2021, Scale Efficiently",
        {
            f"{depth}+{depth} layers of {width}": (
                *(f"model.encoder_layers={depth}", f"model.decoder_layers={depth}"),
                *(f"model.d_model={width}", f"model.d_ff={4 * width}"),
            )
            for depth, width in ((1, 88), (2, 64), (4, 48))
        },
        (
            Expectation("2+2 layers of 64", "better than", "1+1 layers of 88"),
            Expectation("4+4 layers of 48", "better than", "2+2 layers of 64"),
        ),
        AblationScores(
            {
                "2+2 layers of 176": "2+2 layers of 176",
                "4+4 layers of 128": "the recipe",
                "8+8 layers of 96": "8+8 layers of 96",
            },
            (
                Expectation("4+4 layers of 128", "better than", "2+2 layers of 176", "BLEU"),
                Expectation("8+8 layers of 96", "better than", "4+4 layers of 128", "BLEU"),
            ),
        ),
    ),
    Claim(
        "larger-models",
        "Are larger models better?",
        "A larger model is better than a smaller one.",
        f"{VASWANI}, table 3 (C)",
        {"d_model 32": ("model.d_model=32",), "d_model 64": ()},
        (Expectation("d_model 64", "better than", "d_model 32"),),
    ),
    Claim(
        "dropout",
        "Why dropout?",
        "Dropout reduces overfitting, so it helps if there is little training data.",
        f"{VASWANI}, section 5.4 and table 3 (D)",
        {
            "no dropout": FEW_PAIRS,
            "dropout 0.2": (*FEW_PAIRS, "model.dropout=0.2"),
        },
        (Expectation("dropout 0.2", "better than", "no dropout"),),
        see="../training.md",
    ),
    Claim(
        "gated-feed-forward",
        "Is a gated feed-forward network better?",
        "SwiGLU instead of ReLU in the feed-forward network improves quality.",
        "Shazeer 2020, GLU Variants Improve Transformer",
        {"relu": (), "swiglu": ("model.activation=swiglu",)},
        (Expectation("swiglu", "better than", "relu"),),
        see="../parts.md",
    ),
    Claim(
        "checkpoint-averaging",
        "Does averaging checkpoints help?",
        "The average of the last checkpoints translates better than the last one.",
        f"{VASWANI}, section 6.1",
        ablation=AblationScores(
            {"average": "the recipe", "none": "no averaging"},
            (Expectation("average", "better than", "none", "BLEU"),),
        ),
        see="../training.md",
    ),
    Claim(
        "beam-or-greedy",
        "Why beam search?",
        "Beam search finds more probable translations than greedy search, and BLEU is higher.",
        f"{VASWANI}, section 6.1",
        {"greedy": (), "beam 4": ("decoding.beam=4",)},
        (Expectation("beam 4", "better than", "greedy", "BLEU"),),
        see="../decoding.md",
    ),
    Claim(
        "autoregressive-or-not",
        "Can all words be generated at once?",
        "Words that are generated at the same time do not depend on each other, so non-autoregressive translation is "
        "worse, in particular without distillation.",
        "Gu et al. 2018, Non-Autoregressive Neural Machine Translation",
        {
            "autoregressive": (),
            "non-autoregressive": (
                *("model.architecture=non_autoregressive", "decoding.iterations=1"),
                "decoding.beam=5",
            ),
        },
        (Expectation("non-autoregressive", "worse than", "autoregressive", "BLEU"),),
        see="../non_autoregressive.md",
    ),
    Claim(
        "transformer-or-lstm",
        "Is the Transformer better than an LSTM?",
        "At the same size, Transformers translate better than recurrent networks with attention.",
        VASWANI,
        {
            "Transformer": (),
            "LSTM": ("model.architecture=lstm",),
            "convolution": ("model.architecture=convolution",),
        },
        (
            Expectation("LSTM", "worse than", "Transformer"),
            Expectation("convolution", "worse than", "Transformer"),
        ),
        measurement="transformer_or_lstm",
        see="../baselines.md",
    ),
    Claim(
        "path-length",
        "Why attention instead of recurrence and convolution?",
        "Self-attention connects any two positions in one step. An LSTM needs as many steps as there are words between "
        "them, and a stack of convolutions needs many layers.",
        f"{VASWANI}, section 4 and table 1",
        measurement="path_length",
        see="../baselines.md",
    ),
    Claim(
        "quadratic-time",
        "Does attention take quadratic time?",
        "The time of attention grows with the square of the length.",
        f"{VASWANI}, table 1",
        measurement="quadratic_time",
        see="../parts.md",
    ),
    Claim(
        "quadratic-memory",
        "Does attention take quadratic memory?",
        "Attention stores a weight for each pair of positions, so its memory grows with the square of the length.",
        "Rabe and Staats 2021 and Dao et al. 2022 (FlashAttention) describe this as the common belief",
        measurement="quadratic_memory",
        see="../parts.md",
    ),
    Claim(
        "linear-attention-patterns",
        "Do sparse patterns make the cost linear?",
        "Attention to a window, to blocks, or to a fixed number of projected keys costs time and memory in proportion "
        "to the length.",
        "Beltagy et al. 2020, Longformer; Zaheer et al. 2020, Big Bird; Wang et al. 2020, Linformer",
        measurement="linear_patterns",
        see="../parts.md",
    ),
    Claim(
        "parallel-training",
        "Do Transformers train faster than LSTMs?",
        "An LSTM reads one word after the other, so it trains more slowly than a Transformer on parallel hardware.",
        f"{VASWANI}, section 1",
        measurement="parallel_training",
        see="../baselines.md",
    ),
)

CLAIMS: dict[str, Claim] = {claim.name: claim for claim in _CLAIMS}
"""by name, in the order of the list"""
