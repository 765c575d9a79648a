/**
 * A translation model in the browser: text and options in, translations and traces out, as inspection/trace.py has them.
 *
 * @typedef {import("../api.js").TraceRequest} TraceRequest
 * @typedef {import("../trace.js").PackedArray} PackedArray
 * @typedef {import("../trace.js").ProjectionName} ProjectionName
 * @typedef {import("../trace.js").ProjectionsJson} ProjectionsJson
 * @typedef {import("../trace.js").SearchNode} SearchNode
 * @typedef {import("../trace.js").Site} Site
 * @typedef {import("../trace.js").Token} Token
 * @typedef {import("../trace.js").TraceJson} TraceJson
 * @typedef {import("./search.js").Decoding} Decoding
 * @typedef {import("./search.js").Hypothesis} Hypothesis
 * @typedef {import("./tokenizer.js").VocabularyJson} VocabularyJson
 * @typedef {import("./transformer.js").KeyValue} KeyValue
 * @typedef {import("./transformer.js").Memory} Memory
 * @typedef {import("./transformer.js").NetworkConfig} NetworkConfig
 * @typedef {import("./transformer.js").RecordedAttention} RecordedAttention
 * @typedef {{ network: NetworkConfig, decoding: Decoding, source: VocabularyJson, target: VocabularyJson | null,
 *   truncate: number | null, recases: boolean,
 *   head_table: import("../lenses.js").HeadTableJson | null, weights: import("./weights.js").WeightsJson }} TranslatorJson target is
 *   null if the vocabulary is shared; truncate: the largest number of source tokens that are read; recases: texts in
 *   capitals are read in sentence case
 * @typedef {Record<Site, RecordedAttention[]>} Recorded
 * @typedef {{ recorded: Recorded, crossOfNodes: Float32Array[][], rows: number }} KeptTrace what `layer` needs
 */

import { SITES } from "../trace.js";
import { sampleSeed, uniformNumbers } from "./random.js";
import { isAllCaps, isUpperCase, sentenceCase, upperCase } from "./recasing.js";
import { beamSearch, sample, topK } from "./search.js";
import { BOS, EOS, MASK, PAD, UNK, Vocabulary } from "./tokenizer.js";
import { Transformer, softmax } from "./transformer.js";
import { readWeights } from "./weights.js";

/** the most probable tokens recorded for each position */
const CANDIDATES = 8;
/** traces whose arrays are kept */
const KEPT_TRACES = 16;
/** tokens of the longest source or prefix that can be traced, as in the server */
const MAX_TOKENS = 512;
/** limit of parameters times tokens read by occlusion: about two seconds */
const OCCLUSION_WORK = { wasm: 1e10, javascript: 1e9 };
/** tokens that occlusion reads at a time */
const OCCLUSION_TOKENS = 512;
/** characters of scripts without spaces between words, as in words.py */
const UNSPACED = /[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\uff66-\uff9f\u{20000}-\u{323af}]/u;
const PUNCTUATION = /^[.,;:!?…。，、；：！？]+$/;

export class Translator {
  /**
   * @param {TranslatorJson} json
   * @param {Uint8Array} weights
   * @param {boolean} [allowWasm]
   */
  static async load(json, weights, allowWasm = true) {
    return new Translator(json, new Transformer(json.network, await readWeights(json.weights, weights, allowWasm)));
  }

  /** @param {TranslatorJson} json @param {Transformer} network */
  constructor(json, network) {
    this.json = json;
    this.network = network;
    this.source = new Vocabulary(json.source);
    this.target = json.target ? new Vocabulary(json.target) : this.source;
    /** @type {Map<string, KeptTrace>} */
    this.kept = new Map();
    this.traces = 0;
  }

  /**
   * The translation of a text with the model's own options.
   *
   * @param {string} text
   */
  translate(text) {
    if (!text.trim()) return "";
    const { best } = this.search(this.encode(text), [], this.json.decoding);
    return this.decode(best.tokens, text);
  }

