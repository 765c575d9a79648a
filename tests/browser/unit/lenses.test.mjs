import assert from "node:assert/strict";
import test from "node:test";

import { clearHeads, lensesOf, rankedHeads, settledDepths, strongestPlace } from "../../../src/regard/inspection/web/lenses.js";
import { unpack } from "../../../src/regard/inspection/web/trace.js";
import { packFloats, tokens } from "./fixtures.mjs";

test("a token is settled at the depth from which on it is the best", () => {
  const [a, b] = tokens("a", "b");
  const candidates = [[[a], [a]], [[b], [b]], [[a], [b]]];
  assert.deepEqual(settledDepths({ outputs: [a, b], candidates }), [2, 1]);
  assert.deepEqual(settledDepths({ outputs: [b, b], candidates: [[[a], [b]]] }), [1, 0]);
});

test("the strongest place is the deepest of the largest effects, and not where the choice is made", () => {
  const json = { effects: {
    encoder: packFloats([0, 1, 0, 0.99, 0, 0.985], [3, 2]), decoder: packFloats([0, 0, 0.2, 0.9, 0, 1], [3, 2]),
  } };
  const effects = { encoder: unpack(json.effects.encoder), decoder: unpack(json.effects.decoder) };
  const { stack, depth, position, takenOver } = strongestPlace(json, effects);
  assert.deepEqual([stack, depth, position, takenOver], ["encoder", 2, 1, 1]);
});

test("results come from the file, else from the server, once for each request", async () => {
  const outputs = tokens("a");
  const attribution = { position: 0, foil: { id: 7 } };
  const file = lensesOf({ trace: { text: "t", outputs, lenses: { attributions: [attribution], patching: null } } });
  assert.equal(await file.attribution(0, null), attribution);
  assert.equal(await file.attribution(0, 7), attribution);
  assert.equal(await file.attribution(0, 8), null);
  assert.equal(await file.patch("other"), null);
  let calls = 0;
  const lenses = { depth: async () => ++calls, patching: async () => "patched" };
  const served = lensesOf({ trace: { text: "t", outputs, lenses: null }, api: { lenses } });
  assert.deepEqual([await served.depth(), await served.depth()], [1, 1]);
  assert.equal(await served.patch("other"), "patched");
  assert.deepEqual([served.hasPatching, served.hasFoils], [true, false]);
});

test("heads are ranked by the lost probability, and are clear if the interval of BLEU is below 0", () => {
  const head = (name, log, bleu) => ({ head: name, log_probability: [log, log, log], bleu });
  const heads = [head("a", -0.1, [-2, -3, -1]), head("b", -0.5, [-9, -20, 0]), head("c", -0.2, [-4, -5, -3])];
  const names = (/** @type {{ head: string }[]} */ some) => some.map((one) => one.head);
  assert.deepEqual(names(rankedHeads({ bleu: 1, sentences: 1, heads })), ["b", "c", "a"]);
  assert.deepEqual(names(clearHeads(heads)), ["c", "a"]);
});
