/**
 * Reverse-mode differentiation of the Transformer: the gradient of a logit difference with respect to the embeddings of
 * the source and of the decoder input.
 *
 * Each operation returns its value and its vector-Jacobian product (VJP), the function that turns the gradient of the
 * value into that of the input. Everything that the HTML export supports is differentiated.
 *
 * @typedef {import("../lenses.js").Stack} Stack
 * @typedef {import("../trace.js").Site} Site
 * @typedef {import("./matmul.js").Matrix} Matrix
 * @typedef {import("./transformer.js").KeyValue} KeyValue
 * @typedef {import("./transformer.js").Transformer} Transformer
 * @typedef {import("./transformer.js").Weights} Weights
 * @typedef {(gradient: Float32Array) => Float32Array} Vjp
 * @typedef {{ value: Float32Array, vjp: Vjp }} Differentiable
 * @typedef {Record<Stack, Float32Array>} Embeddings of one sentence or of several of the same length: [tokens, d_model]
 */

import { MatrixMemory } from "./matmul.js";
import { ACTIVATIONS, added, erf, rotate, toRows } from "./transformer.js";

/** @type {Record<string, (x: number) => number>} of the functions in ACTIVATIONS */
const DERIVATIVES = {
  relu: (x) => (x > 0 ? 1 : 0),
  gelu: (x) => 0.5 * (1 + erf(x * Math.SQRT1_2)) + x * Math.exp(-x * x / 2) / Math.sqrt(2 * Math.PI),
  swish: (x) => {
    const sigmoid = 1 / (1 + Math.exp(-x));
    return sigmoid * (1 + x * (1 - sigmoid));
  },
};

/** The logit of a token minus that of another one after the last decoder input, as a function of the embeddings. */
export class LogitDifference {
  /**
   * @param {Transformer} network
   * @param {number} sources source tokens
   * @param {number} inputs decoder inputs
   * @param {[token: number, foil: number]} choice
   */
  constructor(network, sources, inputs, choice) {
    this.network = network;
    this.lengths = { encoder: sources, decoder: inputs };
    this.choice = choice;
  }

  /**
   * The differences of several sentences, and the function that computes the gradient of their sum.
   *
   * @param {Embeddings} embeddings one sentence after the other
   * @returns {{ values: number[], gradients: () => Embeddings }}
   */
  at(embeddings) {
    const { network } = this;
    const { d_model: width, encoder_layers, decoder_layers, final_norm } = network.config;
    /** @type {Record<Stack, Vjp[]>} */
    const { encoder, decoder } = { encoder: [], decoder: [] };
    let x = this.withPositions("encoder", embeddings.encoder);
    for (let layer = 0; layer < encoder_layers; layer++) {
      const name = `encoder.layers.${layer}`;
      x = pushed(encoder, this.sublayer(x, `${name}.attention_residual`, (y) => this.attention(y, "encoder", layer)));
      x = pushed(encoder, this.feedForward(x, name));
    }
    const memory = pushed(encoder, this.norm(x, final_norm ? "encoder.norm" : null));
    const memoryGradient = new Float32Array(memory.length);
    x = this.withPositions("decoder", embeddings.decoder);
    for (let layer = 0; layer < decoder_layers; layer++) {
      const name = `decoder.layers.${layer}`;
      x = pushed(decoder, this.sublayer(x, `${name}.attention_residual`, (y) => this.attention(y, "decoder", layer)));
      x = pushed(decoder, this.sublayer(x, `${name}.cross_attention_residual`, (y) =>
        this.attention(y, "cross_attention", layer, { value: memory, gradient: memoryGradient })));
      x = pushed(decoder, this.feedForward(x, name));
    }
    const states = pushed(decoder, this.norm(x, final_norm ? "decoder.norm" : null));
    const { direction, bias } = this.projection();
    const last = lastRows(states, width, this.lengths.decoder);
    return {
      values: last.map((row) => row.reduce((sum, value, i) => sum + value * direction[i], bias)),
      gradients: () => {
        const gradient = new Float32Array(states.length);
        for (const row of lastRows(gradient, width, this.lengths.decoder)) row.set(direction);
        const ofInputs = backward(decoder, gradient);
        return { encoder: backward(encoder, memoryGradient), decoder: ofInputs };
      },
    };
  }

