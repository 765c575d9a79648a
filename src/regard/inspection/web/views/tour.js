/**
 * A guided tour. Each step sets the state of the page so that it shows what the step describes; every number in a step
 * is computed from the trace.
 *
 * @typedef {import("../dom.js").Child} Child
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../state.js").Values} Values
 * @typedef {import("../trace.js").LayerArray} LayerArray
 * @typedef {import("../trace.js").Token} Token
 * @typedef {import("../trace.js").TraceJson} TraceJson
 * @typedef {{ text: Child[], set: Values }} Content what a step says, and the state it sets
 * @typedef {{ title: string, view: string, q?: string, applies?(trace: Trace): boolean,
 *   content(context: Context): Content | Promise<Content> }} Step q: the sentence that the step is about
 * @typedef {{ layer: number, head: number }} Head
 * @typedef {{ dog: number, street: number }} NounWeights
 */

import { bidiText, h, tokenLabel } from "../dom.js";
import { percent } from "../format.js";
import { Trace, detokenize, errorMessage, groupWords } from "../trace.js";

const TIRED = "The dog didn't cross the street because it was too tired.";
const WIDE = "The dog didn't cross the street because it was too wide.";
/** mean weight that counts as a clear pattern of a head */
const CLEAR_PATTERN = 0.5;
/** a weight below this counts as hardly any attention */
const LITTLE_ATTENTION = 0.3;

/** @param {Trace} trace */
const autoregressive = (trace) => !trace.nonAutoregressive;

/** @type {Step[]} */
const STEPS = [
  { title: "A sentence is translated", view: "translate", content: translationStep },
  { title: "Looking while writing", view: "translate", content: crossAttentionStep },
  { title: "Heads have patterns", view: "heads", content: headPatternStep },
  { title: "No looking ahead", view: "heads", applies: autoregressive, content: causalMaskStep },
  { title: "Tokens are revised", view: "iterations", applies: (trace) => trace.nonAutoregressive, content: iterationsStep },
  { title: "Several hypotheses at once", view: "beam", applies: autoregressive, content: beamStep },
  { title: "One weight by hand", view: "weight", content: weightStep },
  { title: "Attention is not the reason", view: "intervene", content: interventionStep },
  { title: "All of this was learned", view: "training", content: trainingStep },
  { title: "What does “it” attend to?", view: "heads", q: TIRED, content: encoderPronounStep },
  { title: "Too tired", view: "heads", q: TIRED, content: (context) => decoderPronounStep(context, WIDE) },
  { title: "Too wide", view: "heads", q: WIDE, content: (context) => decoderPronounStep(context, TIRED) },
];

/** @type {View} */
export const tourView = {
  id: "tour",
  title: "Tour",
  help: "A short tour of this page, using the current sentence. It ends with a classic question about attention: in “the dog "
    + "didn't cross the street because it was too tired”, what does “it” attend to?",
  build,
};

/** @param {Context} context */
function build(context) {
  return h("div", { class: "tour-contents card" },
    h("ol", {}, stepsFor(context.trace).map((step, i) => {
      const available = !step.q || step.q === context.trace.text || !!context.api;
      const link = h("a", { href: `#${linkTo(step, i, context)}`, onclick: (/** @type {Event} */ event) => {
        event.preventDefault();
        goTo(step, i, context);
      } }, step.title);
      return h("li", {}, available ? link : h("span", {}, step.title, h("span", { class: "quiet" }, " (not in this file)")),
        step.q && h("span", { class: "quiet" }, " ", bidiText(step.q)));
    })));
}

/** @param {Trace} trace */
function stepsFor(trace) {
  return STEPS.filter((step) => !step.applies || step.applies(trace));
}

// -------------------------------------------------------------------------------------------------
// Moving through the tour

/**
 * The current step, shown above the view that it is about.
 *
 * @param {Context} context
 */
export function tourStep(context) {
  const { trace, state, api, signal } = context;
  const steps = stepsFor(trace);
  const element = h("section", { class: "tour-step", "aria-label": "Tour", "aria-live": "polite", hidden: true });
  /** the step in the link that is shown */
  let shown = "";
  const show = async () => {
    const wanted = state.get("tour");
    if (wanted === shown) return;
    shown = wanted;
    element.hidden = true;
    if (wanted === "") return;
    const index = Math.min(Math.max((Number.parseInt(wanted, 10) || 1) - 1, 0), steps.length - 1);
    const step = steps[index];
    const isHere = !step.q || step.q === trace.text;
    if (api && !isHere && state.get("q") === step.q) return; // that sentence is being translated
    const content = await contentOf(step, index, isHere, context);
    if (signal.aborted || shown !== wanted) return;
    // The step sets the page on arrival; after that the reader may change it.
    if (isHere && state.get("arrive")) state.set({ ...content.set, arrive: "" });
    element.hidden = false;
    element.replaceChildren(
      h("p", { class: "count quiet" }, `Tour, step ${index + 1} of ${steps.length}`),
      h("h2", {}, step.title), h("p", { class: "tour-text" }, ...content.text),
      tourButtons(element, steps, index, context));
  };
  state.subscribe(show);
  show();
  return element;
}

