/**
 * A short tour. Each step sets the page's real state, so it shows what it speaks of; whatever it claims, it has
 * counted in the trace at hand.
 *
 * @typedef {import("../dom.js").Child} Child
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../state.js").Values} Values
 * @typedef {import("../trace.js").Token} Token
 * @typedef {import("../trace.js").Trace} Trace
 * @typedef {import("../trace.js").Weights} Weights
 * @typedef {{ says: Child[], set: Values }} Told
 * @typedef {{ title: string, view: string, q?: string, fits?(trace: Trace): boolean,
 *   tell(context: Context): Told | Promise<Told> }} Step a step that does not fit a trace is left out
 */

import { h, label, percent, words } from "../dom.js";
import { Trace as Traced, textOf, wordsOf } from "../trace.js";

const TIRED = "The dog didn't cross the street because it was too tired.";
const WIDE = "The dog didn't cross the street because it was too wide.";
/** of a head's attention, on average: enough to be called a habit */
const HABIT = 0.5;
/** less attention than this to either noun is hardly any */
const HARDLY = 0.3;

/** @param {Trace} trace */
const inRounds = (trace) => trace.rounds.length > 0;
/** @param {Trace} trace */
const wordByWord = (trace) => !inRounds(trace);

/** @type {Step[]} */
const STEPS = [
  { title: "A sentence passes", view: "translate", tell: ({ trace }) => {
    const least = trace.probabilities.indexOf(Math.min(...trace.probabilities));
    return {
      says: [`The model cut the text into ${trace.source.length} tokens and wrote ${trace.said.length}, `
        + `${inRounds(trace) ? "all at once" : "one after the other"}. The bar under each is how probable the model found it. It was least sure of `, label(trace.said[least]),
      `: ${percent(trace.probabilities[least])}. Beside it stand the words it might have said instead.`],
      set: { said: String(least) },
    };
  } },
  { title: "It looks while it writes", view: "translate", tell: async ({ trace }) => {
    const { cross } = trace;
    await ready(cross);
    const layer = cross.layers - 1;
    const map = cross.map(layer, "average");
    const rows = trace.said.flatMap((token, row) => (token.special ? [] : [row]));
    const keys = trace.source.flatMap((token, key) => (token.special ? [] : [key]));
    const [row, key] = greatest(rows.flatMap((one) => keys.map((other) => /** @type {[number, number]} */ ([one, other]))),
      ([one, other]) => map[one * cross.keys + other]);
    return {
      says: ["Before each word the decoder looks at the source. The colour is how much. It was most decided while it wrote ",
        label(trace.said[row]), ": ", percent(map[row * cross.keys + key]), " of its attention went to ",
        label(trace.source[key]), `, in the average of the ${cross.heads} heads of layer ${layer + 1}.`],
      set: { said: String(row), at: "", by: "" },
    };
  } },
  { title: "Heads have habits", view: "heads", tell: async ({ trace }) => {
    const { encoder } = trace;
    await ready(encoder);
    const habits = /** @type {const} */ ([[-1, "the token before it"], [0, "itself"], [1, "the token after it"]]);
    const all = headsOf(encoder).flatMap((head) => habits.map(([step, name]) => ({
      ...head, name, share: along(encoder.head(head.layer, head.head), encoder.keys, step),
    })));
    const { layer, head, name, share } = greatest(all, (one) => one.share);
    return {
      says: ["Each small square is a head with weights of its own. ", share >= HABIT
        ? `The one shown large has the plainest habit: on average a token gives ${percent(share)} of its attention to ${name}. `
        : "No head of this encoder has a plain habit here, such as to look at the token before. The one shown large comes "
          + `nearest: on average a token gives ${percent(share)} of its attention to ${name}. `,
      "Choose others and compare."],
      set: { pane: "encoder", layer: String(layer), head: String(head), heads: "", marks: "" },
    };
  } },
  { title: "It cannot look ahead", view: "heads", fits: wordByWord, tell: async ({ trace }) => {
    const { decoder } = trace;
    await ready(decoder);
    let ahead = 0;
    for (const { layer, head } of headsOf(decoder)) {
      decoder.head(layer, head).forEach((weight, i) => {
        if (i % decoder.keys > Math.floor(i / decoder.keys)) ahead = Math.max(ahead, weight);
      });
    }
    return {
      says: ["The translation also looks at itself, but only back: scores of later words are set to minus infinity before "
        + `the softmax. Above the diagonal the greatest weight of all ${decoder.layers * decoder.heads} heads is `
        + `${ahead === 0 ? "exactly 0" : ahead.toPrecision(2)}. So all of a translation can be learned from in one pass.`],
      set: { pane: "decoder", layer: "0", head: "0", heads: "", marks: "" },
    };
  } },
  { title: "It changes its mind", view: "rounds", fits: inRounds, tell: ({ trace }) => {
    const ways = trace.said.map((_, place) => new Set(trace.rounds.map((round) => round.said[place].id)).size);
    const changed = ways.filter((count) => count > 1).length;
    return {
      says: [`All ${trace.said.length} words were said in the first of ${trace.rounds.length} rounds, none of them knowing the `
        + `others. At ${changed} of the places another word stood at some time: hidden again, it was guessed from the rest.`],
      set: {},
    };
  } },
  { title: "It keeps several in mind", view: "beam", fits: wordByWord, tell: ({ trace }) => {
    /** @param {string} state */
    const count = (state) => trace.beam.filter((node) => node.state === state).length;
    return {
      says: [`A beam search looked at ${trace.beam.length - 1} continuations, dropped ${count("pruned")} and finished `
        + `${count("finished")} translations. The best by score, its way in blue, is the one you read. Choose any `
        + "other to see why it lost."],
      set: { node: "" },
    };
  } },
  { title: "One weight by hand", view: "number", tell: async ({ trace }) => {
    const { layer, head, row, key, weight } = await decided(trace);
    return {
      says: ["Every weight comes from a query, a key, a scale and a softmax. This one, ", label(trace.said[row]), " looking at ",
        label(trace.source[key]), ` with ${weight.toFixed(4)}, is the greatest of all cross attention here. It is followed through `
        + "all of it with this model's own numbers and their shapes: nothing is hidden between the formula and the colour."],
      set: { pane: "cross", layer: String(layer), head: String(head), query: String(row), key: String(key) },
    };
  } },
  { title: "Attention is not the reason", view: "interfere", tell: async ({ trace, api }) => {
    const { layer, head } = await decided(trace);
    return {
      says: ["Where a model looks is not why it says something. To learn that, interfere. ", ...(api
        ? ["Here the head with the greatest weight, ", where({ layer, head }), " (cross attention), is made to say nothing. Where the "
          + "translation stays the same, the model did not need it; mute more and see what breaks."]
        : ["A served page can mute a head or force a word, and see whether the translation changes."])],
      set: { mute: api ? `cross.${layer}.${head}` : "", pane: "cross", layer: String(layer), head: String(head) },
    };
  } },
  { title: "It had to learn this", view: "learning", tell: () => ({
    says: ["Nobody told the heads what to look for: their weights began at random and were learned from pairs of texts, at "
      + "the rate drawn here. Where the run keeps checkpoints, the slider shows alignment forming."],
    set: { step: "" },
  }) },
  { title: "What does “it” look at?", view: "heads", q: TIRED, tell: encoderStep },
  { title: "Too tired", view: "heads", q: TIRED, tell: (context) => pronounStep(context, WIDE) },
  { title: "Too wide", view: "heads", q: WIDE, tell: (context) => pronounStep(context, TIRED) },
];

