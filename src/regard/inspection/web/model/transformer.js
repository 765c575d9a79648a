/**
 * The Transformer of nn/transformer.py: token ids in, logits and attention out.
 *
 * Activations are rows of one array [tokens, features]. Linear layers multiply all rows at once; attention runs row by
 * row, because the keys of a row may come from a sentence, or from the path of a hypothesis in a beam.
 *
 * @typedef {import("../trace.js").Site} Site
 * @typedef {import("./matmul.js").Matrix} Matrix
 * @typedef {import("./weights.js").Weights} Weights
 * @typedef {{ d_model: number, heads: number, key_value_heads: number, d_k: number, d_v: number,
 *   encoder_layers: number, decoder_layers: number, pre_norm: boolean, norm: "layer" | "rms" | "batch" | "none",
 *   final_norm: boolean, activation: "relu" | "gelu" | "swish" | "swiglu", position: string, max_distance: number,
 *   max_length: number | null, scale: number }} NetworkConfig
 * @typedef {Float32Array[]} Rows one array of features for each token
 * @typedef {{ keys: Rows, values: Rows }} KeyValue
 * @typedef {{ layers: KeyValue[], length: number }} Memory cross-attention keys and values of one source
 * @typedef {{ weights: Float32Array[], query: Float32Array, key: Float32Array, value: Float32Array }} RecordedAttention
 *   of one layer: weights of each row, [head, key]; projections as rows
 * @typedef {{ logits: Float32Array, kv: KeyValue[], cross: Float32Array[] }} StepResult of one row: logits of the next
 *   token; keys and values of each layer, this token last; cross-attention [head, source] of each layer
 */

/** @type {Record<string, (x: number) => number>} */
export const ACTIVATIONS = {
  relu: (x) => (x > 0 ? x : 0),
  gelu: (x) => x * 0.5 * (1 + erf(x * Math.SQRT1_2)),
  swish: (x) => x / (1 + Math.exp(-x)),
};

export class Transformer {
  /** @param {NetworkConfig} config @param {Weights} weights */
  constructor(config, weights) {
    this.config = config;
    this.weights = weights;
    /** @type {Set<string>} heads whose output is set to zero, such as cross_attention.0.1 */
    this.muted = new Set();
    /** @type {((stack: "encoder" | "decoder", depth: number, x: Float32Array) => void) | null} gets the residual stream at
     * each depth, and may change it; not called in `step` */
    this.visit = null;
    /** @type {((name: string, x: Float32Array) => void) | null} gets the residual stream after each sub-layer, by the name of
     * its residual connection, and the hidden neurons of each feed-forward network; not to be changed */
    this.observe = null;
  }

  // All positions at once

  /**
   * Run the encoder on several sources.
   *
   * @param {number[][]} sources each with EOS
   * @param {RecordedAttention[]} [record] gets the attention of each layer, for a single source
   * @param {number} [layers] only the first layers
   * @returns {Memory[]} one for each source
   */
  encode(sources, record, layers = this.config.encoder_layers) {
    const positions = sources.flatMap((source) => source.map((_, i) => i));
    const spans = toSpans(sources);
    let x = this.embed("encoder", sources.flat(), positions);
    for (let layer = 0; layer < layers; layer++) {
      const name = `encoder.layers.${layer}`;
      this.visit?.("encoder", layer, x);
      x = this.sublayer(x, `${name}.attention_residual`, (y) => {
        const { query, kv } = this.project(y, `${name}.attention`, positions);
        const weights = record && recordAttention(record, query, kv, this.config);
        return this.attend(query, (row) => between(kv, spans[row]), "encoder", layer, positions, weights);
      });
      x = this.feedForward(x, name);
    }
    this.visit?.("encoder", layers, x);
    x = this.norm(x, this.config.final_norm ? "encoder.norm" : null);
    const cross = range(this.config.decoder_layers).map((layer) =>
      this.keysValues(x, `decoder.layers.${layer}.cross_attention`, null));
    let start = 0;
    return sources.map(({ length }) => {
      const layers = cross.map((kv) => between(kv, [start, start + length]));
      start += length;
      return { layers, length };
    });
  }

