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
 * @typedef {{ text: Child[], set: Values, title?: string }} Content what a step says, and the state it sets; title: instead
 *   of that of the step
 * @typedef {{ title: string, view: string, q?: string, applies?(trace: Trace): boolean,
 *   content(context: Context): Content | Promise<Content> }} Step q: the sentence that the step is about
 * @typedef {{ layer: number, head: number }} Head
 * @typedef {{ dog: number, street: number }} NounWeights
 * @typedef {Head & { site: Site, here: NounWeights & { ending: number }, there: NounWeights & { ending: number }
 *   }} HeadEvidence what a head attends to at the pronoun, in this sentence and in the other
 * @typedef {{ it: number[], dog: number[], street: number[], ending: number[] }} Words positions in the source
 * @typedef {import("../trace.js").Site} Site
 */

import { bidiText, h, tokenInProse } from "../dom.js";
import { percent } from "../format.js";
import { behaviourOf, describeBehaviour } from "../head_behaviour.js";
import { loadHistory } from "../history.js";
import { lensesOf, strongestPlace } from "../lenses.js";
import { Trace, detokenize, errorMessage, groupWords, unpack } from "../trace.js";

const TIRED = "The dog didn't cross the street because it was too tired.";
const WIDE = "The dog didn't cross the street because it was too wide.";
/** mean weight that counts as a clear pattern of a head */
const CLEAR_PATTERN = 0.5;
/** a weight below this counts as hardly any attention */
const LITTLE_ATTENTION = 0.3;

/** whether the page's model was found not to show what “it” means; the steps about it are then left out */
let pronounUnclear = false;
/** The button that led to the current step. It has the focus there too, also if the page was built again. */
let pressed = "";

/** @param {Trace} trace */
const autoregressive = (trace) => !trace.nonAutoregressive;
const pronounShown = () => !pronounUnclear;

/** @type {Step[]} */
const STEPS = [
  { title: "A sentence is translated", view: "translate", content: translationStep },
  { title: "Attention to the source", view: "translate", content: crossAttentionStep },
  { title: "Heads have patterns", view: "heads", content: headPatternStep },
  { title: "No looking ahead", view: "heads", applies: autoregressive, content: causalMaskStep },
  { title: "Tokens are revised", view: "iterations", applies: (trace) => trace.nonAutoregressive, content: iterationsStep },
  { title: "Several hypotheses at once", view: "beam", applies: (trace) => trace.options.beam > 1, content: beamStep },
  { title: "One weight, step by step", view: "weight", content: weightStep },
  { title: "Does a head matter?", view: "intervene", content: interventionStep },
  { title: "All of this was learned", view: "training", content: trainingStep },
  { title: "Why this word?", view: "lenses", applies: (trace) => trace.hasLenses, content: attributionStep },
  { title: "One word decides", view: "translate", q: TIRED, content: (context) => occlusionStep(context, WIDE) },
  { title: "Too tired", view: "heads", q: TIRED, applies: pronounShown, content: (context) => pronounStep(context, WIDE) },
  { title: "Too wide", view: "heads", q: WIDE, applies: pronounShown, content: (context) => pronounStep(context, TIRED) },
  { title: "Where it is decided", view: "lenses", q: TIRED, applies: (trace) => autoregressive(trace) && pronounShown(), content: patchingStep },
];

/** @type {View} */
export const tourView = {
  id: "tour",
  title: "Tour",
  help: "A short tour of this page, using the current sentence. It ends with a classic question about attention: in “the dog "
    + "didn't cross the street because it was too tired”, how does the model know what “it” is?",
  build,
};

