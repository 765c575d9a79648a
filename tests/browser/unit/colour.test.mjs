import assert from "node:assert/strict";
import test from "node:test";

import {
  colourOf, divergingPixelOf, fromOklab, maxPool, pixelOf, toOklab,
} from "../../../src/regard/inspection/web/colour.js";

const WEIGHTS = Array.from({ length: 256 }, (_, i) => i / 255);

test("the ends of the scales are their first and last stops", () => {
  assert.deepEqual(colourOf(0, "light"), [0xf3, 0xf2, 0xed]);
  assert.deepEqual(colourOf(1, "light"), [0x16, 0x24, 0x5c]);
  assert.deepEqual(colourOf(0, "dark"), [0x23, 0x26, 0x2d]);
  assert.deepEqual(colourOf(1, "dark"), [0xf2, 0xf6, 0xff]);
});

test("values outside 0 to 1 are clamped", () => {
  assert.deepEqual(colourOf(-1, "light"), colourOf(0, "light"));
  assert.deepEqual(colourOf(2, "dark"), colourOf(1, "dark"));
});

test("lightness is monotonic and steps are even", () => {
  for (const [theme, sign] of [["light", -1], ["dark", 1]]) {
    const labs = WEIGHTS.map((weight) => toOklab(colourOf(weight, theme)));
    const steps = labs.slice(1).map((lab, i) => Math.hypot(...lab.map((part, j) => part - labs[i][j])));
    const mean = steps.reduce((a, b) => a + b) / steps.length;
    for (let i = 8; i < labs.length; i++) assert.ok((labs[i][0] - labs[i - 8][0]) * sign > 0);
    assert.ok(Math.max(...steps) < 3 * mean, "no jumps, apart from rounding to 8 bits");
  }
});

test("OKLab and back is the same colour", () => {
  for (const rgb of [[0, 0, 0], [255, 255, 255], [12, 200, 99], [255, 0, 128]]) assert.deepEqual(fromOklab(toOklab(rgb)), rgb);
});

test("pixels are the colours, opaque", () => {
  const bytes = new Uint8Array(Uint32Array.of(pixelOf(0.3, "light")).buffer);
  assert.deepEqual([...bytes], [...colourOf(0.3, "light"), 255]);
});

test("the diverging scale starts at the same zero, and minus infinity is transparent", () => {
  assert.equal(divergingPixelOf(0, "light"), pixelOf(0, "light"));
  assert.equal(divergingPixelOf(0.7, "light"), pixelOf(0.7, "light"));
  assert.notEqual(divergingPixelOf(-0.7, "light"), divergingPixelOf(0.7, "light"));
  assert.equal(divergingPixelOf(-Infinity, "dark"), 0);
});

test("max pooling keeps a single bright cell and selects rows and columns", () => {
  const values = new Float32Array(100);
  values[57] = 0.9;
  const all = Array.from(Array(10).keys());
  const [pooled, width, rows, columns] = maxPool(values, 10, all, all, 4);
  assert.deepEqual([width, rows.length, columns.length], [4, 4, 4]);
  assert.equal(pooled[2 * 4 + 2], Math.fround(0.9));
  assert.equal(pooled.filter((one) => one > 0).length, 1);
  assert.deepEqual(maxPool(values, 10, [1, 2], [3], 4), [values, 10, [1, 2], [3]], "small matrices are unchanged");
});
