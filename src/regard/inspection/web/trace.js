/**
 * The trace of one sentence, as `Trace.to_json()` of trace.py writes it.
 *
 * @typedef {{ id: number, text: string, special: boolean, label?: string, shown?: string }} Token a token that is one
 *   byte of a character also has a label, and what it shows in running text: the character, or nothing
 * @typedef {Token & { probability: number }} Candidate
 * @typedef {"kept" | "pruned" | "finished"} NodeState
 * @typedef {{ id: number, parent: number | null, token: number, log_probability: number, total: number,
 *   score: number, state: NodeState }} SearchNode
 * @typedef {"encoder" | "decoder" | "cross_attention"} Site where a network has attention
 * @typedef {"source" | "target"} Side
 * @typedef {{ shape: number[], data: string | null, format?: string, max?: number }} PackedArray data is null if the
 *   array was left out: too large for a file, or to be fetched from the server
 * @typedef {"query" | "key" | "value" | "output"} ProjectionName
 * @typedef {{ scale: number } & Record<ProjectionName, PackedArray>} ProjectionsJson
 * @typedef {{ words: number[][], probabilities: PackedArray }} OcclusionJson
 * @typedef {{ inputs: Token[], outputs: Token[] }} Iteration
 * @typedef {{ text: string, translation: string, source: Token[], inputs: Token[], outputs: Token[],
 *   encoder: PackedArray, decoder: PackedArray, cross_attention: PackedArray, nodes: PackedArray,
 *   columns: Record<Site, Token[]>, coverage: { max: number[], sum: number[] }, probabilities: number[],
 *   candidates: Candidate[][], beam: SearchNode[], iterations: Iteration[], parents: number[],
 *   tokens: Record<string, Token>, options: Record<string, number>, muted: string[],
 *   projections: Partial<Record<Site, ProjectionsJson>>, occlusion: OcclusionJson | null,
 *   history?: import("./history.js").HistoryJson | null, lenses?: import("./lenses.js").LensesJson | null,
 *   head_table?: import("./lenses.js").HeadTableJson | null,
 *   id?: string }} TraceJson
 * @typedef {(layer: number) => Promise<Float32Array>} FetchLayer
 * @typedef {{ layer(id: string, site: string, layer: number, projection?: ProjectionName): Promise<Float32Array>
 *   }} LayerSource
 */

const SPACE_SYMBOL = "▁";

/** @type {Site[]} */
export const SITES = ["encoder", "decoder", "cross_attention"];

/** An array [layer, head, query, key]: attention weights or projections. Layers are decoded or fetched when needed. */
export class LayerArray {
  /** @param {PackedArray} packed @param {FetchLayer} [fetch] fetches a layer that is not in the trace */
  constructor(packed, fetch) {
    const [layers, heads, queries, keys] = packed.shape;
    this.layers = layers;
    this.heads = heads;
    this.queries = queries;
    this.keys = keys;
    this.packed = packed;
    this.fetch = fetch;
    /** @type {(Float32Array | undefined)[]} by layer */
    this.loaded = [];
    /** @type {(Promise<void> | undefined)[]} by layer */
    this.loading = [];
    /** @type {Uint8Array | undefined} the bytes of all layers, if they are in the trace */
    this.bytes = undefined;
    /** whether the values were quantized to 8 bits, to keep a file small */
    this.quantized = packed.format === "uint8";
    /** whether the array was left out of the file */
    this.missing = layers > 0 && packed.data === null && !fetch;
  }

  /**
   * Load a layer.
   *
   * @param {number} layer
   * @returns {Promise<void> | null} null if it is loaded already
   */
  load(layer) {
    if (this.packed.data !== null || this.loaded[layer]) return null;
    const { fetch } = this;
    if (!fetch) return Promise.reject(new Error("These values are not in this file."));
    this.loading[layer] ??= fetch(layer).then((values) => {
      this.loaded[layer] = values;
    }).finally(() => {
      this.loading[layer] = undefined;
    });
    return this.loading[layer] ?? null;
  }

  /**
   * The matrix of one head.
   *
   * @param {number} layer
   * @param {number} head
   * @returns {Float32Array} [query, key], row-major; zeros until the layer is loaded
   */
  head(layer, head) {
    const size = this.queries * this.keys;
    if (this.packed.data !== null) {
      this.bytes ??= decodeBase64(this.packed.data);
      const each = this.bytes.length / this.layers;
      this.loaded[layer] ??= toFloats(this.bytes.subarray(layer * each, (layer + 1) * each), this.packed);
    }
    return (this.loaded[layer] ?? new Float32Array(size * this.heads)).subarray(head * size, (head + 1) * size);
  }

