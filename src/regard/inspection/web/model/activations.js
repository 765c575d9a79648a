/**
 * What flows through the network, and its embeddings, computed in the browser as activations.py computes them.
 *
 * @typedef {import("../lenses.js").ArchitectureJson} ArchitectureJson
 * @typedef {import("../lenses.js").EmbeddingsJson} EmbeddingsJson
 * @typedef {import("../lenses.js").Neighbour} Neighbour
 * @typedef {import("../lenses.js").Stack} Stack
 * @typedef {import("../lenses.js").StackJson} StackJson
 * @typedef {import("./tokenizer.js").Vocabulary} Vocabulary
 * @typedef {import("./translator.js").Translator} Translator
 */

import { BOS, EOS } from "./tokenizer.js";
import { packFloats } from "./translator.js";

/** nearest neighbours of each token of a sentence */
const NEIGHBOURS = 6;
/** tokens of the 2-D map: the first ones of the vocabulary, which are the most frequent */
const MAP_TOKENS = 2000;
/** rounds of the power iteration that finds a principal component */
const ITERATIONS = 300;

/**
 * @param {Translator} model
 * @param {string} text
 * @param {number[]} outputs ids of the translation
 * @returns {ArchitectureJson}
 */
export function architecture(model, text, outputs) {
  const { network } = model;
  const { d_model, heads, d_k, pre_norm, activation, position } = network.config;
  const source = model.encode(text);
  const finished = outputs[outputs.length - 1] === EOS ? outputs : [...outputs, EOS];
  const inputs = [BOS, ...finished.slice(0, -1)];
  /** @type {Record<Stack, { stages: string[], stream: Float32Array[], hidden: Float32Array[] }>} */
  const found = { encoder: { stages: [], stream: [], hidden: [] }, decoder: { stages: [], stream: [], hidden: [] } };
  network.visit = (stack, depth, x) => {
    if (depth) return;
    found[stack].stages.push("embedding");
    found[stack].stream.push(x.slice());
  };
  network.observe = (name, x) => {
    const [first, , layer, ...rest] = name.split(".");
    const [stack, part] = [/** @type {Stack} */ (first), rest.join(".")];
    if (part === "feed_forward.hidden") return found[stack].hidden.push(x.slice());
    found[stack].stages.push(`${layer}.${part.replace(/_residual$/, "")}`);
    found[stack].stream.push(x.slice());
  };
  try {
    network.decode([inputs], network.encode([[...source, EOS]]));
  } finally {
    network.visit = network.observe = null;
  }
  /** @param {Stack} stack @param {number} positions @returns {StackJson} */
  const packed = (stack, positions) => ({
    stages: found[stack].stages,
    stream: packFloats(joined(found[stack].stream), [found[stack].stream.length, positions, d_model]),
    hidden: packFloats(joined(found[stack].hidden), [found[stack].hidden.length, positions, found[stack].hidden[0].length / positions]),
  });
  return {
    d_model, d_ff: found.encoder.hidden[0].length / (source.length + 1), heads, d_k, pre_norm, activation, position,
    parameters: parametersByPart(model),
    encoder: packed("encoder", source.length + 1),
    decoder: packed("decoder", inputs.length),
    embeddings: {
      source: embeddings(model, "encoder", model.source, source),
      target: embeddings(model, "decoder", model.target, finished.filter((id) => id !== EOS)),
    },
  };
}

/** @param {Float32Array[]} arrays */
function joined(arrays) {
  const result = new Float32Array(arrays.reduce((sum, one) => sum + one.length, 0));
  let used = 0;
  for (const one of arrays) {
    result.set(one, used);
    used += one.length;
  }
  return result;
}

/**
 * The number of weights of each part, such as `encoder.0.attention`; norms count with their sub-layer.
 *
 * @param {Translator} model
 */
function parametersByPart({ json: { weights: { matrices, vectors } } }) {
  /** @type {Record<string, number>} */
  const found = {};
  const sizes = [...matrices.map(([name, rows, columns]) => /** @type {const} */ ([name, rows * columns])), ...vectors];
  for (const [name, size] of sizes) {
    if (/running_(mean|var)$/.test(name)) continue;
    const pieces = name.replace(".layers.", ".").replace("_residual.", ".").split(".");
    const inStack = pieces[0] === "encoder" || pieces[0] === "decoder";
    const key = inStack ? pieces.slice(0, pieces.length > 2 && /^\d+$/.test(pieces[1]) ? 3 : 2).join(".") : pieces[0];
    found[key] = (found[key] ?? 0) + size;
  }
  return found;
}

