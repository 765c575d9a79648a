/**
 * The tokenizer of data/tokenizer.py in JavaScript: the segmentation of SentencePiece (unigram, bpe, char, word, with
 * bytes for unknown characters), and the normalization and escaping around it.
 *
 * @typedef {import("../trace.js").Token} Token
 * @typedef {"unigram" | "bpe" | "char" | "word"} Kind
 * @typedef {{ kind: Kind, normalization: string, pieces: string[], scores: number[], special_tokens: number,
 *   first_byte: number | null, suppressed: number[] }} VocabularyJson pieces and scores by id; special_tokens: number of
 *   ids at the beginning that stand for no text; first_byte: the id of byte 0 if unknown characters become bytes
 * @typedef {{ children: Map<string, TrieNode>, id: number }} TrieNode id is -1 if no piece ends here
 */

export const PAD = 0;
export const BOS = 1;
export const EOS = 2;
export const UNK = 3;
export const MASK = 4;

const SPACE_SYMBOL = "▁";
const UNK_TEXT = " ⁇";
/** what an unknown character costs, relative to the least probable piece */
const UNK_PENALTY = 10;

// Symbols that SentencePiece treats specially are escaped: U+FDD0 and a digit.
const ESCAPE = "\ufdd0";
/** @type {Record<string, string>} */
const ESCAPES = { [ESCAPE]: `${ESCAPE}0`, [SPACE_SYMBOL]: `${ESCAPE}1`, "\u2585": `${ESCAPE}2` };
const UNESCAPES = Object.fromEntries(Object.entries(ESCAPES).map(([symbol, escape]) => [escape, symbol]));

/** @type {Record<string, (text: string) => string>} */
const NORMALIZATIONS = {
  nfc: (text) => text.normalize("NFC"),
  nfkc: (text) => text.normalize("NFKC"),
  lower: (text) => text.toLowerCase().normalize("NFC"),
  none: (text) => text,
};

export class Vocabulary {
  /** @param {VocabularyJson} json */
  constructor(json) {
    this.json = json;
    this.size = json.pieces.length;
    this.scores = Float32Array.from(json.scores);
    /** @type {Map<string, number>} the ids of pieces that are text */
    this.ids = new Map();
    json.pieces.forEach((piece, id) => {
      if (id >= json.special_tokens && !this.isByte(id)) this.ids.set(piece, id);
    });
    this.segment = SEGMENTATIONS[json.kind](this);
  }

  /** @param {number} id */
  isByte(id) {
    const first = this.json.first_byte;
    return first !== null && id >= first && id < first + 256;
  }

  /**
   * The token ids of a text, without BOS and EOS.
   *
   * @param {string} text
   * @returns {number[]}
   */
  encode(text) {
    const escaped = escape(NORMALIZATIONS[this.json.normalization](text));
    const segments = this.segment([...escaped]);
    return this.json.first_byte === null ? mergeUnknown(segments) : segments.flatMap(([piece, id]) => this.orBytes(piece, id));
  }

  /** @param {string} piece @param {number} id @returns {number[]} */
  orBytes(piece, id) {
    if (id !== UNK) return [id];
    return Array.from(new TextEncoder().encode(piece), (byte) => (this.json.first_byte ?? 0) + byte);
  }

  /**
   * The text of token ids.
   *
   * @param {number[]} ids
   */
  decode(ids) {
    let text = "";
    /** @type {number[]} */
    let bytes = [];
    for (const id of [...ids, EOS]) {
      if (this.isByte(id)) {
        bytes.push(id - (this.json.first_byte ?? 0));
        continue;
      }
      text += decodeUtf8(bytes);
      bytes = [];
      if (id === UNK) text += UNK_TEXT;
      else if (id >= this.json.special_tokens) text += this.json.pieces[id];
    }
    const escaped = text.replaceAll(SPACE_SYMBOL, " ").replace(/^ /, "");
    return escaped.replace(/\ufdd0[012]/g, (one) => UNESCAPES[one]);
  }

  /** @param {number[]} ids @returns {Token[]} */
  tokens(ids) {
    return ids.map((id) => ({ id, text: this.json.pieces[id], special: id <= MASK }));
  }
}

/**
 * What SentencePiece segments: escaped, with `▁` for spaces and one in front.
 *
 * @param {string} text
 */
function escape(text) {
  if (/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/.test(text)) {
    throw new Error("The text contains half of a surrogate pair, which is not a character.");
  }
  const escaped = text.replace(/[\ufdd0\u2581\u2585]/g, (symbol) => ESCAPES[symbol]);
  return escaped && (SPACE_SYMBOL + escaped.replaceAll(" ", SPACE_SYMBOL));
}