  /**
   * The matrix of one head, or the average or maximum over the heads of a layer.
   *
   * @param {number} layer
   * @param {number | "average" | "max"} head
   * @returns {Float32Array} [query, key], row-major
   */
  matrix(layer, head) {
    if (typeof head === "number") return this.head(layer, head);
    const result = new Float32Array(this.queries * this.keys);
    for (let number = 0; number < this.heads; number++) {
      const one = this.head(layer, number);
      if (head === "max") for (let i = 0; i < one.length; i++) result[i] = Math.max(result[i], one[i]);
      else for (let i = 0; i < one.length; i++) result[i] += one[i] / this.heads;
    }
    return result;
  }
}

/**
 * Call a function once layers are loaded: at once if they are, else later. Errors are passed to it as text.
 *
 * @param {[array: LayerArray, layer: number][]} layers
 * @param {(error: string) => void} callback
 */
export function whenLoaded(layers, callback) {
  const loading = layers.map(([array, layer]) => array.load(layer)).filter((one) => one !== null);
  if (!loading.length) return callback("");
  Promise.all(loading).then(() => callback(""), (error) => callback(errorMessage(error)));
}

/** @param {unknown} error */
export function errorMessage(error) {
  return error instanceof Error ? error.message : String(error);
}

/** @param {PackedArray} packed @returns {Float32Array} */
export function unpack(packed) {
  return toFloats(decodeBase64(packed.data ?? ""), packed);
}

