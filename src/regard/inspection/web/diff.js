/**
 * The differences of two translations of one source.
 *
 * @typedef {import("./trace.js").Token} Token
 * @typedef {import("./trace.js").Site} Site
 * @typedef {import("./trace.js").Trace} Trace
 * @typedef {[before: number, after: number]} Pair positions of the same token in both
 */

/**
 * The longest common subsequence of two token sequences.
 *
 * @param {Token[]} a
 * @param {Token[]} b
 * @returns {Pair[]}
 */
export function longestCommonSubsequence(a, b) {
  const width = b.length + 1;
  const lengths = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      lengths[i * width + j] = a[i].id === b[j].id ? lengths[(i + 1) * width + j + 1] + 1
        : Math.max(lengths[(i + 1) * width + j], lengths[i * width + j + 1]);
    }
  }
  /** @type {Pair[]} */
  const pairs = [];
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i].id === b[j].id) pairs.push([i++, j++]);
    else if (lengths[(i + 1) * width + j] >= lengths[i * width + j + 1]) i++;
    else j++;
  }
  return pairs;
}

/**
 * All tokens of both sequences side by side: common tokens together, a changed token next to its replacement.
 *
 * @param {Token[]} before
 * @param {Token[]} after
 * @returns {[number | null, number | null][]}
 */
export function sideBySide(before, after) {
  /** @type {[number | null, number | null][]} */
  const rows = [];
  let [i, j] = [0, 0];
  for (const [a, b] of [...longestCommonSubsequence(before, after), [before.length, after.length]]) {
    while (i < a || j < b) rows.push([i < a ? i++ : null, j < b ? j++ : null]);
    if (a < before.length) rows.push([i++, j++]);
  }
  return rows;
}

/**
 * The rows and columns of an attention site that two traces of the same source have in common.
 *
 * @param {Trace} before
 * @param {Trace} after
 * @param {Site} site
 * @returns {{ rows: Pair[], columns: Pair[] }}
 */
export function commonCells(before, after, site) {
  const outputs = longestCommonSubsequence(before.outputs, after.outputs);
  /** @type {Pair[]} */
  const keys = before.columns[site].map((_, i) => [i, i]);
  if (site === "encoder") return { rows: before.source.map((_, i) => [i, i]), columns: keys };
  if (site === "cross_attention") return { rows: outputs, columns: keys };
  /** @type {Pair[]} */
  const inputs = [[0, 0], ...outputs.map(([i, j]) => /** @type {Pair} */ ([i + 1, j + 1]))];
  return { rows: outputs, columns: inputs.filter(([i, j]) => i < before.inputs.length && j < after.inputs.length) };
}
