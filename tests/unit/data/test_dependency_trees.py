"""Dependency trees: depth and distance against breadth-first search, tokens of words, and models that use them."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from regard.data.batching import collate, collate_trees
from regard.data.corpus import read_pairs
from regard.data.dependency_trees import (
    MultiwordToken,
    ParsedSentence,
    TokenTree,
    check_parse,
    token_tree,
)
from regard.data.pairs import Pair, ParsedPair, parse_of
from regard.data.special_tokens import EOS, PAD
from regard.data.token_dataset import TokenDataset, write_dataset
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.nn.positions import SinusoidalInTree, Tree, sinusoids
from regard.nn.transformer import Transformer
from regard.recipe import DataConfig, DataFiles, Recipe, TokenizerConfig as Section
from regard.tasks.base import PairEncoder

SmallRecipe = Callable[..., Recipe]
PARSED = {"pairs": "a.tsv", "parses": "a.conllu"}


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Heads of up to twelve words in any order, at least one of them attached to the root."""
    count = draw(st.integers(1, 12))
    order = draw(st.permutations(range(1, count + 1)))
    heads = [0] * count
    for index, word in enumerate(order):
        heads[word - 1] = draw(st.sampled_from([0, *order[:index]]))
    return heads


def breadth_first(heads: list[int], start: int) -> list[int]:
    """The number of edges from one word, or the root, to each."""
    neighbours: list[list[int]] = [[] for _ in range(len(heads) + 1)]
    for word, head in enumerate(heads, 1):
        neighbours[word].append(head)
        neighbours[head].append(word)
    distances, queue = {start: 0}, deque([start])
    while queue:
        word = queue.popleft()
        for other in neighbours[word]:
            if other not in distances:
                distances[other] = distances[word] + 1
                queue.append(other)
    return [distances[word] for word in range(len(heads) + 1)]


def ancestors(heads: list[int], word: int) -> list[int]:
    """The heads of a word up to the root, and the root."""
    path = []
    while word:
        word = heads[word - 1]
        path.append(word)
    return path


@given(batch=st.lists(trees(), min_size=1, max_size=4), data=st.data())
def test_depth_and_distance_equal_breadth_first_search(
    batch: list[list[int]], data: st.DataObject
) -> None:
    # Each word has any number of tokens, even none.
    tokens = [
        sorted(data.draw(st.lists(st.integers(1, len(heads)), max_size=15))) for heads in batch
    ]
    depth, distance = collate_trees(list(map(TokenTree, tokens, batch)))
    for row, (words, heads) in enumerate(zip(tokens, batch, strict=True)):
        words_and_root = [*words, 0]  # EOS is the root
        from_root = breadth_first(heads, 0)
        assert depth[row, : len(words_and_root)].tolist() == [
            from_root[word] for word in words_and_root
        ]
        for query, one in enumerate(words_and_root):
            edges = breadth_first(heads, one)
            for key, other in enumerate(words_and_root):
                sign = 1 if one < other else -1
                if one in ancestors(heads, other):
                    sign = 1
                elif other in ancestors(heads, one):
                    sign = -1
                assert distance[row, query, key] == sign * edges[other]


def test_a_deep_tree() -> None:
    chain_of_words = list(range(400))
    depth, distance = collate_trees([TokenTree(list(range(1, 401)), chain_of_words)])
    assert depth[0].tolist() == [*range(1, 401), 0]
    assert distance[0, 0, 399] == 399


# Tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ["I do n't see the dog", "I don't see dogs", "é ist zum Haus"]
    return Tokenizer.train(
        Section(kind="bpe", vocab_size=330), lambda: [Pair(t, t) for t in texts * 9]
    )


def parsed(words: str, heads: Iterable[int]) -> ParsedSentence:
    return ParsedSentence(words.split(), ["X"] * len(words.split()), list(heads))


