import assert from "node:assert/strict";
import test from "node:test";
import { deflateRawSync } from "node:zlib";

import { joinBits, readWeights } from "../../../src/regard/inspection/web/model/weights.js";
import { inflate, unpackText } from "../../../src/regard/inspection/web/packed_text.js";

test("bytes of a text: pairs, escaped pairs, and a last byte", () => {
  const text = String.fromCodePoint(0x4241, 0x10000, 0x107ff, 0x10800, 0x10801, 0x10802, 0x10803 + 0xff);
  assert.deepEqual([...unpackText(text)], [0x41, 0x42, 0x00, 0xd8, 0xff, 0xdf, 0, 0, 13, 0, 60, 0, 0xff]);
  assert.deepEqual([...unpackText("")], []);
});

test("compressed bytes", async () => {
  const bytes = new Uint8Array(deflateRawSync(Buffer.from('{"a": "ä"}')));
  assert.deepEqual(await inflate(bytes).json(), { a: "ä" });
});

for (const width of [0, 1, 3, 8, 11, 16]) {
  test(`integers of 8 + ${width} bits`, () => {
    const values = Int32Array.from({ length: 100 }, (_, i) => (i * 2654435761) >> (24 - width));
    const bits = [...values].flatMap((value) => Array.from({ length: width }, (_, bit) => (value >> bit) & 1));
    const lower = Uint8Array.from({ length: Math.ceil(bits.length / 8) }, (_, byte) =>
      bits.slice(byte * 8, byte * 8 + 8).reduce((sum, bit, i) => sum | (bit << i), 0));
    assert.deepEqual(joinBits(Int8Array.from(values, (value) => value >> width), lower, width), values);
  });
}

test("vectors, matrices and aliases", async () => {
  const vector = new Uint8Array(Float32Array.of(0.5, -2).buffer);
  const upper = deflateRawSync(Uint8Array.of(1, 254, 3, 4, 5, 6, 7)); // 254 is -2
  const json = {
    matrices: [["a.weight", 2, 3, 0.5, 0], ["b.weight", 1, 1, 2, 3]], vectors: [["a.bias", 2]], aliases: { "c.weight": "a.weight" },
  };
  const weights = await readWeights(json, Uint8Array.from([...vector, 0b101, ...upper]));
  assert.deepEqual([...weights.vector("a.bias")], [0.5, -2]);
  assert.equal(weights.vector("b.bias"), null);
  assert.deepEqual([...weights.memory.row(weights.matrix("c.weight"), 0)], [0.5, -1, 1.5]);
  assert.deepEqual([...weights.memory.row(weights.matrix("b.weight"), 0)], [2 * (7 * 8 + 5)]);
  assert.throws(() => weights.matrix("d.weight"), /no matrix d.weight/);
});