/** @param {string} base64 */
export function decodeBase64(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** @param {Uint8Array} bytes @param {PackedArray} packed their format @returns {Float32Array} */
function toFloats(bytes, { format, max = 1 }) {
  // Every machine that browsers run on is little-endian.
  if (format !== "uint8") return new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
  const squares = Float32Array.from({ length: 256 }, (_, root) => (root / 255) ** 2 * max);
  const result = new Float32Array(bytes.length);
  for (let i = 0; i < bytes.length; i++) result[i] = squares[bytes[i]];
  return result;
}

/** The projections of the heads of one site. */
export class Projections {
  /** @param {ProjectionsJson} json @param {(name: ProjectionName) => FetchLayer | undefined} fetch */
  constructor(json, fetch) {
    this.scale = json.scale;
    this.query = new LayerArray(json.query, fetch("query"));
    this.key = new LayerArray(json.key, fetch("key"));
    this.value = new LayerArray(json.value, fetch("value"));
    this.output = new LayerArray(json.output, fetch("output"));
  }
}

/** The probability of each output token when a source word is left out. */
export class Occlusion {
  /** @param {OcclusionJson} json @param {number[]} probabilities with the whole source */
  constructor(json, probabilities) {
    this.words = json.words;
    this.occluded = unpack(json.probabilities);
    this.probabilities = probabilities;
  }

  /**
   * How much an output token loses in probability without a source word; negative if it becomes more probable.
   *
   * @param {number} word
   * @param {number} output
   */
  drop(word, output) {
    return this.probabilities[output] - this.occluded[word * this.probabilities.length + output];
  }
}

export class Trace {
  /** @param {TraceJson} json @param {LayerSource} [server] fetches arrays that are not in the JSON */
  constructor(json, server) {
    /** @param {string} site @param {ProjectionName} [projection] @returns {FetchLayer | undefined} */
    const fetch = (site, projection) => {
      const { id } = json;
      return server && id ? (layer) => server.layer(id, site, layer, projection) : undefined;
    };
    this.text = json.text;
    this.translation = json.translation;
    this.source = joinBytes(json.source);
    /** what the decoder reads at each position */
    this.inputs = joinBytes(json.inputs);
    /** what it predicts there */
    this.outputs = joinBytes(json.outputs);
    this.encoder = new LayerArray(json.encoder, fetch("encoder"));
    this.decoder = new LayerArray(json.decoder, fetch("decoder"));
    this.cross_attention = new LayerArray(json.cross_attention, fetch("cross_attention"));
    /** cross-attention of the search tree: its queries are the nodes in `parents` */
    this.nodes = new LayerArray(json.nodes, fetch("nodes"));
    this.parents = json.parents;
    this.columns = {
      encoder: joinBytes(json.columns.encoder), decoder: joinBytes(json.columns.decoder),
      cross_attention: joinBytes(json.columns.cross_attention),
    };
    this.coverage = json.coverage;
    this.probabilities = json.probabilities;
    this.candidates = json.candidates;
    this.beam = json.beam;
    /** the iterations of mask-predict; empty for an autoregressive model */
    this.iterations = json.iterations;
    this.tokens = json.tokens;
    this.options = json.options;
    this.muted = json.muted;
    /** @type {Partial<Record<Site, Projections>>} */
    this.projections = {};
    for (const site of SITES) {
      const projections = json.projections[site];
      if (projections) this.projections[site] = new Projections(projections, (name) => fetch(site, name));
    }
    this.occlusion = json.occlusion && new Occlusion(json.occlusion, json.probabilities);
    this.history = json.history ?? null;
    this.lenses = json.lenses ?? null;
    this.headTable = json.head_table ?? null;
  }

  /** The position of the least certain output; special tokens only if there is nothing else. */
  get leastCertain() {
    const words = this.outputs.flatMap((token, i) => (token.special ? [] : [i]));
    const all = words.length ? words : [...this.outputs.keys()];
    return all.reduce((least, i) => (this.probabilities[i] < this.probabilities[least] ? i : least), all[0] ?? 0);
  }

  get nonAutoregressive() {
    return this.iterations.length > 0;
  }

  /** Whether lenses can read the model: an autoregressive encoder-decoder Transformer. */
  get hasLenses() {
    return this.encoder.layers > 0 && this.cross_attention.layers > 0 && !this.nonAutoregressive;
  }
}

const BYTE = /^<0x([0-9A-F]{2})>$/;

/**
 * Tokens that are single bytes get the character they form as their label: `😀 1/4` to `😀 4/4`.
 *
 * @param {Token[]} tokens
 * @returns {Token[]}
 */
export function joinBytes(tokens) {
  const result = tokens.slice();
  let start = 0;
  while (start < tokens.length) {
    const length = characterLength(tokens, start);
    if (length && tokens[start].label === undefined) {
      const bytes = tokens.slice(start, start + length).map((token) => parseInt(BYTE.exec(token.text)?.[1] ?? "", 16));
      const character = new TextDecoder().decode(new Uint8Array(bytes));
      for (let i = 0; i < length; i++) {
        result[start + i] = {
          ...tokens[start + i], shown: i ? "" : character, label: length > 1 ? `${character} ${i + 1}/${length}` : character,
        };
      }
    }
    start += length || 1;
  }
  return result;
}

/**
 * The number of byte tokens from here that form one character in UTF-8; 0 if they do not.
 *
 * @param {Token[]} tokens
 * @param {number} start
 */
function characterLength(tokens, start) {
  const first = parseInt(BYTE.exec(tokens[start].text)?.[1] ?? "80", 16);
  const length = first < 0x80 ? 1 : first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : first >= 0xc0 ? 2 : 0;
  for (let i = start + 1; i < start + length; i++) {
    const byte = parseInt(BYTE.exec(tokens[i]?.text ?? "")?.[1] ?? "00", 16);
    if (byte < 0x80 || byte >= 0xc0) return 0;
  }
  return length;
}

/**
 * How a token is written by itself: a byte as `byte F0`.
 *
 * @param {Token} token
 */
export function tokenText(token) {
  return joinBytes([token])[0].label ?? token.text.replace(BYTE, "byte $1");
}

/**
 * How tokens are shown in running text: the text of each, and whether a space comes before it.
 *
 * @param {Token[]} tokens
 * @returns {{ index: number, token: Token, text: string, spaceBefore: boolean }[]}
 */
export function runningText(tokens) {
  return tokens.map((token, index) => {
    const written = token.shown ?? tokenText(token);
    const text = token.special ? written : written.replace(/^▁+/, "").replaceAll(SPACE_SYMBOL, " ");
    if (token.shown === "") return { index, token, text, spaceBefore: false }; // the character is shown before
    if (!text) return { index, token, text: " ", spaceBefore: false }; // the token is a single space
    const spaceBefore = index > 0 && (token.special || token.text.startsWith(SPACE_SYMBOL));
    return { index, token, text, spaceBefore };
  });
}

/**
 * The positions of the tokens of each word; a special token is a word by itself.
 *
 * @param {Token[]} tokens
 * @returns {number[][]}
 */
export function groupWords(tokens) {
  /** @type {number[][]} */
  const words = [];
  tokens.forEach((token, i) => {
    const first = i === 0 || token.special || tokens[i - 1].special || token.text.startsWith(SPACE_SYMBOL);
    if (first) words.push([i]);
    else words[words.length - 1].push(i);
  });
  return words;
}

/**
 * The text of tokens, without special tokens.
 *
 * @param {Token[]} tokens
 */
export function detokenize(tokens) {
  const text = tokens.filter((token) => !token.special).map((token) => token.text).join("");
  const decoded = text.replace(/(?:<0x[0-9A-F]{2}>)+/g, (run) => {
    const bytes = Array.from(run.matchAll(/<0x(..)>/g), (one) => parseInt(one[1], 16));
    return new TextDecoder().decode(new Uint8Array(bytes));
  });
  return decoded.replaceAll(SPACE_SYMBOL, " ").replace(/^ /, "");
}
