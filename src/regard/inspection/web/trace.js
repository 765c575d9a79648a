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
 * @typedef {{ shape: number[], data: string | null, format?: string, greatest?: number }} Packed data is null where the
 *   numbers were left out: too many for a file, or to be asked of the server
 * @typedef {"query" | "key" | "value" | "output"} Part
 * @typedef {{ scale: number } & Record<Part, Packed>} PartsJson
 * @typedef {{ words: number[][], probabilities: Packed }} OcclusionJson
 * @typedef {{ read: Token[], said: Token[] }} Round
 * @typedef {{ text: string, translation: string, source: Token[], read: Token[], said: Token[], encoder: Packed,
 *   decoder: Packed, cross: Packed, nodes: Packed, columns: Record<Kind, Token[]>,
 *   coverage: { most: number[], whole: number[] }, probabilities: number[], candidates: Candidate[][],
 *   beam: SearchNode[], rounds: Round[], parents: number[], tokens: Record<string, Token>, options: Record<string, number>,
 *   muted: string[], parts: Partial<Record<Kind, PartsJson>>, occlusion: OcclusionJson | null,
 *   course?: import("./course.js").CourseJson | null, id?: string }} TraceJson
 * @typedef {(layer: number) => Promise<Float32Array>} Fetch
 * @typedef {{ layer(id: string, place: string, layer: number, part?: Part): Promise<Float32Array> }} Source
 */

const SPACE = "▁";

/** @type {Kind[]} */
export const KINDS = ["encoder", "decoder", "cross"];

/** Numbers by layer and head: attention, [layer, head, query, key], and what it is made of. */
export class Weights {
  /** @param {Packed} packed @param {Fetch} [fetch] where a layer comes from that is not here */
  constructor(packed, fetch) {
    const [layers, heads, queries, keys] = packed.shape;
    this.layers = layers;
    this.heads = heads;
    this.queries = queries;
    this.keys = keys;
    this.packed = packed;
    this.fetch = fetch;
    /** @type {(Float32Array | undefined)[]} by layer */
    this.there = [];
    /** @type {(Promise<void> | undefined)[]} by layer */
    this.coming = [];
    /** @type {Uint8Array | undefined} of all layers, where they are in this file */
    this.bytes = undefined;
    /** rounded to 8 bits, to keep a file small */
    this.rounded = packed.format === "uint8";
    /** too many numbers for this file */
    this.missing = layers > 0 && packed.data === null && !fetch;
  }

  /**
   * A promise while the layer is on its way; null once it is there.
   *
   * @param {number} layer
   * @returns {Promise<void> | null}
   */
  load(layer) {
    if (this.packed.data !== null || this.there[layer]) return null;
    const { fetch } = this;
    if (!fetch) return Promise.reject(new Error("These numbers are not in this file."));
    this.coming[layer] ??= fetch(layer).then((numbers) => {
      this.there[layer] = numbers;
    }).finally(() => {
      this.coming[layer] = undefined;
    });
    return this.coming[layer] ?? null;
  }

  /** @param {number} layer @param {number} head @returns {Float32Array} [query, key], row by row; zeros before they come */
  head(layer, head) {
    const size = this.queries * this.keys;
    if (this.packed.data !== null) { // unpacked when first looked at, and only what is looked at
      this.bytes ??= bytesOf(this.packed.data);
      const each = this.bytes.length / this.layers;
      this.there[layer] ??= numbersOf(this.bytes.subarray(layer * each, (layer + 1) * each), this.packed);
    }
    return (this.there[layer] ?? new Float32Array(size * this.heads)).subarray(head * size, (head + 1) * size);
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

/**
 * Do something with layers: at once if they are there, else when they have come. What went wrong is told.
 *
 * @param {[weights: Weights, layer: number][]} wanted
 * @param {(problem: string) => void} then
 */
export function whenThere(wanted, then) {
  const coming = wanted.map(([weights, layer]) => weights.load(layer)).filter((one) => one !== null);
  if (!coming.length) return then("");
  Promise.all(coming).then(() => then(""), (error) => then(error instanceof Error ? error.message : String(error)));
}

/** @param {Packed} packed @returns {Float32Array} */
export function numbers(packed) {
  return numbersOf(bytesOf(packed.data ?? ""), packed);
}

/** @param {string} base64 */
function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** @param {Uint8Array} bytes @param {Packed} packed how they are to be read @returns {Float32Array} */
function numbersOf(bytes, { format, greatest = 1 }) {
  // Every machine that browsers run on is little-endian.
  if (format !== "uint8") return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
  const squares = Float32Array.from({ length: 256 }, (_, root) => (root / 255) ** 2 * greatest);
  const result = new Float32Array(bytes.length);
  for (let i = 0; i < bytes.length; i++) result[i] = squares[bytes[i]];
  return result;
}

/** What the weights of one place were made of. */
export class Parts {
  /** @param {PartsJson} json @param {(part: Part) => Fetch | undefined} fetch */
  constructor(json, fetch) {
    this.scale = json.scale;
    this.query = new Weights(json.query, fetch("query"));
    this.key = new Weights(json.key, fetch("key"));
    this.value = new Weights(json.value, fetch("value"));
    this.output = new Weights(json.output, fetch("output"));
  }
}

/** The probability of each token said when a word of the source is left out. */
export class Occlusion {
  /** @param {OcclusionJson} json @param {number[]} before */
  constructor(json, before) {
    this.words = json.words;
    this.without = numbers(json.probabilities);
    this.before = before;
  }

  /**
   * How much less probable a token is without a word; below 0 if it is more so.
   *
   * @param {number} word
   * @param {number} said
   */
  fall(word, said) {
    return this.before[said] - this.without[word * this.before.length + said];
  }
}

export class Trace {
  /** @param {TraceJson} json @param {Source} [server] where the rest can be asked for */
  constructor(json, server) {
    /** @param {string} place @param {Part} [part] @returns {Fetch | undefined} */
    const fetch = (place, part) => {
      const { id } = json;
      return server && id ? (layer) => server.layer(id, place, layer, part) : undefined;
    };
    this.text = json.text;
    this.translation = json.translation;
    this.source = json.source;
    this.read = json.read;
    this.said = json.said;
    this.encoder = new Weights(json.encoder, fetch("encoder"));
    this.decoder = new Weights(json.decoder, fetch("decoder"));
    this.cross = new Weights(json.cross, fetch("cross"));
    /** the tree's: its queries are the nodes in `parents` */
    this.nodes = new Weights(json.nodes, fetch("nodes"));
    this.parents = json.parents;
    this.columns = json.columns;
    this.coverage = json.coverage;
    this.probabilities = json.probabilities;
    this.candidates = json.candidates;
    this.beam = json.beam;
    /** how all words came to be said, where they were at once; else there is a beam */
    this.rounds = json.rounds;
    this.tokens = json.tokens;
    this.options = json.options;
    this.muted = json.muted;
    /** @type {Partial<Record<Kind, Parts>>} */
    this.parts = {};
    for (const kind of KINDS) {
      const parts = json.parts[kind];
      if (parts) this.parts[kind] = new Parts(parts, (part) => fetch(kind, part));
    }
    this.occlusion = json.occlusion && new Occlusion(json.occlusion, json.probabilities);
    this.course = json.course ?? null;
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
