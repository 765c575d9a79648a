"""Whatever choices a recipe combines, what it may combine works: padded, step by step, shown, and in learning."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from hypothesis import assume, given, reject, settings, strategies as st
from torch import Tensor

from regard import recipe
from regard.data.special_tokens import PAD
from regard.errors import RegardError
from regard.nn.attention import AttentionIntermediates
from regard.nn.positions import POSITIONS, Tree
from regard.nn.transformer import Transformer

SmallRecipe = Callable[..., recipe.Recipe]
V = 23
SOURCES, TARGETS = [11, 1, 7], [4, 5, 1]


def parse_choice(names: Any) -> st.SearchStrategy[str]:
    return st.sampled_from(get_args(names))


attentions = st.fixed_dictionaries(
    {
        "score": parse_choice(recipe.Score),
        "weighting": parse_choice(recipe.Weighting),
        "encoder": parse_choice(recipe.EncoderPattern),
        "decoder": parse_choice(recipe.DecoderPattern),
        "memory": parse_choice(recipe.CrossAttentionPattern),
        "key_value_heads": st.sampled_from([None, 1, 2]),
        "bias": st.booleans(),
        # Small, so that short texts are long to them.
        "window_size": st.integers(1, 4),
        "rows": st.integers(2, 4),
        "block_size": st.integers(1, 3),
        "global_blocks": st.integers(0, 2),
        "random_blocks": st.integers(0, 2),
    }
)
models = st.fixed_dictionaries(
    {
        "attention": attentions,
        "position": parse_choice(recipe.Position),
        "norm": parse_choice(recipe.Norm),
        "norm_order": parse_choice(recipe.NormOrder),
        "activation": parse_choice(recipe.Activation),
        "max_distance": st.integers(1, 4),
        "tie_output": st.booleans(),
    }
)


class Example:
    """A network in float64 with random weights and statistics, and three pairs of unlike length."""

    def __init__(self, small_recipe: SmallRecipe, model: dict[str, Any]) -> None:
        try:
            section = small_recipe(model={**model, "decoder_layers": 1}).model
        except RegardError:
            reject()
        torch.manual_seed(1)
        self.network = Transformer(section, V, V).double()
        with torch.no_grad():
            for name, tensor in self.network.state_dict().items():
                if tensor.dim() == 1:
                    tensor.uniform_(0.5, 1.5) if "variance" in name else tensor.normal_()
        self.source, self.target = padded(SOURCES), padded(TARGETS)
        self.tree: Tree | None = None
        if POSITIONS[section.position].target is not None:  # a position of the source alone
            size = len(SOURCES), max(SOURCES)
            self.tree = Tree(torch.randint(0, 5, size), torch.randint(0, 5, (*size, size[1])))

    def alone(self, row: int) -> tuple[Tensor, Tensor, Tree | None]:
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
def test_padding_changes_nothing_and_steps_equal_all_at_once(
    small_recipe: SmallRecipe, model: dict[str, Any]
) -> None:
    example = Example(small_recipe, model)
    network = example.network.eval()
    with torch.inference_mode():
        together = example()
        state = network.start(network.encode(example.source, example.tree))
        for t, tokens in enumerate(example.target.T):
            said, state = network.step(tokens, state)
            for row in range(len(SOURCES)):
                if t < TARGETS[row]:
                    torch.testing.assert_close(said[row], together[row, t], rtol=1e-9, atol=1e-9)
        for row, length in enumerate(TARGETS):
            alone = network(*example.alone(row))[0]
            torch.testing.assert_close(together[row, :length], alone, rtol=1e-9, atol=1e-9)


@settings(max_examples=40)
@given(model=models)
def test_watching_changes_nothing(small_recipe: SmallRecipe, model: dict[str, Any]) -> None:
    example = Example(small_recipe, model)
    network = example.network.eval()
    seen: list[AttentionIntermediates] = []
    with torch.inference_mode():
        unwatched = example()
        parts = [part for kind in network.attentions().values() for part in kind]
        for part in parts:
            part.watch = seen.append
        watched = example()
    assert len(seen) == len(parts) == 4
    for row, length in enumerate(TARGETS):
        torch.testing.assert_close(
            watched[row, :length], unwatched[row, :length], rtol=1e-9, atol=1e-9
        )


@settings(max_examples=40)
@given(model=models)
def test_gradients_reach_every_weight_and_are_numbers(
    small_recipe: SmallRecipe, model: dict[str, Any]
) -> None:
    example = Example(small_recipe, model)
    real = example.target != PAD
    logits = example()[real]
    torch.autograd.backward((logits * torch.randn_like(logits)).sum())
    # Without a norm numbers grow until softmax is sure, and ReLU may find no score above zero: both then
    # have a gradient of exactly zero.
    alive = model["norm"] != "none" and model["attention"]["weighting"] == "softmax"
    for name, weight in example.network.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.isfinite().all()), name
        # Some biases cancel by their nature: of keys in softmax, of all before a batch norm.
        if alive and not name.endswith("bias"):
            assert bool(weight.grad.any()), name


@settings(max_examples=30)
@given(model=models)
def test_it_learns_in_half_precision(small_recipe: SmallRecipe, model: dict[str, Any]) -> None:
    """As on a GPU: weights in float32, products in bfloat16, by both ways."""
    assume(model.get("norm") != "none")  # then numbers may grow from layer to layer without end
    example = Example(small_recipe, model)
    network = example.network.float()
    with torch.autocast("cpu", torch.bfloat16):
        fast = example()
        torch.autograd.backward(fast[example.target != PAD].float().square().sum())
        if (
            model["norm"] == "batch"
        ):  # in use it norms by what it has seen: now nothing yet, and numbers grow
            with torch.no_grad():
                for _ in range(20):
                    example()
        for kind in network.attentions().values():
            for part in kind:
                part.watch = lambda _: None
        shown = network.eval()(example.source, example.target, example.tree)
    assert bool(shown.isfinite().all())
    for name, weight in network.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.isfinite().all()), name
