import assert from "node:assert/strict";
import test from "node:test";

import { principalComponents } from "../../../src/regard/inspection/web/model/activations.js";

test("points on a line have one component, and its sign is fixed", () => {
  const rows = [[-2, -4, 1], [0, 0, 1], [2, 4, 1]].map((row) => Float32Array.from(row));
  const { points, variance } = principalComponents(rows);
  const expected = [-Math.sqrt(20), 0, 0, 0, Math.sqrt(20), 0];
  Array.from(points).forEach((value, i) => assert.ok(Math.abs(value - expected[i]) < 1e-5, `${points}`));
  assert.ok(Math.abs(variance[0] - 1) < 1e-9 && Math.abs(variance[1]) < 1e-9);
});

test("the second component is orthogonal to the first and explains less", () => {
  const rows = Array.from({ length: 40 }, (_, i) => Float32Array.from([3 * Math.sin(i), Math.cos(2 * i), 0.1 * Math.sin(5 * i)]));
  const { points, variance } = principalComponents(rows);
  let product = 0;
  for (let i = 0; i < rows.length; i++) product += points[2 * i] * points[2 * i + 1];
  assert.ok(Math.abs(product) < 1e-3);
  assert.ok(variance[0] > variance[1] && variance[0] + variance[1] > 0.98);
});