/** @param {Trace} trace */
function stepsOf(trace) {
  return STEPS.filter((step) => !step.fits || step.fits(trace));
}

/** @type {View} */
export const story = {
  id: "story",
  title: "Story",
  help: "A short tour through this page with the sentence at hand. It ends with the question the paper's readers ask: "
    + "in “the dog didn't cross the street because it was too tired”, what does “it” look at?",
  build: (context) => h("div", { class: "contents card" },
    h("ol", {}, stepsOf(context.trace).map((step, i) => {
      const there = !step.q || step.q === context.trace.text || !!context.api;
      const link = h("a", { href: `#${address(step, i, context)}`, onclick: (/** @type {Event} */ event) => {
        event.preventDefault();
        travel(step, i, context);
      } }, step.title);
      return h("li", {}, there ? link : h("span", {}, step.title, h("span", { class: "quiet" }, " (another page)")),
        step.q && h("span", { class: "quiet" }, " ", words(step.q)));
    }))),
};

/**
 * The step that is told now, above the view that it speaks of.
 *
 * @param {Context} context
 */
export function guide(context) {
  const { trace, state, api, signal } = context;
  const steps = stepsOf(trace);
  const element = h("section", { class: "guide", "aria-label": "The story", "aria-live": "polite", hidden: true });
  /** the step that is shown */
  let shown = "";

  const show = async () => {
    const asked = state.get("story");
    if (asked === shown) return;
    shown = asked;
    element.hidden = true;
    if (asked === "") return;
    const at = Math.min(Math.max((Number.parseInt(asked, 10) || 1) - 1, 0), steps.length - 1);
    const step = steps[at];
    const here = !step.q || step.q === trace.text;
    if (api && !here && state.get("q") === step.q) return; // the page is on its way to that sentence
    /** @type {Told} */
    let told;
    try {
      told = here ? await step.tell(context) : elsewhere(step, at, context);
    } catch (error) {
      told = { says: [error instanceof Error ? error.message : String(error)], set: {} };
    }
    if (signal.aborted || shown !== asked) return;
    // On arrival the page is set for the step; after that it is the reader's.
    if (here && state.get("arrive")) state.set({ ...told.set, arrive: "" });
    /** @param {number} to @param {string} text @param {string} kind */
    const button = (to, text, kind) => h("button", {
      type: "button", class: kind, disabled: !steps[to], onclick: () => {
        const focused = text;
        travel(steps[to], to, context);
        setTimeout(() => /** @type {HTMLElement | null} */ (element.querySelector(`[data-name="${focused}"]`))?.focus());
      }, "data-name": text,
    }, text);
    element.hidden = false;
    element.replaceChildren(
      h("p", { class: "count quiet" }, `The story, ${at + 1} of ${steps.length}`),
      h("h2", {}, step.title), h("p", { class: "tale" }, ...told.says),
      h("div", { class: "controls" }, button(at - 1, "Back", "plain"),
        at + 1 < steps.length ? button(at + 1, "Next", "primary") : "",
        h("button", { type: "button", class: "plain", onclick: () => state.set({ story: "" }) }, "Leave the story")));
  };
  state.listen(show);
  show();
  return element;
}