/** @param {Step} step @param {number} index @param {boolean} isHere @param {Context} context @returns {Promise<Content>} */
async function contentOf(step, index, isHere, context) {
  try {
    return isHere ? await step.content(context) : otherSentence(step, index, context);
  } catch (error) {
    return { text: [errorMessage(error)], set: {} };
  }
}

/** @param {HTMLElement} element @param {Step[]} steps @param {number} index @param {Context} context */
function tourButtons(element, steps, index, context) {
  /** @param {number} to @param {string} text @param {string} style */
  const button = (to, text, style) => h("button", {
    type: "button", class: style, disabled: !steps[to], "data-name": text, onclick: () => {
      goTo(steps[to], to, context);
      setTimeout(() => /** @type {HTMLElement | null} */ (element.querySelector(`[data-name="${text}"]`))?.focus());
    },
  }, text);
  return h("div", { class: "controls" }, button(index - 1, "Back", "plain"),
    index + 1 < steps.length ? button(index + 1, "Next", "primary") : "",
    h("button", { type: "button", class: "plain", onclick: () => context.state.set({ tour: "" }) }, "Leave the tour"));
}

/**
 * Go to a step. If it is about another sentence, the link changes and the form of the page translates that sentence.
 *
 * @param {Step} step
 * @param {number} index
 * @param {Context} context
 */
function goTo(step, index, context) {
  const link = linkTo(step, index, context);
  if (link.has("q") && link.get("q") !== context.trace.text) location.hash = link.toString();
  else context.state.replace(link);
}

/**
 * The link to a step.
 *
 * @param {Step} step
 * @param {number} index
 * @param {Context} context
 */
function linkTo(step, index, { trace, state, api }) {
  const names = ["q", "beam", "length_penalty", "prefix"].filter((name) => state.get(name));
  const request = api && step.q && step.q !== trace.text ? { q: step.q }
    : Object.fromEntries(names.map((name) => [name, state.get(name)]));
  return new URLSearchParams({ ...request, view: step.view, tour: String(index + 1), arrive: "1" });
}

/**
 * A step about a sentence that this page does not show.
 *
 * @param {Step} step
 * @param {number} index
 * @param {Context} context
 * @returns {Content}
 */
function otherSentence(step, index, context) {
  const text = context.api
    ? ["This step is about another sentence. ", h("button", {
      type: "button", class: "plain", onclick: () => goTo(step, index, context),
    }, "Go there")]
    : ["This step is about another sentence, which is not in this file. ", h("code", {}, `regard look RUN "${step.q}"`),
      " saves it as a page; regard serve RUN shows all of them."];
  return { text, set: {} };
}

// -------------------------------------------------------------------------------------------------
// Steps about any sentence

/** @param {Context} context @returns {Content} */
function translationStep({ trace }) {
  const least = trace.probabilities.indexOf(Math.min(...trace.probabilities));
  return {
    text: [`The model split the text into ${trace.source.length} tokens and wrote ${trace.outputs.length}, `
      + `${trace.nonAutoregressive ? "all in parallel" : "one after another"}. The bar under each token is its probability. `
      + "The model was least certain of ", tokenLabel(trace.outputs[least]),
    `: ${percent(trace.probabilities[least])}. The other candidates are listed below.`],
    set: { output: String(least) },
  };
}

/** @param {Context} context @returns {Promise<Content>} */
async function crossAttentionStep({ trace }) {
  const { cross_attention: attention, outputs, source } = trace;
  await loadAll(attention);
  const layer = attention.layers - 1;
  const weights = attention.matrix(layer, "average");
  const rows = outputs.flatMap((token, row) => (token.special ? [] : [row]));
  const keys = source.flatMap((token, key) => (token.special ? [] : [key]));
  const cells = rows.flatMap((row) => keys.map((key) => ({ row, key, weight: weights[row * attention.keys + key] })));
  const { row, key, weight } = maxBy(cells, (cell) => cell.weight);
  return {
    text: ["Before each token, the decoder attends to the source; the colour shows how much. Attention was sharpest at ",
      tokenLabel(outputs[row]), ": ", percent(weight), " of it went to ", tokenLabel(source[key]),
      `, averaged over the ${attention.heads} heads of layer ${layer + 1}.`],
    set: { output: String(row), cross_layer: "", cross_head: "" },
  };
}

