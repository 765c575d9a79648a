/**
 * What the model did with one sentence, as `Trace.to_json()` of trace.py writes it.
 *
 * @typedef {{ id: number, text: string, special: boolean }} Token
 * @typedef {Token & { probability: number }} Candidate
 * @typedef {"kept" | "pruned" | "finished"} NodeState
 * @typedef {{ id: number, parent: number | null, token: number, log_probability: number, total: number,
 *   score: number, state: NodeState }} SearchNode
 * @typedef {"encoder" | "decoder" | "cross"} Kind
 * @typedef {"source" | "target"} Side
 * @typedef {{ shape: number[], data: string }} Packed
 * @typedef {{ text: string, translation: string, source: Token[], read: Token[], said: Token[], encoder: Packed,
 *   decoder: Packed, cross: Packed, probabilities: number[], candidates: Candidate[][], beam: SearchNode[],
 *   tokens: Record<string, Token>, options: Record<string, number> }} TraceJson
 */

export const SPACE = "▁";

/** Attention, [layer, head, query, key]. */
export class Weights {
  /** @param {Packed} packed */
  constructor(packed) {
    const [layers, heads, queries, keys] = packed.shape;
    this.layers = layers;
    this.heads = heads;
    this.queries = queries;
    this.keys = keys;
    this.packed = packed.data;
    /** @type {Float32Array | undefined} */
    this.unpacked = undefined;
  }

  /** Unpacked when first looked at. */
  get data() {
    this.unpacked ??= floats(this.packed);
    return this.unpacked;
  }

  /** @param {number} layer @param {number} head @returns {Float32Array} [query, key], row by row */
  head(layer, head) {
    const size = this.queries * this.keys;
    const start = (layer * this.heads + head) * size;
    return this.data.subarray(start, start + size);
  }

  /**
   * One head, or the heads of a layer as one.
   *
   * @param {number} layer
   * @param {number | "average" | "max"} which
   * @returns {Float32Array} [query, key]
   */
  map(layer, which) {
    if (typeof which === "number") return this.head(layer, which);
    const result = new Float32Array(this.queries * this.keys);
    for (let head = 0; head < this.heads; head++) {
      const one = this.head(layer, head);
      if (which === "max") for (let i = 0; i < one.length; i++) result[i] = Math.max(result[i], one[i]);
      else for (let i = 0; i < one.length; i++) result[i] += one[i] / this.heads;
    }
    return result;
  }
}

/** @param {string} base64 of little-endian float32 @returns {Float32Array} */
export function floats(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return new Float32Array(bytes.buffer); // every machine that browsers run on is little-endian
}

export class Trace {
  /** @param {TraceJson} json */
  constructor(json) {
    this.text = json.text;
    this.translation = json.translation;
    this.source = json.source;
    this.read = json.read;
    this.said = json.said;
    this.encoder = new Weights(json.encoder);
    this.decoder = new Weights(json.decoder);
    this.cross = new Weights(json.cross);
    this.probabilities = json.probabilities;
    this.candidates = json.candidates;
    this.beam = json.beam;
    this.tokens = json.tokens;
    this.options = json.options;
  }
}

/**
 * How pieces stand in running text: what is seen of each, and whether a space is in front of it.
 *
 * @param {Token[]} tokens
 * @returns {{ index: number, token: Token, shown: string, space: boolean }[]}
 */
export function running(tokens) {
  return tokens.map((token, index) => {
    const bare = token.special ? token.text : token.text.replace(/^▁+/, "").replaceAll(SPACE, " ");
    if (!bare) return { index, token, shown: " ", space: false }; // the token is a space, and nothing else
    const space = index > 0 && (token.special || token.text.startsWith(SPACE));
    return { index, token, shown: bare, space };
  });
}

/**
 * The places of the pieces of each word; a mark is a word by itself.
 *
 * @param {Token[]} tokens
 * @returns {number[][]}
 */
export function wordsOf(tokens) {
  /** @type {number[][]} */
  const groups = [];
  tokens.forEach((token, i) => {
    const first = i === 0 || token.special || tokens[i - 1].special || token.text.startsWith(SPACE);
    if (first) groups.push([i]);
    else groups[groups.length - 1].push(i);
  });
  return groups;
}

/**
 * The text that tokens spell, marks left out.
 *
 * @param {Token[]} tokens
 */
export function textOf(tokens) {
  const text = tokens.filter((token) => !token.special).map((token) => token.text).join("");
  const spelled = text.replace(/(?:<0x[0-9A-F]{2}>)+/g, (bytes) => {
    const numbers = Array.from(bytes.matchAll(/<0x(..)>/g), (one) => parseInt(one[1], 16));
    return new TextDecoder().decode(new Uint8Array(numbers));
  });
  return spelled.replaceAll(SPACE, " ").replace(/^ /, "");
}