  /**
   * Source ids without EOS.
   *
   * @param {string} text
   */
  encode(text) {
    return this.source.encode(this.recases(text) ? sentenceCase(text) : text).slice(0, this.json.truncate ?? undefined);
  }

  /** @param {string} text whether it is read in sentence case, and its translation upper-cased */
  recases(text) {
    return this.json.recases && isAllCaps(text);
  }

  /**
   * The text of a translation.
   *
   * @param {number[]} tokens
   * @param {string} source
   * @param {string} [prefix] what it begins with, which keeps its case
   */
  decode(tokens, source, prefix = "") {
    const text = this.target.decode(tokens);
    if (!this.recases(source)) return text;
    const ids = this.target.encode(prefix);
    const given = ids.includes(UNK) ? "" : this.target.decode(ids);
    const kept = text.startsWith(given) ? given : "";
    return kept + upperCase(text.slice(kept.length));
  }

  /**
   * @param {number[]} source
   * @param {number[]} prefix
   * @param {Decoding} decoding
   * @param {number} [layers] only the first layers of the encoder
   */
  search(source, prefix, decoding, layers) {
    const longest = Math.min(decoding.max_length ?? Infinity, (this.json.network.max_length ?? Infinity) - 1);
    const rules = {
      maxLength: Math.min(source.length + decoding.extra_length, longest), bos: BOS, eos: EOS, prefix,
      suppressed: this.target.json.suppressed,
    };
    const [memory] = this.network.encode([[...source, EOS]], undefined, layers);
    /** @type {Map<number, Float32Array[]>} cross-attention of the nodes that were read, [head, source] of each layer */
    const crossOfNodes = new Map();
    /** @type {import("./search.js").Step<KeyValue[]>} */
    const step = (active) => {
      const results = this.network.step(active.map(({ token }) => token), active.map(({ state }) => state), memory);
      results.forEach(({ cross }, row) => crossOfNodes.set(active[row].node, cross));
      return results.map(({ logits, kv }) => ({ logits, state: kv }));
    };
    /** @type {KeyValue[]} */
    const state = memory.layers.map(() => ({ keys: [], values: [] }));
    const found = decoding.temperature
      ? sample(step, state, rules, decoding, uniformNumbers(sampleSeed(decoding.seed, source)))
      : beamSearch(step, state, rules, decoding);
    return { ...found, crossOfNodes };
  }

  /**
   * Translate a text and record everything. The arrays are left out; `layer` returns them.
   *
   * @param {TraceRequest} request
   * @param {(text: string) => void} [onTranslation] gets the translation as soon as it is known
   * @returns {TraceJson}
   */
  trace(request, onTranslation) {
    if (!request.q.trim()) throw new Error("The text is blank: there is nothing to translate.");
    const source = this.encode(request.q);
    const begin = [...this.checked(request.forced ?? []), ...this.encodePrefix(request.prefix ?? "", request.q)];
    const length = Math.max(source.length, begin.length);
    if (length > MAX_TOKENS) throw new Error(`${length} tokens: at most ${MAX_TOKENS} can be shown.`);
    this.network.muted = new Set(request.mute ?? []);
    try {
      const decoding = decodingOf(this.json.decoding, request);
      const found = this.search(source, begin, decoding);
      const prefix = request.forced?.length ? "" : request.prefix;
      onTranslation?.(this.decode(found.best.tokens, request.q, prefix));
      return { ...this.recorded(found, source, request.q, prefix), text: request.q, options: optionsOf(decoding, begin.length), muted: request.mute ?? [] };
    } finally {
      this.network.muted = new Set();
    }
  }

