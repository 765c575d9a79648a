import assert from "node:assert/strict";
import test from "node:test";

import { behaviourOf, describeBehaviour } from "../../../src/regard/inspection/web/head_behaviour.js";
import { tokens } from "./fixtures.mjs";

const KEYS = tokens("▁The", "▁dog", "▁.", "</s>");

/** @param {number[]} attended the key that gets 0.7 of each query's attention; the others share the rest */
function head(attended) {
  return Float32Array.from(attended.flatMap((key) => KEYS.map((_, i) => (i === key ? 0.7 : 0.1))));
}

/** @param {"encoder" | "decoder" | "cross_attention"} site @param {number[]} attended */
const nameOf = (site, attended) => behaviourOf(site, KEYS, head(attended))?.name;

test("the behaviour with the largest share is found", () => {
  assert.equal(nameOf("encoder", [2, 0, 1, 2]), "the token before it");
  assert.equal(nameOf("encoder", [0, 1, 2, 3]), "itself");
  assert.equal(nameOf("encoder", [1, 2, 3, 0]), "the token after it");
  assert.equal(nameOf("encoder", [3, 3, 3, 3]), "the end of the sentence");
  assert.equal(nameOf("encoder", [2, 2, 2, 2]), "punctuation");
  assert.equal(nameOf("decoder", [0, 0, 0, 0]), "the first token");
  assert.equal(nameOf("cross_attention", [0, 3]), "the source token at the same position");
});

test("its share is a mean over the queries that can have it", () => {
  const share = behaviourOf("encoder", KEYS, head([3, 0, 1, 3]))?.share ?? 0;
  assert.ok(Math.abs(share - (0.7 + 0.7 + 0.1) / 3) < 1e-6, "the first token has none before it");
  const decoder = Float32Array.from([1, 0, 0, 0, ...[1, 2, 3].flatMap((i) => KEYS.map((_, j) => (i === j ? 0.4 : 0.2)))]);
  assert.ok(Math.abs((behaviourOf("decoder", KEYS, decoder)?.share ?? 0) - 0.4) < 1e-6, "the first row does not count");
});

test("keys that are not the tokens of the queries have no behaviour", () => {
  assert.equal(behaviourOf("decoder", KEYS, new Float32Array(8)), null);
});

test("a small share is not called a pattern", () => {
  const percent = (/** @type {number} */ value) => `${100 * value}%`;
  assert.equal(describeBehaviour({ name: "itself", share: 0.5 }, percent), "On average, a token gives 50% of its attention to itself.");
  assert.match(describeBehaviour({ name: "itself", share: 0.25 }, percent), /^No simple pattern.*to itself, 25%\.$/);
});
