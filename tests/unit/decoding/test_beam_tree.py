"""The beam tree records what became of every candidate; the best finished path is the result of the search."""

import math
from functools import partial

import pytest

from regard.decoding.beam_search import beam_search
from regard.decoding.beam_tree import BeamTree, Node
from regard.decoding.hypothesis import Hypothesis
from regard.decoding.length_penalty_and_stopping import gnmt_length_penalty
from tests.unit.decoding.mock_model import BOS, EOS, MockStep, initial_state, table_model

MODEL = {
    (): {2: 0.6, 3: 0.3, 4: 0.1},
    (2,): {2: 0.5, 3: 0.4, EOS: 0.1},
    (3,): {EOS: 0.9, 2: 0.1},
    (2, 2): {EOS: 1.0},
    (2, 3): {EOS: 1.0},
}


def path(tree: BeamTree, node: Node) -> tuple[int, ...]:
    """The tokens from the root to a node."""
    if node.parent is None:
        return ()
    return (*path(tree, tree.nodes[node.parent]), node.token)


def recorded_search() -> tuple[BeamTree, Hypothesis]:
    tree = BeamTree(BOS)
    [[best]] = beam_search(
        MockStep(table_model(MODEL, V=5)),
        initial_state(1),
        max_lengths=[4],
        bos=BOS,
        eos=EOS,
        beam=2,
        length_penalty=0.6,
        observer=tree,
    )
    return tree, best


def test_candidates_are_kept_pruned_or_finished() -> None:
    tree, best = recorded_search()
    states = {path(tree, node): node.state for node in tree.nodes}
    # Step 1: two of three fit into the beam. Step 2: 2-2 (0.30) and 3-EOS (0.27) are the first two candidates, and 2-3
    # (0.24) takes the place of the one that has ended. Step 3: both hypotheses end, so nothing is kept.
    expected = {
        (): "kept",
        (2,): "kept",
        (3,): "kept",
        (4,): "pruned",
        (2, 2): "kept",
        (3, EOS): "finished",
        (2, 3): "kept",
        (2, EOS): "pruned",
        (2, 2, EOS): "finished",
        (2, 3, EOS): "finished",
    }
    assert states == expected
    assert best.tokens == [2, 2]


def test_every_node_has_the_probability_of_its_path() -> None:
    tree, best = recorded_search()
    for node in tree.nodes[1:]:
        tokens = path(tree, node)
        each = [math.log(MODEL[tokens[:n]][token]) for n, token in enumerate(tokens)]
        assert node.log_probability == pytest.approx(each[-1], abs=1e-6)
        assert node.total == pytest.approx(sum(each), abs=1e-6)
        assert node.score == pytest.approx(node.total / gnmt_length_penalty(len(tokens), 0.6))
    finished = [node for node in tree.nodes if node.state == "finished"]
    assert max(node.score for node in finished) == pytest.approx(best.score)


@pytest.mark.parametrize("finished", [True, False])
def test_a_sampled_hypothesis_is_a_single_branch(finished: bool) -> None:
    each = [-0.5, -0.25, -2.0][: 2 + finished]
    tree = BeamTree(BOS)
    score = sum(each) / gnmt_length_penalty(len(each), 0.6)
    hypothesis = Hypothesis([2, 3], sum(each), score, each, finished)
    tree.add_path(hypothesis, EOS, partial(gnmt_length_penalty, length_penalty=0.6))
    assert [node.parent for node in tree.nodes] == [None, 0, 1, 2][: 3 + finished]
    assert [node.token for node in tree.nodes] == [BOS, 2, 3, EOS][: 3 + finished]
    assert [node.state for node in tree.nodes[1:]] == ["kept", "kept", "finished"][: 2 + finished]
    assert [node.total for node in tree.nodes[1:]] == [-0.5, -0.75, -2.75][: 2 + finished]
    assert tree.nodes[-1].score == pytest.approx(hypothesis.score)


def test_the_root_is_the_first_token_and_costs_nothing() -> None:
    tree = BeamTree(BOS)
    assert tree.nodes == [Node(0, None, BOS, 0.0, 0.0, 0.0, "kept")]
    assert tree.active_nodes == [0]