  /**
   * What is seen when the model reads a translation again: all of a trace but the request.
   *
   * @param {ReturnType<Translator["search"]>} found
   * @param {number[]} source
   * @param {string} text
   * @param {string} [prefix]
   */
  recorded({ best, nodes, crossOfNodes }, source, text, prefix) {
    const outputs = best.finished ? [...best.tokens, EOS] : best.tokens;
    const inputs = [BOS, ...outputs.slice(0, -1)];
    const { recorded, probabilities } = this.observe(source, inputs);
    const parents = [...new Set(nodes.map(({ parent }) => parent ?? 0))].sort((a, b) => a - b).filter((id) => crossOfNodes.has(id));
    const kept = { recorded, crossOfNodes: parents.map((id) => crossOfNodes.get(id) ?? []), rows: inputs.length };
    const sourceTokens = this.source.tokens([...source, EOS]);
    const inputTokens = this.target.tokens(inputs);
    return {
      id: this.keep(kept),
      translation: this.decode(best.tokens, text, prefix),
      source: sourceTokens,
      inputs: inputTokens,
      outputs: this.target.tokens(outputs),
      ...this.shapes(sourceTokens.length, inputs.length, parents.length),
      columns: { encoder: sourceTokens, decoder: inputTokens, cross_attention: sourceTokens },
      coverage: coverageOf(recorded.cross_attention, this.json.network.heads, sourceTokens.length),
      probabilities: outputs.map((token, row) => probabilities[row][token]),
      candidates: probabilities.map((row) => topK(row, CANDIDATES)
        .map((id) => ({ ...this.target.tokens([id])[0], probability: row[id] }))),
      beam: nodes,
      iterations: [],
      parents,
      tokens: Object.fromEntries(nodes.map(({ token }) => [token, this.target.tokens([token])[0]])),
      projections: this.projectionShapes(sourceTokens.length, inputs.length),
      occlusion: this.occlude(source, inputs, outputs),
      history: null,
      lenses: null,
      head_table: this.json.head_table,
    };
  }

  /** @param {string} prefix @param {string} source */
  encodePrefix(prefix, source) {
    return this.target.encode(this.recases(source) && isUpperCase(prefix) ? sentenceCase(prefix) : prefix);
  }

  /** @param {number[]} forced */
  checked(forced) {
    for (const id of forced) {
      if (!(id >= 0 && id < this.target.size) || [PAD, BOS, EOS, MASK].includes(id)) {
        throw new Error(`Forced token ${id} must be between 0 and ${this.target.size - 1}, and stand for text.`);
      }
    }
    return forced;
  }

  /**
   * One pass with teacher forcing.
   *
   * @param {number[]} source
   * @param {number[]} inputs
   */
  observe(source, inputs) {
    /** @type {Recorded} */
    const recorded = { encoder: [], decoder: [], cross_attention: [] };
    const memories = this.network.encode([[...source, EOS]], recorded.encoder);
    const logits = this.network.decode([inputs], memories, recorded);
    return { recorded, probabilities: inputs.map((_, row) => probabilitiesAt(logits, row, this.target.size)) };
  }

  /**
   * The probability of each output token if one source word is left out.
   *
   * @param {number[]} source
   * @param {number[]} inputs
   * @param {number[]} outputs
   */
  occlude(source, inputs, outputs) {
    const words = groupWords(this.source.tokens(source));
    const tokens = words.length * (source.length + 1 + inputs.length);
    const { memory } = this.network.weights;
    if (tokens * memory.used > OCCLUSION_WORK[memory.usesWasm ? "wasm" : "javascript"]) return null;
    const found = new Float32Array(words.length * outputs.length);
    const batch = Math.max(1, Math.floor(OCCLUSION_TOKENS / (source.length + inputs.length)));
    for (let first = 0; first < words.length; first += batch) {
      const some = words.slice(first, first + batch);
      const memories = this.network.encode(some.map((word) => [...source.filter((_, i) => !word.includes(i)), EOS]));
      const logits = this.network.decode(some.map(() => inputs), memories);
      for (let row = 0; row < some.length * outputs.length; row++) {
        found[first * outputs.length + row] = probabilitiesAt(logits, row, this.target.size)[outputs[row % outputs.length]];
      }
    }
    return { words, probabilities: packFloats(found, [words.length, outputs.length]) };
  }

  // Arrays

