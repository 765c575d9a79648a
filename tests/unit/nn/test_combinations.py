"""Every combination of choices that a recipe allows works: padded, step by step, with recording, and in training."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import assume, given, reject, settings, strategies as st
from torch import Tensor

from regard.data.special_tokens import PAD
from regard.errors import RegardError
from regard.nn.attention import AttentionIntermediates
from regard.nn.attention_patterns import PATTERNS
from regard.nn.positions import POSITIONS, Tree
from regard.nn.transformer import Transformer
from regard.recipe import Choice, Recipe, Registry
from regard.recipe.registry import allowed_names

SmallRecipe = Callable[..., Recipe]
V = 23
SOURCES, TARGETS = [11, 1, 7], [4, 5, 1]


def choice_of(key: str) -> st.SearchStrategy[str]:
    return st.sampled_from(allowed_names(key))


attentions = st.fixed_dictionaries(
    {
        "score": choice_of("model.attention.score"),
        "weighting": choice_of("model.attention.weighting"),
        "encoder": choice_of("model.attention.encoder"),
        "decoder": choice_of("model.attention.decoder"),
        "cross_attention": choice_of("model.attention.cross_attention"),
        "key_value_heads": st.sampled_from([None, 1, 2]),
        "bias": st.booleans(),
        # Small, so that even short texts exceed them.
        "window_size": st.integers(1, 4),
        "linformer_k": st.integers(2, 4),
        "block_size": st.integers(1, 3),
        "global_blocks": st.integers(0, 2),
        "random_blocks": st.integers(0, 2),
    }
)
models = st.fixed_dictionaries(
    {
        "attention": attentions,
        "position": choice_of("model.position"),
        "norm": choice_of("model.norm"),
        "norm_order": choice_of("model.norm_order"),
        "activation": choice_of("model.activation"),
        "max_distance": st.integers(1, 4),
        "tie_output": st.booleans(),
    }
)


def used(model: dict[str, Any]) -> dict[str, Any]:
    """The model section without the options that no selected choice reads, which a recipe refuses."""
    attention = model["attention"]
    sites = ("encoder", "decoder", "cross_attention")
    selected: list[Choice[Any]] = [POSITIONS.choices[model["position"]]]
    selected += [PATTERNS.choices[attention[site]] for site in sites]
    read = {option for choice in selected for option in choice.options}

    def keep(name: str, registry: Registry[Any]) -> bool:
        known = {option for choice in registry.choices.values() for option in choice.options}
        return name in read or name not in known

    kept = {
        name: value
        for name, value in attention.items()
        if keep(f"model.attention.{name}", PATTERNS)
    }
    rest = {name: value for name, value in model.items() if keep(f"model.{name}", POSITIONS)}
    return {**rest, "attention": kept}


class Example:
    """A float64 network with random weights and statistics, and three pairs of different lengths."""

    def __init__(self, small_recipe: SmallRecipe, model: dict[str, Any]) -> None:
        try:
            data = {"pairs": "pairs.tsv"}
            if model["position"] == "tree":
                data["parses"] = "parses.conllu"
            section = small_recipe(
                data={"train": data}, model={**used(model), "decoder_layers": 1}
            ).model
        except RegardError:
            reject()
        torch.manual_seed(1)
        self.network = Transformer(section, V, V).double()
        with torch.no_grad():
            for name, tensor in self.network.state_dict().items():
                if tensor.dim() == 1:
                    tensor.uniform_(0.5, 1.5) if "running_var" in name else tensor.normal_()
        self.source, self.target = padded(SOURCES), padded(TARGETS)
        self.tree: Tree | None = None
        if POSITIONS[section.position].target is not None:  # tree positions, for the source only
            size = len(SOURCES), max(SOURCES)
            self.tree = Tree(torch.randint(0, 5, size), torch.randint(0, 5, (*size, size[1])))

    def single(self, row: int) -> tuple[Tensor, Tensor, Tree | None]:
        """One pair without padding."""
        s, t = SOURCES[row], TARGETS[row]
        tree = self.tree
        if tree is not None:
            tree = Tree(tree.depth[[row], :s], tree.distance[[row], :s, :s])
        return self.source[[row], :s], self.target[[row], :t], tree

    def __call__(self) -> Tensor:
        logits: Tensor = self.network(self.source, self.target, self.tree)
        return logits


def padded(lengths: Sequence[int]) -> Tensor:
    ids = torch.randint(PAD + 1, V, (len(lengths), max(lengths)))
    return ids.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], PAD)


@settings(max_examples=40)
@given(model=models)
def test_padding_changes_nothing_and_steps_equal_all_positions_at_once(
    small_recipe: SmallRecipe, model: dict[str, Any]
) -> None:
    example = Example(small_recipe, model)
    network = example.network.eval()
    with torch.inference_mode():
        together = example()
        state = network.start(network.encode(example.source, example.tree))
        for t, tokens in enumerate(example.target.T):
            logits, state = network.step(tokens, state)
            for row in range(len(SOURCES)):
                if t < TARGETS[row]:
                    torch.testing.assert_close(logits[row], together[row, t], rtol=1e-9, atol=1e-9)
        for row, length in enumerate(TARGETS):
            alone = network(*example.single(row))[0]
            torch.testing.assert_close(together[row, :length], alone, rtol=1e-9, atol=1e-9)


@settings(max_examples=40)
@given(model=models)
def test_recording_does_not_change_the_logits(
    small_recipe: SmallRecipe, model: dict[str, Any]
) -> None:
    example = Example(small_recipe, model)
    network = example.network.eval()
    recorded: list[AttentionIntermediates] = []
    with torch.inference_mode():
        plain = example()
        parts = [part for kind in network.attentions().values() for part in kind]
        for part in parts:
            part.observer = recorded.append
        observed = example()
    assert len(recorded) == len(parts) == 4
    for row, length in enumerate(TARGETS):
        torch.testing.assert_close(
            observed[row, :length], plain[row, :length], rtol=1e-9, atol=1e-9
        )


@settings(max_examples=40)
@given(model=models)
def test_every_weight_gets_a_finite_gradient(
    small_recipe: SmallRecipe, model: dict[str, Any]
) -> None:
    example = Example(small_recipe, model)
    non_pad = example.target != PAD
    logits = example()[non_pad]
    torch.autograd.backward((logits * torch.randn_like(logits)).sum())
    # Without a norm, values grow until softmax saturates; with ReLU weighting, no score may be positive. In both
    # cases gradients are exactly zero.
    nonzero = model["norm"] != "none" and model["attention"]["weighting"] == "softmax"
    for name, weight in example.network.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.isfinite().all()), name
        # Some biases cancel: those of keys in softmax, and those before a batch norm.
        if nonzero and not name.endswith("bias"):
            assert bool(weight.grad.any()), name


@settings(max_examples=30)
@given(model=models)
def test_gradients_are_finite_in_bfloat16(small_recipe: SmallRecipe, model: dict[str, Any]) -> None:
    """As on a GPU: weights in float32, matrix products in bfloat16, by both paths."""
    assume(model.get("norm") != "none")  # values would grow from layer to layer
    example = Example(small_recipe, model)
    network = example.network.float()
    with torch.autocast("cpu", torch.bfloat16):
        fast = example()
        torch.autograd.backward(fast[example.target != PAD].float().square().sum())
        if model["norm"] == "batch":  # eval mode needs running statistics, or values would grow
            with torch.no_grad():
                for _ in range(20):
                    example()
        for kind in network.attentions().values():
            for part in kind:
                part.observer = lambda _: None
        explicit = network.eval()(example.source, example.target, example.tree)
    assert bool(explicit.isfinite().all())
    for name, weight in network.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.isfinite().all()), name
