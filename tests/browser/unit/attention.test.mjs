import assert from "node:assert/strict";
import test from "node:test";

import { computeAttention, matmul, softmaxRows, transpose } from "../../../src/regard/inspection/web/attention.js";
import { LayerArray } from "../../../src/regard/inspection/web/trace.js";
import { packFloats } from "./fixtures.mjs";

/** @param {ArrayLike<number>} actual @param {number[]} expected */
function assertClose(actual, expected) {
  assert.equal(actual.length, expected.length);
  expected.forEach((value, i) => assert.ok(Math.abs(actual[i] - value) < 1e-6, `${actual[i]} is not ${value}`));
}

test("matrix product and transpose", () => {
  const a = Float32Array.of(1, 2, 3, 4, 5, 6);
  assertClose(transpose(a, 2, 3), [1, 4, 2, 5, 3, 6]);
  assertClose(matmul(a, Float32Array.of(1, 0, 0, 1, 1, 1), 2, 3, 2), [4, 5, 10, 11]);
});

test("softmax of each row; masked scores get weight 0", () => {
  assertClose(softmaxRows(Float32Array.of(0, 0, Math.log(3), 0), 2), [0.5, 0.5, 0.75, 0.25]);
  assertClose(softmaxRows(Float32Array.of(5, -Infinity, 1000, 1000), 2), [1, 0, 0.5, 0.5]);
});

/** two queries and keys of one head, d_k = 1, d_v = 2 */
const PROJECTIONS = {
  scale: 0.5,
  query: new LayerArray(packFloats([2, 4], [1, 1, 2, 1])), key: new LayerArray(packFloats([1, -1], [1, 1, 2, 1])),
  value: new LayerArray(packFloats([1, 0, 0, 1], [1, 1, 2, 2])), output: new LayerArray(packFloats([1, 1], [1, 1, 2, 1])),
};

test("attention is computed step by step", () => {
  const low = 1 / (1 + Math.exp(4));
  const steps = computeAttention(Float32Array.of(1, 0, 1 - low, low), PROJECTIONS, 0, 0, 1, 0);
  assertClose(steps.products, [2, -2, 4, -4]);
  assertClose(steps.scores, [1, -1, 2, -2]);
  assert.deepEqual([...steps.masked], [1, -Infinity, 2, -2], "a weight of 0 is a masked key");
  assertClose(steps.weights, [1, 0, 1 - low, low]);
  assertClose(steps.head, [1, 0, 1 - low, low]);
});

test("a weight that underflows is not taken for a mask", () => {
  const far = { ...PROJECTIONS, scale: 100 };
  const steps = computeAttention(Float32Array.of(1, 0, 1, 0), far, 0, 0, 0, 1);
  assert.deepEqual([...steps.masked], [200, -200, 400, -400]);
});
