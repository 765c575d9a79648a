/**
 * Matrices in memory, and the products of linear layers with them: y = x W^T in float32.
 *
 * The products run in WebAssembly with SIMD (matmul.wat) if the browser supports it, else in JavaScript.
 *
 * @typedef {{ rows: number, columns: number }} Shape
 * @typedef {Shape & { offset: number, stride: number }} Matrix offset and stride in floats; rows are padded with zeros
 * @typedef {(x: number, w: number, y: number, rows: number, inner: number, outer: number) => void} Matmul
 */

import { decodeBase64 } from "../trace.js";
import { MATMUL_WASM } from "./matmul_wasm.js";

/** rows of x that are multiplied in one call */
const BLOCK = 32;
const PAGE_BYTES = 65536;

export class MatrixMemory {
  /**
   * @param {Shape[]} shapes of all matrices
   * @param {boolean} [allowWasm] false: JavaScript even if the browser supports WebAssembly, for tests
   */
  constructor(shapes, allowWasm = true) {
    const widest = Math.max(0, ...shapes.map(({ columns }) => roundUp(columns, 4)));
    const tallest = Math.max(0, ...shapes.map(({ rows }) => roundUp(rows, 2)));
    const weights = shapes.reduce((sum, { rows, columns }) => sum + roundUp(rows, 2) * roundUp(columns, 4), 0);
    const size = weights + BLOCK * (widest + tallest);
    const wasm = allowWasm ? startWasm(size) : null;
    this.usesWasm = wasm !== null;
    this.floats = wasm ? wasm.floats : new Float32Array(size);
    this.matmul = wasm ? wasm.matmul : plainMatmul(this.floats);
    /** where x and y of a product are stored */
    this.x = weights;
    this.y = weights + BLOCK * widest;
    this.used = 0;
  }

  /**
   * Reserve a matrix of zeros.
   *
   * @param {Shape} shape
   * @returns {Matrix}
   */
  add({ rows, columns }) {
    const matrix = { rows, columns, offset: this.used, stride: roundUp(columns, 4) };
    this.used += roundUp(rows, 2) * matrix.stride;
    return matrix;
  }

  /** @param {Matrix} matrix @param {number} row @returns {Float32Array} a view */
  row({ offset, stride, columns }, row) {
    return this.floats.subarray(offset + row * stride, offset + row * stride + columns);
  }

  /**
   * The products of each row of x with each row of a matrix.
   *
   * @param {Float32Array} x [count, columns]
   * @param {number} count
   * @param {Matrix} matrix
   * @returns {Float32Array} [count, rows]
   */
  multiply(x, count, matrix) {
    const { rows, columns, stride, offset } = matrix;
    const outer = roundUp(rows, 2);
    const { floats } = this;
    const result = new Float32Array(count * rows);
    for (let first = 0; first < count; first += BLOCK) {
      const some = Math.min(BLOCK, count - first);
      for (let i = 0; i < some; i++) {
        const from = (first + i) * columns;
        floats.set(x.subarray(from, from + columns), this.x + i * stride);
        if (stride > columns) floats.fill(0, this.x + i * stride + columns, this.x + (i + 1) * stride);
      }
      this.matmul(this.x, offset, this.y, some, stride, outer);
      for (let i = 0; i < some; i++) {
        result.set(floats.subarray(this.y + i * outer, this.y + i * outer + rows), (first + i) * rows);
      }
    }
    return result;
  }
}

/** @param {number} value @param {number} multiple */
function roundUp(value, multiple) {
  return Math.ceil(value / multiple) * multiple;
}

/**
 * @param {number} size floats of memory
 * @returns {{ floats: Float32Array, matmul: Matmul } | null} null if the browser has no WebAssembly with SIMD
 */
function startWasm(size) {
  try {
    const { exports } = new WebAssembly.Instance(new WebAssembly.Module(decodeBase64(MATMUL_WASM)));
    const memory = /** @type {WebAssembly.Memory} */ (exports.memory);
    const matmul = /** @type {Matmul} */ (exports.matmul);
    memory.grow(Math.ceil(size * 4 / PAGE_BYTES) - memory.buffer.byteLength / PAGE_BYTES + 1);
    return {
      floats: new Float32Array(memory.buffer),
      matmul: (x, w, y, rows, inner, outer) => matmul(x * 4, w * 4, y * 4, rows, inner, outer),
    };
  } catch {
    return null;
  }
}

/** @param {Float32Array} floats @returns {Matmul} */
function plainMatmul(floats) {
  return (x, w, y, rows, inner, outer) => {
    for (let output = 0; output < outer; output += 2) { // two sums at a time, which do not wait for each other
      const [first, second] = [w + output * inner, w + (output + 1) * inner];
      for (let row = 0; row < rows; row++) {
        const from = x + row * inner;
        let [one, other] = [0, 0];
        for (let i = 0; i < inner; i++) {
          const value = floats[from + i];
          one += value * floats[first + i];
          other += value * floats[second + i];
        }
        floats[y + row * outer + output] = one;
        floats[y + row * outer + output + 1] = other;
      }
    }
  };
}
