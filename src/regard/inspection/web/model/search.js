/**
 * Beam search and sampling for one sentence, with the rules of decoding/. They know nothing about the model: a step
 * function reads the last token of each hypothesis and returns logits.
 *
 * @typedef {import("../trace.js").SearchNode} SearchNode
 * @typedef {{ beam: number, length_penalty: number, length_normalization: "gnmt" | "transformers" | "ctranslate2",
 *   extra_length: number, max_length: number | null, temperature: number | null, seed: number }} Decoding
 * @typedef {{ maxLength: number, bos: number, eos: number, prefix: number[], suppressed: number[] }} Rules what may come
 *   next, whatever the method; maxLength does not count EOS
 * @typedef {{ tokens: number[], finished: boolean, score: number, logProbabilities: number[] }} Hypothesis tokens
 *   without BOS and EOS; finished: EOS was generated
 */

/**
 * @template S
 * @typedef {(active: { token: number, state: S, node: number }[]) => { logits: Float32Array, state: S }[]} Step
 *   reads one token of each hypothesis, which is a node of the search tree
 */

/**
 * @template S
 * @typedef {{ tokens: number[], logProbabilities: number[], total: number, token: number, state: S, node: number }} Active
 *   a hypothesis that is not finished; node: its last token in the tree
 */

/** @typedef {{ beam: number, token: number, added: number, total: number }} Candidate a hypothesis with one more token */

/**
 * @typedef {{ penalty(length: number, alpha: number): number, forcesEos: boolean, cutsAtLimit: boolean,
 *   isDone(bestActive: number, finished: number[], full: boolean, length: number, maxPenalty: number,
 *     alpha: number): boolean }} LengthNormalization see decoding/length_penalty_and_stopping.py; finished: scores,
 *   best first; full: as many as beams
 */

/** @param {number} length @param {number} alpha */
const power = (length, alpha) => length ** alpha;

/** @type {Record<string, LengthNormalization>} */
export const LENGTH_NORMALIZATIONS = {
  gnmt: {
    penalty: gnmtPenalty,
    forcesEos: false,
    cutsAtLimit: false,
    isDone: (best, finished, full, length, maxPenalty, alpha) => {
      const toBeat = finished[0] ?? -Infinity;
      return best / maxPenalty <= toBeat || (full && best / gnmtPenalty(length, alpha) <= toBeat);
    },
  },
  transformers: {
    penalty: power,
    forcesEos: true,
    cutsAtLimit: false,
    isDone: (best, finished, full, length, _, alpha) =>
      best === -Infinity || (full && best / power(length, alpha) <= finished[finished.length - 1]),
  },
  ctranslate2: {
    penalty: power,
    forcesEos: false,
    cutsAtLimit: true,
    isDone: (best, finished, full, _length, _maxPenalty, alpha) =>
      (alpha === 0 ? best <= (finished[0] ?? -Infinity) : best === -Infinity || full),
  },
};

/** @param {number} length EOS counted @param {number} alpha */
function gnmtPenalty(length, alpha) {
  return ((5 + length) / 6) ** alpha;
}

/**
 * @template S
 * @param {Step<S>} step
 * @param {S} state
 * @param {Rules} rules
 * @param {Decoding} decoding
 * @returns {{ best: Hypothesis, nodes: SearchNode[] }} the best hypothesis, and the search as a tree
 */