def by_word(tokenizer: Tokenizer, text: str, parse: ParsedSentence | None) -> dict[int, str]:
    (ids,) = tokenizer.source.encode([text])
    words = token_tree(text, parse, tokenizer.source).words
    found: dict[int, list[int]] = {}
    for word, piece in zip(words, ids, strict=True):
        found.setdefault(word, []).append(piece)
    return {word: tokenizer.source.decode([pieces])[0] for word, pieces in found.items()}


@pytest.mark.parametrize(
    ("text", "parse", "expected"),
    [
        ("I see dogs", parsed("I see dogs", [2, 0, 2]), {1: "I", 2: "see", 3: "dogs"}),
        ("  I see  dogs ", parsed("I see dogs", [2, 0, 2]), {1: " I", 2: "see", 3: " dogs "}),
        ("éx 中国!", parsed("éx 中 国 !", [0, 1, 2, 3]), {1: "éx", 2: "中", 3: "国", 4: "!"}),
        ("e\u0301x", parsed("é x", [0, 1]), {1: "é", 2: "x"}),
        ("a▁b ▅", parsed("a ▁ b ▅", [0, 1, 1, 1]), {1: "a", 2: "▁", 3: "b", 4: "▅"}),
        ("   ", None, {0: "   "}),
    ],
)  # fmt: skip
def test_every_token_belongs_to_the_word_it_spells(
    tokenizer: Tokenizer, text: str, parse: ParsedSentence | None, expected: dict[int, str]
) -> None:
    found = by_word(tokenizer, text, parse)
    assert {word: without_spaces(form) for word, form in found.items()} == {
        word: without_spaces(form) for word, form in expected.items()
    }


def without_spaces(text: str) -> str:
    return "".join(text.split())