  /**
   * Run the decoder on all positions of several targets (teacher forcing).
   *
   * @param {number[][]} targets decoder inputs, BOS first
   * @param {Memory[]} memories one for each target
   * @param {{ decoder: RecordedAttention[], cross_attention: RecordedAttention[] }} [record] for a single target
   * @returns {Float32Array} logits [tokens, V]
   */
  decode(targets, memories, record) {
    const positions = targets.flatMap((target) => target.map((_, i) => i));
    const spans = toSpans(targets);
    const memoryOf = targets.flatMap((target, i) => target.map(() => memories[i]));
    let x = this.embed("decoder", targets.flat(), positions);
    for (let layer = 0; layer < this.config.decoder_layers; layer++) {
      const name = `decoder.layers.${layer}`;
      this.visit?.("decoder", layer, x);
      x = this.sublayer(x, `${name}.attention_residual`, (y) => {
        const { query, kv } = this.project(y, `${name}.attention`, positions);
        const weights = record && recordAttention(record.decoder, query, kv, this.config);
        return this.attend(query, (row) => between(kv, [spans[row][0], row + 1]), "decoder", layer, positions, weights);
      });
      x = this.sublayer(x, `${name}.cross_attention_residual`, (y) => {
        const query = this.linear(y, `${name}.cross_attention.query`);
        const weights = record
          && recordAttention(record.cross_attention, query, memories[0].layers[layer], this.config);
        return this.attend(query, (row) => memoryOf[row].layers[layer], "cross_attention", layer, null, weights);
      });
      x = this.feedForward(x, name);
    }
    this.visit?.("decoder", this.config.decoder_layers, x);
    return this.logits(x);
  }

  // Step by step

  /**
   * Read one more token of each hypothesis.
   *
   * @param {number[]} tokens the last token of each hypothesis
   * @param {KeyValue[][]} pasts for each hypothesis and layer, keys and values of the tokens before
   * @param {Memory} memory of the source, which all of them translate
   * @returns {StepResult[]} for each hypothesis
   */
  step(tokens, pasts, memory) {
    const positions = pasts.map((past) => past[0].keys.length);
    /** @type {StepResult[]} */
    const results = tokens.map(() => ({ logits: new Float32Array(0), kv: [], cross: [] }));
    let x = this.embed("decoder", tokens, positions);
    for (let layer = 0; layer < this.config.decoder_layers; layer++) {
      const name = `decoder.layers.${layer}`;
      x = this.sublayer(x, `${name}.attention_residual`, (y) => {
        const { query, kv } = this.project(y, `${name}.attention`, positions);
        results.forEach((result, row) => result.kv.push(joined(pasts[row][layer], between(kv, [row, row + 1]))));
        return this.attend(query, (row) => results[row].kv[layer], "decoder", layer, positions);
      });
      x = this.sublayer(x, `${name}.cross_attention_residual`, (y) => {
        const query = this.linear(y, `${name}.cross_attention.query`);
        /** @type {Float32Array[]} */
        const weights = [];
        const output = this.attend(query, () => memory.layers[layer], "cross_attention", layer, null, weights);
        results.forEach((result, row) => result.cross.push(weights[row]));
        return output;
      });
      x = this.feedForward(x, name);
    }
    const logits = this.logits(x);
    const size = logits.length / tokens.length;
    results.forEach((result, row) => { result.logits = logits.subarray(row * size, (row + 1) * size); });
    return results;
  }

  // Embeddings and positions

  /**
   * @param {"encoder" | "decoder"} stack
   * @param {number[]} ids
   * @param {number[]} positions
   */
  embed(stack, ids, positions) {
    const { d_model: width } = this.config;
    const matrix = this.weights.matrix(`${stack}.embedding.weight`);
    const factor = Math.fround(Math.sqrt(width));
    const x = new Float32Array(ids.length * width);
    ids.forEach((id, token) => {
      const row = this.weights.memory.row(matrix, id);
      const added = this.positionVector(stack, positions[token]);
      for (let i = 0; i < width; i++) x[token * width + i] = Math.fround(row[i] * factor) + (added ? added[i] : 0);
    });
    return x;
  }

  /**
   * What is added to the embedding at a position; null if nothing is.
   *
   * @param {string} stack
   * @param {number} position
   * @returns {Float32Array | null}
   */
  positionVector(stack, position) {
    const { position: kind, d_model: width, max_length: longest } = this.config;
    if (kind === "sinusoidal") return sinusoid(position, width);
    if (kind === "index") return new Float32Array(width).fill(position);
    if (kind !== "learned") return null;
    if (longest !== null && position >= longest) {
      throw new Error(`The text is longer than the ${longest} positions that the model has learned.`);
    }
    return this.weights.memory.row(this.weights.matrix(`${stack}.position.embedding`), position);
  }

  // Sub-layers

