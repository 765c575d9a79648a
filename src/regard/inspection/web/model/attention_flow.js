/**
 * Attention, attention rollout and ALTI+ at the last decoder position, as attribution.py computes them.
 *
 * @typedef {import("../lenses.js").Stack} Stack
 * @typedef {import("../trace.js").Site} Site
 * @typedef {import("./transformer.js").RecordedAttention} RecordedAttention
 * @typedef {import("./transformer.js").Transformer} Transformer
 * @typedef {import("./translator.js").Recorded} Recorded
 * @typedef {Record<Stack, number[]>} Shares of the source tokens and of the decoder inputs
 * @typedef {Float32Array | Float64Array} Vector
 */

import { toRows } from "./transformer.js";

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
 * @returns {Shares}
 */
export function attentionShares({ decoder, cross_attention: cross }, heads) {
  /** @param {RecordedAttention[]} layers */
  const mean = (layers) => {
    const rows = layers.map((layer) => averaged(layer, heads)).map((all) => all[all.length - 1]);
    return rows[0].map((_, key) => rows.reduce((sum, row) => sum + row[key], 0) / rows.length);
  };
  return { encoder: mean(cross), decoder: mean(decoder) };
}

/**
 * Attention rollout: attention followed through all layers; half of each layer is passed on by the residual connection.
 *
 * @param {Recorded} recorded
 * @param {number} heads
 * @returns {Shares}
 */
export function rollout({ encoder, decoder, cross_attention: cross }, heads) {
  /** @param {RecordedAttention} layer */
  const withResidual = (layer) => averaged(layer, heads).map((row, i) => row.map((value, j) => (value + Number(i === j)) / 2));
  return follow(encoder.map(withResidual), decoder.map(withResidual),
    cross.map((layer) => averaged(layer, heads).map((row) => row.map((value) => value / 2))));
}

/**
 * The contributions of all layers, multiplied.
 *
 * @param {number[][][]} encoder [query][key] of each layer, with the residual connection on the diagonal
 * @param {number[][][]} decoder rows may be shorter than the matrix is wide, because of the causal mask
 * @param {number[][][]} cross [query][key] of each layer; what is missing to 1 comes from the residual connection
 * @returns {Shares}
 */
function follow(encoder, decoder, cross) {
  const [sources, targets] = [cross[0][0].length, decoder[0].length];
  // relevance[i]: what position i has of each source token; found[i]: of each source token and each decoder token
  const relevance = encoder.reduce((found, layer) => product(layer, found), identity(sources));
  let found = identity(targets).map((row) => [...Array(sources).fill(0), ...row]);
  decoder.forEach((own, layer) => {
    const fromSource = product(cross[layer], relevance);
    found = product(own, found).map((row, i) => {
      const kept = Math.max(0, 1 - cross[layer][i].reduce((sum, value) => sum + value, 0)); // rounding may make it negative
      return row.map((value, j) => value * kept + (j < sources ? fromSource[i][j] : 0));
    });
  });
  const last = found[targets - 1];
  return { encoder: last.slice(0, sources), decoder: last.slice(sources) };
}

/** @param {number} size */
function identity(size) {
  return Array.from({ length: size }, (_, i) => Array.from({ length: size }, (__, j) => Number(i === j)));
}

/** @param {number[][]} a rows may be shorter than b is high @param {number[][]} b */
function product(a, b) {
  return a.map((row) => b[0].map((_, column) => row.reduce((sum, value, i) => sum + value * b[i][column], 0)));
}

// -------------------------------------------------------------------------------------------------
// ALTI+

/**
 * ALTI+ contributions: rollout with the actual contributions of the vectors instead of attention weights and of one half.
 *
 * @param {Transformer} network
 * @param {Recorded} recorded
 * @param {Record<Stack, Float32Array[]>} streams the residual stream before the first sub-layer and after each one
 * @returns {Shares | null} null if the norm after the residual connection is not layer norm
 */
