/**
 * Contrastive attribution in the browser, by those methods of attribution.py that need neither gradients nor the vectors
 * inside the network: occlusion, attention rollout and attention.
 *
 * @typedef {import("../lenses.js").AttributionJson} AttributionJson
 * @typedef {import("../lenses.js").Stack} Stack
 * @typedef {import("./transformer.js").RecordedAttention} RecordedAttention
 * @typedef {import("./translator.js").Recorded} Recorded
 * @typedef {import("./translator.js").Translator} Translator
 * @typedef {{ stack: Stack, positions: number[] }} Word
 */

import { BOS, EOS } from "./tokenizer.js";
import { groupWords } from "./translator.js";

/** tokens that are read at a time */
const BATCH_TOKENS = 512;

/**
 * Why a token and not another.
 *
 * @param {Translator} model
 * @param {string} text
 * @param {number[]} outputs ids of the translation
 * @param {number} position of the token
 * @param {number | null} foil id of the other token; null: the second best
 * @returns {AttributionJson}
 */
export function attribution(model, text, outputs, position, foil) {
  const source = [...model.encode(text), EOS];
  const inputs = [BOS, ...outputs.slice(0, position)];
  const token = outputs[position];
  const { recorded, logits } = observe(model, source, inputs);
  const other = foil ?? secondBest(logits, token);
  const difference = logits[token] - logits[other];
  const tokens = { encoder: model.source.tokens(source), decoder: model.target.tokens(inputs) };
  /** @param {Stack} stack @returns {Word[]} */
  const wordsOf = (stack) => groupWords(tokens[stack]).map((positions) => ({ stack, positions }));
  const words = [...wordsOf("encoder"), ...wordsOf("decoder")];
  /** @type {AttributionJson["scores"]} */
  const scores = {
    occlusion: differencesWithout(model, source, inputs, [token, other], words).map((value) => difference - value),
  };
  const shares = { attention_rollout: rollout(recorded, model.json.network.heads), attention: lastRows(recorded, model.json.network.heads) };
  for (const [name, { encoder, decoder }] of Object.entries(shares)) {
    scores[name] = words.map(({ stack, positions }) => positions.reduce((sum, at) => sum + (stack === "encoder" ? encoder : decoder)[at], 0));
  }
  /** @param {Stack} stack */
  const names = (stack) => wordsOf(stack).map(({ positions }) =>
    positions.map((at) => tokens[stack][at].text).join("").replace(/^▁+/, ""));
  const [ours, theirs] = model.target.tokens([token, other]);
  return {
    token: ours, foil: theirs, position, difference, source_words: names("encoder"), target_words: names("decoder"), scores,
    agreement: agreementOf(scores), completeness: 0,
  };
}

/** @param {Translator} model @param {number[]} source @param {number[]} inputs */
function observe({ network, target }, source, inputs) {
  /** @type {Recorded} */
  const recorded = { encoder: [], decoder: [], cross_attention: [] };
  const memories = network.encode([source], recorded.encoder);
  const logits = network.decode([inputs], memories, recorded);
  return { recorded, logits: logits.subarray((inputs.length - 1) * target.size) };
}

/** @param {Float32Array} logits @param {number} token */
function secondBest(logits, token) {
  let best = token === 0 ? 1 : 0;
  for (let id = 0; id < logits.length; id++) if (id !== token && logits[id] > logits[best]) best = id;
  return best;
}

// -------------------------------------------------------------------------------------------------
// Occlusion

/**
 * The difference of the logits of two tokens after the last input, if one word is neutral; a result for each word.
 *
 * @param {Translator} model
 * @param {number[]} source
 * @param {number[]} inputs
 * @param {[number, number]} choice
 * @param {Word[]} words
 */