  /** The difference is the product of the last state with this direction, plus the bias. */
  projection() {
    const { weights } = this.network;
    const [token, foil] = this.choice;
    const matrix = weights.matrix("projection.weight");
    const bias = weights.vector("projection.bias");
    const other = weights.memory.row(matrix, foil);
    return {
      direction: weights.memory.row(matrix, token).map((value, i) => value - other[i]),
      bias: bias ? bias[token] - bias[foil] : 0,
    };
  }

  /** @param {Stack} stack @param {Float32Array} embeddings */
  withPositions(stack, embeddings) {
    const width = this.network.config.d_model;
    const x = embeddings.slice();
    toRows(x, width).forEach((row, i) => {
      const vector = this.network.positionVector(stack, i % this.lengths[stack]);
      if (vector) added(vector, row);
    });
    return x;
  }

  // Sub-layers

  /**
   * @param {Float32Array} x
   * @param {string} name of the residual connection
   * @param {(y: Float32Array) => Differentiable} run
   * @returns {Differentiable}
   */
  sublayer(x, name, run) {
    if (this.network.config.pre_norm) {
      const normed = this.norm(x, `${name}.norm`);
      const output = run(normed.value);
      return {
        value: added(x, output.value),
        vjp: (gradient) => added(gradient, normed.vjp(output.vjp(gradient))),
      };
    }
    const output = run(x);
    const normed = this.norm(added(x, output.value), `${name}.norm`);
    return {
      value: normed.value,
      vjp: (gradient) => {
        const ofSum = normed.vjp(gradient);
        return added(ofSum, output.vjp(ofSum));
      },
    };
  }

  /** @param {Float32Array} x @param {string} layer @returns {Differentiable} */
  feedForward(x, layer) {
    const name = `${layer}.feed_forward`;
    const { activation } = this.network.config;
    return this.sublayer(x, `${name}_residual`, (y) => {
      const inner = this.linear(y, `${name}.inner`);
      if (activation === "swiglu") return this.gated(inner, this.linear(y, `${name}.gate`), `${name}.outer`);
      const outer = this.linear(inner.value.map(ACTIVATIONS[activation]), `${name}.outer`);
      return {
        value: outer.value,
        vjp: (gradient) => {
          const hidden = outer.vjp(gradient);
          return inner.vjp(hidden.map((value, i) => value * DERIVATIVES[activation](inner.value[i])));
        },
      };
    });
  }

  /** @param {Differentiable} inner @param {Differentiable} gate @param {string} name of the outer layer @returns {Differentiable} */
  gated(inner, gate, name) {
    const outer = this.linear(inner.value.map((value, i) => value * ACTIVATIONS.swish(gate.value[i])), name);
    return {
      value: outer.value,
      vjp: (gradient) => {
        const hidden = outer.vjp(gradient);
        const ofInner = hidden.map((value, i) => value * ACTIVATIONS.swish(gate.value[i]));
        const ofGate = hidden.map((value, i) => value * inner.value[i] * DERIVATIVES.swish(gate.value[i]));
        return added(inner.vjp(ofInner), gate.vjp(ofGate));
      },
    };
  }

  /** @param {Float32Array} x @param {string} name @returns {Differentiable} */
  linear(x, name) {
    return { value: this.network.linear(x, name), vjp: this.linearVjp(name) };
  }

  /** @param {string} name @returns {Vjp} */
  linearVjp(name) {
    const { memory, matrices } = transposedWeights(this.network.weights);
    const matrix = /** @type {Matrix} */ (matrices.get(`${name}.weight`));
    return (gradient) => memory.multiply(gradient, gradient.length / matrix.columns, matrix);
  }