/** @param {Context} context @returns {Promise<Content>} */
async function headPatternStep({ trace: { encoder } }) {
  await loadAll(encoder);
  const patterns = /** @type {const} */ ([[-1, "the token before it"], [0, "itself"], [1, "the token after it"]]);
  const all = headsOf(encoder).flatMap((head) => patterns.map(([offset, name]) => ({
    ...head, name, mean: diagonalMean(encoder.head(head.layer, head.head), encoder.keys, offset),
  })));
  const { layer, head, name, mean } = maxBy(all, (one) => one.mean);
  return {
    text: ["Each small square is one head, with weights of its own. ", mean >= CLEAR_PATTERN
      ? `The enlarged one has the clearest pattern: on average, a token gives ${percent(mean)} of its attention to ${name}. `
      : "No head of this encoder has a simple pattern here, such as attending to the previous token. The enlarged one comes "
        + `closest: on average, a token gives ${percent(mean)} of its attention to ${name}. `,
    "Select others to compare."],
    set: headState("encoder", { layer, head }),
  };
}

/** @param {Context} context @returns {Promise<Content>} */
async function causalMaskStep({ trace: { decoder } }) {
  await loadAll(decoder);
  let max = 0;
  for (const { layer, head } of headsOf(decoder)) {
    decoder.head(layer, head).forEach((weight, i) => {
      if (i % decoder.keys > Math.floor(i / decoder.keys)) max = Math.max(max, weight);
    });
  }
  return {
    text: ["The translation also attends to itself, but only to earlier tokens: the causal mask sets the scores of later tokens "
      + `to minus infinity before the softmax. Above the diagonal, the largest weight of all ${decoder.layers * decoder.heads} `
      + `heads is ${max === 0 ? "exactly 0" : max.toPrecision(2)}. This is why training can use all positions of a translation `
      + "in one pass."],
    set: headState("decoder", { layer: 0, head: 0 }),
  };
}

/** @param {Context} context @returns {Content} */
function iterationsStep({ trace }) {
  const versions = trace.outputs.map((_, position) => new Set(trace.iterations.map((one) => one.outputs[position].id)).size);
  const changed = versions.filter((count) => count > 1).length;
  return {
    text: [`All ${trace.outputs.length} tokens were predicted in the first of ${trace.iterations.length} iterations, `
      + `independently of each other. At ${changed} of the positions the token changed later, when it was masked and `
      + "predicted again from the rest."],
    set: {},
  };
}

/** @param {Context} context @returns {Content} */
function beamStep({ trace }) {
  /** @param {string} state */
  const count = (state) => trace.beam.filter((node) => node.state === state).length;
  return {
    text: [`Beam search considered ${trace.beam.length - 1} candidates, pruned ${count("pruned")} of them and finished `
      + `${count("finished")} hypotheses. The one with the best score, on the blue path, is the translation. Select any other `
      + "to see why it lost."],
    set: { node: "" },
  };
}

/** @param {Context} context @returns {Promise<Content>} */
async function weightStep({ trace }) {
  const { layer, head, row, key, weight } = await largestCrossAttention(trace);
  return {
    text: ["Every weight is computed from a query, a key, a scale and a softmax. This one, ", tokenLabel(trace.outputs[row]),
      " attending to ", tokenLabel(trace.source[key]), ` with ${weight.toFixed(4)}, is the largest cross-attention weight here. `
      + "Each step is shown with the model's own values and their shapes."],
    set: { site: "cross_attention", layer: String(layer), head: String(head), query: String(row), key: String(key) },
  };
}

/** @param {Context} context @returns {Promise<Content>} */
async function interventionStep({ trace, api }) {
  const { layer, head } = await largestCrossAttention(trace);
  return {
    text: ["Where a model looks is not why it says something. To find the reasons, intervene. ", ...(api
      ? ["Here the cross-attention head with the largest weight, ", headName({ layer, head }), ", is muted. If the translation "
        + "stays the same, the model did not need it; mute more heads and see what breaks."]
      : ["On a served page you can mute a head or force a word and see whether the translation changes."])],
    set: {
      mute: api ? `cross_attention.${layer}.${head}` : "", site: "cross_attention", layer: String(layer), head: String(head),
    },
  };
}

/** @returns {Content} */
function trainingStep() {
  return {
    text: ["Nobody told the heads what to look for: their weights started at random and were learned from pairs of texts, with "
      + "the learning rate shown here. If the run has checkpoints, the slider shows how the alignment developed."],
    set: { step: "" },
  };
}

