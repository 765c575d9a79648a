import assert from "node:assert/strict";
import test from "node:test";

import { MatrixMemory } from "../../../src/regard/inspection/web/model/matmul.js";

const SHAPES = [{ rows: 5, columns: 7 }, { rows: 8, columns: 16 }, { rows: 1, columns: 4 }];

/** @param {number} length */
const numbers = (length) => Float32Array.from({ length }, (_, i) => Math.sin(3 * i + 1));

for (const wasm of [true, false]) {
  test(`products of any shape, ${wasm ? "with" : "without"} WebAssembly`, () => {
    const memory = new MatrixMemory(SHAPES, wasm);
    assert.equal(memory.usesWasm, wasm);
    const matrices = SHAPES.map((shape) => memory.add(shape));
    for (const [number, matrix] of matrices.entries()) {
      for (let row = 0; row < matrix.rows; row++) memory.row(matrix, row).set(numbers(matrix.columns).map((one) => one + number + row));
    }
    for (const matrix of matrices) {
      for (const count of [1, 4, 5, 33, 70]) {
        const x = numbers(count * matrix.columns);
        const y = memory.multiply(x, count, matrix);
        assert.equal(y.length, count * matrix.rows);
        for (let i = 0; i < count; i++) {
          for (let row = 0; row < matrix.rows; row++) {
            const expected = memory.row(matrix, row).reduce((sum, one, j) => sum + one * x[i * matrix.columns + j], 0);
            assert.ok(Math.abs(y[i * matrix.rows + row] - expected) < 1e-4);
          }
        }
      }
    }
  });
}