  /** @param {Float32Array} x @param {string | null} name null: no norm @returns {Differentiable} */
  norm(x, name) {
    const { network } = this;
    const { norm: kind, d_model: width } = network.config;
    const value = network.norm(x, name);
    if (name === null || kind === "none") return { value, vjp: (gradient) => gradient };
    const gain = network.weights.vector(`${name}.weight`);
    /** @type {Vjp} */
    const scaled = (gradient) => (gain ? gradient.map((one, i) => one * gain[i % width]) : gradient);
    if (kind === "batch") {
      const variance = /** @type {Float32Array} */ (network.weights.vector(`${name}.running_var`));
      return { value, vjp: (gradient) => scaled(gradient).map((one, i) => one / Math.sqrt(variance[i % width] + 1e-5)) };
    }
    return {
      value,
      vjp: (gradient) => {
        const result = scaled(gradient).slice();
        for (let start = 0; start < x.length; start += width) {
          const { mean, factor } = network.rowStatistics(x, start);
          let [sum, product] = [0, 0];
          for (let i = start; i < start + width; i++) {
            if (kind === "layer") sum += result[i] / width;
            product += result[i] * (x[i] - mean) * factor / width;
          }
          for (let i = start; i < start + width; i++) {
            result[i] = factor * (result[i] - sum - (x[i] - mean) * factor * product);
          }
        }
        return result;
      },
    };
  }

  // Attention

  /**
   * @param {Float32Array} x
   * @param {Site} site
   * @param {number} layer
   * @param {{ value: Float32Array, gradient: Float32Array }} [memory] what cross-attention reads; its gradient is added to
   * @returns {Differentiable}
   */
  attention(x, site, layer, memory) {
    const { network } = this;
    const { key_value_heads: heads, d_k, d_v } = network.config;
    const stack = site === "encoder" ? "encoder" : "decoder";
    const name = `${stack}.layers.${layer}.${memory ? site : "attention"}`;
    const read = memory?.value ?? x;
    const [query, key, value] = [
      this.linear(x, `${name}.query`), this.linear(read, `${name}.key`), this.linear(read, `${name}.value`)];
    const positions = memory ? null : toRows(x, network.config.d_model).map((_, row) => row % this.lengths[stack]);
    const rotary = network.config.position === "rotary" ? positions : null;
    if (rotary) for (const one of [query, key]) rotate(one.value, rotary, d_k);
    const kv = { keys: toRows(key.value, heads * d_k), values: toRows(value.value, heads * d_v) };
    /** @type {(row: number) => number} the first key of a row */
    const start = (row) => Math.floor(row / this.lengths[stack]) * this.lengths[memory ? "encoder" : stack];
    /** @param {number} row @returns {KeyValue} */
    const keysOf = (row) => {
      const end = site === "decoder" ? row + 1 : start(row) + this.lengths.encoder;
      return { keys: kv.keys.slice(start(row), end), values: kv.values.slice(start(row), end) };
    };
    /** @type {Float32Array[]} */
    const weights = [];
    const result = network.attend(query.value, keysOf, site, layer, positions, weights);
    return {
      value: result,
      vjp: (gradient) => {
        const mixed = this.linearVjp(`${name}.output`)(gradient);
        const found = this.attentionGradients(mixed, { query: query.value, weights, keysOf, start, positions }, name, kv);
        if (rotary) for (const one of [found.query, found.key]) rotate(one, rotary.map((at) => -at), d_k);
        const [ofQuery, ofKey, ofValue] = [query.vjp(found.query), key.vjp(found.key), value.vjp(found.value)];
        if (!memory) return added(ofQuery, added(ofKey, ofValue));
        added(ofKey, memory.gradient);
        added(ofValue, memory.gradient);
        return ofQuery;
      },
    };
  }