/**
 * The characters of bytes; each byte that belongs to none becomes U+FFFD.
 *
 * @param {number[]} bytes
 */
function decodeUtf8(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length;) {
    const length = bytes[i] < 0x80 ? 1 : bytes[i] < 0xe0 ? 2 : bytes[i] < 0xf0 ? 3 : 4;
    try {
      text += new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes.slice(i, i + length)));
      i += length;
    } catch {
      text += "\ufffd";
      i++;
    }
  }
  return text;
}

/**
 * Unknown pieces side by side are one token.
 *
 * @param {[piece: string, id: number][]} segments
 */
function mergeUnknown(segments) {
  return segments.map(([, id]) => id).filter((id, i, ids) => id !== UNK || ids[i - 1] !== UNK);
}

// -------------------------------------------------------------------------------------------------
// Segmentations: characters in, pieces and their ids out

/** @typedef {(characters: string[]) => [piece: string, id: number][]} Segmentation */

/** @type {Record<Kind, (vocabulary: Vocabulary) => Segmentation>} */
const SEGMENTATIONS = {
  unigram: unigramSegmentation,
  bpe: bpeSegmentation,
  char: ({ ids }) => (characters) => characters.map((one) => [one, ids.get(one) ?? UNK]),
  word: ({ ids }) => (characters) => splitWords(characters).map((word) => [word, ids.get(word) ?? UNK]),
};

/** @param {string[]} characters */
function splitWords(characters) {
  return characters.join("").split(/(?=▁)/).filter(Boolean);
}

/**
 * The most probable segmentation of a unigram language model (Kudo 2018), by Viterbi's algorithm.
 *
 * @param {Vocabulary} vocabulary
 * @returns {Segmentation}
 */
function unigramSegmentation({ ids, scores }) {
  const trie = makeTrie(ids);
  let lowest = Infinity;
  for (const id of ids.values()) lowest = Math.min(lowest, scores[id]);
  const unknown = Math.fround(lowest - UNK_PENALTY);
  return (characters) => {
    const count = characters.length;
    const best = new Float32Array(count + 1).fill(-Infinity);
    best[0] = 0;
    const [from, pieces] = [new Int32Array(count + 1), new Int32Array(count + 1)];
    /** @param {number} start @param {number} end @param {number} id @param {number} score */
    const consider = (start, end, id, score) => {
      const total = Math.fround(best[start] + score);
      if (total > best[end]) [best[end], from[end], pieces[end]] = [total, start, id];
    };
    for (let start = 0; start < count; start++) {
      let [end, single] = [start, false];
      /** @type {TrieNode | undefined} */
      let node = trie;
      while ((node = node.children.get(characters[end]))) {
        end++;
        if (node.id < 0) continue;
        single ||= end === start + 1;
        consider(start, end, node.id, scores[node.id]);
      }
      if (!single) consider(start, start + 1, UNK, unknown);
    }
    /** @type {[string, number][]} */
    const found = [];
    for (let end = count; end > 0; end = from[end]) {
      found.push([characters.slice(from[end], end).join(""), pieces[end]]);
    }
    return found.reverse();
  };
}

/** @param {Map<string, number>} ids @returns {TrieNode} */
function makeTrie(ids) {
  /** @type {TrieNode} */
  const root = { children: new Map(), id: -1 };
  for (const [piece, id] of ids) {
    let node = root;
    for (const character of piece) {
      let next = node.children.get(character);
      if (!next) node.children.set(character, next = { children: new Map(), id: -1 });
      node = next;
    }
    node.id = id;
  }
  return root;
}

/**
 * Byte-pair encoding: of all neighbours that form a piece, the ones with the best score are merged, again and again.
 *
 * @param {Vocabulary} vocabulary
 * @returns {Segmentation}
 */
function bpeSegmentation({ ids, scores }) {
  return (characters) => splitWords(characters).flatMap((word) => {
    const symbols = [...word];
    /** @param {number} i the score of merging symbols i and i + 1 */
    const scoreAt = (i) => {
      const id = ids.get(symbols[i] + symbols[i + 1]);
      return i + 1 < symbols.length && id !== undefined ? scores[id] : -Infinity;
    };
    const candidates = symbols.map((_, i) => scoreAt(i));
    for (;;) {
      const score = candidates.reduce((most, one) => Math.max(most, one), -Infinity);
      if (score === -Infinity) break;
      const i = candidates.indexOf(score);
      symbols.splice(i, 2, symbols[i] + symbols[i + 1]);
      candidates.splice(i, 1);
      candidates[i] = scoreAt(i);
      if (i) candidates[i - 1] = scoreAt(i - 1);
    }
    return symbols.map((symbol) => /** @type {[string, number]} */ ([symbol, ids.get(symbol) ?? UNK]));
  });
}