  /**
   * A sub-layer with its residual connection and norm.
   *
   * @param {Float32Array} x
   * @param {string} name of the residual connection
   * @param {(y: Float32Array) => Float32Array} run
   */
  sublayer(x, name, run) {
    const { pre_norm: first } = this.config;
    const y = first ? added(x, run(this.norm(x, `${name}.norm`))) : this.norm(added(x, run(x)), `${name}.norm`);
    this.observe?.(name, y);
    return y;
  }

  /** @param {Float32Array} x @param {string} layer */
  feedForward(x, layer) {
    const name = `${layer}.feed_forward`;
    return this.sublayer(x, `${name}_residual`, (y) => {
      const inner = this.linear(y, `${name}.inner`);
      const gated = this.config.activation === "swiglu";
      const activation = ACTIVATIONS[gated ? "swish" : this.config.activation];
      if (gated) {
        const gate = this.linear(y, `${name}.gate`);
        for (let i = 0; i < inner.length; i++) inner[i] *= activation(gate[i]);
      } else {
        for (let i = 0; i < inner.length; i++) inner[i] = activation(inner[i]);
      }
      this.observe?.(`${name}.hidden`, inner);
      return this.linear(inner, `${name}.outer`);
    });
  }

  /** @param {Float32Array} x @param {string} name */
  linear(x, name) {
    const matrix = this.weights.matrix(`${name}.weight`);
    const y = this.weights.memory.multiply(x, x.length / matrix.columns, matrix);
    return addBias(y, this.weights.vector(`${name}.bias`));
  }

  /**
   * The logits over the vocabulary.
   *
   * @param {Float32Array} x outputs of the last decoder layer
   */
  logits(x) {
    return this.linear(this.norm(x, this.config.final_norm ? "decoder.norm" : null), "projection");
  }

  /** @param {Float32Array} x @param {string | null} name null: no norm */
  norm(x, name) {
    if (name === null || this.config.norm === "none") return x;
    const [gain, bias] = [this.weights.vector(`${name}.weight`), this.weights.vector(`${name}.bias`)];
    if (this.config.norm === "batch") return this.batchNorm(x, name, gain, bias);
    const width = this.config.d_model;
    const y = new Float32Array(x.length);
    for (let start = 0; start < x.length; start += width) {
      const { mean, factor } = this.rowStatistics(x, start);
      for (let i = 0; i < width; i++) {
        y[start + i] = (x[start + i] - mean) * factor * (gain ? gain[i] : 1) + (bias ? bias[i] : 0);
      }
    }
    return y;
  }

  /**
   * What layer norm subtracts from a row, and what it multiplies the difference by; RMSNorm subtracts nothing.
   *
   * @param {Float32Array} x
   * @param {number} start of the row
   */
  rowStatistics(x, start) {
    const centred = this.config.norm === "layer";
    const [width, epsilon] = [this.config.d_model, centred ? 1e-5 : 1e-6];
    let [mean, square] = [0, 0];
    if (centred) for (let i = 0; i < width; i++) mean += x[start + i] / width;
    for (let i = 0; i < width; i++) square += (x[start + i] - mean) ** 2;
    return { mean, factor: 1 / Math.sqrt(square / width + epsilon) };
  }

  /**
   * Batch norm with the statistics of training.
   *
   * @param {Float32Array} x
   * @param {string} name
   * @param {Float32Array | null} gain
   * @param {Float32Array | null} bias
   */
  batchNorm(x, name, gain, bias) {
    const [mean, variance] = [this.weights.vector(`${name}.running_mean`), this.weights.vector(`${name}.running_var`)];
    if (!mean || !variance || !gain || !bias) throw new Error(`${name}: no statistics in this file.`);
    const width = this.config.d_model;
    return x.map((value, at) => {
      const i = at % width;
      return (value - mean[i]) * gain[i] / Math.sqrt(variance[i] + 1e-5) + bias[i];
    });
  }

  // Attention

  /**
   * Queries, keys and values of self-attention.
   *
   * @param {Float32Array} x
   * @param {string} name
   * @param {number[]} positions
   */
  project(x, name, positions) {
    const query = this.linear(x, `${name}.query`);
    if (this.config.position === "rotary") rotate(query, positions, this.config.d_k);
    return { query, kv: this.keysValues(x, name, positions) };
  }

  /**
   * @param {Float32Array} x
   * @param {string} name
   * @param {number[] | null} positions null in cross-attention, which has none
   * @returns {KeyValue}
   */
  keysValues(x, name, positions) {
    const [key, value] = [this.linear(x, `${name}.key`), this.linear(x, `${name}.value`)];
    if (positions && this.config.position === "rotary") rotate(key, positions, this.config.d_k);
    const { key_value_heads: heads, d_k, d_v } = this.config;
    return { keys: toRows(key, heads * d_k), values: toRows(value, heads * d_v) };
  }

