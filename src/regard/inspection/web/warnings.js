/**
 * Signs that a translation may be wrong: improbable words, repetitions, source words without attention, odd length.
 * They are hints, not proof.
 *
 * @typedef {import("./trace.js").Side} Side
 * @typedef {import("./trace.js").Trace} Trace
 * @typedef {{ side: Side, positions: number[], short: string, text: string }} Warning without positions, it concerns
 *   the whole translation
 */

import { percent } from "./format.js";
import { detokenize, groupWords } from "./trace.js";

/** a lower probability is a warning */
const LOW_PROBABILITY = 0.3;
/** a source word is covered if some output gives it this much attention, averaged over all layers and heads, */
const MIN_ATTENTION = 0.1;
/** or if all outputs together give it this much */
const MIN_COVERAGE = 0.3;
/** one side may be this many times as long as the other, if the longer one has MIN_TOKENS or more */
const MAX_LENGTH_RATIO = 2;
const MIN_TOKENS = 6;
const LONGEST_REPETITION = 3;

/** @param {Trace} trace @returns {Warning[]} */
export function findWarnings(trace) {
  return [...lowProbability(trace), ...repetition(trace), ...lowCoverage(trace), ...oddLength(trace)];
}

/** @param {Trace} trace @returns {Warning[]} */
function lowProbability({ probabilities, outputs }) {
  return outputs.flatMap((_, position) => {
    const probability = probabilities[position];
    if (probability >= LOW_PROBABILITY) return [];
    const text = `has a probability of only ${percent(probability)}`;
    return [{ side: /** @type {Side} */ ("target"), positions: [position], short: "low probability", text }];
  });
}

/**
 * One, two or three words that occur twice in a row.
 *
 * @param {Trace} trace
 * @returns {Warning[]}
 */
function repetition({ outputs }) {
  const words = groupWords(outputs).filter((positions) => !outputs[positions[0]].special);
  const texts = words.map((positions) => detokenize(positions.map((position) => outputs[position])).trim().toLowerCase());
  /** @type {Warning[]} */
  const warnings = [];
  for (let i = 1; i < texts.length; i++) {
    for (let size = 1; size <= LONGEST_REPETITION; size++) {
      if (i < size || i + size > texts.length) break;
      const now = texts.slice(i, i + size).join(" ");
      const before = texts.slice(i - size, i).join(" ");
      if (now === before && /\p{L}/u.test(now)) {
        warnings.push({ side: "target", positions: words[i], short: "repetition", text: "repeats the word or words before it" });
        break;
      }
    }
  }
  return warnings;
}

/**
 * Source words that received almost no attention.
 *
 * @param {Trace} trace
 * @returns {Warning[]}
 */
function lowCoverage({ source, coverage }) {
  if (!coverage.max.length) return [];
  return groupWords(source).flatMap((positions) => {
    const text = detokenize(positions.map((position) => source[position]));
    const sum = positions.reduce((total, position) => total + coverage.sum[position], 0);
    const covered = sum >= MIN_COVERAGE || positions.some((position) => coverage.max[position] >= MIN_ATTENTION);
    if (source[positions[0]].special || !/[\p{L}\p{N}]/u.test(text) || covered) return [];
    return [{
      side: /** @type {Side} */ ("source"), positions, short: "almost no attention",
      text: "received almost no attention and may be missing from the translation",
    }];
  });
}

/** @param {Trace} trace @returns {Warning[]} */
function oddLength({ source, outputs }) {
  const [before, after] = [source, outputs].map((tokens) => tokens.filter((token) => !token.special).length);
  const similar = after <= MAX_LENGTH_RATIO * before && before <= MAX_LENGTH_RATIO * after;
  if (Math.max(before, after) < MIN_TOKENS || similar) return [];
  const text = `The translation has ${after} tokens, the source ${before}.`;
  return [{ side: "target", positions: [], short: "length", text }];
}