export function alti(network, recorded, streams) {
  const { pre_norm, norm } = network.config;
  if (!pre_norm && norm !== "layer") return null;
  /** @param {Site} site @param {number} sublayers of a layer @param {number} first number of the sub-layer */
  const ofSite = (site, sublayers, first) => recorded[site].map((layer, number) => {
    const stack = site === "encoder" ? "encoder" : "decoder";
    const at = number * sublayers + first;
    const name = `${stack}.layers.${number}.${site === "cross_attention" ? site : "attention"}`;
    return contributions(network, name, layer, streams[stack][at], streams[stack][at + 1]);
  });
  const cross = ofSite("cross_attention", 3, 1).map((layer) => layer.map((row) => row.slice(1))); // the first is the residual's
  return follow(ofSite("encoder", 2, 0), ofSite("decoder", 3, 0), cross);
}

/**
 * How much each key's vector contributes to the vector after the residual connection. The residual connection counts as the
 * query's own key in self-attention, and is the first column otherwise. A contribution is the part of the L1 norm of the
 * result that vanishes without the vector.
 *
 * @param {Transformer} network
 * @param {string} name of the attention
 * @param {RecordedAttention} recorded
 * @param {Float32Array} before the residual connection
 * @param {Float32Array} after
 * @returns {number[][]} [query][key]
 */
function contributions(network, name, recorded, before, after) {
  const { config: { d_model: width, heads, pre_norm }, weights: all } = network;
  const isSelf = !name.endsWith("cross_attention");
  const outputs = outputsOfKeys(network, name, recorded.value);
  const bias = all.vector(`${name}.output.bias`);
  const gain = pre_norm ? null : all.vector(`${name}_residual.norm.weight`);
  const [residuals, results] = [toRows(before, width), toRows(after, width)];
  return recorded.weights.map((weights, query) => {
    const keys = weights.length / heads;
    const parts = Array.from({ length: keys }, (_, key) => {
      const part = new Float64Array(width);
      for (let head = 0; head < heads; head++) {
        const [weight, output] = [weights[head * keys + key], outputs[key][head]];
        for (let i = 0; i < width; i++) part[i] += weight * output[i];
      }
      return part;
    });
    const total = Float64Array.from(residuals[query], (value, i) => value + (bias ? bias[i] : 0));
    for (const part of parts) addTo(total, part);
    if (isSelf) addTo(parts[query], residuals[query]);
    else parts.unshift(Float64Array.from(residuals[query]));
    const scaled = pre_norm ? parts : parts.map((part) => centred(part)); // layer norm is linear once its variance is known
    const deviation = pre_norm ? 1 : Math.sqrt(centred(total).reduce((sum, value) => sum + value * value, 0) / width + 1e-5);
    const result = results[query];
    const size = result.reduce((sum, value) => sum + Math.abs(value), 0);
    const shares = scaled.map((part) => Math.max(0, size - result.reduce((sum, value, i) =>
      sum + Math.abs(value - part[i] / deviation * (gain ? gain[i] : 1)), 0)));
    const sum = Math.max(1e-12, shares.reduce((one, other) => one + other, 0));
    return shares.map((share) => share / sum);
  });
}

/**
 * What each head writes into the residual stream for each key, before it is weighted: [key][head].
 *
 * @param {Transformer} network
 * @param {string} name
 * @param {Float32Array} value [key, heads of keys and values * d_v]
 */
function outputsOfKeys(network, name, value) {
  const { config: { d_model: width, heads, key_value_heads, d_v }, weights } = network;
  const matrix = weights.matrix(`${name}.output.weight`);
  return toRows(value, key_value_heads * d_v).map((row) => Array.from({ length: heads }, (_, head) => {
    const start = network.keyHead(head) * d_v;
    const result = new Float64Array(width);
    for (let output = 0; output < width; output++) {
      const weight = weights.memory.row(matrix, output);
      for (let i = 0; i < d_v; i++) result[output] += weight[head * d_v + i] * row[start + i];
    }
    return result;
  }));
}

/** @param {Float64Array} sum added to @param {Vector} values */
function addTo(sum, values) {
  for (let i = 0; i < sum.length; i++) sum[i] += values[i];
}

/** @param {Float64Array} values @returns {Float64Array} without their mean */
function centred(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return values.map((value) => value - mean);
}
