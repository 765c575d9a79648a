/**
 * What a head does with its attention in one sentence, measured: the share of it that goes to the token before, to the
 * end of the sentence, and so on. `describe_heads` in Python measures the same for many sentences.
 *
 * @typedef {import("./trace.js").Site} Site
 * @typedef {import("./trace.js").Token} Token
 * @typedef {{ name: string, share: number }} Behaviour
 */

/** a head with less than this share for any of them has no clear pattern, as in head_ablation.py */
export const CLEAR_SHARE = 0.4;

const PUNCTUATION = /^▁?[.,;:!?…。，、；：！？]+$/;

/**
 * The behaviour with the largest share; null if the keys are not tokens of the sentence.
 *
 * @param {Site} site
 * @param {Token[]} keys
 * @param {Float32Array} matrix [query, key] of one head
 * @returns {Behaviour | null}
 */
export function behaviourOf(site, keys, matrix) {
  const queries = matrix.length / keys.length;
  if (site !== "cross_attention" && queries !== keys.length) return null;
  const found = patternsOf(site, keys, queries).map(({ name, first = 0, keysOf }) => {
    let [total, count] = [0, 0];
    for (let query = first; query < queries; query++) {
      const attended = keysOf(query).filter((key) => key >= 0 && key < keys.length);
      if (!attended.length) continue;
      total += attended.reduce((sum, key) => sum + matrix[query * keys.length + key], 0);
      count++;
    }
    return { name, share: count ? total / count : 0 };
  });
  return found.reduce((best, one) => (one.share > best.share ? one : best));
}

/**
 * The patterns that a head of a site can have: its queries from `first` on, and the keys that belong to it.
 *
 * @param {Site} site
 * @param {Token[]} keys
 * @param {number} queries
 * @returns {{ name: string, first?: number, keysOf(query: number): number[] }[]}
 */
function patternsOf(site, keys, queries) {
  const end = keys.findIndex((token) => token.text === "</s>" && token.special);
  const punctuation = keys.flatMap((token, i) => (!token.special && PUNCTUATION.test(token.text) ? [i] : []));
  const anywhere = [
    { name: "the end of the sentence", keysOf: () => [end] }, { name: "punctuation", keysOf: () => punctuation },
  ];
  if (site === "cross_attention") {
    const slope = (keys.length - 1) / Math.max(1, queries - 1);
    return [...anywhere, { name: "the source token at the same position", keysOf: (query) => [Math.round(query * slope)] }];
  }
  const before = { name: "the token before it", keysOf: (/** @type {number} */ query) => [query - 1] };
  const itself = { name: "itself", keysOf: (/** @type {number} */ query) => [query] };
  if (site === "encoder") {
    return [...anywhere, before, itself, { name: "the token after it", keysOf: (query) => [query + 1] }];
  }
  // The first token of the decoder has nothing else to attend to.
  return [...anywhere, before, { ...itself, first: 1 }, { name: "the first token", first: 1, keysOf: () => [0] }];
}

/**
 * In a sentence.
 *
 * @param {Behaviour} behaviour
 * @param {(share: number) => string} percent
 */
export function describeBehaviour({ name, share }, percent) {
  return share < CLEAR_SHARE ? `No simple pattern in this sentence: the largest share goes to ${name}, ${percent(share)}.`
    : `On average, a token gives ${percent(share)} of its attention to ${name}.`;
}