/** @param {Context} context */
function build(context) {
  const steps = stepsFor(context.trace);
  return h("div", { class: "tour-contents card" },
    h("button", { type: "button", class: "primary", onclick: () => goTo(steps[0], 0, context) }, "Start the tour"),
    h("ol", {}, steps.map((step, i) => {
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
  const element = h("section", { class: "tour-step", "aria-label": "Tour", "aria-live": "polite", hidden: true });
  /** the step in the link that is shown */
  let shown = "";
  const show = async () => {
    const wanted = state.get("tour");
    if (wanted === shown) return;
    shown = wanted;
    element.hidden = true;
    if (wanted === "") return;
    const number = Number.parseInt(wanted, 10) || 1;
    const index = Math.min(Math.max(number, 1), stepsFor(trace).length) - 1;
    const step = stepsFor(trace)[index];
    const isHere = !step.q || step.q === trace.text;
    if (api && !isHere && state.get("q") === step.q) return; // that sentence is being translated
    element.replaceChildren(h("p", { class: "count quiet" }, countOf(index, stepsFor(trace))),
      h("h2", {}, step.title), h("p", { class: "quiet" }, "Computing…"),
      tourButtons(stepsFor(trace), index, context));
    element.hidden = false;
    focusButton(element);
    const content = await contentOf(step, index, isHere, context);
    if (signal.aborted || shown !== wanted) return;
    const steps = stepsFor(trace); // fewer, if this step has found that the others do not apply
    // The step sets the page on arrival; after that the reader may change it.
    if (isHere && state.get("arrive")) state.set({ ...content.set, arrive: "" });
    element.replaceChildren(
      h("p", { class: "count quiet" }, countOf(index, steps)),
      h("h2", {}, content.title ?? step.title), h("p", { class: "tour-text" }, ...content.text),
      tourButtons(steps, index, context));
    focusButton(element);
    pressed = "";
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

/** @param {number} index @param {Step[]} steps */
function countOf(index, steps) {
  return `Tour, step ${index + 1} of ${steps.length}`;
}

/**
 * Focus the button that was pressed in the step before, unless the reader has moved on to something else.
 *
 * @param {HTMLElement} element
 */
function focusButton(element) {
  const name = pressed;
  if (!name) return;
  setTimeout(() => { // the page may not be in the document yet
    const elsewhere = document.activeElement && document.activeElement !== document.body;
    const found = element.querySelector(`[data-name="${name}"]:enabled`) ?? element.querySelector("button:enabled");
    if (!elsewhere) /** @type {HTMLElement | null} */ (found)?.focus();
  });
}

/** @param {Step[]} steps @param {number} index @param {Context} context */
function tourButtons(steps, index, context) {
  /** @param {number} to @param {string} text @param {string} style */
  const button = (to, text, style) => h("button", {
    type: "button", class: style, disabled: !steps[to], "data-name": text, onclick: () => {
      pressed = text;
      goTo(steps[to], to, context);
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
  const least = trace.leastCertain;
  return {
    text: [`The model split the text into ${trace.source.length} tokens and wrote ${trace.outputs.length}, `
      + `${trace.nonAutoregressive ? "all in parallel" : "one after another"}. The bar under each token is its probability. `
      + "The model was least certain of ", tokenInProse(trace.outputs[least]),
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
      tokenInProse(outputs[row]), ": ", percent(weight), " of it went to ", tokenInProse(source[key]),
      `, averaged over the ${attention.heads} heads of layer ${layer + 1}.`],
    set: { output: String(row), cross_layer: "", cross_head: "" },
  };
}

/** @param {Context} context @returns {Promise<Content>} */
async function headPatternStep({ trace }) {
  const sites = /** @type {const} */ (["encoder", "decoder", "cross_attention"]);
  await Promise.all(sites.map((site) => loadAll(trace[site])));
  const all = sites.flatMap((site) => headsOf(trace[site]).flatMap((head) => {
    const behaviour = behaviourOf(site, trace.columns[site], trace[site].head(head.layer, head.head));
    return behaviour ? [{ ...head, site, behaviour }] : [];
  }));
  const { site, layer, head, behaviour } = maxBy(all, (one) => one.behaviour.share);
  return {
    text: ["Each small square is one head, with weights of its own. The enlarged one comes closest to a simple pattern. ",
      describeBehaviour(behaviour, percent), " Select others to compare."],
    set: headState(site, { layer, head }),
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
    text: ["Every weight is computed from a query, a key, a scale and a softmax. This one, ", tokenInProse(trace.outputs[row]),
      " attending to ", tokenInProse(trace.source[key]), ` with ${weight.toFixed(4)}, is the largest cross-attention weight here. `
      + "Each step is shown with the model's own values and their shapes."],
    set: { site: "cross_attention", layer: String(layer), head: String(head), query: String(row), key: String(key) },
  };
}

/** @param {Context} context @returns {Promise<Content>} */
async function interventionStep({ trace, api }) {
  const { layer, head } = await largestCrossAttention(trace);
  const mute = `cross_attention.${layer}.${head}`;
  const text = ["Where a model attends does not explain its output. To find out what the output depends on, change something. ",
    ...(api ? ["Here the cross-attention head with the largest weight, ", headName({ layer, head }), ", is muted. ",
      ...mutedResult(trace, await api.trace({ q: trace.text, mute: [mute] })), " Mute other heads and see what breaks."]
      : ["With a model, this page can mute a head or force a word, and show whether the translation changes."])];
  return {
    text, set: { mute: api ? mute : "", site: "cross_attention", layer: String(layer), head: String(head) },
  };
}

/** @param {Trace} before @param {TraceJson} after the translation with a muted head @returns {Child[]} */
function mutedResult(before, after) {
  if (before.translation === after.translation) {
    return ["The translation stays the same: for this sentence, the model does not need that head."];
  }
  return ["The translation becomes “", bidiText(after.translation), "”: for this sentence, the model needs that head."];
}

/** @param {Context} context @returns {Promise<Content>} */
async function trainingStep(context) {
  const history = await loadHistory(context);
  const hasSlider = history && (history.alignments?.length || (context.api?.align && history.checkpoints.length));
  return {
    text: ["Nobody told the heads what to look for: all weights were learned from pairs of texts. ",
      history?.curves ? "The curves show how the loss changed during training. " : "",
      hasSlider ? "The slider shows how the model came to align the words of this sentence." : ""],
    set: { step: "" },
  };
}

/**
 * Contrastive attribution of the token that the model was least certain of.
 *
 * @param {Context} context
 * @returns {Promise<Content>}
 */
async function attributionStep(context) {
  const { trace } = context;
  const position = trace.leastCertain;
  const found = await lensesOf(context).attribution(position, null);
  if (!found) {
    return { text: ["Why did the model choose a word and not another? ", h("code", {}, "regard serve RUN"),
      " can tell, with contrastive attribution."], set: {} };
  }
  const { token, foil, difference, scores, source_words } = found;
  const words = [...source_words, ...found.target_words];
  /** @param {string} method the word with the largest share in favour */
  const strongest = (method) => scores[method].indexOf(Math.max(...scores[method]));
  /** @param {number} word @returns {Child[]} */
  const named = (word) => (scores.integrated_gradients[word] > 0 || scores.occlusion[word] > 0
    ? ["“", h("b", {}, bidiText(words[word])), "”", word < source_words.length ? "" : " in the translation so far"] : ["no word"]);
  const [first, second] = [strongest("integrated_gradients"), strongest("occlusion")];
  return {
    text: ["The model was least certain of ", tokenInProse(token), ". The other candidate was ", tokenInProse(foil),
      difference < 0 ? `, even with a logit that is larger by ${(-difference).toFixed(1)}; the whole translation decided. `
        : `, whose logit is smaller by ${difference.toFixed(1)}. `,
      ...(first === second ? ["Two methods that measure what the choice depends on agree on the strongest reason: ", ...named(first)]
        : ["Two methods name the strongest reason: integrated gradients say ", ...named(first), ", occlusion says ", ...named(second)]),
      ". The map compares all methods."],
    set: { output: String(position), foil: "" },
  };
}

// -------------------------------------------------------------------------------------------------
// Steps about the dog and the street

/**
 * Both sentences and the position of the translation of “it” in each.
 *
 * @param {Context} context
 * @param {string} otherText
 * @returns {Promise<{ other: Trace, here: number, there: number } | Content | null>} null if there is no model to translate
 *   the other sentence; what to say instead if the translations differ in any other way
 */
async function comparePronouns({ trace, api }, otherText) {
  if (!api) return null;
  const other = new Trace(await cachedTrace(otherText, api), api);
  const positions = pronounPositions(trace.outputs, other.outputs);
  pronounUnclear = !positions;
  return positions ? { other, here: positions[0], there: positions[1] } : unclearPronoun(trace, other);
}

/** @param {Trace} trace @param {Trace} other @returns {Content} */
function unclearPronoun(trace, other) {
  const [it, ending] = [h("i", {}, "it"), h("i", {}, endingOf(other.text))];
  return {
    title: "What does “it” refer to?",
    text: [...(trace.translation === other.translation
      ? ["This model gives the sentence the same translation if it ends in ", ending, "."]
      : ["If the sentence ends in ", ending, ", this model writes “", bidiText(other.translation),
        "”. The two translations do not differ in the pronoun and the adjective alone."]),
    " So its translations do not show what ", it, " refers to. The model of ", h("code", {}, "regard demo"),
    " has learned such sentences; there, the tour has three more steps."],
    set: {},
  };
}

/** @param {string} text the last word of a sentence of this tour */
function endingOf(text) {
  return /(\w+)\.$/.exec(text)?.[1] ?? "";
}

/**
 * The source words without which the pronoun becomes improbable.
 *
 * @param {Context} context
 * @param {string} otherText
 * @returns {Promise<Content>}
 */
async function occlusionStep(context, otherText) {
  const { trace } = context;
  const compared = await comparePronouns(context, otherText);
  if (compared && "text" in compared) return compared;
  const pronoun = compared?.here ?? (await pronounRow(trace));
  if (pronoun === null) return wordsNotFound();
  const both = compared ? ["The model wrote ", tokenInProse(trace.outputs[compared.here]), " for ", h("i", {}, "it"),
    ". If the sentence ends in ", h("i", {}, endingOf(otherText)), ", it writes ", tokenInProse(compared.other.outputs[compared.there]),
    ", and only the pronoun and the last adjective change. "]
    : ["The token that attends most to ", h("i", {}, "it"), " is ", tokenInProse(trace.outputs[pronoun]), ". "];
  return { text: [...both, ...occlusionText(trace, pronoun)], set: { output: String(pronoun), colour: "occlusion" } };
}

/** @param {Trace} trace @param {number} pronoun @returns {Child[]} */
function occlusionText({ occlusion, probabilities, source, outputs }, pronoun) {
  if (!occlusion) return ["What it depends on was not measured, because the model is too large."];
  const drops = occlusion.words.map((word, i) => ({ word, drop: occlusion.drop(i, pronoun) }))
    .sort((a, b) => b.drop - a.drop).filter(({ drop }, rank) => rank < 2 && drop > 0.05);
  if (!drops.length) return ["No single source word decides it: it stays about as probable when any one of them is removed."];
  return ["Which words does it depend on? ", tokenInProse(outputs[pronoun]), ` has a probability of ${percent(probabilities[pronoun])}. `,
    ...drops.flatMap(({ word, drop }, rank) => [rank ? ", without " : "Without ",
      h("b", {}, detokenize(word.map((position) => source[position])).trim()), ` only ${percent(probabilities[pronoun] - drop)}`]), "."];
}

/**
 * What the heads attend to when the translation of “it” is written: the head that turns from one noun to the other, and
 * the one that reads the word that differs. If no head does, what the pronoun depends on instead.
 *
 * @param {Context} context
 * @param {string} otherText
 * @returns {Promise<Content>}
 */
async function pronounStep(context, otherText) {
  const { trace } = context;
  const compared = await comparePronouns(context, otherText);
  if (!compared) return singlePronounStep(trace);
  if ("text" in compared) return compared;
  const { other, here, there } = compared;
  const heads = await headEvidence(trace, here, other, there);
  if (!heads) return wordsNotFound();
  const turning = maxBy(heads, turn);
  const opening = ["Here ", h("i", {}, "it"), " became ", tokenInProse(trace.outputs[here]), ". "];
  if (turn(turning) < LITTLE_ATTENTION) {
    return {
      text: [...opening, "No head of this model switches from one noun to the other: ", siteName(turning), " comes closest, with ",
        formatNouns(turning.here), " here and ", formatNouns(turning.there), " with ", h("i", {}, endingOf(otherText)),
        ". So attention alone does not show how it decides. ", ...occlusionText(trace, here)],
      set: { view: "translate", output: String(here), colour: "occlusion" },
    };
  }
  const readers = heads.filter((one) => one.site === "cross_attention"
    && (turning.site !== "cross_attention" || one.layer < turning.layer));
  const reader = readers.length ? maxBy(readers, (one) => Math.min(one.here.ending, one.there.ending)) : null;
  const reads = reader && Math.min(reader.here.ending, reader.there.ending) >= CLEAR_PATTERN;
  return {
    text: [...opening, ...(reads ? ["First, ", siteName(reader), " reads ", h("b", {}, endingOf(trace.text)),
      ` (${reader.here.ending.toFixed(2)}). Then `] : ["At that position, "]), siteName(turning), " looks at the noun that fits: ",
    formatNouns(turning.here), ". With ", h("i", {}, endingOf(otherText)), ", where the model wrote ",
    tokenInProse(other.outputs[there]), ", the same head gives ", formatNouns(turning.there),
    ". One word at the end of the sentence moves its attention from one noun to the other."],
    set: headState(turning.site, turning),
  };
}

/** @param {Trace} trace one sentence without a model to translate the other @returns {Promise<Content>} */
async function singlePronounStep(trace) {
  const row = await pronounRow(trace);
  const words = findWords(trace);
  if (row === null || !words) return wordsNotFound();
  const attention = trace.cross_attention;
  const best = maxBy(headsOf(attention).map((head) => ({ ...head, ...nounWeights(attention, head, [row], words) })),
    (one) => Math.max(one.dog, one.street));
  return {
    text: ["The token that attends most to ", h("i", {}, "it"), " is ", tokenInProse(trace.outputs[row]),
      ". At that position, cross-attention ", headName(best), ", the head with the largest weight, gave ", formatNouns(best), "."],
    set: headState("cross_attention", best),
  };
}

/**
 * How far a head turns from one noun to the other: its smaller preference of the two, if they differ.
 *
 * @param {HeadEvidence} head
 */
function turn({ here, there }) {
  const [now, then] = [here.dog - here.street, there.dog - there.street];
  return now * then < 0 ? Math.min(Math.abs(now), Math.abs(then)) : -Math.abs(now + then) / 2;
}

/** @param {HeadEvidence} head */
function siteName({ site, layer, head }) {
  return `${site === "encoder" ? "encoder" : "cross-attention"} ${headName({ layer, head })}`;
}

/**
 * Every head of the encoder, from “it”, and of the cross-attention, from the pronoun, in both sentences.
 *
 * @param {Trace} trace @param {number} row @param {Trace} other @param {number} otherRow
 * @returns {Promise<HeadEvidence[] | null>}
 */
async function headEvidence(trace, row, other, otherRow) {
  const [words, otherWords] = [findWords(trace), findWords(other)];
  if (!words || !otherWords) return null;
  const sites = /** @type {const} */ (["encoder", "cross_attention"]);
  await Promise.all(sites.flatMap((site) => [loadAll(trace[site]), loadAll(other[site])]));
  return sites.flatMap((site) => headsOf(trace[site]).map((head) => {
    const [rows, otherRows] = site === "encoder" ? [words.it, otherWords.it] : [[row], [otherRow]];
    return {
      ...head, site, here: weightsOf(trace[site], head, rows, words), there: weightsOf(other[site], head, otherRows, otherWords),
    };
  }));
}

/** @param {LayerArray} weights @param {Head} head @param {number[]} rows @param {Words} words */
function weightsOf(weights, head, rows, words) {
  const ending = nounWeights(weights, head, rows, { dog: words.ending, street: words.ending }).dog;
  return { ...nounWeights(weights, head, rows, words), ending };
}

/**
 * Activation patching: the place of the network that makes the two sentences differ.
 *
 * @param {Context} context
 * @returns {Promise<Content>}
 */
async function patchingStep(context) {
  const found = await lensesOf(context).patch(WIDE);
  if (!found) {
    return { text: ["Which activation inside the network makes the difference? ", h("code", {}, "regard serve RUN"),
      " can tell, with activation patching."], set: {} };
  }
  const effects = { encoder: unpack(found.effects.encoder), decoder: unpack(found.effects.decoder) };
  const { stack, depth, position, effect, takenOver } = strongestPlace(found, effects);
  const share = Math.min(1, Math.max(0, effect));
  return {
    text: ["Now the model reads that the street is too wide, but at one place inside it gets the vector of the other sentence. ",
      share >= CLEAR_PATTERN ? "One such place is enough: " : "No single place is enough; the strongest is ",
      h("b", {}, `${stack} layer ${depth} at `, tokenInProse(found.labels[stack][position][0])),
      `${share >= CLEAR_PATTERN ? "" : ", which"} brings back ${percent(share)} of the difference between `, tokenInProse(found.tokens[0]), " and ",
      tokenInProse(found.tokens[1]), takenOver === null ? "" : `, and decoder layer ${takenOver} takes it over`,
      ". The maps below show all places; “What makes two sentences differ?” compares any two sentences."],
    set: { against: WIDE, output: String(found.position) },
  };
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

/** @param {Trace} trace the position of the token that attends most to “it”; null if the source does not have it */
async function pronounRow(trace) {
  const { cross_attention: attention } = trace;
  const words = findWords(trace);
  if (!words || !attention.layers) return null;
  await loadAll(attention);
  const rows = trace.outputs.flatMap((token, row) => (token.special ? [] : [row]));
  return maxBy(rows, (one) => Math.max(...headsOf(attention).map(({ layer, head }) =>
    sumOf(attention.head(layer, head), one * attention.keys, words.it))));
}

/**
 * The positions of “it”, “the dog”, “the street” and the last word in the source; null if one is missing. A noun counts
 * with its article, because the encoder mixes the two: heads often look at the article of the noun they mean.
 *
 * @param {Trace} trace
 * @returns {Words | null}
 */
function findWords({ source, text }) {
  const groups = groupWords(source);
  const texts = groups.map((group) => detokenize(group.map((position) => source[position])).trim().toLowerCase());
  /** @param {string} word */
  const find = (word) => groups[texts.indexOf(word)];
  /** @param {string} noun */
  const phrase = (noun) => {
    const at = texts.indexOf(noun);
    return at > 0 && texts[at - 1] === "the" ? [...groups[at - 1], ...groups[at]] : groups[at];
  };
  const [it, dog, street] = [find("it"), phrase("dog"), phrase("street")];
  const ending = groups[texts.findIndex((one) => one.replace(/\W+$/, "") === endingOf(text))];
  return it && dog && street && ending ? { it, dog, street, ending } : null;
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

/** @param {NounWeights} weights */
function formatNouns({ dog, street }) {
  return h("strong", {}, h("i", {}, "the dog"), ` ${dog.toFixed(2)}, `, h("i", {}, "the street"), ` ${street.toFixed(2)}`);
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
