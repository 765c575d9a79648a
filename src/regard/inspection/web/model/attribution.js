/**
 * Contrastive attribution in the browser, by the methods of attribution.py.
 *
 * @typedef {import("../lenses.js").AttributionJson} AttributionJson
 * @typedef {import("../lenses.js").Stack} Stack
 * @typedef {import("./attention_flow.js").Shares} Shares
 * @typedef {import("./gradients.js").Embeddings} Embeddings
 * @typedef {import("./transformer.js").Transformer} Transformer
 * @typedef {import("./translator.js").Recorded} Recorded
 * @typedef {import("./translator.js").Translator} Translator
 * @typedef {import("../trace.js").Token} Token
 * @typedef {{ stack: Stack, positions: number[] }} Word
 */

import { alti, attentionShares, rollout } from "./attention_flow.js";
import { LogitDifference } from "./gradients.js";
import { BOS, EOS } from "./tokenizer.js";
import { toRows } from "./transformer.js";
import { groupWords } from "./translator.js";

/** tokens that are read at a time */
const BATCH_TOKENS = 512;
/** integrated gradients: points on the path, doubled until the shares add up */
const [FIRST_STEPS, MOST_STEPS] = [16, 512];
/** a sum of shares of both signs counts as at least this fraction of the sum of their sizes */
const SMALL_SUM = 0.01;
/** integrated gradients stop at this relative error of the sum */
const COMPLETENESS = 0.005;
/** @type {Stack[]} */
const STACKS = ["encoder", "decoder"];

/**
 * Why a token and not another. Other calls of the worker are answered in between.
 *
 * @param {Translator} model
 * @param {string} text
 * @param {number[]} outputs ids of the translation
 * @param {number} position of the token
 * @param {number | null} foil id of the other token; null: the second best
 * @returns {Promise<AttributionJson>}
 */
export async function attribution(model, text, outputs, position, foil) {
  const { network } = model;
  const source = [...model.encode(text), EOS];
  const inputs = [BOS, ...outputs.slice(0, position)];
  const token = outputs[position];
  const { recorded, streams, logits } = observe(model, source, inputs);
  const other = foil ?? secondBest(logits, token);
  const tokens = { encoder: model.source.tokens(source), decoder: model.target.tokens(inputs) };
  const words = STACKS.flatMap((stack) => groupWords(tokens[stack]).map((positions) => ({ stack, positions })));
  const explained = new LogitDifference(network, source.length, inputs.length, [token, other]);
  const point = eachStack((stack) => embeddingsOf(network, stack, tokens[stack]));
  const neutral = eachStack((stack) => neutralEmbeddings(network, stack, tokens[stack], point[stack]));
  const [difference] = explained.at(point).values;
  const integrated = await integratedGradients(explained, point, neutral, difference);
  const contributions = alti(network, recorded, streams);
  /** @param {Shares} shares of the tokens */
  const ofWords = (shares) => words.map(({ stack, positions }) => positions.reduce((sum, at) => sum + shares[stack][at], 0));
  /** @type {AttributionJson["scores"]} */
  const scores = {
    gradient_x_input: ofWords(sharesOf(explained.at(point).gradients(), point, network)),
    integrated_gradients: ofWords(integrated.shares),
    occlusion: await occlusion(explained, point, neutral, words, difference),
    attention_rollout: ofWords(rollout(recorded, network.config.heads)),
    ...(contributions && { alti: ofWords(contributions) }),
    attention: ofWords(attentionShares(recorded, network.config.heads)),
  };
  /** @param {Stack} stack */
  const names = (stack) => words.filter((word) => word.stack === stack).map(({ positions }) =>
    positions.map((at) => tokens[stack][at].text).join("").replace(/^▁+/, ""));
  const [ours, theirs] = model.target.tokens([token, other]);
  return {
    token: ours, foil: theirs, position, difference, source_words: names("encoder"), target_words: names("decoder"), scores,
    agreement: agreementOf(scores), completeness: integrated.error,
  };
}

/**
 * One pass with teacher forcing: attention, residual streams and the logits after the last input.
 *
 * @param {Translator} model @param {number[]} source @param {number[]} inputs
 */
function observe({ network, target }, source, inputs) {
  /** @type {Recorded} */
  const recorded = { encoder: [], decoder: [], cross_attention: [] };
  /** @type {Record<Stack, Float32Array[]>} before the first sub-layer and after each one */
  const streams = { encoder: [], decoder: [] };
  network.visit = (stack, depth, x) => {
    if (!depth) streams[stack].push(x.slice());
  };
  network.observe = (name, x) => {
    if (name.endsWith("_residual")) streams[/** @type {Stack} */ (name.split(".")[0])].push(x.slice());
  };
  try {
    const memories = network.encode([source], recorded.encoder);
    const logits = network.decode([inputs], memories, recorded);
    return { recorded, streams, logits: logits.subarray((inputs.length - 1) * target.size) };
  } finally {
    network.visit = network.observe = null;
  }
}

