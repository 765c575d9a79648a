/**
 * Scaled dot-product attention of one head, computed step by step from the model's queries, keys and values.
 *
 * @typedef {import("./trace.js").Projections} Projections
 * @typedef {{ i: number, j: number, T: number, K: number, dk: number, dv: number, scale: number, q: Float32Array,
 *   k: Float32Array, v: Float32Array, model: Float32Array, products: Float32Array, scores: Float32Array,
 *   masked: Float32Array, weights: Float32Array, head: Float32Array }} AttentionSteps
 *   every intermediate of one head, row-major: T queries, K keys; i and j are the selected query and key
 */

/** a weight of 0 comes from the mask unless its score is this far below the maximum of its row */
const UNDERFLOW = 80;

/**
 * @param {Float32Array} model the weights that the model computed, [T, K]; its zeros tell which keys are masked
 * @param {Projections} projections
 * @param {number} layer @param {number} head @param {number} i @param {number} j
 * @returns {AttentionSteps}
 */
export function computeAttention(model, projections, layer, head, i, j) {
  const [q, k, v] = [projections.query, projections.key, projections.value].map((one) => one.head(layer, head));
  const [T, K, { scale }] = [projections.query.queries, projections.key.queries, projections];
  const [dk, dv] = [projections.key.keys, projections.value.keys];
  const products = matmul(q, transpose(k, K, dk), T, dk, K);
  const scores = products.map((product) => product * scale);
  const masked = maskScores(scores, model, K);
  const weights = softmaxRows(masked, K);
  const output = matmul(weights, v, T, K, dv);
  return { i, j, T, K, dk, dv, scale, q, k, v, model, products, scores, masked, weights, head: output };
}

/**
 * Set the scores of masked keys to minus infinity.
 *
 * @param {Float32Array} scores
 * @param {Float32Array} model
 * @param {number} columns
 */
function maskScores(scores, model, columns) {
  const masked = scores.slice();
  for (let start = 0; start < scores.length; start += columns) {
    let max = -Infinity;
    for (let i = start; i < start + columns; i++) if (model[i] > 0) max = Math.max(max, scores[i]);
    for (let i = start; i < start + columns; i++) {
      if (model[i] === 0 && scores[i] > max - UNDERFLOW) masked[i] = -Infinity;
    }
  }
  return masked;
}

/**
 * The softmax of each row.
 *
 * @param {Float32Array} scores
 * @param {number} columns
 */
export function softmaxRows(scores, columns) {
  const weights = new Float32Array(scores.length);
  for (let start = 0; start < scores.length; start += columns) {
    const row = scores.subarray(start, start + columns);
    const max = row.reduce((most, score) => Math.max(most, score), -Infinity);
    let sum = 0;
    for (const score of row) sum += Math.exp(score - max);
    row.forEach((score, i) => { weights[start + i] = Math.exp(score - max) / sum; });
  }
  return weights;
}

/** @param {Float32Array} values @param {number} rows @param {number} columns */
export function transpose(values, rows, columns) {
  return Float32Array.from(values, (_, i) => values[(i % rows) * columns + Math.floor(i / rows)]);
}

/** @param {Float32Array} a @param {Float32Array} b @param {number} rows @param {number} inner @param {number} columns */
export function matmul(a, b, rows, inner, columns) {
  const result = new Float32Array(rows * columns);
  const sums = new Float64Array(columns);
  for (let row = 0; row < rows; row++) {
    sums.fill(0);
    for (let c = 0; c < inner; c++) {
      const factor = a[row * inner + c];
      for (let column = 0; column < columns; column++) sums[column] += factor * b[c * columns + column];
    }
    result.set(sums, row * columns);
  }
  return result;
}