  /** @param {KeptTrace} trace @returns {string} its id */
  keep(trace) {
    const id = String(++this.traces);
    this.kept.set(id, trace);
    for (const old of this.kept.keys()) if (this.kept.size > KEPT_TRACES) this.kept.delete(old);
    return id;
  }

  /**
   * The attention weights of a layer, [head, query, key], or a projection of its heads.
   *
   * @param {string} id of the trace
   * @param {Site | "nodes"} site
   * @param {number} layer
   * @param {ProjectionName} [projection]
   */
  layer(id, site, layer, projection) {
    const trace = this.kept.get(id);
    if (!trace) throw new Error("This translation is no longer in memory; translate the text again.");
    const { heads, d_k, d_v } = this.json.network;
    if (site === "nodes") return byHead(trace.crossOfNodes.map((layers) => layers[layer]), heads);
    const { weights, query, key, value } = trace.recorded[site][layer];
    if (projection === "query") return splitHeads(query, heads, heads, d_k);
    if (projection === "key") return splitHeads(key, heads, this.json.network.key_value_heads, d_k);
    if (projection === "value") return splitHeads(value, heads, this.json.network.key_value_heads, d_v);
    if (projection === "output") return this.outputByHead(site, layer);
    return byHead(weights, heads);
  }

  /**
   * W_O as [head, d_v, d].
   *
   * @param {Site} site
   * @param {number} layer
   */
  outputByHead(site, layer) {
    const { heads, d_v, d_model: width } = this.json.network;
    const { memory } = this.network.weights;
    const matrix = this.network.weights.matrix(`${attentionName(site, layer)}.output.weight`);
    const result = new Float32Array(heads * d_v * width);
    for (let output = 0; output < width; output++) {
      memory.row(matrix, output).forEach((weight, i) => { result[i * width + output] = weight; });
    }
    return result;
  }

  /**
   * The arrays of attention, of which only the shapes are in the JSON.
   *
   * @param {number} sources @param {number} targets @param {number} parents
   */
  shapes(sources, targets, parents) {
    const { encoder_layers: encoder, decoder_layers: decoder, heads } = this.json.network;
    return {
      encoder: omitted([encoder, heads, sources, sources]),
      decoder: omitted([decoder, heads, targets, targets]),
      cross_attention: omitted([decoder, heads, targets, sources]),
      nodes: omitted([decoder, heads, parents, sources]),
    };
  }

  /**
   * @param {number} sources
   * @param {number} targets
   * @returns {TraceJson["projections"]} of the sites whose weights are the softmax of products, without another term
   */
  projectionShapes(sources, targets) {
    const { heads, d_k, d_v, d_model, scale, position, encoder_layers, decoder_layers } = this.json.network;
    /** @param {Site} site @returns {ProjectionsJson} */
    const shapesOf = (site) => {
      const layers = site === "encoder" ? encoder_layers : decoder_layers;
      const [queries, keys] = [site === "encoder" ? sources : targets, site === "decoder" ? targets : sources];
      return {
        scale, query: omitted([layers, heads, queries, d_k]), key: omitted([layers, heads, keys, d_k]),
        value: omitted([layers, heads, keys, d_v]), output: omitted([layers, heads, d_v, d_model]),
      };
    };
    const sites = SITES.filter((site) => site === "cross_attention" || position !== "relative");
    return Object.fromEntries(sites.map((site) => [site, shapesOf(site)]));
  }
}

// -------------------------------------------------------------------------------------------------
// Options

/** @param {Decoding} decoding of the recipe @param {TraceRequest} request @returns {Decoding} */
function decodingOf(decoding, { beam, length_penalty, temperature, seed }) {
  return {
    ...decoding,
    beam: beam ?? decoding.beam,
    length_penalty: length_penalty ?? decoding.length_penalty,
    temperature: (temperature ?? decoding.temperature) || null,
    seed: seed ?? decoding.seed,
  };
}

/** @param {Decoding} decoding @param {number} forced */
function optionsOf({ beam, length_penalty, temperature, seed }, forced) {
  return /** @type {Record<string, number>} */ ({ beam, length_penalty, temperature, seed, forced });
}