  /**
   * Multi-head attention of each query row, and the output projection.
   *
   * @param {Float32Array} query [rows, heads * d_k]
   * @param {(row: number) => KeyValue} keysOf what each row attends to
   * @param {Site} site
   * @param {number} layer
   * @param {number[] | null} positions of the queries among their keys, in self-attention
   * @param {Float32Array[]} [record] gets the weights of each row, [head, key]
   */
  attend(query, keysOf, site, layer, positions, record) {
    const { heads, d_k, d_v } = this.config;
    const name = `${site === "encoder" ? "encoder" : "decoder"}.layers.${layer}.${
      site === "cross_attention" ? site : "attention"}`;
    const relative = positions && this.config.position === "relative" ? this.relativeVectors(name) : null;
    const rows = query.length / (heads * d_k);
    const output = new Float32Array(rows * heads * d_v);
    for (let row = 0; row < rows; row++) {
      const { keys, values } = keysOf(row);
      const weights = new Float32Array(heads * keys.length);
      for (let head = 0; head < heads; head++) {
        const of = weights.subarray(head * keys.length, (head + 1) * keys.length);
        this.scores(of, query, row, head, keys, relative, positions);
        softmax(of);
        if (this.muted.has(`${site}.${layer}.${head}`)) continue;
        this.mix(output.subarray((row * heads + head) * d_v, (row * heads + head + 1) * d_v), of, head, values,
          relative, positions ? positions[row] : 0);
      }
      record?.push(weights);
    }
    return this.linear(output, `${name}.output`);
  }

  /**
   * @param {Float32Array} result the score of each key
   * @param {Float32Array} query
   * @param {number} row
   * @param {number} head
   * @param {Rows} keys
   * @param {RelativeVectors | null} relative
   * @param {number[] | null} positions
   */
  scores(result, query, row, head, keys, relative, positions) {
    const { heads, d_k, scale } = this.config;
    const [start, keyStart] = [(row * heads + head) * d_k, this.keyHead(head) * d_k];
    for (let key = 0; key < keys.length; key++) {
      const vector = keys[key];
      let sum = 0;
      for (let i = 0; i < d_k; i++) sum += query[start + i] * vector[keyStart + i];
      if (relative && positions) {
        const of = relative.key(key - positions[row]);
        for (let i = 0; i < d_k; i++) sum += query[start + i] * of[i];
      }
      result[key] = sum * scale;
    }
  }

  /**
   * The weighted sum of the values.
   *
   * @param {Float32Array} result
   * @param {Float32Array} weights
   * @param {number} head
   * @param {Rows} values
   * @param {RelativeVectors | null} relative
   * @param {number} position of the query
   */
  mix(result, weights, head, values, relative, position) {
    const { d_v } = this.config;
    const start = this.keyHead(head) * d_v;
    for (let key = 0; key < values.length; key++) {
      const [weight, vector] = [weights[key], values[key]];
      for (let i = 0; i < d_v; i++) result[i] += weight * vector[start + i];
      if (relative) {
        const of = relative.value(key - position);
        for (let i = 0; i < d_v; i++) result[i] += weight * of[i];
      }
    }
  }

  /**
   * The head of keys and values that a query head uses.
   *
   * @param {number} head
   */
  keyHead(head) {
    return Math.floor(head * this.config.key_value_heads / this.config.heads);
  }

  /** @typedef {{ key(distance: number): Float32Array, value(distance: number): Float32Array }} RelativeVectors */

  /**
   * The learned vector of each distance.
   *
   * @param {string} name
   * @returns {RelativeVectors}
   */
  relativeVectors(name) {
    const { max_distance: most } = this.config;
    const [keys, values] = ["keys", "values"].map((one) => this.weights.matrix(`${name}.position.${one}`));
    /** @param {Matrix} matrix @param {number} distance */
    const vector = (matrix, distance) => this.weights.memory.row(matrix, Math.min(Math.max(distance, -most), most) + most);
    return { key: (distance) => vector(keys, distance), value: (distance) => vector(values, distance) };
  }
}

// -------------------------------------------------------------------------------------------------
// Rows

/** @param {number} count */
function range(count) {
  return Array.from({ length: count }, (_, i) => i);
}

/** @param {Float32Array} x @param {number} width @returns {Rows} */
export function toRows(x, width) {
  return range(x.length / width).map((row) => x.subarray(row * width, (row + 1) * width));
}