/**
 * Go to a step. One about another sentence goes there by its link, which the form of the page follows.
 *
 * @param {Step} step
 * @param {number} index
 * @param {Context} context
 */
function travel(step, index, context) {
  const link = address(step, index, context);
  if (link.has("q") && link.get("q") !== context.trace.text) location.hash = link.toString();
  else context.state.go(link);
}

/**
 * The link to a step: what it shows in its view is set on arrival.
 *
 * @param {Step} step
 * @param {number} index
 * @param {Context} context
 */
function address(step, index, { trace, state, api }) {
  const asked = ["q", "beam", "alpha", "prefix"].flatMap((name) => (state.get(name) ? [[name, state.get(name)]] : []));
  const kept = api && step.q && step.q !== trace.text ? { q: step.q } : Object.fromEntries(asked);
  return new URLSearchParams({ ...kept, view: step.view, story: String(index + 1), arrive: "1" });
}

/**
 * A step about another sentence than this page's.
 *
 * @param {Step} step
 * @param {number} index
 * @param {Context} context
 * @returns {Told}
 */
function elsewhere(step, index, context) {
  const says = context.api
    ? ["This step is about another sentence. ", h("button", {
      type: "button", class: "plain", onclick: () => travel(step, index, context),
    }, "Go there")]
    : ["This page holds another sentence. ", h("code", {}, `regard look RUN "${step.q}"`),
      " makes the page of this one; regard serve RUN shows all of them."];
  return { says, set: {} };
}

// ----- the dog