// -------------------------------------------------------------------------------------------------
// Embeddings

/**
 * @param {Translator} model
 * @param {Stack} stack
 * @param {Vocabulary} vocabulary
 * @param {number[]} ids whose neighbours are wanted
 * @returns {EmbeddingsJson}
 */
function embeddings({ network }, stack, vocabulary, ids) {
  const { memory } = network.weights;
  const matrix = network.weights.matrix(`${stack}.embedding.weight`);
  const all = Array.from({ length: vocabulary.size }, (_, id) => id);
  const texts = vocabulary.tokens(all).filter(({ text, special }) => !special && !/^<.*>$/.test(text)).map(({ id }) => id);
  const rows = all.map((id) => memory.row(matrix, id));
  const norms = rows.map((row) => Math.sqrt(dot(row, row)) + 1e-9);
  /** @param {number} id @returns {Neighbour[]} */
  const neighbours = (id) => texts.filter((other) => other !== id)
    .map((other) => ({ other, cosine: dot(rows[id], rows[other]) / norms[id] / norms[other] }))
    .sort((a, b) => b.cosine - a.cosine).slice(0, NEIGHBOURS)
    .map(({ other, cosine }) => ({ ...vocabulary.tokens([other])[0], cosine }));
  const shown = [...new Set([...texts.slice(0, MAP_TOKENS), ...ids])].sort((a, b) => a - b);
  const { points, variance } = principalComponents(shown.map((id) => rows[id]));
  return {
    tokens: vocabulary.tokens(shown), points: packFloats(points, [shown.length, 2]), variance, size: vocabulary.size,
    neighbours: Object.fromEntries([...new Set(ids)].map((id) => [id, neighbours(id)])),
  };
}

/** @param {Float32Array | Float64Array} a @param {Float32Array | Float64Array} b */
function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

/**
 * The first two principal components, by power iteration.
 *
 * @param {Float32Array[]} rows
 * @returns {{ points: Float32Array, variance: [number, number] }} points [row, 2]; shares of the variance
 */
export function principalComponents(rows) {
  const width = rows[0].length;
  const mean = new Float64Array(width);
  for (const row of rows) for (let i = 0; i < width; i++) mean[i] += row[i] / rows.length;
  const centred = rows.map((row) => Float64Array.from(row, (value, i) => value - mean[i]));
  const covariance = Array.from({ length: width }, () => new Float64Array(width));
  for (const row of centred) {
    for (let i = 0; i < width; i++) for (let j = 0; j <= i; j++) covariance[i][j] += row[i] * row[j];
  }
  for (let i = 0; i < width; i++) for (let j = 0; j < i; j++) covariance[j][i] = covariance[i][j];
  const total = covariance.reduce((sum, row, i) => sum + row[i], 0) || 1;
  /** @type {Float64Array[]} */
  const axes = [];
  const shares = [0, 1].map(() => {
    const { axis, value } = strongestAxis(covariance);
    for (let i = 0; i < width; i++) for (let j = 0; j < width; j++) covariance[i][j] -= value * axis[i] * axis[j];
    axes.push(axis);
    return value / total;
  });
  const points = Float32Array.from(centred.flatMap((row) => axes.map((axis) => dot(row, axis))));
  return { points, variance: [shares[0], shares[1]] };
}

/** @param {Float64Array[]} matrix symmetric @returns {{ axis: Float64Array, value: number }} its largest entry is positive */
function strongestAxis(matrix) {
  let axis = Float64Array.from(matrix, (_, i) => 1 + (i % 7) / 7);
  let value = 0;
  for (let round = 0; round < ITERATIONS; round++) {
    const next = Float64Array.from(matrix, (row) => dot(row, axis));
    value = Math.sqrt(dot(next, next));
    if (value < 1e-12) return { axis: new Float64Array(axis.length), value: 0 };
    axis = next.map((one) => one / value);
  }
  const largest = axis.reduce((best, one) => (Math.abs(one) > Math.abs(best) ? one : best), 0);
  return { axis: largest < 0 ? axis.map((one) => -one) : axis, value };
}