/**
 * For each token, the first row of its sentence and one past the last.
 *
 * @param {number[][]} sentences
 */
function toSpans(sentences) {
  let start = 0;
  return sentences.flatMap((sentence) => {
    /** @type {[number, number]} */
    const span = [start, start += sentence.length];
    return sentence.map(() => span);
  });
}

/** @param {KeyValue} kv @param {[start: number, end: number]} span @returns {KeyValue} */
function between({ keys, values }, [start, end]) {
  return { keys: keys.slice(start, end), values: values.slice(start, end) };
}

/** @param {KeyValue} past @param {KeyValue} now @returns {KeyValue} */
function joined(past, now) {
  return { keys: [...past.keys, ...now.keys], values: [...past.values, ...now.values] };
}

/**
 * Start the record of a layer.
 *
 * @param {RecordedAttention[]} record
 * @param {Float32Array} query
 * @param {KeyValue} kv
 * @param {NetworkConfig} config
 * @returns {Float32Array[]} to be filled with the weights of each row
 */
function recordAttention(record, query, { keys, values }, config) {
  const width = config.key_value_heads;
  const [key, value] = [flat(keys, width * config.d_k), flat(values, width * config.d_v)];
  record.push({ weights: [], query: query.slice(), key, value });
  return record[record.length - 1].weights;
}

/** @param {Rows} rows @param {number} width */
function flat(rows, width) {
  const result = new Float32Array(rows.length * width);
  rows.forEach((row, i) => result.set(row, i * width));
  return result;
}

// -------------------------------------------------------------------------------------------------
// Functions of values

/** @param {Float32Array} x @param {Float32Array} y overwritten with the sum */
export function added(x, y) {
  for (let i = 0; i < y.length; i++) y[i] += x[i];
  return y;
}

/** @param {Float32Array} y overwritten @param {Float32Array | null} bias */
function addBias(y, bias) {
  if (bias) for (let i = 0; i < y.length; i++) y[i] += bias[i % bias.length];
  return y;
}

/** @param {Float32Array} values overwritten */
export function softmax(values) {
  let [most, sum] = [-Infinity, 0];
  for (let i = 0; i < values.length; i++) most = Math.max(most, values[i]);
  for (let i = 0; i < values.length; i++) sum += values[i] = Math.exp(values[i] - most);
  for (let i = 0; i < values.length; i++) values[i] /= sum;
}

/** @type {Map<string, Float32Array>} */
const sinusoids = new Map();

/**
 * sin(pos / 10000^(2i/d)) and cos, alternating.
 *
 * @param {number} position
 * @param {number} width
 */
function sinusoid(position, width) {
  const key = `${position} ${width}`;
  let vector = sinusoids.get(key);
  if (!vector) {
    vector = Float32Array.from({ length: width }, (_, i) => {
      const angle = position * 10000 ** (-(i - i % 2) / width);
      return i % 2 ? Math.cos(angle) : Math.sin(angle);
    });
    sinusoids.set(key, vector);
  }
  return vector;
}

/**
 * Rotary positions: rotate pairs of features of each head, in place.
 *
 * @param {Float32Array} x [rows, heads * width]
 * @param {number[]} positions of the rows
 * @param {number} width of a head
 */
export function rotate(x, positions, width) {
  const perRow = x.length / positions.length;
  positions.forEach((position, row) => {
    for (let i = 0; i < width; i += 2) {
      const angle = position * 10000 ** (-i / width);
      const [cos, sin] = [Math.fround(Math.cos(angle)), Math.fround(Math.sin(angle))];
      for (let at = row * perRow + i; at < (row + 1) * perRow; at += width) {
        const [even, odd] = [x[at], x[at + 1]];
        x[at] = even * cos - odd * sin;
        x[at + 1] = even * sin + odd * cos;
      }
    }
  });
}

/**
 * The error function, by its Taylor series and, for large values, its continued fraction.
 *
 * @param {number} x
 */
export function erf(x) {
  const size = Math.abs(x);
  if (size > 6) return Math.sign(x);
  if (size > 2.5) {
    let fraction = 0;
    for (let k = 40; k >= 1; k--) fraction = k / 2 / (size + fraction);
    return Math.sign(x) * (1 - Math.exp(-size * size) / Math.sqrt(Math.PI) / (size + fraction));
  }
  let [term, sum] = [x, x];
  for (let n = 1; Math.abs(term) > 1e-17 && n < 100; n++) {
    term *= -x * x / n;
    sum += term / (2 * n + 1);
  }
  return 2 / Math.sqrt(Math.PI) * sum;
}