def test_a_token_that_spans_two_words_belongs_to_the_first(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.source.encode(["I don't see"])
    assert tokenizer.source.pieces(ids) == ["▁I", "▁don", "'", "t", "▁see"]
    tree = token_tree("I don't see", parsed("I do n't see", [4, 4, 4, 0]), tokenizer.source)
    assert tree.words == [1, 2, 3, 3, 4]


def test_words_written_as_one_belong_to_the_first(tokenizer: Tokenizer) -> None:
    parse = parsed("ist zu dem Haus", [0, 4, 4, 1])._replace(
        multiword_tokens={2: MultiwordToken("zum", 3)}
    )
    check_parse("ist zum Haus", parse, "here")
    found = by_word(tokenizer, "ist zum Haus", parse)
    assert {word: without_spaces(form) for word, form in found.items()} == {
        1: "ist",
        2: "zum",
        4: "Haus",
    }


@given(
    words=st.lists(st.text(min_size=1).filter(without_spaces), min_size=1, max_size=6),
    data=st.data(),
)
def test_the_words_of_tokens_are_in_order(
    tokenizer: Tokenizer, words: list[str], data: st.DataObject
) -> None:
    gaps = data.draw(
        st.lists(st.sampled_from(["", " ", "\u3000 "]), min_size=len(words), max_size=len(words))
    )
    text = "".join(chain.from_iterable(zip(gaps, words, strict=True)))
    parse = ParsedSentence(words, words, list(range(len(words))))
    tree = token_tree(text, parse, tokenizer.source)
    assert len(tree.words) == len(tokenizer.source.encode([text])[0])
    assert tree.words == sorted(tree.words)
    assert set(tree.words) <= set(range(1, len(words) + 1))


# Files

CONLLU = """# text = ist zum Haus
1\tist\tsein\tAUX\t_\t_\t0\troot\t_\t_
2-3\tzum\t_\t_\t_\t_\t_\t_\t_\t_
2\tzu\tzu\tADP\t_\t_\t4\tcase\t_\t_
3\tdem\tder\tDET\t_\t_\t4\tdet\t_\t_
3.1\tleer\t_\t_\t_\t_\t_\t_\t_\t_
4\tHaus\tHaus\tNOUN\t_\t_\t1\tobl\t_\t_

1\tHund\tHund\tNOUN\t_\t_\t0\troot\t_\t_
"""


def read(folder: Path, source: str, conllu: str) -> list[Pair]:
    (folder / "a.src").write_text(source)
    (folder / "a.tgt").write_text("x\n" * source.count("\n"))
    (folder / "a.conllu").write_text(conllu)
    files = DataFiles(source=("a.src",), target=("a.tgt",), parses=("a.conllu",))
    return list(read_pairs(files, DataConfig(root=str(folder), train=files)))


def test_every_line_has_a_tree_except_blank_lines(tmp_path: Path) -> None:
    pairs = read(tmp_path, "ist  zum Haus\n\nHund\n", CONLLU)
    assert [pair[:2] for pair in pairs] == [("ist  zum Haus", "x"), ("", "x"), ("Hund", "x")]
    first, blank, last = map(parse_of, pairs)
    assert first is not None
    assert first.heads == [0, 4, 4, 1]
    assert first.multiword_tokens == {2: ("zum", 3)}
    assert first.line == 2
    assert blank is None
    assert last is not None
    assert (last.words, last.line) == (["Hund"], 9)
    assert parse_of(Pair("a", "b")) is None


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ("ist zum Hause\nHund\n", ("", ""), r"a.conllu:2, line 1 of .*a.src: .* nothing more where the text has 'e'"),
        ("ist zum Haus\nHuhn\n", ("", ""), r"a.conllu:9, line 2 of .*a.src: .* it has 'nd' where the text has 'hn'"),
        ("ist zum Haus\nHund\nHund\n", ("", ""), r"a.conllu: there is no tree for line 3 of .*a.src"),
        ("ist zum Haus\n", ("", ""), r"a.conllu:9: more trees than lines: .*a.src has only 1 lines"),
        ("ist zum Haus\nHund\n", ("_\t1\tobl", "_\t4\tobl"), r"not a tree: word 2 \('zu'\) is not connected"),
        ("ist zum Haus\nHund\n", ("_\t1\tobl", "_\t7\tobl"), r"has head 7, but there are only 4 words"),
    ],
)  # fmt: skip
def test_a_parse_that_does_not_match_is_refused(
    tmp_path: Path, source: str, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        read(tmp_path, source, CONLLU.replace(*change) if change[0] else CONLLU)


def test_trees_are_stored_in_the_dataset_and_collated(
    tmp_path: Path, tokenizer: Tokenizer, small_recipe: SmallRecipe
) -> None:
    parses = [parsed("I see dogs", [2, 0, 2]), None, parsed("dogs see", [2, 0])]
    pairs = [
        ParsedPair.from_pair(Pair(text, "dog"), parse)
        for text, parse in zip(["I see dogs", " ", "dogs see"], parses, strict=True)
    ]
    recipe = small_recipe(data={"train": PARSED}, model={"position": "tree"})
    write_dataset(tmp_path / "a", pairs, tokenizer, None, PairEncoder(recipe).rows)
    batch = collate(TokenDataset(tmp_path / "a"), np.arange(3))
    expected = collate_trees([token_tree(p.source, parse_of(p), tokenizer.source) for p in pairs])
    assert batch.position_info is not None
    for actual, tensor in zip(batch.position_info, expected, strict=True):
        assert torch.equal(actual, tensor)
    assert batch.position_info[0].shape == batch.source.shape
    write_dataset(tmp_path / "b", pairs, tokenizer, None)
    assert collate(TokenDataset(tmp_path / "b"), np.arange(3)).position_info is None


# The model


def test_sinusoids_of_position_and_depth_are_combined(small_recipe: SmallRecipe) -> None:
    module = SinusoidalInTree(small_recipe(model={"d_model": 8}).model)
    depth = torch.tensor([[2, 1, 600, 0]])
    x = torch.randn(1, 4, 8)
    table = sinusoids(601, 8).double().numpy()
    u, v = (
        part.weight.detach().double().numpy()
        for part in (module.text_projection, module.depth_projection)
    )
    expected = x.numpy() + np.tanh(table[:4] @ u.T + table[depth[0].numpy()] @ v.T)
    actual = module(x, tree=Tree(depth, torch.zeros(1, 4, 4, dtype=torch.long)))
    np.testing.assert_allclose(actual.detach().numpy(), expected, atol=1e-5)


@pytest.fixture
def network(small_recipe: SmallRecipe) -> Transformer:
    torch.manual_seed(1)
    model = {"position": "tree", "max_distance": 3}
    recipe = small_recipe(data={"train": PARSED}, model=model)
    return Transformer(recipe.model, 20, 20).eval()


def tree_of(*token_trees: TokenTree) -> Tree:
    return Tree(*(part.long() for part in collate_trees(token_trees)))


SHORT = TokenTree([1, 1, 2], [2, 0])
LONG = TokenTree([1, 2, 3, 4, 5], [2, 3, 0, 3, 4])


def test_padding_has_no_effect(network: Transformer) -> None:
    short = torch.tensor([[7, 8, 9, EOS]])
    padded = torch.tensor([[7, 8, 9, EOS, PAD, PAD], [9, 8, 7, 6, 5, EOS]])
    alone = network.encode(short, tree_of(SHORT)).states
    together = network.encode(padded, tree_of(SHORT, LONG)).states
    torch.testing.assert_close(together[:1, :4], alone, rtol=0, atol=1e-6)


def test_the_encoder_depends_on_the_tree(network: Transformer) -> None:
    source = torch.tensor([[9, 8, 7, 6, 5, EOS]])
    one = network.encode(source, tree_of(LONG)).states
    other = network.encode(source, tree_of(LONG._replace(heads=[2, 0, 2, 3, 4]))).states
    assert (one - other).abs().max() > 0.01


def test_fused_and_explicit_attention_and_steps_agree(network: Transformer) -> None:
    source, target = torch.tensor([[9, 8, 7, 6, 5, EOS]]), torch.tensor([[2, 5, 6]])
    tree = tree_of(LONG)
    fused = network(source, target, tree)
    modules = [module for modules in network.attentions().values() for module in modules]
    for module in modules:
        module.observer = lambda shown: None
    torch.testing.assert_close(network(source, target, tree), fused, rtol=0, atol=1e-5)
    state = network.start(network.encode(source, tree))
    for position, token in enumerate(target[0]):
        logits, state = network.step(token[None], state)
        torch.testing.assert_close(logits[0], fused[0, position], rtol=0, atol=1e-5)


def test_a_missing_tree_is_reported(network: Transformer) -> None:
    with pytest.raises(RegardError, match="needs the parse of every text"):
        network.encode(torch.tensor([[5, EOS]]))


# Recipes


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"train": {"pairs": "a.tsv"}}, {"position": "tree"}, "position: tree needs data.train.parses"),
        ({"train": PARSED, "test": {"pairs": "a.tsv"}}, {"position": "tree"}, "needs data.test.parses"),
        ({"train": PARSED}, {}, "data.train.parses needs model.position: tree, not sinusoidal"),
        ({"train": PARSED}, {"position": "tree", "attention": {"encoder": "window"}}, "attention.encoder: full, not"),
        ({"train": PARSED}, {"position": "tree", "d_model": 9, "heads": 3}, "needs an even model.d_model, not 9"),
        ({"train": {**PARSED, "parses": ["a", "b"]}}, {"position": "tree"}, r"parses has 2 file\(s\) for 1 source"),
    ],
)  # fmt: skip
def test_incompatible_options_are_refused(
    small_recipe: SmallRecipe, data: dict[str, object], model: dict[str, object], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        small_recipe(data=data, model=model)
