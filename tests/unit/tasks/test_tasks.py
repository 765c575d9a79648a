"""What each task makes of its data, its network and its objective, against numbers worked out by hand or by NumPy."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from regard import recipe as recipes
from regard.data.batching import pad_sources
from regard.data.corpus import read_pairs
from regard.data.pairs import Pair
from regard.data.special_tokens import EOS, MASK, PAD, SPECIAL_TOKENS
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.metrics.base import METRICS
from regard.nn.architectures import ARCHITECTURES
from regard.nn.dropout import drop_tokens, mask_tokens
from regard.nn.encoder_heads import (
    AttentionPooling,
    EncoderForMaskedLM,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)
from regard.nn.loss import LabelLoss, MaskedLMLoss
from regard.recipe import CleaningConfig, DataFiles, Recipe, make_recipe
from regard.tasks import TASKS, LanguageModel, MaskedLM, build_network
from regard.tasks.base import label_names

V = 50
FIRST = len(SPECIAL_TOKENS)
MODEL = {"d_model": 16, "heads": 2, "d_ff": 32, "dropout": 0}


def recipe_of(task: str, **sections: Any) -> Recipe:
    alone = task in ("masked_lm", "language_model")
    values = {
        "task": task,
        "data": {"train": {"text": "t"} if alone else {"pairs": "p.tsv"}},
        "tokenizer": {"kind": "word", "vocab_size": 60},
        **sections,
    }
    values["model"] = {**MODEL, **sections.get("model", {})}
    return make_recipe(values, "test")


# Masked words


def test_fifteen_in_a_hundred_words_are_hidden_in_the_shares_of_bert() -> None:
    torch.manual_seed(1)
    lengths = [1, 2, 3, 4, 10, 13, 200, 999]
    words = torch.full((len(lengths), 1000), PAD)
    for row, length in enumerate(lengths):
        words[row, :length] = torch.randint(FIRST, 5000, (length,))
    words = words.repeat(100, 1)
    source = words.clone()
    source[range(len(source)), (words != PAD).sum(1)] = EOS
    shown, wanted = mask_tokens(source, words, 5000)
    chosen = wanted != PAD
    # 0.15 n, rounded, half upwards, but one at least.
    assert chosen.sum(1)[: len(lengths)].tolist() == [1, 1, 1, 1, 2, 2, 30, 150]
    assert torch.equal(wanted[chosen], words[chosen])
    assert torch.equal(shown[~chosen], source[~chosen])  # EOS and padding are never touched
    count = int(chosen.sum())
    hidden = int((shown == MASK)[chosen].sum())
    kept = int((shown == words)[chosen].sum())
    assert hidden / count == pytest.approx(0.8, abs=0.01)
    assert kept / count == pytest.approx(0.1, abs=0.01)
    others = shown[chosen & (shown != MASK) & (shown != words)]
    assert len(others) / count == pytest.approx(0.1, abs=0.01)
    assert others.min() >= FIRST
    # Every place is as likely as any other.
    middle = chosen.view(100, len(lengths), -1)[:, -1, :999].float().mean(0)
    assert middle[:500].mean() == pytest.approx(0.15, abs=0.01)


def test_hidden_words_follow_the_generator() -> None:
    source = torch.randint(FIRST, V, (4, 30))
    first, again, other = (
        mask_tokens(source, source, V, torch.Generator().manual_seed(seed))[1] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_word_dropout_hides_words_but_no_marks() -> None:
    torch.manual_seed(1)
    source = torch.randint(FIRST, V, (100, 100))
    source[:, -1] = EOS
    source[:, -2] = PAD
    shown = drop_tokens(source, 0.25)
    assert (shown == MASK).float().mean() == pytest.approx(0.98 * 0.25, abs=0.01)
    assert torch.equal(shown[:, -2:], source[:, -2:])


def test_the_mask_objective_is_the_sum_over_hidden_words() -> None:
    recipe = recipe_of("masked_lm")
    network = EncoderForMaskedLM(recipe.model, V).double()
    objective = MaskedLMLoss(network, recipe.training)
    source = torch.randint(FIRST, V, (3, 20))
    source[1, 12:] = PAD
    words = source.clone()
    objective.eval()
    loss = objective(source, source[:, :0], words)
    assert loss == objective(source, source[:, :0], words)  # validation hides the same words
    shown, hidden = mask_tokens(source, words, V, torch.Generator().manual_seed(0))
    by_hand = F.cross_entropy(
        network(shown).flatten(0, 1), hidden.flatten(), ignore_index=PAD, reduction="sum"
    )
    torch.testing.assert_close(loss.double(), by_hand)
    objective.train()
    losses = {float(objective(source, source[:, :0], words).detach()) for _ in range(5)}
    assert len(losses) == 5  # learning hides others each time


# Labels


def test_padding_changes_no_label() -> None:
    recipe = recipe_of("tagging")
    torch.manual_seed(1)
    long = torch.randint(FIRST, V, (1, 9))
    short = torch.cat([long[:, :5], torch.full((1, 4), PAD)], dim=1)
    for network in (
        EncoderForTokenClassification(recipe.model, V, 8),
        EncoderForSequenceClassification(recipe.model, V, 8),
    ):
        network.double().eval()
        if isinstance(network, EncoderForSequenceClassification):
            torch.nn.init.normal_(network.pool.query)
        both = network(torch.cat([long, short]))
        torch.testing.assert_close(both[0], network(long)[0])
        alone = network(long[:, :5])[0]
        torch.testing.assert_close(both[1, : len(alone)], alone)


def test_a_pool_is_the_mean_at_first_and_then_a_weighted_sum() -> None:
    pool = AttentionPooling(4).double()
    states = torch.randn(2, 3, 4, dtype=torch.float64)
    real = torch.tensor([[True, True, True], [True, True, False]])
    torch.testing.assert_close(pool(states, real)[0], states[0].mean(0))
    torch.testing.assert_close(pool(states, real)[1], states[1, :2].mean(0))
    torch.nn.init.normal_(pool.query)
    x, query = states[0].numpy(), pool.query.detach().numpy()
    weights = np.exp(x @ query / 2)
    by_hand = (weights / weights.sum()) @ x
    np.testing.assert_allclose(pool(states, real)[0].detach().numpy(), by_hand)


def test_the_label_objective_counts_labels_only() -> None:
    recipe = recipe_of("tagging", training={"label_smoothing": 0.1, "word_dropout": 0.5})
    network = EncoderForTokenClassification(recipe.model, V, 8).double().eval()
    objective = LabelLoss(network, recipe.training).eval()
    source = torch.randint(FIRST, V, (2, 5))
    wanted = torch.tensor([[5, PAD, 6, PAD, PAD], [7, 5, PAD, 6, PAD]])
    by_hand = F.cross_entropy(
        network(source).flatten(0, 1), wanted.flatten(), ignore_index=PAD, reduction="sum"
    )
    torch.testing.assert_close(objective(source, source[:, :0], wanted).double(), by_hand)


# What a task makes of pairs


def stored(
    task: str, pairs: Iterable[Pair], folder: Path, tokenizer: Tokenizer, **data: Any
) -> tuple[Any, TokenDataset]:
    recipe = recipe_of(task)
    clean = CleaningConfig(**data)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"clean": clean})})
    form = TASKS[task].encoder(recipe)
    write_dataset(folder / "a.arrow", pairs, tokenizer, clean, form.rows)
    return form, TokenDataset(folder / "a.arrow")


def characters(pairs: list[Pair], labels: bool = False) -> Tokenizer:
    section = recipes.TokenizerConfig(kind="char", vocab_size=300, shared=not labels)
    return Tokenizer.train(section, lambda: pairs, labels)


def test_a_tag_stands_at_the_first_piece_of_its_word(tmp_path: Path) -> None:
    pairs = [Pair("ab c", "X Y"), Pair("c", "Y")]
    tokenizer = characters(pairs, labels=True)
    form, store = stored("tagging", pairs, tmp_path, tokenizer)
    batch = form.collate(store, np.array([0, 1]))
    assert tokenizer.source.pieces(batch.source[0].tolist()) == ["▁", "a", "b", "▁", "c", "</s>"]
    x, y = (tokenizer.target.encode([label])[0][0] for label in "XY")
    assert batch.labels.tolist() == [[x, 0, 0, y, 0, 0], [y, 0, 0, 0, 0, 0]]
    assert form.count_labels(store, np.array([0, 1])) == 3
    assert label_names(tokenizer.target)[x - FIRST] == "X"


def test_every_label_is_an_entry_in_its_own_case() -> None:
    pairs = [Pair("a", label) for label in ("NOUN", "noun", "ﬁ")]
    section = recipe_of(
        "tagging", tokenizer={"kind": "char", "vocab_size": 300, "normalize": "lower"}
    )
    tokenizer = Tokenizer.train(section.tokenizer, lambda: pairs, labels=True)
    assert sorted(label_names(tokenizer.target)) == ["NOUN", "noun", "ﬁ"]


def test_a_classified_text_may_be_of_any_length(tmp_path: Path) -> None:
    pairs = [Pair("a b c d e f g h i j k l", "X"), Pair("a", "Y")]
    form, store = stored(
        "classification", pairs, tmp_path, characters(pairs, labels=True), max_ratio=2
    )
    batch = form.collate(store, np.array([0, 1]))
    assert batch.labels.shape == (2, 1)
    assert form.count_labels(store, np.array([0, 1])) == 2
    assert len(batch.source[0]) == 25  # 24 characters, a blank before each letter, and EOS


def test_long_text_is_cut_and_not_lost(tmp_path: Path) -> None:
    pairs = [Pair("abcdefgh", ""), Pair("", ""), Pair("ab", "")]
    tokenizer = characters(pairs)
    form, store = stored("masked_lm", pairs, tmp_path, tokenizer, max_tokens=4)
    rows = pad_sources(store, np.arange(len(store))).tolist()
    assert "".join(tokenizer.source.decode(rows)) == "abcdefghab"
    assert store.source_lengths[:].tolist() == [4, 4, 1, 3]
    batch = form.collate(store, np.array([0, 2]))
    assert batch.labels[1].tolist() == [batch.source[1, 0], PAD, PAD, PAD, PAD]
    assert form.count_labels(store, np.arange(4)) == 4


def test_the_mask_form_counts_as_many_words_as_are_hidden(tmp_path: Path) -> None:
    pairs = [Pair("x" * length, "") for length in range(1, 80)]
    form, store = stored("masked_lm", pairs, tmp_path, characters(pairs))
    for rows in np.array_split(np.arange(len(store)), 7):
        batch = form.collate(store, rows)
        _, hidden = mask_tokens(batch.source, batch.labels, 300)
        assert form.count_labels(store, rows) == int((hidden != PAD).sum())


def test_a_stream_is_cut_into_blocks_that_follow_each_other(tmp_path: Path) -> None:
    pairs = [Pair("abc", ""), Pair("", ""), Pair("bca", "")]
    tokenizer = characters(pairs)
    form, store = stored("language_model", pairs, tmp_path, tokenizer, max_tokens=4)
    blank, a, b, c = tokenizer.source.encode(["abc"])[0]
    stream = [EOS, blank, a, b, c, EOS, EOS, blank, b, c, a, EOS]
    batches = [form.collate(store, np.array([row])) for row in range(len(store))]
    assert [i for batch in batches for i in batch.target[0].tolist()] == stream[:-1]
    assert [i for batch in batches for i in batch.labels[0].tolist()] == stream[1:]
    assert form.count_labels(store, np.arange(len(store))) == 11
    both = form.collate(store, np.arange(len(store)))
    assert both.source.shape == (3, 0)
    assert (both.target == PAD).equal(both.labels == PAD)


@pytest.mark.parametrize("task", ["tagging", "classification", "masked_lm", "language_model"])
def test_processes_share_a_batch_and_one_may_be_idle(task: str, tmp_path: Path) -> None:
    pairs = [Pair("ab", "X" if task in ("tagging", "classification") else "")] * 2
    tokenizer = characters(pairs, labels=task in ("tagging", "classification"))
    form, store = stored(task, pairs, tmp_path, tokenizer, keep_duplicates=True, max_tokens=50)
    rows = np.arange(len(store))
    parts = [form.collate(store, rows, part, 3) for part in range(3)]
    assert (parts[2].labels == PAD).all()
    if task == "masked_lm":
        assert not (mask_tokens(parts[2].source, parts[2].labels, 300)[1] != PAD).any()
    else:
        assert sum(part.tokens for part in parts) == form.count_labels(store, rows)


def test_a_source_is_cut_if_the_recipe_says_so(tmp_path: Path) -> None:
    pairs = [Pair("abcdefgh", "ab"), Pair("ab", "abcdefgh")]
    _, store = stored(
        "translation",
        pairs,
        tmp_path,
        characters(pairs),
        truncate=True,
        max_tokens=4,
        max_ratio=None,
    )
    assert store.source_lengths[:].tolist() == [
        4
    ]  # a target is never cut: the second pair is left out


# Data


def test_conllu_is_words_and_tags(tmp_path: Path) -> None:
    rows = [
        "# text",
        "1\tVery good\t_\tADJ\t_\t_\t0\troot\t_\t_",
        "2\t!\t_\tPUNCT\t_\t_\t1\tp\t_\t_",
    ]
    (tmp_path / "a.conllu").write_text("\n".join(rows) + "\n\n")
    recipe = make_recipe(
        {"task": "tagging", "data": {"root": str(tmp_path), "train": {"conllu": "a.conllu"}}},
        "test",
    )
    assert list(read_pairs(recipe.data.train, recipe.data)) == [Pair("Very_good !", "ADJ PUNCT")]


@pytest.mark.parametrize("head", ["²", "x", "_"])
def test_a_head_that_is_no_number_is_told_with_its_line(tmp_path: Path, head: str) -> None:
    (tmp_path / "a.conllu").write_text(f"1\tdog\t_\tNOUN\t_\t_\t{head}\troot\t_\t_\n\n")
    recipe = make_recipe(
        {"task": "tagging", "data": {"root": str(tmp_path), "train": {"conllu": "a.conllu"}}},
        "test",
    )
    with pytest.raises(RegardError, match=r"a.conllu:1: the head of a word must be a number, not"):
        list(read_pairs(recipe.data.train, recipe.data))


def test_text_alone_has_no_target_and_no_blanks_at_its_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(" = Title = \n \nmore\n")
    texts = DataFiles(text=("a.txt",))
    data = recipe_of("masked_lm").data.model_copy(update={"root": str(tmp_path)})
    assert list(read_pairs(texts, data)) == [Pair("= Title =", ""), Pair("", ""), Pair("more", "")]


# Recipes


def test_what_suits_a_task_is_filled_in() -> None:
    assert recipe_of("tagging").evaluation.metrics == ("accuracy", "f1")
    assert recipe_of("tagging").tokenizer.shared is False
    assert recipe_of("masked_lm").training.best_checkpoint_metric == "loss"
    assert recipe_of("masked_lm").training.label_smoothing == 0.0
    assert recipe_of("masked_lm", training={"label_smoothing": 0.2}).training.label_smoothing == 0.2
    assert recipe_of("language_model").model.architecture == "decoder_only"
    assert recipe_of("translation").evaluation.metrics[0] == "bleu"


@pytest.mark.parametrize(
    ("task", "sections", "message"),
    [
        (
            "tagging",
            {"evaluation": {"metrics": ["bleu"]}},
            "bleu cannot be computed for task tagging; allowed: accur",
        ),
        (
            "translation",
            {"evaluation": {"metrics": ["perplexity"]}},
            "cannot be computed for task translation",
        ),
        (
            "tagging",
            {"model": {"architecture": "decoder_only"}},
            "needs model.architecture: transformer",
        ),
        (
            "language_model",
            {"model": {"architecture": "transformer"}},
            "needs model.architecture: decod",
        ),
        ("classification", {"tokenizer": {"shared": True}}, "needs tokenizer.shared: false"),
        ("masked_lm", {"tokenizer": {"shared": False}}, "needs tokenizer.shared: true"),
        (
            "masked_lm",
            {"training": {"best_checkpoint_metric": "score", "validate_sentences": 9}},
            "best_checkpoint_metric: loss",
        ),
        (
            "masked_lm",
            {"training": {"word_dropout": 0.1}},
            "word_dropout: 0.1 needs task: translation, tagging or classification, not masked_lm",
        ),
        ("masked_lm", {"data": {"train": {"pairs": "p"}}}, "data.train: task masked_lm needs text"),
        ("tagging", {"data": {"train": {"text": "t"}}}, "needs targets: set source and target"),
        ("classification", {"data": {"train": {"conllu": "t"}}}, "conllu needs task: tagging"),
        (
            "tagging",
            {"data": {"train": {"pairs": "t"}, "clean": {"truncate": True}}},
            "words without a tag",
        ),
        (
            "masked_lm",
            {"data": {"train": {"text": "t"}, "languages": ["en", "de"]}},
            r"data.languages: \[en, de\] has no effect with task: masked_lm",
        ),
        ("sing", {}, "'sing' must be "),
    ],
)
def test_what_does_not_fit_a_task_is_refused(
    task: Any, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        recipe_of(task, **sections)


def test_a_decoder_needs_positions_for_both_texts() -> None:
    section = {"architecture": "decoder_only", "position": "learned", "max_length": 300}
    with pytest.raises(
        RegardError, match=r"max_length: 300 is shorter than the longest training text: 514"
    ):
        recipe_of("translation", model=section)
    assert recipe_of("translation", model={**section, "max_length": 514})
    assert recipe_of("language_model", model=section)


# Perplexity


def test_perplexity_of_a_stream_does_not_depend_on_how_it_is_cut() -> None:
    """A model that reads only the last word gives each token the same probability in every block."""
    pairs = [Pair(" ".join(np.random.default_rng(n).choice(list("abcd"), 9)), "") for n in range(9)]
    recipe = recipe_of(
        "language_model",
        data={"train": {"text": "t"}, "clean": {"max_tokens": 7}},
        model={"position": "none"},
    )
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: pairs)
    torch.manual_seed(1)
    network: Any = build_network(recipe, tokenizer).eval()
    for layer in network.layers:
        torch.nn.init.zeros_(layer.attention.output.weight)
    model = LanguageModel(recipe, tokenizer, network, torch.device("cpu"))
    tokens, by_words = model.evaluate(pairs)
    stream = [EOS, *(i for p in pairs for i in (*tokenizer.source.encode([p.source])[0], EOS))]
    read = torch.tensor([stream[:-1]])
    logits = network(read[:, :0], read)[0]
    by_hand = math.exp(F.cross_entropy(logits, torch.tensor(stream[1:])).detach())
    assert tokens.value == pytest.approx(by_hand)
    assert by_words.value == pytest.approx(by_hand)  # as many words as tokens
    assert "unknown:0" in tokens.signature
    assert "lines:9" in tokens.signature


@pytest.mark.parametrize("option", [{"top_k": 3}, {"top_p": 0.5}, {"seed": 2}])
def test_greedy_generation_refuses_the_options_of_sampling(option: dict[str, Any]) -> None:
    pairs = [Pair("a b c d", "")]
    recipe = recipe_of("language_model")
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: pairs)
    network: Any = build_network(recipe, tokenizer).eval()
    model = LanguageModel(recipe, tokenizer, network, torch.device("cpu"))
    ((name, value),) = option.items()
    with pytest.raises(RegardError, match=f"{name} {value}: no effect with temperature 0"):
        model.generate("a b", 3, temperature=0, **option)
    assert model.generate("a b", 3, temperature=1.0, **option).startswith("a b")


def test_accuracy_and_perplexity_of_masked_tokens() -> None:
    pairs = [Pair("a b c d", ""), Pair(" ", ""), Pair("b", "")]
    recipe = recipe_of("masked_lm", data={"train": {"text": "t"}, "clean": {"max_tokens": 3}})
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: pairs)
    network: Any = build_network(recipe, tokenizer).eval()
    torch.nn.init.zeros_(network.encoder.embedding.weight)  # all words are equally likely
    model = MaskedLM(recipe, tokenizer, network, torch.device("cpu"))
    accuracy, perplexity = model.evaluate(pairs)
    assert perplexity.value == pytest.approx(tokenizer.source.size)
    assert accuracy.value == 0.0  # the first entry, a special token, is never right
    assert "lines:3" in accuracy.signature  # one text of four words is two


def test_the_masked_tokens_do_not_depend_on_the_other_texts_of_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = [Pair("abcdefghij"[:length] * 3, "") for length in range(1, 10)]
    recipe = recipe_of("masked_lm")
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: pairs)
    model = MaskedLM(
        recipe, tokenizer, build_network(recipe, tokenizer).eval(), torch.device("cpu")
    )
    together = model.evaluate(pairs)
    monkeypatch.setattr(
        "regard.tasks.masked_lm.plan_rows",
        lambda lengths, *_: ([row] for row in range(len(lengths))),
    )
    assert [one.value for one in model.evaluate(pairs)] == pytest.approx(
        [one.value for one in together], rel=1e-5
    )


OPTIONS_OF_TASKS: dict[str, dict[str, Any]] = {
    "data.conllu": {"data": {"train": {"conllu": "c"}}},
    "data.to": {"data": {"train": {"pairs": "p", "to": "de"}}},
    "data.tag": {"data": {"train": {"pairs": "p", "tag": "bt"}}},
    "data.bidirectional": {"data": {"train": {"pairs": "p"}, "bidirectional": True}},
    "data.context": {"data": {"train": {"pairs": "p"}, "context": 1}},
    "data.clean.truncate": {"data": {"train": {"pairs": "p"}, "clean": {"truncate": True}}},
    "model.output_bias": {"model": {"output_bias": True}},
    "model.position: tree": {
        "model": {"position": "tree"},
        "data": {"train": {"pairs": "p", "parses": "c"}},
    },
    "training.batching: packed": {"training": {"batching": "packed"}},
    "training.augment": {"training": {"augment": {"title": 0.1}}},
    "training.teacher": {"training": {"teacher": "runs/teacher"}},
    "training.subword_sampling": {
        "training": {"subword_sampling": 0.1},
        "tokenizer": {"kind": "bpe"},
    },
    "training.target_word_dropout": {"training": {"target_word_dropout": 0.1}},
    "training.rdrop": {"training": {"rdrop": 0.1}, "model": {"dropout": 0.1}},
    "training.simcut": {"training": {"simcut": 0.1}},
    "training.word_dropout": {"training": {"word_dropout": 0.1}},
}
"""an example of each option that not every task supports"""


def test_the_options_that_a_task_can_support_are_all_listed() -> None:
    supported = {key for task in TASKS.values() for key in task.supports}
    assert supported == {*OPTIONS_OF_TASKS}
    assert all(key not in task.supports for task in TASKS.values() for key in task.reasons)


@pytest.mark.parametrize("task", ["translation", "tagging", "classification"])
@pytest.mark.parametrize("key", OPTIONS_OF_TASKS)
def test_a_task_states_which_options_it_supports(key: str, task: str) -> None:
    sections = {"data": {"train": {"pairs": "p"}}, **OPTIONS_OF_TASKS[key]}
    if key in TASKS[task].supports:
        recipe_of(task, **sections)
        return
    name = key.replace("data.", "data.train.") if key in ("data.to", "data.tag") else key
    with pytest.raises(RegardError, match=rf"{name.split('.')[-1]}.* needs task: .*, not {task}"):
        recipe_of(task, **sections)


def test_a_new_task_supports_what_it_states() -> None:
    """No name of a task is compared anywhere: the options follow from the registration."""
    kind = replace(TASKS["translation"], supports=("training.augment",))
    TASKS.register("paraphrasing", summary="other words for a text")(kind)
    try:
        recipe_of("paraphrasing", training={"augment": {"title": 0.1}})
        with pytest.raises(RegardError, match="packed needs task: translation, not paraphrasing"):
            recipe_of("paraphrasing", training={"batching": "packed"})
    finally:
        del TASKS.choices["paraphrasing"]


def test_every_task_is_complete() -> None:
    for name, task in TASKS.items():
        assert (task.model.task, TASKS.choices[name].summary != "") == (name, True)
        assert set(task.metrics) <= set(METRICS)
        assert set(task.architectures) <= set(ARCHITECTURES)
    assert {metric for task in TASKS.values() for metric in task.metrics} == set(METRICS)