/** @param {Context} context @returns {Promise<Told>} */
async function encoderStep({ trace }) {
  const { encoder } = trace;
  await ready(encoder);
  const found = places(trace);
  if (!found) return lost();
  const { layer, head, dog, street } = greatest(headsOf(encoder).map((one) => ({
    ...one, ...looks(encoder, one, found.it, found),
  })), (one) => Math.max(one.dog, one.street));
  const most = Math.max(dog, street);
  return {
    says: ["In the encoder the source looks at itself. Of all its heads, ", where({ layer, head }),
      " lets ", h("i", {}, "it"), " look most at one of the two nouns: ", pair(dog, street), ". ", most < HARDLY
        ? "That is hardly any: if this model knows what “it” means, it does not show here. Go on to the decoder."
        : `So here it looks at the ${dog > street ? "dog" : "street"}.`],
    set: { pane: "encoder", layer: String(layer), head: String(head), heads: "", marks: "" },
  };
}

/**
 * What the decoder looks at while it writes the word for “it”, in the head where the two sentences differ most.
 *
 * @param {Context} context
 * @param {string} otherText
 * @returns {Promise<Told>}
 */
async function pronounStep({ trace, api }, otherText) {
  const other = api ? new Traced(await remember(otherText, api), api) : null;
  const apart = other && parting(trace.said, other.said);
  const mine = await pronoun(trace, apart?.[0]);
  const theirs = other && await pronoun(other, apart?.[1]);
  if (!mine || (other && !theirs)) return lost();
  const all = mine.heads.map((one, i) => ({ ...one, then: theirs?.heads[i] }));
  const best = greatest(all, (one) => (one.then
    ? Math.abs(one.dog - one.street - one.then.dog + one.then.street) : Math.max(one.dog, one.street)));
  const [now, then] = [noun(best), best.then && noun(best.then)];
  const last = /too (\w+)\.$/.exec(otherText)?.[1] ?? "";
  const it = () => h("i", {}, "it");
  const set = { pane: "cross", layer: String(best.layer), head: String(best.head), heads: "", marks: "" };
  return {
    says: ["The model wrote “", words(trace.translation), "” ", ...(apart
      ? ["Here ", it(), " became ", label(trace.said[mine.row]), ", the first word that ", h("i", {}, last), " at the end would change. "]
      : ["The word that looks most at ", it(), " is ", label(trace.said[mine.row]), ". "]),
      "While the model wrote it, ", where(best), " (cross attention), ",
      best.then ? "of all heads the one that changes most" : "the most decided of all heads", ", gave ", pair(best.dog, best.street),
      ...(best.then && theirs && other ? ["; with ", h("i", {}, last), ", ", ...(apart ? [it(), " became "] : ["that word is "]),
        label(other.said[theirs.row]), " and the same head gave ", pair(best.then.dog, best.then.street), ". ",
        now && then && now !== then
          ? "One word at the end of the sentence turned its eyes from one noun to the other."
          : "Even in this head it does not turn from one noun to the other."]
        : ["."])],
    set,
  };
}

/**
 * Where the word for “it” stands in two translations that differ in two words: the last is the one for “tired” or “wide”.
 *
 * @param {Token[]} a
 * @param {Token[]} b
 * @returns {[number, number] | null} the place in each; null where they differ otherwise
 */
function parting(a, b) {
  const [one, other] = [a, b].map((said) => wordsOf(said).map((places) => ({
    place: places[0], text: textOf(places.map((place) => said[place])),
  })));
  const differ = one.flatMap((word, i) => (word.text === other[i]?.text ? [] : [i]));
  if (one.length !== other.length || differ.length !== 2) return null;
  return [one[differ[0]].place, other[differ[0]].place];
}

/** @type {Map<string, Promise<import("../trace.js").TraceJson>>} */
const remembered = new Map();

/** @param {string} q @param {NonNullable<Context["api"]>} api */
function remember(q, api) {
  const asked = remembered.get(q) ?? api.trace({ q });
  remembered.set(q, asked);
  asked.catch(() => remembered.delete(q));
  return asked;
}

/**
 * The row that writes the word for “it”: where nothing else tells, the one that looks at it most.
 *
 * @param {Trace} trace
 * @param {number} [known]
 */
