"""The network that says all words at once, what it learns by, and how a translator uses it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.data.corpus import Pair
from regard.data.special_tokens import EOS, MASK, PAD
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.nn.loss import MaskPredictLoss, Seq2SeqLoss, hide_words, translation
from regard.nn.non_autoregressive import LENGTHS, Cut, NonAutoregressiveTransformer, Predicted
from regard.nn.transformer import Memory, Transformer
from regard.recipe import Length, Recipe, Training
from regard.tasks import Translator, build_network
from tests.scripts import load_script

SmallRecipe = Callable[..., Recipe]
MakeRun = Callable[..., Path]
V = 20


@pytest.fixture(params=get_args(Length))
def network(
    small_recipe: SmallRecipe, request: pytest.FixtureRequest
) -> NonAutoregressiveTransformer:
    return make(small_recipe, length=request.param, spare=3)


def make(small_recipe: SmallRecipe, **parallel: Any) -> NonAutoregressiveTransformer:
    torch.manual_seed(1)
    section = small_recipe(model={"architecture": "non_autoregressive", "parallel": parallel}).model
    return NonAutoregressiveTransformer(section, V, V).eval()


def pad(*rows: list[int]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows])


SOURCE = pad([5, 6, 7, EOS], [8, EOS])
WANTED = pad([9, 10, 11, 12, EOS], [13, 14, EOS])


# The network


@pytest.mark.parametrize(
    "choice",
    [{"position": "relative"}, {"attention": {"weighting": "relu"}}, {"attention": {"score": "additive"}}],
    ids=str,
)  # fmt: skip
def test_a_target_that_is_all_padding_teaches_nothing_and_leaves_numbers(
    small_recipe: SmallRecipe, choice: dict[str, Any]
) -> None:
    """What a process reads that has no row of its own."""
    section = small_recipe(model={"architecture": "non_autoregressive", **choice}).model
    network = NonAutoregressiveTransformer(section, V, V)
    network(SOURCE[:1], torch.full((1, 3), PAD)).sum().backward()
    assert all(w.grad is None or bool(w.grad.isfinite().all()) for w in network.parameters())


def test_every_word_sees_every_other(network: NonAutoregressiveTransformer) -> None:
    read = torch.tensor([[MASK, 9, 10, MASK]])
    before = network(SOURCE[:1], read)
    after = network(SOURCE[:1], torch.tensor([[MASK, 9, 10, 11]]))
    assert (before[0, 0] - after[0, 0]).abs().max() > 1e-3


def test_padding_changes_nothing(network: NonAutoregressiveTransformer) -> None:
    together = network(SOURCE, pad([MASK, 9, MASK, 10], [MASK, 11]))
    alone = network(SOURCE[1:, :2], torch.tensor([[MASK, 11]]))
    torch.testing.assert_close(together[1, :2], alone[0], rtol=1e-4, atol=1e-5)
    memory, single = network.encode(SOURCE), network.encode(SOURCE[1:, :2])
    limits = torch.tensor([50, 50])
    chosen = network.length.choose(memory, limits, 3)
    assert chosen[1].tolist() == network.length.choose(single, limits[:1], 3)[0].tolist()


def test_filling_gives_the_logits_at_hidden_places_for_all_candidates(
    network: NonAutoregressiveTransformer,
) -> None:
    """Two rows a sentence, which share its keys and values."""
    read = pad([MASK, 9, MASK], [MASK, MASK], [10, MASK, 11], [MASK])
    filled = network.fill(read, read == MASK, network.start(network.encode(SOURCE)))
    full = network(SOURCE.repeat_interleave(2, 0), read)
    torch.testing.assert_close(filled, full[read == MASK], rtol=1e-4, atol=1e-5)


# Length


def test_predicted_places_are_the_words_alone(small_recipe: SmallRecipe) -> None:
    length = make(small_recipe).length
    assert isinstance(length, Predicted)
    assert length.places(SOURCE, WANTED).tolist() == [[9, 10, 11, 12], [13, 14, PAD, PAD]]


def test_cut_places_are_filled_with_end(small_recipe: SmallRecipe) -> None:
    length = make(small_recipe, length="cut", spare=3).length
    assert isinstance(length, Cut)
    words = length.places(SOURCE, WANTED)
    assert words.tolist() == [[9, 10, 11, 12, EOS, EOS], [13, 14, EOS, EOS, PAD, PAD]]
    idle = length.places(SOURCE, torch.zeros_like(WANTED))
    assert not idle.any(), "a process with nothing to learn has nothing to say"
    tight = make(small_recipe, length="cut", spare=1).length.places(SOURCE, WANTED)
    assert tight.tolist() == [[9, 10, 11, 12, EOS], [13, 14, EOS, PAD, PAD]]  # room for all


def test_length_loss_is_the_mean_of_the_written_out_cross_entropy(
    small_recipe: SmallRecipe,
) -> None:
    network = make(small_recipe, difference=4, length_weight=0.5)
    length = network.length
    assert isinstance(length, Predicted)
    memory = network.encode(SOURCE)
    total = 0.0
    # 4 words for 3, and 2 for 1: both one more than the source has.
    for states, real in zip(memory.states.double().numpy(force=True), [4, 2], strict=True):
        weight, bias = (w.double().numpy(force=True) for w in length.classes.parameters())
        logits = weight @ states[:real].mean(0) + bias
        total -= logits[4 + 1] - np.log(np.exp(logits).sum())
    loss = length.loss(memory, length.places(SOURCE, WANTED))
    assert loss.item() == pytest.approx(0.5 * total / 2, rel=1e-5)


def test_far_differences_are_learned_as_the_farthest(small_recipe: SmallRecipe) -> None:
    network = make(small_recipe, difference=2)
    memory = network.encode(SOURCE[:1])
    one = network.length.loss(memory, torch.full((1, 5), 9))
    other = network.length.loss(memory, torch.full((1, 9), 9))
    assert one.item() == other.item() > 0


class Sure(Predicted):
    """Says these logits, whatever it reads."""

    def __init__(self, section: Any, logits: list[float]) -> None:
        super().__init__(section)
        self.logits = torch.tensor([logits])

    def forward(self, memory: Memory) -> Tensor:
        return self.logits.expand(len(memory.real), -1)


def test_candidates_are_the_likeliest_possible_lengths(small_recipe: SmallRecipe) -> None:
    section = small_recipe(model={"non_autoregressive": {"difference": 2}}).model
    memory = Memory(torch.zeros(2, 4, 16), SOURCE != PAD)  # sources of 3 words and of 1
    logits = [5.0, 1.0, 3.0, 4.0, 2.0]  # of -2 … 2 words more
    chosen = Sure(section, logits).choose(memory, torch.tensor([4, 9]), 3)
    assert chosen.tolist() == [[1, 4, 3], [2, 1, 3]]  # -2 is too short for the second, 5 > 4
    unlikely = [0.0, 0.0, 9.0, 9.0 + math.log(0.02), 9.0 + math.log(0.009)]
    chosen = Sure(section, unlikely).choose(memory, torch.tensor([9, 9]), 3)
    assert chosen.tolist() == [[3, 4, 0], [1, 2, 0]]


def test_where_no_length_is_possible_the_limit_is_kept(small_recipe: SmallRecipe) -> None:
    section = small_recipe(model={"non_autoregressive": {"difference": 2}}).model
    real = torch.ones(1, 31, dtype=torch.bool)
    memory = Memory(torch.zeros(1, 31, 16), real)  # a source of 30 words
    chosen = Sure(section, [0.0] * 5).choose(memory, torch.tensor([10]), 3)
    assert chosen.tolist() == [[10, 10, 10]]


# Learning


def test_one_to_all_words_are_hidden_each_number_as_often() -> None:
    torch.manual_seed(1)
    real = torch.arange(6) < torch.tensor([4] * 3000 + [2] * 3000)[:, None]
    hidden = hide_words(real)
    assert not (hidden & ~real).any()
    for rows, length in ((slice(0, 3000), 4), (slice(3000, 6000), 2)):
        counts = torch.bincount(hidden[rows].sum(1), minlength=7).tolist()
        assert counts[0] == 0
        assert counts[1 : length + 1] == pytest.approx([3000 / length] * length, rel=0.12)
        places = hidden[rows].float().mean(0)[:length].tolist()
        assert places == pytest.approx([(length + 1) / 2 / length] * length, rel=0.06)


def test_loss_is_the_mean_over_hidden_words_times_all_tokens(
    network: NonAutoregressiveTransformer,
) -> None:
    objective = MaskPredictLoss(network, Training(rate=1.0, label_smoothing=0.0)).eval()
    words = network.length.places(SOURCE, WANTED)
    hidden = hide_words(words != PAD, torch.Generator().manual_seed(1))
    logits = network(SOURCE, words.masked_fill(hidden, MASK)).double().numpy(force=True)
    own = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = [own[row, place, words[row, place]] for row, place in hidden.nonzero().tolist()]
    loss = objective(SOURCE, WANTED, WANTED)
    assert loss.item() == pytest.approx(-np.mean(wanted) * 8, rel=1e-4)  # 8 tokens, EOS counted


def test_validation_hides_the_same_words_each_time_training_others(
    network: NonAutoregressiveTransformer,
) -> None:
    objective = MaskPredictLoss(network, Training(rate=1.0))
    torch.manual_seed(1)
    resting = {objective.eval()(SOURCE, WANTED, WANTED).item() for _ in range(5)}
    learning = {objective.train()(SOURCE, WANTED, WANTED).item() for _ in range(5)}
    assert len(resting) == 1
    assert len(learning) > 1
    torch.manual_seed(7)
    first = objective(SOURCE, WANTED, WANTED).item()
    torch.manual_seed(7)
    assert objective(SOURCE, WANTED, WANTED).item() == first


def test_the_length_counts_the_same_whatever_the_size_of_a_batch(
    small_recipe: SmallRecipe,
) -> None:
    """Twice the same sentences give twice the loss, which is divided by twice the tokens."""
    network = make(small_recipe, length_weight=1.0)
    objective = MaskPredictLoss(network, Training(rate=1.0, label_smoothing=0.0)).train()
    gradients = []
    for times in (1, 4):
        network.zero_grad()
        batch = SOURCE.repeat(times, 1), WANTED.repeat(times, 1)
        (objective(batch[0], batch[1], batch[1]) / (8 * times)).backward()
        gradient = network.length.classes.weight.grad  # type: ignore[union-attr]
        gradients.append(gradient.clone())  # type: ignore[union-attr, operator]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


def test_a_batch_with_nothing_wanted_moves_nothing(network: NonAutoregressiveTransformer) -> None:
    objective = MaskPredictLoss(network, Training(rate=1.0)).train()
    loss = objective(SOURCE, WANTED, torch.zeros_like(WANTED))
    loss.backward()
    assert loss.item() == 0
    for name, weight in network.named_parameters():
        assert weight.grad is not None, f"{name}: other processes would wait for it"
        assert not weight.grad.any(), name


def test_each_network_is_taught_in_its_way(small_recipe: SmallRecipe) -> None:
    section = small_recipe().model
    assert type(translation(make(small_recipe), Training(rate=1.0))) is MaskPredictLoss
    assert type(translation(Transformer(section, V, V), Training(rate=1.0))) is Seq2SeqLoss


# Recipes and translators


def test_names_and_lengths_are_the_same() -> None:
    assert set(LENGTHS) == set(get_args(Length))


def test_cut_needs_as_many_learned_positions_as_places(small_recipe: SmallRecipe) -> None:
    model = {"architecture": "non_autoregressive", "position": "learned", "max_length": 260}
    small_recipe(model=model)
    with pytest.raises(RegardError, match="260 is shorter than the places of length: cut: 266"):
        small_recipe(model={**model, "non_autoregressive": {"length": "cut"}})


def translator(small_recipe: SmallRecipe, **model: Any) -> Translator:
    recipe = small_recipe(tokenizer={"kind": "word", "vocab_size": 60}, model=model)
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: [Pair("ein Hund", "a dog")] * 5)
    torch.manual_seed(1)
    network = build_network(recipe, tokenizer).eval()
    return Translator(recipe, tokenizer, network, torch.device("cpu"))


@pytest.fixture
def at_once(small_recipe: SmallRecipe) -> Translator:
    return translator(small_recipe, architecture="parallel")


def test_what_is_asked_is_what_comes(at_once: Translator) -> None:
    texts = ["a dog", "", "ein Hund a dog ein Hund"]
    found = at_once.search(texts, nbest=3)
    assert [len(some) for some in found] == [3, 1, 3]
    assert found[1][0].text == ""
    for some in found:
        assert [one.score for one in some] == sorted((one.score for one in some), reverse=True)
    assert at_once.translate(texts) == [some[0].text for some in found]
    assert at_once.translate(texts, rounds=1) == [
        one.text for (one,) in at_once.search(texts, rounds=1)
    ]
    alone = [at_once.translate([text])[0] for text in texts]
    assert at_once.translate(texts) == alone


def test_the_length_can_be_set(at_once: Translator) -> None:
    (found,) = at_once.search(["a dog"], length=7)
    (one,) = found
    assert len(one.tokens) == len(one.token_log_probabilities) == 7
    assert one.score == pytest.approx(one.log_probability / 7)
    assert one.finished


def test_how_a_translation_came_about_can_be_seen(at_once: Translator) -> None:
    filling = at_once.find_at_once("a dog ein Hund", rounds=3, length=6)
    assert [row.count(MASK) for row in filling.read] == [6, 4, 2]
    assert filling.said[-1] == filling.hypothesis.tokens
    ((best, *_),) = at_once.search(["a dog ein Hund"], rounds=3)
    seen = at_once.find_at_once("a dog ein Hund", rounds=3)
    assert at_once.tokenizer.target.pieces(seen.said[-1]) == best.tokens


def test_a_translator_that_cuts_has_no_length_to_set(small_recipe: SmallRecipe) -> None:
    model = translator(small_recipe, architecture="parallel", parallel={"length": "cut"})
    (one,) = model.translate(["a dog"])
    assert EOS not in model.tokenizer.target.encode([one])[0]
    with pytest.raises(RegardError, match="length 3: this model ends where it says EOS"):
        model.translate(["a dog"], length=3)


@pytest.mark.parametrize(
    "options",
    [{"beam": 2}, {"length_penalty": 0.5}, {"prefixes": ["a"]}, {"beam": 5, "length_penalty": 1.0}],
)
def test_options_of_the_other_kind_are_refused(
    at_once: Translator, options: dict[str, Any]
) -> None:
    with pytest.raises(RegardError, match=f"{next(iter(options))} .*says all words at once"):
        at_once.search(["a dog"], **options)


def test_what_draws_or_goes_by_steps_is_refused(at_once: Translator) -> None:
    with pytest.raises(RegardError, match="says all words at once"):
        at_once.sample(["a dog"])
    with pytest.raises(RegardError, match="says all words at once"):
        at_once.find("a dog", beam=2, alpha=0.6)


@pytest.mark.parametrize("options", [{"iterations": 2}, {"candidates": 2}, {"length": 4}])
def test_a_model_that_goes_by_steps_refuses_rounds(
    small_recipe: SmallRecipe, options: dict[str, Any]
) -> None:
    with pytest.raises(RegardError, match="says one word after another: it takes beam"):
        translator(small_recipe).translate(["a dog"], **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"iterations": 0}, "search.iterations: 0 must be greater than or equal to 1"),
        ({"candidates": 2, "nbest": 3}, "nbest between 1 and candidates"),
        ({"length": 0}, "length 0, candidates 1: a length must be at least 1"),
        ({"length": 4, "candidates": 2}, "with a length given there is one candidate"),
    ],
)
def test_impossible_options_are_refused(
    at_once: Translator, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        at_once.search(["a dog"], **options)


def test_learned_positions_bound_the_length(small_recipe: SmallRecipe, tmp_path: Path) -> None:
    model = translator(small_recipe, architecture="parallel", position="learned", max_length=300)
    (one, *_) = model.search(["a dog " * 140])[0]
    assert 1 <= len(one.tokens) <= 300


def test_the_benchmark_measures_with_as_many_threads_as_it_says(make_run: MakeRun) -> None:
    benchmark = load_script("benchmarks/parallel.py")
    run = make_run(model={"architecture": "non_autoregressive"})
    models = benchmark.Models("cpu", threads=1)
    models.translate(benchmark.Way("one round", run, {"iterations": 1}), ["a dog"])
    assert models.open[run].threads == 1