function differencesWithout({ network, target }, source, inputs, [token, other], words) {
  const rows = Math.max(1, Math.floor(BATCH_TOKENS / (source.length + inputs.length)));
  /** @type {number[]} */
  const found = [];
  const read = { encoder: source, decoder: inputs };
  const neutral = { encoder: meanEmbedding(network, "encoder"), decoder: meanEmbedding(network, "decoder") };
  for (let first = 0; first < words.length; first += rows) {
    const some = words.slice(first, first + rows);
    network.visit = (stack, depth, x) => {
      if (depth) return;
      some.forEach((word, row) => {
        if (word.stack !== stack) return;
        for (const position of word.positions) {
          const embedding = embeddingOf(network, stack, read[stack][position]);
          const start = (row * read[stack].length + position) * embedding.length;
          embedding.forEach((value, i) => { x[start + i] += neutral[stack][i] - value; }); // the position stays
        }
      });
    };
    try {
      const logits = network.decode(some.map(() => inputs), network.encode(some.map(() => source)));
      some.forEach((_, row) => {
        const last = ((row + 1) * inputs.length - 1) * target.size;
        found.push(logits[last + token] - logits[last + other]);
      });
    } finally {
      network.visit = null;
    }
  }
  return found;
}

/** @param {Translator["network"]} network @param {Stack} stack @param {number} id */
function embeddingOf({ weights, config }, stack, id) {
  const factor = Math.sqrt(config.d_model);
  return weights.memory.row(weights.matrix(`${stack}.embedding.weight`), id).map((value) => value * factor);
}

/** @param {Translator["network"]} network @param {Stack} stack */
function meanEmbedding(network, stack) {
  const { rows, columns } = network.weights.matrix(`${stack}.embedding.weight`);
  const mean = new Float64Array(columns);
  for (let id = 0; id < rows; id++) embeddingOf(network, stack, id).forEach((value, i) => { mean[i] += value / rows; });
  return mean;
}

// -------------------------------------------------------------------------------------------------
// Attention

/**
 * The attention of each row, averaged over heads.
 *
 * @param {RecordedAttention} layer
 * @param {number} heads
 */
function averaged({ weights }, heads) {
  return weights.map((row) => {
    const keys = row.length / heads;
    return Array.from({ length: keys }, (_, key) => {
      let sum = 0;
      for (let head = 0; head < heads; head++) sum += row[head * keys + key];
      return sum / heads;
    });
  });
}

/**
 * Cross-attention and self-attention of the last decoder position, averaged over layers and heads.
 *
 * @param {Recorded} recorded
 * @param {number} heads
 */
function lastRows({ decoder, cross_attention: cross }, heads) {
  /** @param {RecordedAttention[]} layers */
  const mean = (layers) => {
    const rows = layers.map((layer) => averaged(layer, heads)).map((all) => all[all.length - 1]);
    return rows[0].map((_, key) => rows.reduce((sum, row) => sum + row[key], 0) / rows.length);
  };
  return { encoder: mean(cross), decoder: mean(decoder) };
}

/**
 * Attention rollout at the last decoder position: attention followed through all layers; half of each layer is passed on
 * by the residual connection.
 *
 * @param {Recorded} recorded
 * @param {number} heads
 */
function rollout(recorded, heads) {
  const layers = recorded.decoder.map((layer, i) => ({
    own: withResidual(averaged(layer, heads)), cross: averaged(recorded.cross_attention[i], heads),
  }));
  const [sources, targets] = [layers[0].cross[0].length, layers[0].own.length];
  // relevance[i]: what position i has of each source token; found[i]: of each source token and each decoder token
  let relevance = identity(sources);
  for (const layer of recorded.encoder) relevance = product(withResidual(averaged(layer, heads)), relevance);
  let found = identity(targets).map((row) => [...Array(sources).fill(0), ...row]);
  for (const { own, cross } of layers) {
    const fromSource = product(cross, relevance);
    found = product(own, found).map((row, i) => row.map((value, j) => (value + (j < sources ? fromSource[i][j] : 0)) / 2));
  }
  const last = found[targets - 1];
  return { encoder: last.slice(0, sources), decoder: last.slice(sources) };
}

/** @param {number} size */
function identity(size) {
  return Array.from({ length: size }, (_, i) => Array.from({ length: size }, (__, j) => Number(i === j)));
}

/** @param {number[][]} attention rows may be shorter than the matrix is wide, because of a causal mask */
function withResidual(attention) {
  return attention.map((row, i) => row.map((value, j) => (value + Number(i === j)) / 2));
}

/** @param {number[][]} a rows may be shorter than b is high @param {number[][]} b */
function product(a, b) {
  return a.map((row) => b[0].map((_, column) => row.reduce((sum, value, i) => sum + value * b[i][column], 0)));
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