// -------------------------------------------------------------------------------------------------
// Steps about the dog and the street

/** @param {Context} context @returns {Promise<Content>} */
async function encoderPronounStep({ trace }) {
  const { encoder } = trace;
  await loadAll(encoder);
  const words = findWords(trace);
  if (!words) return wordsNotFound();
  const best = maxBy(headsOf(encoder).map((head) => ({ ...head, ...nounWeights(encoder, head, words.it, words) })),
    (one) => Math.max(one.dog, one.street));
  return {
    text: ["In the encoder, the source attends to itself. Of all its heads, ", headName(best), " gives one of the two nouns the "
      + "most attention from ", h("i", {}, "it"), ": ", formatNouns(best), ". ",
    preferredNoun(best) === null
      ? "That is hardly any: if this model knows what “it” refers to, it does not show here. Continue with the decoder."
      : `So here it attends to the ${preferredNoun(best)}.`],
    set: headState("encoder", best),
  };
}

/**
 * What the decoder attends to when it writes the translation of “it”, in the head that differs most between the two
 * sentences.
 *
 * @param {Context} context
 * @param {string} otherText
 * @returns {Promise<Content>}
 */
async function decoderPronounStep({ trace, api }, otherText) {
  const other = api ? new Trace(await cachedTrace(otherText, api), api) : null;
  const positions = other && pronounPositions(trace.outputs, other.outputs);
  const here = await pronounAttention(trace, positions?.[0]);
  const there = other && await pronounAttention(other, positions?.[1]);
  if (!here || (other && !there)) return wordsNotFound();
  const heads = here.heads.map((head, i) => ({ ...head, other: there?.heads[i] }));
  const best = maxBy(heads, (head) => (head.other
    ? Math.abs(head.dog - head.street - head.other.dog + head.other.street) : Math.max(head.dog, head.street)));
  const otherEnding = h("i", {}, /too (\w+)\.$/.exec(otherText)?.[1] ?? "");
  const it = () => h("i", {}, "it");
  const opening = positions
    ? ["Here ", it(), " became ", tokenLabel(trace.outputs[here.row]), ", the first word that changes if the sentence ends in ",
      otherEnding.cloneNode(true), ". "]
    : ["The token that attends most to ", it(), " is ", tokenLabel(trace.outputs[here.row]), ". "];
  const comparison = best.other && there && other
    ? ["; with ", otherEnding, ", ", ...(positions ? [it(), " became "] : ["that token is "]),
      tokenLabel(other.outputs[there.row]), " and the same head gave ", formatNouns(best.other), ". ", conclusion(best, best.other)]
    : ["."];
  return {
    text: ["The model wrote “", bidiText(trace.translation), "” ", ...opening, "At that position, cross-attention ",
      headName(best), ", ", best.other ? "the head that changes most" : "the head with the largest weight", ", gave ",
      formatNouns(best), ...comparison],
    set: headState("cross_attention", best),
  };
}

/** @param {NounWeights} here @param {NounWeights} there */
function conclusion(here, there) {
  const [now, then] = [preferredNoun(here), preferredNoun(there)];
  return now && then && now !== then
    ? "One word at the end of the sentence moved its attention from one noun to the other."
    : "Even this head does not move from one noun to the other.";
}

/**
 * The positions of the translation of “it” in two translations that differ in two words; the other word is the one for
 * “tired” or “wide”.
 *
 * @param {Token[]} a
 * @param {Token[]} b
 * @returns {[number, number] | null} null if they differ in any other way
 */
function pronounPositions(a, b) {
  const [first, second] = [a, b].map((tokens) => groupWords(tokens).map((positions) => ({
    position: positions[0], text: detokenize(positions.map((position) => tokens[position])),
  })));
  const different = first.flatMap((word, i) => (word.text === second[i]?.text ? [] : [i]));
  if (first.length !== second.length || different.length !== 2) return null;
  return [first[different[0]].position, second[different[0]].position];
}

/** @type {Map<string, Promise<TraceJson>>} */
const traces = new Map();

/** @param {string} q @param {NonNullable<Context["api"]>} api */
function cachedTrace(q, api) {
  const loading = traces.get(q) ?? api.trace({ q });
  traces.set(q, loading);
  loading.catch(() => traces.delete(q));
  return loading;
}

/**
 * The attention to both nouns, by all heads, at the position of the translation of “it”; if it is not known, at the
 * position that attends most to “it”.
 *
 * @param {Trace} trace
 * @param {number} [position]
 */
