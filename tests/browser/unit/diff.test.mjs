import assert from "node:assert/strict";
import test from "node:test";

import { commonCells, longestCommonSubsequence, sideBySide } from "../../../src/regard/inspection/web/diff.js";
import { tokens } from "./fixtures.mjs";

const BEFORE = tokens("a", "b", "c", "d");
const AFTER = tokens("a", "x", "y", "c", "d", "e");

test("the longest common subsequence", () => {
  assert.deepEqual(longestCommonSubsequence(BEFORE, AFTER), [[0, 0], [2, 3], [3, 4]]);
  assert.deepEqual(longestCommonSubsequence(BEFORE, []), []);
});

test("tokens side by side: each token once, changed ones next to each other", () => {
  assert.deepEqual(sideBySide(BEFORE, AFTER), [[0, 0], [1, 1], [null, 2], [2, 3], [3, 4], [null, 5]]);
  assert.deepEqual(sideBySide([], tokens("a")), [[null, 0]]);
});

test("common cells of each attention site", () => {
  /** @param {any[]} outputs */
  const trace = (outputs) => ({
    source: tokens("s", "t"), outputs, inputs: tokens("<s>", ...outputs.slice(0, -1).map((token) => token.text)),
    columns: { encoder: tokens("s", "t"), decoder: [], cross_attention: tokens("s", "t") },
  });
  const [before, after] = [trace(BEFORE), trace(AFTER)];
  assert.deepEqual(commonCells(before, after, "encoder"), { rows: [[0, 0], [1, 1]], columns: [[0, 0], [1, 1]] });
  assert.deepEqual(commonCells(before, after, "cross_attention").rows, [[0, 0], [2, 3], [3, 4]]);
  assert.deepEqual(commonCells(before, after, "decoder").columns, [[0, 0], [1, 1], [3, 4]], "inputs come one position later");
});