  /**
   * The gradients of queries, keys and values.
   *
   * @param {Float32Array} gradient of the mixed values [rows, heads * d_v]
   * @param {{ query: Float32Array, weights: Float32Array[], keysOf: (row: number) => KeyValue,
   *   start: (row: number) => number, positions: number[] | null }} recorded
   * @param {string} name
   * @param {KeyValue} kv of all rows
   */
  attentionGradients(gradient, { query, weights, keysOf, start, positions }, name, kv) {
    const { network } = this;
    const { heads, key_value_heads, d_k, d_v, scale } = network.config;
    const relative = positions && network.config.position === "relative" ? network.relativeVectors(name) : null;
    const found = {
      query: new Float32Array(query.length), key: new Float32Array(kv.keys.length * key_value_heads * d_k),
      value: new Float32Array(kv.values.length * key_value_heads * d_v),
    };
    weights.forEach((row, at) => {
      const { keys, values } = keysOf(at);
      const ofScores = new Float64Array(keys.length);
      const position = positions ? positions[at] : 0;
      for (let head = 0; head < heads; head++) {
        const [ofRow, mixed] = [(at * heads + head) * d_k, (at * heads + head) * d_v];
        const [keyHead, valueHead] = [network.keyHead(head) * d_k, network.keyHead(head) * d_v];
        // Softmax: the gradient of a score is its weight times the gradient of the weight minus the mean of all those.
        let mean = 0;
        for (let key = 0; key < keys.length; key++) {
          const weight = row[head * keys.length + key];
          const vector = values[key];
          const into = (start(at) + key) * key_value_heads * d_v + valueHead;
          let sum = 0;
          for (let i = 0; i < d_v; i++) {
            sum += gradient[mixed + i] * vector[valueHead + i];
            found.value[into + i] += weight * gradient[mixed + i];
          }
          if (relative) sum += dot(gradient, mixed, relative.value(key - position));
          ofScores[key] = sum;
          mean += weight * sum;
        }
        for (let key = 0; key < keys.length; key++) {
          const one = row[head * keys.length + key] * (ofScores[key] - mean) * scale;
          const vector = keys[key];
          const into = (start(at) + key) * key_value_heads * d_k + keyHead;
          for (let i = 0; i < d_k; i++) {
            found.query[ofRow + i] += one * vector[keyHead + i];
            found.key[into + i] += one * query[ofRow + i];
          }
          if (relative) relative.key(key - position).forEach((value, i) => { found.query[ofRow + i] += one * value; });
        }
      }
    });
    return found;
  }
}

/** @param {Vjp[]} vjps @param {Differentiable} step @returns {Float32Array} its value */
function pushed(vjps, { value, vjp }) {
  vjps.push(vjp);
  return value;
}

/** @param {Vjp[]} vjps in the order of the forward pass @param {Float32Array} gradient of the last value */
function backward(vjps, gradient) {
  return vjps.reduceRight((found, vjp) => vjp(found), gradient);
}

/** @param {Float32Array} x @param {number} width @param {number} length rows of a sentence @returns {Float32Array[]} views */
function lastRows(x, width, length) {
  return toRows(x, width).filter((_, row) => (row + 1) % length === 0);
}

/** @param {Float32Array} x @param {number} start @param {Float32Array} y */
function dot(x, start, y) {
  let sum = 0;
  for (let i = 0; i < y.length; i++) sum += x[start + i] * y[i];
  return sum;
}

/** @typedef {{ memory: MatrixMemory, matrices: Map<string, Matrix> }} Transposed by the name of the matrix */
/** @type {WeakMap<Weights, Transposed>} */
const transposed = new WeakMap();

/**
 * The transposed matrices of all layers, which the gradients are multiplied with.
 *
 * @param {Weights} weights
 * @returns {Transposed}
 */
function transposedWeights(weights) {
  const known = transposed.get(weights);
  if (known) return known;
  const names = [...weights.matrices.keys()].filter((name) => /\.layers\..*\.weight$/.test(name));
  const shapes = names.map((name) => ({ rows: weights.matrix(name).columns, columns: weights.matrix(name).rows }));
  const memory = new MatrixMemory(shapes, weights.memory.usesWasm);
  const matrices = new Map(names.map((name, i) => [name, memory.add(shapes[i])]));
  for (const [name, matrix] of matrices) {
    for (let column = 0; column < matrix.columns; column++) {
      weights.memory.row(weights.matrix(name), column).forEach((value, row) => { memory.row(matrix, row)[column] = value; });
    }
  }
  transposed.set(weights, { memory, matrices });
  return { memory, matrices };
}
