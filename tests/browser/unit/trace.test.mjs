import assert from "node:assert/strict";
import test from "node:test";

import {
  LayerArray, Occlusion, detokenize, groupWords, joinBytes, runningText, tokenText, unpack, whenLoaded,
} from "../../../src/regard/inspection/web/trace.js";
import { packBytes, packFloats, tokens } from "./fixtures.mjs";

const VALUES = [0.1, 0.9, 0.5, 0.5, 0.3, 0.7, 1, 0];
/** one layer, two heads, two queries, two keys */
const SHAPE = [1, 2, 2, 2];

/** @param {Float32Array} values */
const rounded = (values) => Array.from(values, (value) => Math.round(value * 1000) / 1000);

test("float32 arrays are decoded by layer and head", () => {
  const weights = new LayerArray(packFloats([...VALUES, ...VALUES.map((value) => value / 2)], [2, 2, 2, 2]));
  assert.deepEqual(rounded(weights.head(0, 1)), [0.3, 0.7, 1, 0]);
  assert.deepEqual(rounded(weights.head(1, 0)), [0.05, 0.45, 0.25, 0.25]);
  assert.deepEqual([weights.layers, weights.heads, weights.queries, weights.keys, weights.missing], [2, 2, 2, 2, false]);
});

test("8-bit arrays are squares of the bytes, relative to the maximum", () => {
  assert.deepEqual(rounded(unpack(packBytes([0, 51, 255], [3], 2))), [0, 0.08, 2]);
  assert.ok(new LayerArray(packBytes([0], [1, 1, 1, 1], 1)).quantized);
});

test("heads are aggregated by average and maximum", () => {
  const weights = new LayerArray(packFloats(VALUES, SHAPE));
  assert.deepEqual(rounded(weights.matrix(0, "average")), [0.2, 0.8, 0.75, 0.25]);
  assert.deepEqual(rounded(weights.matrix(0, "max")), [0.3, 0.9, 1, 0.5]);
  assert.deepEqual(rounded(weights.matrix(0, 0)), [0.1, 0.9, 0.5, 0.5]);
});

test("a layer that is not in the trace is fetched once; it is zero until then", async () => {
  let requests = 0;
  const weights = new LayerArray({ shape: SHAPE, data: null }, async () => { requests++; return Float32Array.from(VALUES); });
  assert.deepEqual(rounded(weights.head(0, 0)), [0, 0, 0, 0]);
  await Promise.all([weights.load(0), weights.load(0)]);
  assert.equal(weights.load(0), null);
  assert.equal(requests, 1);
  assert.deepEqual(rounded(weights.head(0, 0)), [0.1, 0.9, 0.5, 0.5]);
});

test("a failed request is reported, and can be repeated", async () => {
  let requests = 0;
  const weights = new LayerArray({ shape: SHAPE, data: null }, async () => { requests++; throw new Error("offline"); });
  for (const _ of [1, 2]) assert.equal(await new Promise((resolve) => whenLoaded([[weights, 0]], resolve)), "offline");
  assert.equal(requests, 2);
});

test("an array that was left out of a file is missing", async () => {
  const weights = new LayerArray({ shape: SHAPE, data: null });
  assert.ok(weights.missing);
  await assert.rejects(/** @type {Promise<void>} */ (weights.load(0)), /not in this file/);
  assert.ok(!new LayerArray({ shape: [0, 0, 0, 0], data: null }).missing, "nothing is missing if there are no layers");
});

test("layers that are loaded are used at once", () => {
  let called = false;
  whenLoaded([[new LayerArray(packFloats(VALUES, SHAPE)), 0]], (error) => { called = error === ""; });
  assert.ok(called);
});

test("occlusion is the drop in probability", () => {
  const occlusion = new Occlusion({ words: [[0], [1, 2]], probabilities: packFloats([0.5, 0.25, 0.125, 0.75], [2, 2]) }, [0.5, 0.5]);
  assert.deepEqual([occlusion.drop(0, 1), occlusion.drop(1, 0), occlusion.drop(1, 1)], [0.25, 0.375, -0.25]);
});

test("tokens in running text: spaces come from the token or before a special token", () => {
  const shown = runningText(tokens("▁The", "▁dog", "s", "▁", "</s>"));
  assert.equal(shown.map(({ text, spaceBefore }) => (spaceBefore ? " " : "") + text).join(""), "The dogs  </s>");
});

test("tokens are grouped into words; special tokens stand alone", () => {
  assert.deepEqual(groupWords(tokens("<s>", "▁The", "▁sleep", "s", "</s>")), [[0], [1], [2, 3], [4]]);
});

test("tokens are joined to text, bytes are decoded, special tokens left out", () => {
  assert.equal(detokenize(tokens("▁The", "▁caf", "<0xC3>", "<0xA9>", "</s>").map((token) => ({
    ...token, special: token.text === "</s>" }))), "The café");
});

/** @param {string[]} texts */
const ordinary = (...texts) => tokens(...texts).map((token) => ({ ...token, special: false }));

test("byte tokens are joined to the character they form", () => {
  const bytes = ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"];
  const joined = joinBytes(ordinary("▁a", ...bytes, "<0xC3>", "<0xA9>", "b"));
  assert.deepEqual(joined.map(tokenText), ["▁a", "😀 1/4", "😀 2/4", "😀 3/4", "😀 4/4", "é 1/2", "é 2/2", "b"]);
  assert.equal(runningText(joined).map(({ text }) => text).join(""), "a😀éb");
  assert.equal(detokenize(joined), "a😀éb");
});

test("bytes that form no character are shown as bytes", () => {
  const joined = joinBytes(ordinary("<0xF0>", "<0x9F>", "x", "<0x80>", "<0x41>"));
  assert.deepEqual(joined.map(tokenText), ["byte F0", "byte 9F", "x", "byte 80", "A"]);
});