export function beamSearch(step, state, rules, decoding) {
  const { beam, length_penalty: alpha } = decoding;
  const rule = LENGTH_NORMALIZATIONS[decoding.length_normalization];
  const maxLength = Math.max(rules.maxLength, rules.prefix.length);
  const maxPenalty = rule.penalty(maxLength + 1, alpha);
  const nodes = [rootNode(rules.bos)];
  /** @type {Active<S>[]} */
  let active = [{ tokens: [], logProbabilities: [], total: 0, token: rules.bos, state, node: 0 }];
  /** @type {Hypothesis[]} */
  const found = [];
  /** @type {number[]} scores of the best hypotheses that ended with EOS, best first */
  let scores = [];
  for (;;) {
    // 1. Run the model, and select candidates: EOS among the first `beam` finishes a hypothesis.
    const { length } = active[0].tokens;
    const results = step(active);
    const candidates = bestCandidates(active, results.map(({ logits }) =>
      logProbabilities(logits, rules, length, rule.forcesEos && length >= maxLength)), 2 * beam);
    const penalty = rule.penalty(length + 1, alpha);
    const ended = candidates.filter((one, rank) => one.token === rules.eos && rank < beam);
    const continued = candidates.filter((one) => one.token !== rules.eos).slice(0, beam);
    for (const one of ended) found.push(toHypothesis(extend(active[one.beam], one), true, one.total / penalty));
    scores = [...scores, ...ended.map((one) => one.total / penalty)].sort((a, b) => b - a).slice(0, beam);

    // 2. Decide whether the search is done.
    const best = continued[0]?.total ?? -Infinity;
    let done = length >= maxLength || rule.isDone(best, scores, scores.length >= beam, length + 1, maxPenalty, alpha);
    if (rule.cutsAtLimit && maxLength - length === 1 && continued.length) {
      const extended = extend(active[continued[0].beam], continued[0]);
      found.push(toHypothesis(extended, false, continued[0].total / penalty));
      done = true;
    } else if (done && !scores.length) {
      const present = rule.penalty(Math.max(1, length), alpha);
      for (const one of active) found.push(toHypothesis(one, false, one.total / present));
    }

    // 3. Record the step, and extend the hypotheses.
    const ids = addNodes(nodes, active, candidates, new Set(ended), new Set(done ? [] : continued), penalty);
    if (done) break;
    active = continued.map((one) => ({ ...extend(active[one.beam], one), token: one.token, total: one.total,
      state: results[one.beam].state, node: ids.get(one) ?? 0 }));
  }
  // Of equal scores the first one found wins.
  const best = found.reduce((most, one) => (one.score > most.score ? one : most));
  return { best, nodes };
}

/**
 * Sample each token from the model's distribution, until EOS or the maximum length.
 *
 * @template S
 * @param {Step<S>} step
 * @param {S} state
 * @param {Rules} rules
 * @param {Decoding} decoding
 * @param {() => number} random numbers from 0 to 1
 * @returns {{ best: Hypothesis, nodes: SearchNode[] }} the tree is a single path
 */
export function sample(step, state, rules, decoding, random) {
  const { length_penalty: alpha, temperature } = decoding;
  const { penalty } = LENGTH_NORMALIZATIONS[decoding.length_normalization];
  const maxLength = Math.max(rules.maxLength, rules.prefix.length);
  const nodes = [rootNode(rules.bos)];
  /** @type {Active<S>} */
  let active = { tokens: [], logProbabilities: [], total: 0, token: rules.bos, state, node: 0 };
  for (;;) {
    const { length } = active.tokens;
    const [result] = step([active]);
    const values = logProbabilities(result.logits, rules, length, false);
    const token = draw(values, temperature ?? 1, random());
    const ends = token === rules.eos;
    if (values[token] === -Infinity || (!ends && length >= maxLength)) return { best: toHypothesis(active, false, active.total), nodes };
    const one = { beam: 0, token, added: values[token], total: active.total + values[token] };
    addNodes(nodes, [active], [one], new Set(ends ? [one] : []), new Set([one]), penalty(length + 1, alpha));
    const extended = extend(active, one);
    if (ends) return { best: toHypothesis(extended, true, one.total), nodes };
    active = { ...extended, token, total: one.total, state: result.state, node: nodes.length - 1 };
  }
}

/** @param {Float32Array} logProbabilities @param {number} temperature @param {number} uniform */
function draw(logProbabilities, temperature, uniform) {
  const most = logProbabilities.reduce((a, b) => Math.max(a, b), -Infinity);
  let sum = 0;
  const cumulative = Float64Array.from(logProbabilities, (one) => (sum += Math.exp((one - most) / temperature)));
  const token = cumulative.findIndex((one) => one > uniform * sum);
  return token < 0 ? cumulative.length - 1 : token;
}

// -------------------------------------------------------------------------------------------------
// Log-probabilities and candidates

