"""Dependency trees: depth and distance against a breadth-first search, pieces of words, and the model they steer."""

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from regard.tasks.encoders import Translated

from regard.data.batching import collate, collate_trees
from regard.data.conllu import MultiwordToken, ParsedSentence, read_conllu
from regard.data.corpus import Pair, ParsedPair, parse_of, read_pairs
from regard.data.dataset import TokenDataset, write_dataset
from regard.data.dependency_trees import TokenTree, check_parse, token_tree
from regard.data.special_tokens import EOS, PAD
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.nn.positions import SinusoidalInTree, Tree, sinusoids
from regard.nn.transformer import Transformer
from regard.recipe import Data, DataFiles, Recipe, Tokenizer as Section

SmallRecipe = Callable[..., Recipe]
PARSED = {"pairs": "a.tsv", "parses": "a.conllu"}


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Heads of up to twelve words in any order, at least one of them hanging on the root."""
    count = draw(st.integers(1, 12))
    order = draw(st.permutations(range(1, count + 1)))
    heads = [0] * count
    for place, word in enumerate(order):
        heads[word - 1] = draw(st.sampled_from([0, *order[:place]]))
    return heads


def breadth_first(heads: list[int], start: int) -> list[int]:
    """Branches from one word, or the root, to each."""
    neighbours: list[list[int]] = [[] for _ in range(len(heads) + 1)]
    for word, head in enumerate(heads, 1):
        neighbours[word].append(head)
        neighbours[head].append(word)
    found, waiting = {start: 0}, deque([start])
    while waiting:
        word = waiting.popleft()
        for other in neighbours[word]:
            if other not in found:
                found[other] = found[word] + 1
                waiting.append(other)
    return [found[word] for word in range(len(heads) + 1)]


def above(heads: list[int], word: int) -> list[int]:
    """The words on the way up to the root, and the root."""
    way = []
    while word:
        word = heads[word - 1]
        way.append(word)
    return way


@given(batch=st.lists(trees(), min_size=1, max_size=4), data=st.data())
def test_depth_and_distance_are_those_of_a_search(
    batch: list[list[int]], data: st.DataObject
) -> None:
    # Each word has any number of pieces, even none.
    pieces = [
        sorted(data.draw(st.lists(st.integers(1, len(heads)), max_size=15))) for heads in batch
    ]
    depth, distance = collate_trees(list(map(TokenTree, pieces, batch)))
    for row, (words, heads) in enumerate(zip(pieces, batch, strict=True)):
        at = [*words, 0]  # EOS is the root
        from_root = breadth_first(heads, 0)
        assert depth[row, : len(at)].tolist() == [from_root[word] for word in at]
        for query, one in enumerate(at):
            branches = breadth_first(heads, one)
            for key, other in enumerate(at):
                sign = 1 if one < other else -1
                if one in above(heads, other):
                    sign = 1
                elif other in above(heads, one):
                    sign = -1
                assert distance[row, query, key] == sign * branches[other]


def test_a_deep_tree_is_no_trouble() -> None:
    chain_of_words = list(range(400))
    depth, distance = collate_trees([TokenTree(list(range(1, 401)), chain_of_words)])
    assert depth[0].tolist() == [*range(1, 401), 0]
    assert distance[0, 0, 399] == 399


# Pieces


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    texts = ["I do n't see the dog", "I don't see dogs", "é ist zum Haus"]
    return Tokenizer.train(Section(kind="bpe", size=330), lambda: [Pair(t, t) for t in texts * 9])


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
    ("text", "parse", "wanted"),
    [
        ("I see dogs", parsed("I see dogs", [2, 0, 2]), {1: "I", 2: "see", 3: "dogs"}),
        ("  I see  dogs ", parsed("I see dogs", [2, 0, 2]), {1: " I", 2: "see", 3: " dogs "}),
        ("éx 中国!", parsed("éx 中 国 !", [0, 1, 2, 3]), {1: "éx", 2: "中", 3: "国", 4: "!"}),
        ("e\u0301x", parsed("é x", [0, 1]), {1: "é", 2: "x"}),
        ("a▁b ▅", parsed("a ▁ b ▅", [0, 1, 1, 1]), {1: "a", 2: "▁", 3: "b", 4: "▅"}),
        ("   ", None, {0: "   "}),
    ],
)  # fmt: skip
def test_every_piece_belongs_to_the_word_it_spells(
    tokenizer: Tokenizer, text: str, parse: ParsedSentence | None, wanted: dict[int, str]
) -> None:
    found = by_word(tokenizer, text, parse)
    assert {word: letters(form) for word, form in found.items()} == {
        word: letters(form) for word, form in wanted.items()
    }


def letters(text: str) -> str:
    return "".join(text.split())


def test_a_piece_over_two_words_belongs_to_the_first(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.source.encode(["I don't see"])
    assert tokenizer.source.pieces(ids) == ["▁I", "▁don", "'", "t", "▁see"]
    tree = token_tree("I don't see", parsed("I do n't see", [4, 4, 4, 0]), tokenizer.source)
    assert tree.words == [1, 2, 3, 3, 4]


def test_words_written_as_one_belong_to_the_first(tokenizer: Tokenizer) -> None:
    parse = parsed("ist zu dem Haus", [0, 4, 4, 1])._replace(written={2: MultiwordToken("zum", 3)})
    check_parse("ist zum Haus", parse, "here")
    found = by_word(tokenizer, "ist zum Haus", parse)
    assert {word: letters(form) for word, form in found.items()} == {1: "ist", 2: "zum", 4: "Haus"}


@given(words=st.lists(st.text(min_size=1).filter(letters), min_size=1, max_size=6), data=st.data())
def test_any_text_is_shared_out_in_order(
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
    texts = DataFiles(source=("a.src",), target=("a.tgt",), parses=("a.conllu",))
    return list(read_pairs(texts, Data(root=str(folder), train=texts)))


def test_trees_come_with_their_lines_and_blank_lines_have_none(tmp_path: Path) -> None:
    pairs = read(tmp_path, "ist  zum Haus\n\nHund\n", CONLLU)
    assert pairs == [("ist  zum Haus", "x"), ("", "x"), ("Hund", "x")]
    first, blank, last = map(parse_of, pairs)
    assert first is not None
    assert first.heads == [0, 4, 4, 1]
    assert first.written == {2: ("zum", 3)}
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
        ("ist zum Haus\nHund\nHund\n", ("", ""), r"a.conllu: no tree is left for line 3 of .*a.src"),
        ("ist zum Haus\n", ("", ""), r"a.conllu:9: a tree too many: .*a.src has only 1 lines"),
        ("ist zum Haus\nHund\n", ("_\t1\tobl", "_\t4\tobl"), r"no tree: from word 2 \('zu'\) no way leads to the root"),
        ("ist zum Haus\nHund\n", ("_\t1\tobl", "_\t7\tobl"), r"hangs on word 7, but there are only 4"),
    ],
)  # fmt: skip
def test_a_parse_that_does_not_fit_is_refused(
    tmp_path: Path, source: str, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        read(tmp_path, source, CONLLU.replace(*change) if change[0] else CONLLU)


def test_trees_rest_in_the_store_and_come_back_in_batches(
    tmp_path: Path, tokenizer: Tokenizer, small_recipe: SmallRecipe
) -> None:
    parses = [parsed("I see dogs", [2, 0, 2]), None, parsed("dogs see", [2, 0])]
    pairs = [
        ParsedPair.of(Pair(text, "dog"), parse)
        for text, parse in zip(["I see dogs", " ", "dogs see"], parses, strict=True)
    ]
    recipe = small_recipe(data={"train": PARSED}, model={"position": "tree"})
    write_dataset(tmp_path / "a", pairs, tokenizer, None, Translated(recipe).rows)
    batch = collate(TokenDataset(tmp_path / "a"), np.arange(3))
    wanted = collate_trees([token_tree(p.source, parse_of(p), tokenizer.source) for p in pairs])
    assert batch.position_info is not None
    for found, right in zip(batch.position_info, wanted, strict=True):
        assert torch.equal(found, right)
    assert batch.position_info[0].shape == batch.source.shape
    write_dataset(tmp_path / "b", pairs, tokenizer, None)
    assert collate(TokenDataset(tmp_path / "b"), np.arange(3)).places is None


# The model


def test_waves_of_place_and_depth_are_mixed(small_recipe: SmallRecipe) -> None:
    module = SinusoidalInTree(small_recipe(model={"d_model": 8}).model)
    depth = torch.tensor([[2, 1, 600, 0]])
    x = torch.randn(1, 4, 8)
    table = sinusoids(601, 8).double().numpy()
    u, v = (part.weight.detach().double().numpy() for part in (module.place, module.depth))
    wanted = x.numpy() + np.tanh(table[:4] @ u.T + table[depth[0].numpy()] @ v.T)
    found = module(x, tree=Tree(depth, torch.zeros(1, 4, 4, dtype=torch.long)))
    np.testing.assert_allclose(found.detach().numpy(), wanted, atol=1e-5)


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


def test_padding_changes_nothing(network: Transformer) -> None:
    short = torch.tensor([[7, 8, 9, EOS]])
    padded = torch.tensor([[7, 8, 9, EOS, PAD, PAD], [9, 8, 7, 6, 5, EOS]])
    alone = network.encode(short, tree_of(SHORT)).states
    together = network.encode(padded, tree_of(SHORT, LONG)).states
    torch.testing.assert_close(together[:1, :4], alone, rtol=0, atol=1e-6)


def test_the_tree_steers_the_encoder(network: Transformer) -> None:
    source = torch.tensor([[9, 8, 7, 6, 5, EOS]])
    one = network.encode(source, tree_of(LONG)).states
    other = network.encode(source, tree_of(LONG._replace(heads=[2, 0, 2, 3, 4]))).states
    assert (one - other).abs().max() > 0.01


def test_shown_and_fast_are_equal_and_step_follows(network: Transformer) -> None:
    source, target = torch.tensor([[9, 8, 7, 6, 5, EOS]]), torch.tensor([[2, 5, 6]])
    tree = tree_of(LONG)
    fast = network(source, target, tree)
    parts = [part for parts in network.attentions().values() for part in parts]
    for part in parts:
        part.watch = lambda shown: None
    torch.testing.assert_close(network(source, target, tree), fast, rtol=0, atol=1e-5)
    state = network.start(network.encode(source, tree))
    for place, token in enumerate(target[0]):
        logits, state = network.step(token[None], state)
        torch.testing.assert_close(logits[0], fast[0, place], rtol=0, atol=1e-5)


def test_without_a_tree_it_says_what_is_missing(network: Transformer) -> None:
    with pytest.raises(RegardError, match="needs the parse of every text"):
        network.encode(torch.tensor([[5, EOS]]))


# Recipes


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"train": {"pairs": "a.tsv"}}, {"position": "tree"}, "position: tree needs data.train.parses"),
        ({"train": PARSED, "test": {"pairs": "a.tsv"}}, {"position": "tree"}, "needs data.test.parses"),
        ({"train": PARSED}, {}, "data.train.parses is for model.position: tree, not sinusoidal"),
        ({"train": PARSED}, {"position": "tree", "attention": {"encoder": "window"}}, "encoder must be full"),
        ({"train": PARSED}, {"position": "tree", "d_model": 9, "heads": 3}, "width 9 must be even"),
        ({"train": {**PARSED, "parses": ["a", "b"]}}, {"position": "tree"}, r"parses names 2 file\(s\), the texts 1"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    small_recipe: SmallRecipe, data: dict[str, object], model: dict[str, object], message: str
) -> None:
    with pytest.raises(RegardError, match=message):
        small_recipe(data=data, model=model)


def test_conllu_of_no_tree_at_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\tx\n")
    with pytest.raises(RegardError, match="a:1: 2 fields, CoNLL-U has 10"):
        list(read_conllu(tmp_path / "a"))
