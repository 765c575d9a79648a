import assert from "node:assert/strict";
import test from "node:test";

import { findWarnings } from "../../../src/regard/inspection/web/warnings.js";
import { tokens } from "./fixtures.mjs";

/** @param {Record<string, any>} changes */
function traceWith(changes) {
  const source = tokens("▁The", "▁dog", "▁sleep", "s", "</s>");
  const outputs = tokens("▁Der", "▁Hund", "▁schläft", "</s>");
  const covered = source.map(() => 1);
  return { source, outputs, probabilities: [0.9, 0.9, 0.9, 0.9], coverage: { max: covered, sum: covered }, ...changes };
}

/** @param {Record<string, any>} changes */
const warningsOf = (changes) => findWarnings(traceWith(changes)).map(({ side, positions, short }) => [side, positions, short]);

test("a good translation has no warnings", () => {
  assert.deepEqual(warningsOf({}), []);
});

test("improbable tokens", () => {
  assert.deepEqual(warningsOf({ probabilities: [0.29, 0.3, 1, 1] }), [["target", [0], "low probability"]]);
});

test("repeated words and phrases, but not punctuation", () => {
  const repeated = tokens("▁a", "▁b", "▁a", "▁b", "▁!", "▁!");
  assert.deepEqual(warningsOf({ outputs: repeated, probabilities: repeated.map(() => 1) }), [["target", [2], "repetition"]]);
});

test("source words without attention; special tokens do not count", () => {
  const low = [1, 1, 0.05, 0.05, 0];
  assert.deepEqual(warningsOf({ coverage: { max: low, sum: low } }), [["source", [2, 3], "almost no attention"]]);
  assert.deepEqual(warningsOf({ coverage: { max: low, sum: [1, 1, 0.2, 0.2, 0] } }), [], "enough in total");
  assert.deepEqual(warningsOf({ coverage: { max: [], sum: [] } }), [], "a model without cross-attention");
});

test("a translation of very different length", () => {
  const long = tokens(..."abcdefghi".split("").map((letter) => `▁${letter}`));
  assert.deepEqual(warningsOf({ outputs: long, probabilities: long.map(() => 1) }), [["target", [], "length"]]);
});