/** @param {Site} site @param {number} layer */
function attentionName(site, layer) {
  return site === "cross_attention" ? `decoder.layers.${layer}.cross_attention` : `${site}.layers.${layer}.attention`;
}

// -------------------------------------------------------------------------------------------------
// Words and values

/**
 * The positions of the tokens of each word, without special tokens, as group_words of trace.py finds them.
 *
 * @param {Token[]} tokens
 */
export function groupWords(tokens) {
  /** @type {number[][]} */
  const words = [];
  tokens.forEach(({ text, special }, position) => {
    if (special) return;
    const last = words[words.length - 1];
    const begins = text.startsWith("▁") || PUNCTUATION.test(text);
    const [first, before] = [[...text][0] ?? "", [...tokens[position - 1]?.text ?? ""].at(-1) ?? ""];
    const unspaced = UNSPACED.test(first) || UNSPACED.test(before);
    if (last && last[last.length - 1] === position - 1 && !begins && !unspaced) last.push(position);
    else words.push([position]);
  });
  return words;
}

/** @param {Float32Array} logits [rows, size] @param {number} row @param {number} size */
export function probabilitiesAt(logits, row, size) {
  const values = logits.slice(row * size, (row + 1) * size);
  softmax(values);
  return values;
}

/**
 * The attention each source token receives, averaged over layers and heads: maximum and sum over outputs.
 *
 * @param {RecordedAttention[]} layers
 * @param {number} heads
 * @param {number} sources
 */
function coverageOf(layers, heads, sources) {
  /** @type {{ max: number[], sum: number[] }} */
  const coverage = { max: Array(sources).fill(0), sum: Array(sources).fill(0) };
  const rows = layers[0]?.weights.length ?? 0;
  for (let row = 0; row < rows; row++) {
    for (let source = 0; source < sources; source++) {
      let mean = 0;
      for (const { weights } of layers) {
        for (let head = 0; head < heads; head++) mean += weights[row][head * sources + source] / heads / layers.length;
      }
      coverage.max[source] = Math.max(coverage.max[source], mean);
      coverage.sum[source] += mean;
    }
  }
  return coverage;
}

// -------------------------------------------------------------------------------------------------
// Arrays in the order of a trace

/** @param {number[]} shape @returns {PackedArray} */
function omitted(shape) {
  return { shape, format: "float32", data: null };
}

/** @param {Float32Array} values @param {number[]} shape @returns {PackedArray} */
export function packFloats(values, shape) {
  const bytes = new Uint8Array(values.buffer, values.byteOffset, values.byteLength);
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return { shape, format: "float32", data: btoa(text) };
}

/**
 * Rows of [head, key] as one array [head, row, key]. A shorter row, of a causal mask, is filled with zeros.
 *
 * @param {Float32Array[]} rows
 * @param {number} heads
 */
function byHead(rows, heads) {
  const keys = Math.max(0, ...rows.map((row) => row.length)) / heads;
  const result = new Float32Array(heads * rows.length * keys);
  rows.forEach((row, i) => {
    const width = row.length / heads;
    for (let head = 0; head < heads; head++) {
      result.set(row.subarray(head * width, (head + 1) * width), (head * rows.length + i) * keys);
    }
  });
  return result;
}

/**
 * Rows [row, head, feature] as [head, row, feature]; heads of keys and values are repeated for the queries they serve.
 *
 * @param {Float32Array} x
 * @param {number} heads
 * @param {number} stored heads of x
 * @param {number} width
 */
function splitHeads(x, heads, stored, width) {
  const rows = x.length / (stored * width);
  const result = new Float32Array(heads * rows * width);
  for (let head = 0; head < heads; head++) {
    const from = Math.floor(head * stored / heads);
    for (let row = 0; row < rows; row++) {
      const start = (row * stored + from) * width;
      result.set(x.subarray(start, start + width), (head * rows + row) * width);
    }
  }
  return result;
}