/** @param {Float32Array} logits @param {number} token */
function secondBest(logits, token) {
  let best = token === 0 ? 1 : 0;
  for (let id = 0; id < logits.length; id++) if (id !== token && logits[id] > logits[best]) best = id;
  return best;
}

/** Let the worker answer other calls. */
function pause() {
  return new Promise((resolve) => { setTimeout(resolve); });
}

// -------------------------------------------------------------------------------------------------
// Embeddings

/** @param {(stack: Stack) => Float32Array} of @returns {Embeddings} */
function eachStack(of) {
  return { encoder: of("encoder"), decoder: of("decoder") };
}

/**
 * @param {Transformer} network
 * @param {Stack} stack
 * @param {Token[]} tokens
 */
function embeddingsOf({ weights, config }, stack, tokens) {
  const { d_model: width } = config;
  const matrix = weights.matrix(`${stack}.embedding.weight`);
  const result = new Float32Array(tokens.length * width);
  tokens.forEach(({ id }, at) => result.set(weights.memory.row(matrix, id).map((value) => value * Math.sqrt(width)), at * width));
  return result;
}

/**
 * A neutral word is the mean of all embeddings; special tokens, which every sentence has, stay as they are.
 *
 * @param {Transformer} network
 * @param {Stack} stack
 * @param {Token[]} tokens
 * @param {Float32Array} embeddings of the tokens
 */
function neutralEmbeddings({ weights }, stack, tokens, embeddings) {
  const matrix = weights.matrix(`${stack}.embedding.weight`);
  const { rows, columns: width } = matrix;
  const mean = new Float64Array(width);
  for (let id = 0; id < rows; id++) {
    weights.memory.row(matrix, id).forEach((value, i) => { mean[i] += value * Math.sqrt(width) / rows; });
  }
  const result = embeddings.slice();
  tokens.forEach(({ special }, at) => { if (!special) result.set(mean, at * width); });
  return result;
}

/**
 * Several sentences, one after the other.
 *
 * @param {Embeddings[]} sentences
 */
function concatenated(sentences) {
  return eachStack((stack) => {
    const result = new Float32Array(sentences.length * sentences[0][stack].length);
    sentences.forEach((one, i) => result.set(one[stack], i * one[stack].length));
    return result;
  });
}

/** @param {LogitDifference} explained @returns {number} sentences that are read at a time */
function batchSize({ lengths }) {
  return Math.max(1, Math.floor(BATCH_TOKENS / (lengths.encoder + lengths.decoder)));
}

// -------------------------------------------------------------------------------------------------
// Gradients

/**
 * The product of gradient and vector of each token.
 *
 * @param {Record<Stack, Float32Array | Float64Array>} gradients
 * @param {Embeddings} vectors
 * @param {Transformer} network
 * @returns {Shares}
 */
function sharesOf(gradients, vectors, { config: { d_model: width } }) {
  /** @param {Stack} stack */
  const of = (stack) => toRows(vectors[stack], width).map((row, token) =>
    row.reduce((sum, value, i) => sum + value * gradients[stack][token * width + i], 0));
  return { encoder: of("encoder"), decoder: of("decoder") };
}

/**
 * The gradient averaged on the way from the neutral sentence to this one, times the way.
 *
 * @param {LogitDifference} explained
 * @param {Embeddings} point
 * @param {Embeddings} neutral
 * @param {number} difference at the point
 * @returns {Promise<{ shares: Shares, error: number }>} error: relative, of the sum of the shares
 */
async function integratedGradients(explained, point, neutral, difference) {
  const total = difference - explained.at(neutral).values[0];
  const way = eachStack((stack) => point[stack].map((value, i) => value - neutral[stack][i]));
  for (let steps = FIRST_STEPS; ; steps *= 2) {
    const shares = sharesOf(await pathIntegral(explained, neutral, way, steps), way, explained.network);
    const each = [...shares.encoder, ...shares.decoder];
    const sum = each.reduce((one, other) => one + other, 0);
    const sizes = each.reduce((total, one) => total + Math.abs(one), 0);
    // In float32 a sum near 0 cannot be met to a fraction of itself.
    const error = Math.abs(sum - total) / Math.max(Math.abs(total), SMALL_SUM * sizes, 1e-6);
    if (error <= COMPLETENESS || steps >= MOST_STEPS) return { shares, error };
  }
}

