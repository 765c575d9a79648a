import assert from "node:assert/strict";
import test from "node:test";

import {
  compact, decimal, grouped, percent, scientific, signed, subscript, ticks,
} from "../../../src/regard/inspection/web/format.js";

test("percentages have decimals only near 0 and 100", () => {
  assert.deepEqual([0, 0.0001, 0.005, 0.0999, 0.5, 0.991, 0.9999, 1].map(percent),
    ["0.0%", "<0.1%", "0.5%", "10.0%", "50%", "99.1%", ">99.9%", "100%"]);
});

test("negative numbers have a proper minus sign", () => {
  assert.equal(signed(-1.23456), "−1.235");
  assert.equal(signed(2), "2.000");
  assert.equal(decimal(-0.5), "−0.5000");
  assert.equal(compact(-12.345), "−12.3");
});

test("there is no negative zero, and masked scores are minus infinity", () => {
  assert.equal(decimal(-0.00001), "0.0000");
  assert.equal(decimal(-Infinity), "−∞");
});

test("compact numbers have three significant digits; large ones are grouped", () => {
  assert.deepEqual([0, 0.000123, 0.12345, 12.345, 999.9, 1234.5, 1e6].map(compact),
    ["0", "1.2e−4", "0.123", "12.3", "1000", "1,235", "1,000,000"]);
});

test("very small and very large values are written in scientific notation", () => {
  assert.deepEqual([0, 0.0001, 0.5, 123456].map(scientific), ["0.0000", "1.000e−4", "0.5000", "1.235e+5"]);
});

test("grouping and subscripts", () => {
  assert.equal(grouped(1234567), "1,234,567");
  assert.equal(subscript(12), "₁₂");
});

test("ticks are round numbers that cover the range", () => {
  assert.deepEqual(ticks(0, 10, 4), [0, 5, 10]);
  assert.deepEqual(ticks(0.31, 0.69, 4), [0.3, 0.4, 0.5, 0.6, 0.7]);
  assert.deepEqual(ticks(3, 3, 4), [3, 4, 5, 6]);
  for (const [low, high] of [[-3.3, 7.9], [90, 99.5], [1e-6, 3e-4]]) {
    const found = ticks(low, high, 5);
    assert.ok(found[0] <= low && found[found.length - 1] >= high);
  }
});
