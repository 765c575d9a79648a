"""What the page is told is what the model did."""

import base64
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.marks import END, START
from regard.model import Translator
from regard.nn.heads import MultiHeadAttention
from regard.trace import CANDIDATES, Trace, trace

TEXT = "ein Hund dog"


@pytest.fixture(scope="module")
def model(finished_run: Path) -> Translator:
    return Translator.load(finished_run, "cpu")


@pytest.fixture(scope="module")
def traced(model: Translator) -> Trace:
    return trace(model, TEXT, beam=3, alpha=0.6)


def test_it_is_the_translation_of_the_model(model: Translator, traced: Trace) -> None:
    ((best, *_),) = model.search([TEXT], beam=3, alpha=0.6)
    assert traced.translation == best.text
    assert [token.text for token in traced.said[: len(best.tokens)]] == best.tokens
    logs = [math.log(probability) for probability in traced.probabilities]
    assert logs == pytest.approx(best.token_log_probabilities, abs=1e-4)


def test_rows_are_queries_and_sum_to_one(traced: Trace) -> None:
    S, T = len(traced.source), len(traced.read)
    assert traced.encoder.shape == (2, 2, S, S)
    assert traced.decoder.shape == (2, 2, T, T)
    assert traced.cross.shape == (2, 2, T, S)
    for weights in (traced.encoder, traced.decoder, traced.cross):
        np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert not traced.decoder[..., *np.triu_indices(T, 1)].any()


def test_rows_read_one_token_and_say_the_next(traced: Trace) -> None:
    assert traced.source[-1].id == END
    assert traced.read[0].id == START
    assert traced.read[0].special
    assert traced.read[1:] == traced.said[:-1]


def test_candidates_are_the_most_probable(traced: Trace) -> None:
    assert len(traced.candidates) == len(traced.said)
    for row, token, probability in zip(
        traced.candidates, traced.said, traced.probabilities, strict=True
    ):
        assert len(row) <= CANDIDATES
        values = [one.probability for one in row]
        assert values == sorted(values, reverse=True)
        known = {one.token.id: one.probability for one in row}
        assert known.get(token.id, probability) == pytest.approx(probability)


def test_the_tree_holds_the_way_to_the_translation(traced: Trace) -> None:
    nodes = {node.id: node for node in traced.beam}
    assert list(nodes) == list(range(len(nodes)))
    assert (nodes[0].parent, nodes[0].token) == (None, START)
    for node in traced.beam[1:]:
        assert node.parent is not None
        parent = nodes[node.parent]
        assert parent.state == "kept"
        assert node.total == pytest.approx(parent.total + node.log_probability, abs=1e-5)
    said = [token.id for token in traced.said]
    last = "finished" if said[-1] == END else "kept"
    ways = []
    for node in traced.beam:
        way, at = [], node
        while at.parent is not None:
            way.append(at.token)
            at = nodes[at.parent]
        if node.state == last:
            ways.append(way[::-1])
    assert said in ways or said[:-1] in ways
    assert {node.token for node in traced.beam} == set(traced.tokens)


def test_at_each_step_no_more_go_on_than_the_beam_is_wide(traced: Trace) -> None:
    depth: dict[int, int] = {0: 0}
    kept: dict[int, int] = {}
    for node in traced.beam[1:]:
        assert node.parent is not None
        depth[node.id] = depth[node.parent] + 1
        kept[depth[node.id]] = kept.get(depth[node.id], 0) + (node.state == "kept")
    assert max(kept.values()) == 3


def test_a_prefix_is_kept(model: Translator) -> None:
    assert trace(model, TEXT, prefix="a dog").translation.startswith("a dog")


def test_nothing_of_the_watching_stays(model: Translator, traced: Trace) -> None:
    parts = [part for part in model.network.modules() if isinstance(part, MultiHeadAttention)]
    assert parts
    assert all(part.watch is None for part in parts)


def test_json_holds_the_very_numbers(traced: Trace) -> None:
    plain = traced.to_json()
    for name in ("encoder", "decoder", "cross"):
        data = np.frombuffer(base64.b64decode(plain[name]["data"]), "<f4")
        assert np.array_equal(data.reshape(plain[name]["shape"]), getattr(traced, name))
    assert plain["said"][-1] == traced.said[-1]._asdict()
    assert torch.tensor(plain["probabilities"]).shape == (len(traced.said),)