async function pronounAttention(trace, position) {
  const { cross_attention: attention } = trace;
  await loadAll(attention);
  const words = findWords(trace);
  if (!words) return null;
  const rows = trace.outputs.flatMap((token, row) => (token.special ? [] : [row]));
  const row = position ?? maxBy(rows, (one) => Math.max(...headsOf(attention).map(({ layer, head }) =>
    sumOf(attention.head(layer, head), one * attention.keys, words.it))));
  return { row, heads: headsOf(attention).map((head) => ({ ...head, ...nounWeights(attention, head, [row], words) })) };
}

/** @param {Trace} trace the positions of “it”, “dog” and “street” in the source; null if one is missing */
function findWords({ source }) {
  const groups = groupWords(source);
  /** @param {string} word */
  const find = (word) => groups.find((group) =>
    detokenize(group.map((position) => source[position])).trim().toLowerCase() === word);
  const [it, dog, street] = ["it", "dog", "street"].map(find);
  return it && dog && street ? { it, dog, street } : null;
}

/** @returns {Content} */
function wordsNotFound() {
  const text = "The tokenizer of this model does not keep “it”, “dog” and “street” as words of the sentence, so there is "
    + "nothing to show.";
  return { text: [text], set: {} };
}

/**
 * @param {LayerArray} weights
 * @param {Head} head
 * @param {number[]} rows
 * @param {{ dog: number[], street: number[] }} columns
 * @returns {NounWeights} mean over the rows
 */
function nounWeights(weights, { layer, head }, rows, { dog, street }) {
  const matrix = weights.head(layer, head);
  /** @param {number[]} keys */
  const mean = (keys) => rows.reduce((total, row) => total + sumOf(matrix, row * weights.keys, keys), 0) / rows.length;
  return { dog: mean(dog), street: mean(street) };
}

/** @param {NounWeights} weights the noun with more attention; null if neither has much */
function preferredNoun({ dog, street }) {
  if (Math.max(dog, street) < LITTLE_ATTENTION) return null;
  return dog > street ? "dog" : "street";
}

/** @param {NounWeights} weights */
function formatNouns({ dog, street }) {
  return h("strong", {}, h("i", {}, "dog"), ` ${dog.toFixed(2)}, `, h("i", {}, "street"), ` ${street.toFixed(2)}`);
}

// -------------------------------------------------------------------------------------------------
// Helpers

/** @param {Head} head */
function headName({ layer, head }) {
  return `head ${head + 1} of layer ${layer + 1}`;
}

/** @param {import("../trace.js").Site} site @param {Head} head @returns {Values} */
function headState(site, { layer, head }) {
  return { site, layer: String(layer), head: String(head), heads: "", special: "" };
}

/**
 * The largest cross-attention weight between two tokens that are not special.
 *
 * @param {Trace} trace
 */
async function largestCrossAttention({ cross_attention: attention, outputs, source }) {
  await loadAll(attention);
  const all = headsOf(attention).flatMap((one) => {
    const matrix = attention.head(one.layer, one.head);
    return outputs.flatMap((token, row) => (token.special ? [] : source.flatMap((other, key) => (other.special ? []
      : [{ ...one, row, key, weight: matrix[row * attention.keys + key] }]))));
  });
  return maxBy(all, (one) => one.weight);
}

/** @param {LayerArray} weights */
async function loadAll(weights) {
  await Promise.all(Array.from({ length: weights.layers }, (_, layer) => weights.load(layer)));
}

/** @param {LayerArray} weights @returns {Head[]} */
function headsOf({ layers, heads }) {
  return Array.from({ length: layers * heads }, (_, i) => ({ layer: Math.floor(i / heads), head: i % heads }));
}

/**
 * The mean of a diagonal.
 *
 * @param {Float32Array} matrix
 * @param {number} keys
 * @param {number} offset
 */
function diagonalMean(matrix, keys, offset) {
  let total = 0;
  let count = 0;
  for (let row = 0; row < matrix.length / keys; row++) {
    if (row + offset < 0 || row + offset >= keys) continue;
    total += matrix[row * keys + row + offset];
    count++;
  }
  return count ? total / count : 0;
}

/** @param {Float32Array} matrix @param {number} start @param {number[]} keys */
function sumOf(matrix, start, keys) {
  return keys.reduce((total, key) => total + matrix[start + key], 0);
}

/**
 * @template T
 * @param {T[]} all
 * @param {(one: T) => number} value
 * @returns {T}
 */
function maxBy(all, value) {
  if (!all.length) throw new Error("This model has no attention of this kind, so there is nothing to show.");
  return all.reduce((best, one) => (value(one) > value(best) ? one : best));
}
