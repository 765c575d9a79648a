import assert from "node:assert/strict";
import test from "node:test";

import {
  bestPath, explain, explainPenalty, layOutTree, lengthPenalty, neighbour, pathTo,
} from "../../../src/regard/inspection/web/beam_tree.js";

const TOKENS = {
  1: { id: 1, text: "<s>", special: true }, 2: { id: 2, text: "</s>", special: true },
  10: { id: 10, text: "▁a", special: false }, 11: { id: 11, text: "▁b", special: false },
};
/** [id, parent, token, total, score, state] with a beam of 1 */
const ROWS = [
  [0, null, 1, 0, 0, "kept"],
  [1, 0, 10, -0.5, -0.5, "kept"], [2, 0, 11, -1.5, -1.5, "pruned"], [3, 0, 2, -3, -3, "pruned"],
  [4, 1, 2, -0.9, -0.8, "finished"], [5, 1, 11, -2, -1.9, "pruned"],
];
const TRACE = {
  tokens: TOKENS,
  beam: ROWS.map(([id, parent, token, total, score, state]) => ({ id, parent, token, total, score, state, log_probability: total })),
};
const OUTPUTS = [TOKENS[10], TOKENS[2]];

test("nodes are placed by step and rank", () => {
  const nodes = layOutTree(TRACE);
  assert.deepEqual(nodes.map(({ step, rank }) => [step, rank]), [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]);
  assert.deepEqual(nodes[0].children, nodes.slice(1, 4));
  assert.equal(nodes[4].parent, nodes[1]);
});

test("an unknown token is shown by its id", () => {
  const [root] = layOutTree({ tokens: {}, beam: TRACE.beam.slice(0, 1) });
  assert.equal(root.token.text, "#1");
});

test("the path of a node and of the translation", () => {
  const nodes = layOutTree(TRACE);
  assert.deepEqual(pathTo(nodes[5]).map(({ node }) => node.id), [1, 5]);
  assert.deepEqual([...bestPath(OUTPUTS, nodes)].map(({ node }) => node.id), [0, 1, 4]);
  assert.equal(bestPath([TOKENS[11]], nodes).size, 2, "a pruned hypothesis can be a path");
  assert.equal(bestPath([TOKENS[11], TOKENS[2]], nodes).size, 0);
});

test("arrow keys move to the parent, to the continued child and within a column", () => {
  const nodes = layOutTree(TRACE);
  assert.equal(neighbour(nodes, nodes[4], "ArrowLeft"), nodes[1]);
  assert.equal(neighbour(nodes, nodes[0], "ArrowRight"), nodes[1]);
  assert.equal(neighbour(nodes, nodes[1], "ArrowDown"), nodes[2]);
  assert.equal(neighbour(nodes, nodes[1], "ArrowUp"), undefined);
  assert.equal(neighbour(nodes, nodes[1], "Enter"), null);
});

test("each node is explained", () => {
  const nodes = layOutTree(TRACE);
  const best = bestPath(OUTPUTS, nodes);
  assert.deepEqual([1, 2, 3, 4, 5].map((i) => explain(1, nodes, best, nodes[i])), [
    "Ranked 1 of the 3 candidates of step 1: within the beam of 1, so it was continued.",
    "Ranked 2 of the 3 candidates of step 1. The beam of 1 was filled by better candidates.",
    "Ranked 3 of the 3 candidates of step 1. A hypothesis can finish only if it is among the top 1, so this one was pruned.",
    "This is the only finished hypothesis, so it is the translation.",
    "Ranked 2 of the 2 candidates of step 2. The search ended at this step, so nothing was continued.",
  ]);
});

test("a translation that was cut off is explained", () => {
  const nodes = layOutTree({ tokens: TOKENS, beam: TRACE.beam.slice(0, 2) });
  const best = bestPath([TOKENS[10]], nodes);
  assert.match(explain(1, nodes, best, nodes[1]), /maximum length .* cut off here/);
});

test("the length penalty of the paper", () => {
  assert.equal(lengthPenalty(1, 0.6), 1);
  assert.equal(lengthPenalty(7, 1), 2);
  assert.equal(lengthPenalty(50, 0), 1);
});

test("whether the length penalty changed the rank", () => {
  const nodes = layOutTree(TRACE);
  assert.match(explainPenalty(0, nodes, nodes[4]), /No length penalty/);
  assert.match(explainPenalty(0.6, nodes, nodes[1]), /same length/);
  assert.match(explainPenalty(0.6, nodes, nodes[4]), /no other hypothesis finished/);
  const more = layOutTree({ tokens: TOKENS, beam: [...TRACE.beam, { ...TRACE.beam[4], id: 6, total: -0.7, score: -0.9 }] });
  assert.match(explainPenalty(0.6, more, more[4]), /it would rank 2\.$/);
  assert.match(explainPenalty(0.6, more, more[6]), /it would rank 1 and be the translation\.$/);
});
