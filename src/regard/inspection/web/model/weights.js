/**
 * The weights of the model, as interop/html_export.py writes them.
 *
 * A matrix is quantized row by row: a weight is its integer times the scale of the row. The integers of all matrices are
 * two streams of bytes: their upper 8 bits, and the bits below, several in a byte. Scales and vectors are floats. Each
 * stream is written in base 85, which is plain ASCII.
 *
 * @typedef {import("./matmul.js").Matrix} Matrix
 * @typedef {{ bits: number, matrices: [name: string, rows: number, columns: number][],
 *   vectors: [name: string, length: number][], aliases: Record<string, string> }} WeightsJson in the order of the
 *   streams; aliases are other names of tied weights
 */

import { MatrixMemory } from "./matmul.js";

/** the digits of base 85; one of Python's, `<`, is replaced by a comma, because it means something in HTML */
const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~";

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
 * @param {string} text the three streams, separated by spaces
 * @param {boolean} [allowWasm]
 */
export function readWeights(json, text, allowWasm = true) {
  const [floatBytes, upper, lower] = text.split(" ").map(decodeBase85);
  const floats = new Float32Array(floatBytes.buffer, floatBytes.byteOffset, floatBytes.length / 4);
  const shapes = json.matrices.map(([, rows, columns]) => ({ rows, columns }));
  const memory = new MatrixMemory(shapes, allowWasm);
  /** @type {Map<string, Matrix>} */
  const matrices = new Map();
  /** @type {Map<string, Float32Array>} */
  const vectors = new Map();
  let [position, used] = [0, 0];
  for (const [name, length] of json.vectors) {
    vectors.set(name, floats.subarray(used, used += length));
  }
  for (const [name, rows, columns] of json.matrices) {
    const matrix = memory.add({ rows, columns });
    matrices.set(name, matrix);
    const scales = floats.subarray(used, used += rows);
    for (let row = 0; row < rows; row++) {
      dequantize(memory.row(matrix, row), scales[row], json.bits, upper, lower, position);
      position += columns;
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
 * @param {Float32Array} result one row
 * @param {number} scale
 * @param {number} bits 8, 9, 10, 12 or 16
 * @param {Uint8Array} upper
 * @param {Uint8Array} lower
 * @param {number} position of the first value in the streams
 */
function dequantize(result, scale, bits, upper, lower, position) {
  const width = bits - 8;
  const [perByte, mask] = [width ? 8 / width : 1, (1 << width) - 1];
  for (let i = 0; i < result.length; i++) {
    const index = position + i;
    let value = ((upper[index] << 24) >> 24) << width; // the upper byte has the sign
    if (width) value |= (lower[Math.floor(index / perByte)] >> (index % perByte * width)) & mask;
    result[i] = value * scale;
  }
}

/**
 * @param {string} text as base64.b85encode of Python writes it, apart from one digit
 * @returns {Uint8Array}
 */
export function decodeBase85(text) {
  const values = new Uint8Array(128);
  for (let i = 0; i < DIGITS.length; i++) values[DIGITS.charCodeAt(i)] = i;
  const groups = Math.ceil(text.length / 5);
  const padding = groups * 5 - text.length;
  const bytes = new Uint8Array(groups * 4);
  for (let group = 0, at = 0; group < groups; group++) {
    let value = 0;
    for (let i = 0; i < 5; i++, at++) value = value * 85 + (at < text.length ? values[text.charCodeAt(at)] : 84);
    bytes[group * 4] = value / 0x1000000;
    bytes[group * 4 + 1] = value >>> 16;
    bytes[group * 4 + 2] = value >>> 8;
    bytes[group * 4 + 3] = value;
  }
  return bytes.subarray(0, bytes.length - padding);
}
