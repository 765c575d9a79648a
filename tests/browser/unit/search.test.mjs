import assert from "node:assert/strict";
import test from "node:test";

import { sampleSeed, uniformNumbers } from "../../../src/regard/inspection/web/model/random.js";
import { beamSearch, sample, topK } from "../../../src/regard/inspection/web/model/search.js";

const [BOS, EOS] = [0, 1];
const DECODING = {
  beam: 2, length_penalty: 0, length_normalization: "gnmt", extra_length: 50, max_length: null, temperature: null, seed: 1,
};
const RULES = { maxLength: 4, bos: BOS, eos: EOS, prefix: [], suppressed: [BOS] };

/** A model with a table of probabilities by the text so far; EOS for any other text. @param {Record<string, number[]>} table */
const model = (table) => (active) => active.map(({ token, state }) => {
  const text = token === BOS ? "" : `${state}${token}`;
  return { logits: Float32Array.from(table[text] ?? [0, 1, 0, 0], Math.log), state: text };
});

test("beam search finds what greedy search misses", () => {
  const table = { "": [0, 0, 0.6, 0.4], 2: [0, 0.4, 0.3, 0.3], 3: [0, 0.9, 0.05, 0.05] };
  const { best, nodes } = beamSearch(model(table), "", RULES, DECODING);
  assert.deepEqual(best.tokens, [3]);
  assert.ok(best.finished);
  assert.deepEqual(nodes.filter((one) => one.state === "finished").map((one) => [one.parent, one.token]), [[2, EOS], [1, EOS]]);
  assert.deepEqual(beamSearch(model(table), "", RULES, { ...DECODING, beam: 1 }).best.tokens, [2]);
});

test("a length penalty prefers longer hypotheses", () => {
  const table = { "": [0, 0, 0.5, 0.5], 2: [0, 1, 0, 0], 3: [0, 0, 0, 0.9], 33: [0, 0.9, 0, 0] };
  assert.deepEqual(beamSearch(model(table), "", RULES, DECODING).best.tokens, [2]);
  assert.deepEqual(beamSearch(model(table), "", RULES, { ...DECODING, length_penalty: 2 }).best.tokens, [3, 3]);
});

test("prefixes are forced, other tokens suppressed, and long hypotheses cut", () => {
  const endless = model(Object.fromEntries(["", 2, 22, 222, 2222, 3, 32, 322, 3222].map((text) => [text, [0.1, 0, 0.8, 0.1]])));
  const { best } = beamSearch(endless, "", { ...RULES, prefix: [3] }, { ...DECODING, beam: 1 });
  assert.deepEqual([best.tokens, best.finished], [[3, 2, 2, 2], false]);
  const forced = beamSearch(endless, "", RULES, { ...DECODING, beam: 1, length_normalization: "transformers" }).best;
  assert.deepEqual([forced.tokens, forced.finished], [[2, 2, 2, 2], true]);
  const cut = beamSearch(endless, "", RULES, { ...DECODING, length_normalization: "ctranslate2" }).best;
  assert.deepEqual([cut.tokens, cut.finished, cut.logProbabilities.length], [[2, 2, 2, 2], false, 4]);
});

test("samples follow the random numbers", () => {
  const table = { "": [0, 0, 0.25, 0.75] };
  const drawn = (number) => sample(model(table), "", RULES, { ...DECODING, temperature: 1 }, () => number).best.tokens;
  assert.deepEqual([drawn(0.2), drawn(0.3)], [[2], [3]]);
});

test("random numbers are those of numpy and torch", () => {
  // np.random.SeedSequence([seed, 0, *source]).generate_state(1)
  assert.equal(sampleSeed(1, [5, 6, 7]), 1895921399);
  assert.equal(sampleSeed(123456789012, [9, 400, 3, 2, 1, 1]), 3977050296);
  // torch.rand(2, generator=torch.Generator().manual_seed(42), dtype=torch.float64)
  const next = uniformNumbers(42);
  assert.deepEqual([next(), next()], [0.05815448596142969, 0.06291016742457756]);
});

test("the largest values come first, of equal ones the first", () => {
  assert.deepEqual(topK(Float32Array.of(1, 3, 2, 3, -Infinity), 3), [1, 3, 2]);
  assert.deepEqual(topK(Float32Array.of(1), 3), [0]);
});