async function pronoun(trace, known) {
  const { cross } = trace;
  await ready(cross);
  const found = places(trace);
  if (!found) return null;
  const rows = trace.said.flatMap((token, row) => (token.special ? [] : [row]));
  const row = known ?? greatest(rows, (one) => Math.max(...headsOf(cross).map(({ layer, head }) =>
    sum(cross.head(layer, head), one * cross.keys, found.it))));
  return { row, heads: headsOf(cross).map((one) => ({ ...one, ...looks(cross, one, [row], found) })) };
}

/** @param {Trace} trace where “it”, the dog and the street are; null where one is missing */
function places({ source }) {
  const groups = wordsOf(source);
  /** @param {string} word */
  const find = (word) => groups.find((group) =>
    textOf(group.map((place) => source[place])).trim().toLowerCase() === word);
  const [it, dog, street] = ["it", "dog", "street"].map(find);
  return it && dog && street ? { it, dog, street } : null;
}

/** @returns {Told} */
function lost() {
  return { says: ["This model cuts the sentence so that “it”, “dog” and “street” are not words of it; there is nothing to point at."], set: {} };
}

/**
 * @param {Weights} weights
 * @param {{ layer: number, head: number }} where
 * @param {number[]} rows
 * @param {{ dog: number[], street: number[] }} columns
 */
function looks(weights, { layer, head }, rows, { dog, street }) {
  const map = weights.head(layer, head);
  /** @param {number[]} keys */
  const mean = (keys) => rows.reduce((total, row) => total + sum(map, row * weights.keys, keys), 0) / rows.length;
  return { dog: mean(dog), street: mean(street) };
}

/** @param {{ dog: number, street: number }} one the noun that is looked at; null where neither is, or hardly */
function noun({ dog, street }) {
  if (Math.max(dog, street) < HARDLY) return null;
  return dog > street ? "dog" : "street";
}

/** @param {number} dog @param {number} street */
function pair(dog, street) {
  return h("strong", {}, h("i", {}, "dog"), ` ${dog.toFixed(2)}, `, h("i", {}, "street"), ` ${street.toFixed(2)}`);
}

/** @param {{ layer: number, head: number }} one */
function where({ layer, head }) {
  return `head ${head + 1} of layer ${layer + 1}`;
}

// ----- counting

/**
 * The greatest weight of cross attention between two words.
 *
 * @param {Trace} trace
 */
async function decided({ cross, said, source }) {
  await ready(cross);
  const all = headsOf(cross).flatMap((one) => {
    const map = cross.head(one.layer, one.head);
    return said.flatMap((token, row) => (token.special ? [] : source.flatMap((other, key) => (other.special ? []
      : [{ ...one, row, key, weight: map[row * cross.keys + key] }]))));
  });
  return greatest(all, (one) => one.weight);
}

/** @param {Weights} weights */
async function ready(weights) {
  await Promise.all(Array.from({ length: weights.layers }, (_, layer) => weights.load(layer)));
}

/** @param {Weights} weights */
function headsOf({ layers, heads }) {
  return Array.from({ length: layers * heads }, (_, i) => ({ layer: Math.floor(i / heads), head: i % heads }));
}

/**
 * The mean weight beside the diagonal.
 *
 * @param {Float32Array} map
 * @param {number} keys
 * @param {number} step
 */
function along(map, keys, step) {
  let total = 0;
  let count = 0;
  for (let row = 0; row < map.length / keys; row++) {
    if (row + step < 0 || row + step >= keys) continue;
    total += map[row * keys + row + step];
    count++;
  }
  return count ? total / count : 0;
}

/** @param {Float32Array} map @param {number} start @param {number[]} keys */
function sum(map, start, keys) {
  return keys.reduce((total, key) => total + map[start + key], 0);
}

/**
 * @template T
 * @param {T[]} all
 * @param {(one: T) => number} value
 * @returns {T}
 */
function greatest(all, value) {
  if (!all.length) throw new Error("This model has no attention of this kind, so there is nothing to show.");
  return all.reduce((best, one) => (value(one) > value(best) ? one : best));
}
