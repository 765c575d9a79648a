"""The non-autoregressive Transformer: the network, its loss, and its use in a translator."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.data.pairs import Pair
from regard.data.special_tokens import EOS, MASK, PAD
from regard.data.tokenizer import Tokenizer
from regard.decoding.mask_predict import Iteration
from regard.errors import RegardError
from regard.nn.dropout import random_token_mask
from regard.nn.loss import MaskPredictLoss, Seq2SeqLoss
from regard.nn.non_autoregressive import LENGTHS, NonAutoregressiveTransformer, Predicted, UntilEOS
from regard.nn.transformer import EncoderOutput, Transformer
from regard.recipe import Recipe, TrainingConfig
from regard.recipe.registry import allowed_names
from regard.tasks import Translator, build_network
from regard.tasks.translation import translation_loss

SmallRecipe = Callable[..., Recipe]
V = 20


@pytest.fixture(params=allowed_names("model.non_autoregressive.length"))
def network(
    small_recipe: SmallRecipe, request: pytest.FixtureRequest
) -> NonAutoregressiveTransformer:
    extra = {"extra_positions": 3} if request.param == "eos" else {}
    return make(small_recipe, length=request.param, **extra)


def make(small_recipe: SmallRecipe, **options: Any) -> NonAutoregressiveTransformer:
    torch.manual_seed(1)
    model = {"architecture": "non_autoregressive", "non_autoregressive": options}
    section = small_recipe(model=model).model
    return NonAutoregressiveTransformer(section, V, V).eval()


def pad(*rows: list[int]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])


SOURCE = pad([5, 6, 7, EOS], [8, EOS])
LABELS = pad([9, 10, 11, 12, EOS], [13, 14, EOS])


# The network


@pytest.mark.parametrize(
    "choice",
    [{"position": "relative"}, {"attention": {"weighting": "relu"}}, {"attention": {"score": "additive"}}],
    ids=str,
)  # fmt: skip
def test_a_target_of_padding_has_finite_gradients(
    small_recipe: SmallRecipe, choice: dict[str, Any]
) -> None:
    """The input of an idle process."""
    section = small_recipe(model={"architecture": "non_autoregressive", **choice}).model
    network = NonAutoregressiveTransformer(section, V, V)
    network(SOURCE[:1], torch.full((1, 3), PAD)).sum().backward()
    assert all(w.grad is None or bool(w.grad.isfinite().all()) for w in network.parameters())


def test_every_token_attends_to_every_other(network: NonAutoregressiveTransformer) -> None:
    target = torch.tensor([[MASK, 9, 10, MASK]])
    before = network(SOURCE[:1], target)
    after = network(SOURCE[:1], torch.tensor([[MASK, 9, 10, 11]]))
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-3


def test_padding_does_not_change_logits_and_lengths(network: NonAutoregressiveTransformer) -> None:
    together = network(SOURCE, pad([MASK, 9, MASK, 10], [MASK, 11]))
    alone = network(SOURCE[1:, :2], torch.tensor([[MASK, 11]]))
    torch.testing.assert_close(together[1, :2], alone[0], rtol=1e-4, atol=1e-5)
    memory, single = network.encode(SOURCE), network.encode(SOURCE[1:, :2])
    limits = torch.tensor([50, 50])
    chosen = network.length.candidates(memory, limits, 3)
    assert chosen[1].tolist() == network.length.candidates(single, limits[:1], 3)[0].tolist()


def test_predict_masked_gives_the_logits_at_masked_positions_of_all_candidates(
    network: NonAutoregressiveTransformer,
) -> None:
    """Two rows per sentence share its keys and values."""
    target = pad([MASK, 9, MASK], [MASK, MASK], [10, MASK, 11], [MASK])
    predicted = network.predict_masked(
        target, target == MASK, network.start(network.encode(SOURCE))
    )
    full = network(SOURCE.repeat_interleave(2, 0), target)
    torch.testing.assert_close(predicted, full[target == MASK], rtol=1e-4, atol=1e-5)


# Length


def test_with_a_predicted_length_the_labels_have_no_eos(small_recipe: SmallRecipe) -> None:
    length = make(small_recipe).length
    assert isinstance(length, Predicted)
    assert length.position_labels(SOURCE, LABELS).tolist() == [[9, 10, 11, 12], [13, 14, PAD, PAD]]


def test_with_length_eos_the_labels_are_filled_with_eos(small_recipe: SmallRecipe) -> None:
    length = make(small_recipe, length="eos", extra_positions=3).length
    assert isinstance(length, UntilEOS)
    words = length.position_labels(SOURCE, LABELS)
    assert words.tolist() == [[9, 10, 11, 12, EOS, EOS], [13, 14, EOS, EOS, PAD, PAD]]
    idle = length.position_labels(SOURCE, torch.zeros_like(LABELS))
    assert not idle.any(), "an idle process has no labels"
    tight = make(small_recipe, length="eos", extra_positions=1).length.position_labels(
        SOURCE, LABELS
    )
    assert tight.tolist() == [
        [9, 10, 11, 12, EOS],
        [13, 14, EOS, PAD, PAD],
    ]  # as many positions as the target needs


def test_length_loss_is_the_mean_of_the_written_out_cross_entropy(
    small_recipe: SmallRecipe,
) -> None:
    network = make(small_recipe, max_length_difference=4, length_loss_weight=0.5)
    length = network.length
    assert isinstance(length, Predicted)
    memory = network.encode(SOURCE)
    total = 0.0
    # 4 tokens for 3, and 2 for 1: both one more than the source has.
    for states, length_of_source in zip(
        memory.states.double().numpy(force=True), [4, 2], strict=True
    ):
        weight, bias = (w.double().numpy(force=True) for w in length.classifier.parameters())
        logits = weight @ states[:length_of_source].mean(0) + bias
        total -= logits[4 + 1] - np.log(np.exp(logits).sum())
    loss = length.loss(memory, length.position_labels(SOURCE, LABELS))
    assert loss.item() == pytest.approx(0.5 * total / 2, rel=1e-5)


def test_differences_are_clipped_to_the_largest_one(small_recipe: SmallRecipe) -> None:
    network = make(small_recipe, max_length_difference=2)
    memory = network.encode(SOURCE[:1])
    one = network.length.loss(memory, torch.full((1, 5), 9))
    other = network.length.loss(memory, torch.full((1, 9), 9))
    assert one.item() == other.item() > 0


def small_section(small_recipe: SmallRecipe) -> Any:
    options = {"max_length_difference": 2}
    return small_recipe(
        model={"architecture": "non_autoregressive", "non_autoregressive": options}
    ).model


class FixedLogits(Predicted):
    """Predicts these logits for any source."""

    def __init__(self, section: Any, logits: list[float]) -> None:
        super().__init__(section)
        self.logits = torch.tensor([logits])

    def forward(self, memory: EncoderOutput) -> Tensor:
        return self.logits.expand(len(memory.non_pad), -1)


def test_candidates_are_the_most_probable_possible_lengths(small_recipe: SmallRecipe) -> None:
    section = small_section(small_recipe)
    memory = EncoderOutput(torch.zeros(2, 4, 16), SOURCE != PAD)  # sources of 3 tokens and of 1
    logits = [5.0, 1.0, 3.0, 4.0, 2.0]  # of differences from -2 to 2
    chosen = FixedLogits(section, logits).candidates(memory, torch.tensor([4, 9]), 3)
    assert chosen.tolist() == [[1, 4, 3], [2, 1, 3]]  # -2 is too short for the second, 5 > 4
    unlikely = [0.0, 0.0, 9.0, 9.0 + math.log(0.02), 9.0 + math.log(0.009)]
    chosen = FixedLogits(section, unlikely).candidates(memory, torch.tensor([9, 9]), 3)
    assert chosen.tolist() == [[3, 4, 0], [1, 2, 0]]


def test_if_no_length_is_possible_the_limit_is_used(small_recipe: SmallRecipe) -> None:
    section = small_section(small_recipe)
    non_pad = torch.ones(1, 31, dtype=torch.bool)
    memory = EncoderOutput(torch.zeros(1, 31, 16), non_pad)  # a source of 30 tokens
    chosen = FixedLogits(section, [0.0] * 5).candidates(memory, torch.tensor([10]), 3)
    assert chosen.tolist() == [[10, 10, 10]]


# The loss


def test_one_to_all_tokens_are_masked_with_equal_probability() -> None:
    torch.manual_seed(1)
    non_pad = torch.arange(6) < torch.tensor([4] * 3000 + [2] * 3000)[:, None]
    masked = random_token_mask(non_pad)
    assert not (masked & ~non_pad).any()
    for rows, length in ((slice(0, 3000), 4), (slice(3000, 6000), 2)):
        counts = torch.bincount(masked[rows].sum(1), minlength=7).tolist()
        assert counts[0] == 0
        assert counts[1 : length + 1] == pytest.approx([3000 / length] * length, rel=0.12)
        fractions = masked[rows].float().mean(0)[:length].tolist()
        assert fractions == pytest.approx([(length + 1) / 2 / length] * length, rel=0.06)


def test_the_loss_is_the_mean_over_masked_tokens_times_the_number_of_labels(
    network: NonAutoregressiveTransformer,
) -> None:
    loss_fn = MaskPredictLoss(
        network, TrainingConfig(learning_rate=1.0, label_smoothing=0.0)
    ).eval()
    tokens = network.length.position_labels(SOURCE, LABELS)
    masked = random_token_mask(tokens != PAD, torch.Generator().manual_seed(1))
    logits = network(SOURCE, tokens.masked_fill(masked, MASK)).double().numpy(force=True)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = [log_probs[row, t, tokens[row, t]] for row, t in masked.nonzero().tolist()]
    loss = loss_fn(SOURCE, LABELS, LABELS)
    assert loss.item() == pytest.approx(-np.mean(expected) * 8, rel=1e-4)  # 8 tokens, EOS counted


def test_validation_always_masks_the_same_tokens_and_training_does_not(
    network: NonAutoregressiveTransformer,
) -> None:
    loss_fn = MaskPredictLoss(network, TrainingConfig(learning_rate=1.0))
    torch.manual_seed(1)
    validation = {loss_fn.eval()(SOURCE, LABELS, LABELS).item() for _ in range(5)}
    training = {loss_fn.train()(SOURCE, LABELS, LABELS).item() for _ in range(5)}
    assert len(validation) == 1
    assert len(training) > 1
    torch.manual_seed(7)
    first = loss_fn(SOURCE, LABELS, LABELS).item()
    torch.manual_seed(7)
    assert loss_fn(SOURCE, LABELS, LABELS).item() == first


def test_the_weight_of_the_length_loss_does_not_depend_on_the_batch_size(
    small_recipe: SmallRecipe,
) -> None:
    """Repeating a batch multiplies the loss and the number of tokens that it is divided by."""
    network = make(small_recipe, length_loss_weight=1.0)
    loss_fn = MaskPredictLoss(
        network, TrainingConfig(learning_rate=1.0, label_smoothing=0.0)
    ).train()
    gradients = []
    for times in (1, 4):
        network.zero_grad()
        batch = SOURCE.repeat(times, 1), LABELS.repeat(times, 1)
        (loss_fn(batch[0], batch[1], batch[1]) / (8 * times)).backward()
        gradient = network.length.classifier.weight.grad  # type: ignore[union-attr]
        gradients.append(gradient.clone())  # type: ignore[union-attr, operator]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


def test_a_batch_without_labels_has_zero_gradients(network: NonAutoregressiveTransformer) -> None:
    loss_fn = MaskPredictLoss(network, TrainingConfig(learning_rate=1.0)).train()
    loss = loss_fn(SOURCE, LABELS, torch.zeros_like(LABELS))
    loss.backward()
    assert loss.item() == 0
    for name, weight in network.named_parameters():
        assert weight.grad is not None, f"{name}: other processes would wait for its gradient"
        assert not weight.grad.any(), name


def test_each_network_has_its_loss(small_recipe: SmallRecipe) -> None:
    section, training = small_recipe().model, TrainingConfig(learning_rate=1.0)
    assert type(translation_loss(make(small_recipe), training, 5)) is MaskPredictLoss
    assert type(translation_loss(Transformer(section, V, V), training, 5)) is Seq2SeqLoss


# Recipes and translators


def test_the_registered_lengths() -> None:
    assert {*LENGTHS} == {"predicted", "eos"}


def test_length_eos_needs_enough_learned_positions(small_recipe: SmallRecipe) -> None:
    model = {"architecture": "non_autoregressive", "position": "learned", "max_length": 260}
    small_recipe(model=model)
    with pytest.raises(
        RegardError, match="260 is shorter than the 266 decoder positions of length: eos"
    ):
        small_recipe(model={**model, "non_autoregressive": {"length": "eos"}})


def translator(small_recipe: SmallRecipe, **model: Any) -> Translator:
    recipe = small_recipe(tokenizer={"kind": "word", "vocab_size": 60}, model=model)
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: [Pair("ein Hund", "a dog")] * 5)
    torch.manual_seed(1)
    network = build_network(recipe, tokenizer).eval()
    return Translator(recipe, tokenizer, network, torch.device("cpu"))


@pytest.fixture
def mask_predict_model(small_recipe: SmallRecipe) -> Translator:
    return translator(small_recipe, architecture="non_autoregressive")


def test_search_returns_the_best_candidates_of_each_text(mask_predict_model: Translator) -> None:
    texts = ["a dog", "", "ein Hund a dog ein Hund"]
    found = mask_predict_model.search(texts, nbest=3)
    assert [len(some) for some in found] == [3, 1, 3]
    assert found[1][0].text == ""
    for some in found:
        assert [one.score for one in some] == sorted((one.score for one in some), reverse=True)
    assert mask_predict_model.translate(texts) == [some[0].text for some in found]
    assert mask_predict_model.translate(texts, iterations=1) == [
        one.text for (one,) in mask_predict_model.search(texts, iterations=1)
    ]
    alone = [mask_predict_model.translate([text])[0] for text in texts]
    assert mask_predict_model.translate(texts) == alone


def test_the_length_can_be_set(mask_predict_model: Translator) -> None:
    (found,) = mask_predict_model.search(["a dog"], length=7)
    (one,) = found
    assert len(one.tokens) == len(one.token_log_probabilities) == 7
    assert one.score == pytest.approx(one.log_probability / 7)
    assert one.finished


def test_an_observer_sees_every_iteration(mask_predict_model: Translator) -> None:
    steps: list[Iteration] = []
    options: Any = {"iterations": 3, "observer": steps.append}
    ((generated,),) = mask_predict_model.generate(["a dog ein Hund"], length=6, **options)
    assert [row.tolist().count(MASK) for step in steps for row in step.inputs] == [6, 4, 2]
    assert steps[-1].tokens[0].tolist() == generated.hypothesis.tokens
    steps.clear()
    ((best, *_),) = mask_predict_model.search(["a dog ein Hund"], iterations=3)
    ((same, *_),) = mask_predict_model.search(["a dog ein Hund"], **options)
    assert same.tokens == best.tokens
    texts = [mask_predict_model.tokenizer.target.pieces(row.tolist()) for row in steps[-1].tokens]
    assert best.tokens in [some[: len(best.tokens)] for some in texts]


def test_the_length_cannot_be_set_if_the_model_predicts_eos(small_recipe: SmallRecipe) -> None:
    model = translator(
        small_recipe, architecture="non_autoregressive", non_autoregressive={"length": "eos"}
    )
    (one,) = model.translate(["a dog"])
    assert EOS not in model.tokenizer.target.encode([one])[0]
    with pytest.raises(RegardError, match="length 3: this model ends at the first EOS"):
        model.translate(["a dog"], length=3)


@pytest.mark.parametrize(
    "options",
    [
        {"beam": 2},
        {"length_penalty": 0.5},
        {"beam": 5, "length_penalty": 1.0},
        {"temperature": 0.7},
    ],
)
def test_options_of_autoregressive_models_are_refused(
    mask_predict_model: Translator, options: dict[str, Any]
) -> None:
    with pytest.raises(
        RegardError, match=f"{next(iter(options))} .*no effect on a non-autoregressive"
    ):
        mask_predict_model.search(["a dog"], **options)


@pytest.mark.parametrize("arguments", [{"prefixes": ["a"]}, {"constraints": [["a"]]}])
def test_prefixes_and_constraints_are_refused(
    mask_predict_model: Translator, arguments: dict[str, Any]
) -> None:
    with pytest.raises(
        RegardError, match=f"{next(iter(arguments))} .*not supported by a non-autoregressive"
    ):
        mask_predict_model.search(["a dog"], **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 2}, "iterations 2.*no effect on an autoregressive model"),
        ({"length_beam": 2}, "length_beam 2.*no effect on an autoregressive model"),
        ({"length": 4}, "length 4.*only for a non-autoregressive model"),
    ],
)
def test_an_autoregressive_model_refuses_options_of_mask_predict(
    small_recipe: SmallRecipe, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        translator(small_recipe).translate(["a dog"], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "decoding.iterations: 0 must be greater than or equal to 1"),
        ({"length_beam": 2, "nbest": 3}, "nbest 3: must be between 1 and length_beam, 2"),
        ({"length": 0}, "length 0: must be at least 1"),
        ({"length": 4, "nbest": 2}, "nbest 2: must be between 1 and length_beam, 1"),
    ],
)
def test_impossible_options_are_refused(
    mask_predict_model: Translator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        mask_predict_model.search(["a dog"], **options)


def test_a_model_that_ends_at_eos_has_one_candidate_length(small_recipe: SmallRecipe) -> None:
    section = {"architecture": "non_autoregressive", "non_autoregressive": {"length": "eos"}}
    with pytest.raises(RegardError, match=r"decoding.length_beam: 9 has no effect with model\."):
        small_recipe(model=section, decoding={"length_beam": 9})
    model = translator(small_recipe, **section)
    with pytest.raises(RegardError, match=r"length_beam 9: no effect with model\.non_auto.*: eos"):
        model.translate(["a dog"], length_beam=9)
    with pytest.raises(RegardError, match=r"nbest 2: this model ends at the first EOS"):
        model.search(["a dog"], nbest=2)
    assert model.translate(["a dog"], length_beam=1) == model.translate(["a dog"])


def test_learned_positions_limit_the_length(small_recipe: SmallRecipe, tmp_path: Path) -> None:
    model = translator(
        small_recipe, architecture="non_autoregressive", position="learned", max_length=300
    )
    (one, *_) = model.search(["a dog " * 140])[0]
    assert 1 <= len(one.tokens) <= 300
