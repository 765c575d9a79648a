/**
 * The weights of the model, as interop/html_export.py writes them.
 *
 * A matrix is integers times a step. The bytes hold, in this order: the vectors, as floats; the low bits of all integers,
 * matrix by matrix, each matrix beginning with a new byte; the upper 8 bits of all integers, compressed.
 *
 * @typedef {import("./matmul.js").Matrix} Matrix
 * @typedef {{ matrices: [name: string, rows: number, columns: number, step: number, lowBits: number][],
 *   vectors: [name: string, length: number][], aliases: Record<string, string> }} WeightsJson in the order of the bytes;
 *   aliases are other names of tied weights
 */

import { inflate } from "../packed_text.js";
import { MatrixMemory } from "./matmul.js";

/** The weights by name. */
export class Weights {
  /** @param {MatrixMemory} memory @param {Map<string, Matrix>} matrices @param {Map<string, Float32Array>} vectors */
  constructor(memory, matrices, vectors) {
    this.memory = memory;
    this.matrices = matrices;
    this.vectors = vectors;
  }

  /** @param {string} name @returns {Matrix} */
  matrix(name) {
    const found = this.matrices.get(name);
    if (!found) throw new Error(`There is no matrix ${name} in this file.`);
    return found;
  }

  /**
   * A vector; null if the model has none of this name.
   *
   * @param {string} name
   * @returns {Float32Array | null}
   */
  vector(name) {
    return this.vectors.get(name) ?? null;
  }
}

/**
 * @param {WeightsJson} json
 * @param {Uint8Array} bytes
 * @param {boolean} [allowWasm]
 */
export async function readWeights(json, bytes, allowWasm = true) {
  const memory = new MatrixMemory(json.matrices.map(([, rows, columns]) => ({ rows, columns })), allowWasm);
  /** @type {Map<string, Matrix>} */
  const matrices = new Map();
  /** @type {Map<string, Float32Array>} */
  const vectors = new Map();
  let used = 0;
  for (const [name, length] of json.vectors) {
    vectors.set(name, new Float32Array(bytes.slice(used, used += length * 4).buffer));
  }
  const lower = json.matrices.map(([, rows, columns, , lowBits]) =>
    bytes.subarray(used, used += Math.ceil(rows * columns * lowBits / 8)));
  const upper = new Int8Array(await inflate(bytes.subarray(used)).arrayBuffer());
  let position = 0;
  for (const [number, [name, rows, columns, step, lowBits]] of json.matrices.entries()) {
    const matrix = memory.add({ rows, columns });
    matrices.set(name, matrix);
    const values = joinBits(upper.subarray(position, position += rows * columns), lower[number], lowBits);
    for (let row = 0; row < rows; row++) {
      const result = memory.row(matrix, row);
      for (let column = 0; column < columns; column++) result[column] = values[row * columns + column] * step;
    }
  }
  for (const [name, other] of Object.entries(json.aliases)) {
    const [matrix, vector] = [matrices.get(other), vectors.get(other)];
    if (matrix) matrices.set(name, matrix);
    if (vector) vectors.set(name, vector);
  }
  return new Weights(memory, matrices, vectors);
}

/**
 * The integers with these upper bits and low bits.
 *
 * @param {Int8Array} upper
 * @param {Uint8Array} lower several values in a byte; the first begins at the lowest bit
 * @param {number} width low bits of a value, at most 24
 */
export function joinBits(upper, lower, width) {
  const values = new Int32Array(upper.length);
  const mask = (1 << width) - 1;
  let [read, bits, held] = [0, 0, 0];
  for (let i = 0; i < upper.length; i++) {
    for (; held < width; held += 8) bits |= lower[read++] << held;
    values[i] = (upper[i] << width) | (bits & mask);
    bits >>>= width;
    held -= width;
  }
  return values;
}