/**
 * The model's log-probability of each allowed token, minus infinity for the others.
 *
 * @param {Float32Array} logits
 * @param {Rules} rules
 * @param {number} position
 * @param {boolean} onlyEos EOS is the only possible token, and costs nothing
 */
function logProbabilities(logits, { eos, prefix, suppressed }, position, onlyEos) {
  const values = onlyEos ? new Float32Array(logits.length).fill(-Infinity) : logSoftmax(logits);
  if (onlyEos) values[eos] = 0;
  if (position >= prefix.length) {
    for (const token of suppressed) values[token] = -Infinity;
    return values;
  }
  const forced = new Float32Array(logits.length).fill(-Infinity);
  forced[prefix[position]] = values[prefix[position]];
  return forced;
}

/** @param {Float32Array} logits @returns {Float32Array} */
export function logSoftmax(logits) {
  let [most, sum] = [-Infinity, 0];
  for (let i = 0; i < logits.length; i++) if (logits[i] > most) most = logits[i];
  for (let i = 0; i < logits.length; i++) sum += Math.exp(logits[i] - most);
  const logSum = most + Math.log(sum);
  const result = new Float32Array(logits.length);
  for (let i = 0; i < logits.length; i++) result[i] = logits[i] - logSum;
  return result;
}

/**
 * The best possible candidates, best first.
 *
 * @param {{ total: number }[]} active
 * @param {Float32Array[]} added log-probabilities of each hypothesis
 * @param {number} count
 * @returns {Candidate[]}
 */
function bestCandidates(active, added, count) {
  const all = active.flatMap(({ total }, beam) => topK(added[beam], count)
    .map((token) => ({ beam, token, added: added[beam][token], total: total + added[beam][token] })));
  return all.filter((one) => one.total > -Infinity).sort((a, b) => b.total - a.total).slice(0, count);
}

/**
 * The indices of the largest values, largest first; of equal values, the first.
 *
 * @param {Float32Array} values
 * @param {number} count
 * @returns {number[]}
 */
export function topK(values, count) {
  /** @type {number[]} */
  const best = [];
  let least = -Infinity;
  for (let i = 0; i < values.length; i++) {
    if (best.length === count && !(values[i] > least)) continue;
    let at = best.length;
    while (at > 0 && values[best[at - 1]] < values[i]) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
    least = values[best[best.length - 1]];
  }
  return best;
}

// -------------------------------------------------------------------------------------------------
// Hypotheses and the tree

/**
 * @template {{ tokens: number[], logProbabilities: number[] }} A
 * @param {A} active
 * @param {Candidate} candidate
 * @returns {A}
 */
function extend(active, { token, added }) {
  return { ...active, tokens: [...active.tokens, token], logProbabilities: [...active.logProbabilities, added] };
}

/**
 * @param {{ tokens: number[], logProbabilities: number[] }} active its last token is EOS if it is finished
 * @param {boolean} finished
 * @param {number} score
 * @returns {Hypothesis}
 */
function toHypothesis({ tokens, logProbabilities: each }, finished, score) {
  return { tokens: finished ? tokens.slice(0, -1) : tokens, finished, score, logProbabilities: each };
}

/** @param {number} bos @returns {SearchNode} */
function rootNode(bos) {
  return { id: 0, parent: null, token: bos, log_probability: 0, total: 0, score: 0, state: "kept" };
}

/**
 * Add the candidates of a step to the tree.
 *
 * @param {SearchNode[]} nodes
 * @param {{ node: number }[]} active
 * @param {Candidate[]} candidates
 * @param {Set<Candidate>} ended
 * @param {Set<Candidate>} kept
 * @param {number} penalty
 * @returns {Map<Candidate, number>} the ids of the new nodes
 */
function addNodes(nodes, active, candidates, ended, kept, penalty) {
  const ids = new Map();
  for (const one of candidates) {
    const state = ended.has(one) ? "finished" : kept.has(one) ? "kept" : "pruned";
    ids.set(one, nodes.length);
    nodes.push({ id: nodes.length, parent: active[one.beam].node, token: one.token, log_probability: one.added,
      total: one.total, score: one.total / penalty, state });
  }
  return ids;
}