/**
 * The mean of the gradients on a way, by Gauss-Legendre quadrature.
 *
 * @param {LogitDifference} explained
 * @param {Embeddings} start
 * @param {Embeddings} way
 * @param {number} steps
 */
async function pathIntegral(explained, start, way, steps) {
  const nodes = gaussLegendre(steps);
  const sums = { encoder: new Float64Array(way.encoder.length), decoder: new Float64Array(way.decoder.length) };
  for (let first = 0; first < steps; first += batchSize(explained)) {
    const some = nodes.slice(first, first + batchSize(explained));
    const gradients = explained.at(concatenated(some.map(({ node }) =>
      eachStack((stack) => start[stack].map((value, i) => value + (node + 1) / 2 * way[stack][i]))))).gradients();
    some.forEach(({ weight }, row) => {
      for (const stack of STACKS) {
        const [sum, from] = [sums[stack], row * sums[stack].length];
        for (let i = 0; i < sum.length; i++) sum[i] += weight / 2 * gradients[stack][from + i];
      }
    });
    await pause();
  }
  return sums;
}

/**
 * The nodes and weights of Gauss-Legendre quadrature on [-1, 1]: the roots of the Legendre polynomial, by Newton's method.
 *
 * @param {number} count
 * @returns {{ node: number, weight: number }[]}
 */
export function gaussLegendre(count) {
  return Array.from({ length: count }, (_, i) => {
    let [node, slope] = [Math.cos(Math.PI * (i + 0.75) / (count + 0.5)), 0];
    for (let round = 0; round < 10; round++) {
      let [last, value] = [1, node];
      for (let k = 2; k <= count; k++) [last, value] = [value, ((2 * k - 1) * node * value - (k - 1) * last) / k];
      slope = count * (node * value - last) / (node * node - 1);
      node -= value / slope;
    }
    return { node, weight: 2 / ((1 - node * node) * slope * slope) };
  });
}

// -------------------------------------------------------------------------------------------------
// Occlusion

/**
 * The change of the difference if a word becomes neutral.
 *
 * @param {LogitDifference} explained
 * @param {Embeddings} point
 * @param {Embeddings} neutral
 * @param {Word[]} words
 * @param {number} difference at the point
 */
async function occlusion(explained, point, neutral, words, difference) {
  const { d_model: width } = explained.network.config;
  /** @type {number[]} */
  const found = [];
  for (let first = 0; first < words.length; first += batchSize(explained)) {
    const sentences = words.slice(first, first + batchSize(explained)).map((word) => eachStack((stack) => {
      const result = point[stack].slice();
      for (const at of word.stack === stack ? word.positions : []) {
        result.set(neutral[stack].subarray(at * width, (at + 1) * width), at * width);
      }
      return result;
    }));
    found.push(...explained.at(concatenated(sentences)).values.map((value) => difference - value));
    await pause();
  }
  return found;
}

// -------------------------------------------------------------------------------------------------
// Agreement

/**
 * Spearman's rank correlation of the sizes of the shares, for each pair of methods.
 *
 * @param {AttributionJson["scores"]} scores
 * @returns {AttributionJson["agreement"]}
 */
function agreementOf(scores) {
  const ranked = Object.entries(scores).map(([name, values]) => ({ name, ranks: ranksOf(values.map(Math.abs)) }));
  return ranked.flatMap((first, i) => ranked.slice(i + 1).map((second) => (
    /** @type {[string, string, number]} */ ([first.name, second.name, correlation(first.ranks, second.ranks)]))));
}

/** @param {number[]} values @returns {number[]} equal values share the mean of their ranks */
function ranksOf(values) {
  return values.map((value) => values.reduce((rank, one) => rank + (one < value ? 1 : one === value ? 0.5 : 0), -0.5));
}

/** @param {number[]} a @param {number[]} b @returns {number} Pearson's correlation; 0 if one side is constant */
function correlation(a, b) {
  const centred = [a, b].map((values) => {
    const mean = values.reduce((sum, one) => sum + one, 0) / values.length;
    return values.map((one) => one - mean);
  });
  /** @param {number[]} x @param {number[]} y */
  const dot = (x, y) => x.reduce((sum, one, i) => sum + one * y[i], 0);
  const size = Math.sqrt(dot(centred[0], centred[0]) * dot(centred[1], centred[1]));
  return size ? dot(centred[0], centred[1]) / size : 0;
}
