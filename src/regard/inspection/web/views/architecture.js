/**
 * Architecture: a picture of how data flow through the model, with real shapes and numbers. Every part opens the
 * view that explains it further.
 *
 * @typedef {import("../dom.js").Child} Child
 * @typedef {import("../lenses.js").ArchitectureJson} ArchitectureJson
 * @typedef {import("../lenses.js").EmbeddingsJson} EmbeddingsJson
 * @typedef {import("../lenses.js").Stack} Stack
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../trace.js").Token} Token
 * @typedef {{ id: string, stack: Stack, kind: "embedding" | "attention" | "cross_attention" | "feed_forward" | "output",
 *   layer: number, index: number, name: string, shape: string }} Stage one box of the picture; index: in the stream
 */

import { paintDiverging, tint } from "../canvas.js";
import { NARROW, bar, h, range, scrollFade, setTabStop, svg, tableToggle, tokenBar, tokenLabel } from "../dom.js";
import { compact, grouped, percent, signed } from "../format.js";
import { lensesOf } from "../lenses.js";
import { onThemeChange } from "../theme.js";
import { errorMessage, runningText, tokenText, unpack } from "../trace.js";

const MAP_WIDTH = 520;
const MAP_HEIGHT = 380;
/** neurons that are listed */
const STRONGEST = 6;
/** values of a vector that are written out */
const FIRST_VALUES = 6;
/** whether the numbers of a part are below the picture, not beside it */
const STACKED = matchMedia("(max-width: 900px)");

/** @type {View} */
export const architectureView = {
  id: "architecture",
  title: "Architecture",
  help: "How data flows through the model. The colour shows how much each part changes the vector of each token. "
    + "Select a part to see its numbers; select a token to follow it.",
  applies: (trace) => trace.encoder.layers > 0 && trace.cross_attention.layers > 0 && !trace.nonAutoregressive,
  build,
};

/** @param {Context} context */
function build(context) {
  const { trace, api } = context;
  if (!trace.lenses?.architecture && !api?.lenses) {
    return h("p", { class: "card" }, "This file has no activations; ", h("code", {}, 'regard look RUN "…" --lenses'),
      " includes them, and ", h("code", {}, "regard serve RUN"), " computes them.");
  }
  const element = h("div", { class: "architecture" }, h("p", { class: "status", role: "status" }, "Computing…"));
  lensesOf(context).architecture().then((json) => {
    if (json) element.replaceChildren(...picture(context, new Flow(json, context)));
  }).catch((error) => {
    element.replaceChildren(h("p", { class: "status wrong", role: "status" }, errorMessage(error)));
  });
  return element;
}

/** The activations of one sentence. */
class Flow {
  /** @param {ArchitectureJson} json @param {Context} context */
  constructor(json, { trace }) {
    this.json = json;
    /** @type {Record<Stack, Token[]>} the tokens that each stack reads */
    this.tokens = { encoder: trace.source, decoder: trace.inputs };
    this.stream = { encoder: unpack(json.encoder.stream), decoder: unpack(json.decoder.stream) };
    this.hidden = { encoder: unpack(json.encoder.hidden), decoder: unpack(json.decoder.hidden) };
    this.stages = [...stagesOf(json, this.tokens, "encoder"), ...stagesOf(json, this.tokens, "decoder")];
  }

  /**
   * The vector of a token after a stage.
   *
   * @param {Stack} stack
   * @param {number} index of the stage
   * @param {number} position
   */
  vector(stack, index, position) {
    const width = this.json.d_model;
    const start = (index * this.tokens[stack].length + position) * width;
    return this.stream[stack].subarray(start, start + width);
  }

  /**
   * How far a sub-layer moves the vector of a token, relative to its length before.
   *
   * @param {Stage} stage
   * @param {number} position
   */
  change({ stack, index }, position) {
    if (!index) return 0;
    const [before, after] = [this.vector(stack, index - 1, position), this.vector(stack, index, position)];
    return length(after.map((value, i) => value - before[i])) / (length(before) || 1);
  }

  /** @param {Stage} stage @param {number} position the neurons of a feed-forward network */
  neurons({ stack, layer }, position) {
    const width = this.json.d_ff;
    const start = (layer * this.tokens[stack].length + position) * width;
    return this.hidden[stack].subarray(start, start + width);
  }
}

/** @param {Float32Array} vector */
function length(vector) {
  return Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0));
}

/**
 * @param {ArchitectureJson} json
 * @param {Record<Stack, Token[]>} tokens
 * @param {Stack} stack
 * @returns {Stage[]}
 */
function stagesOf(json, tokens, stack) {
  const count = tokens[stack].length;
  const shape = `${count} × ${json.d_model}`;
  const names = { attention: "Self-attention", cross_attention: "Cross-attention", feed_forward: "Feed-forward" };
  /** @type {Stage[]} */
  const stages = json[stack].stages.map((id, index) => {
    if (id === "embedding") {
      const name = json.position === "sinusoidal" || json.position === "learned" ? "Embedding + position" : "Embedding";
      return { id: `${stack}.embedding`, stack, kind: "embedding", layer: -1, index, name, shape };
    }
    const [layer, kind] = /** @type {[string, "attention" | "cross_attention" | "feed_forward"]} */ (id.split("."));
    return { id: `${stack}.${id}`, stack, kind, layer: Number(layer), index, name: names[kind], shape };
  });
  if (stack === "decoder") {
    const name = "Projection + softmax";
    stages.push({
      id: "output", stack, kind: "output", layer: -1, index: stages.length - 1, name, shape: `${count} × ${grouped(json.embeddings.target.size)}`,
    });
  }
  return stages;
}

// -------------------------------------------------------------------------------------------------
// The picture

/** @param {Context} context @param {Flow} flow */
function picture(context, flow) {
  const { state, signal, trace } = context;
  const strongest = Math.max(...flow.stages.flatMap((stage) => (stage.kind === "output" ? []
    : flow.tokens[stage.stack].map((_, i) => flow.change(stage, i)))));
  const boxes = flow.stages.map((stage) => stageBox(context, flow, stage, strongest));
  const detail = h("section", { class: "card part", "aria-live": "polite" });
  /** @param {Stack} stack */
  const position = (stack) => {
    const [name, count] = [stack === "encoder" ? "read" : "output", flow.tokens[stack].length];
    return state.get(name) === "" ? Math.min(1, count - 1) : state.index(name, count);
  };
  const lines = {
    encoder: tokenLine(context, "encoder", flow.tokens.encoder, "read", "Tokens of the source"),
    decoder: tokenLine(context, "decoder", flow.tokens.decoder, "output", "Tokens that the decoder has read"),
  };
  let [shown, stageShown] = ["", ""];
  const update = () => {
    if (state.get("view") !== "architecture") return;
    const found = flow.stages.findIndex(({ id }) => id === state.get("stage"));
    const current = flow.stages[found < 0 ? 0 : found];
    const at = position(current.stack);
    const now = `${current.id} ${position("encoder")} ${position("decoder")}`;
    if (now === shown) return;
    shown = now;
    boxes.forEach(({ button }, i) => button.setAttribute("aria-pressed", String(flow.stages[i] === current)));
    setTabStop(boxes.map(({ button }) => button), boxes[Math.max(found, 0)].button);
    for (const stack of /** @type {Stack[]} */ (["encoder", "decoder"])) lines[stack].mark(position(stack));
    boxes.forEach(({ mark }, i) => mark(position(flow.stages[i].stack)));
    detail.replaceChildren(h("div", { class: "part-body" }, ...describe(context, flow, current, at)));
    if (STACKED.matches && stageShown && stageShown !== current.id) detail.scrollIntoView({ block: "start" });
    stageShown = current.id;
  };
  state.subscribe(update);
  requestAnimationFrame(update);
  onThemeChange(() => boxes.forEach(({ paint }) => paint()), signal);
  const of = (/** @type {Stack} */ stack) => boxes.filter((_, i) => flow.stages[i].stack === stack);
  const first = flow.stages.filter(({ stack }) => stack === "encoder").length;
  /** @param {KeyboardEvent} event */
  const onkeydown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, ArrowRight: first, ArrowLeft: -first }[event.key];
    const next = step && boxes[boxes.findIndex(({ button }) => button === document.activeElement) + step]?.button;
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.click();
  };
  return [
    h("div", { class: "card stacks", role: "group", "aria-label": "Parts of the model", onkeydown },
      stackColumn("Encoder", "reads the source", lines.encoder.element, of("encoder").map(({ button }) => button),
        h("p", { class: "flow-end" }, "Output of the encoder: keys and values of every cross-attention →")),
      stackColumn("Decoder", "writes the translation", lines.decoder.element, of("decoder").map(({ button }) => button),
        h("p", { class: "flow-end", dir: "auto" }, "Next tokens: ",
          runningText(trace.outputs).map(({ text, spaceBefore }) => `${spaceBefore ? " " : ""}${text}`).join(""))),
      h("p", { class: "legend quiet" }, scale(), `0 to ${compact(strongest)}: length of the change, relative to the vector before; in the `
        + "last box 0 to 1: probability of the next token")),
    detail,
  ];
}

function scale() {
  const cells = range(9).map((i) => {
    const cell = h("span", { "aria-hidden": "true" });
    tint(cell, i / 8);
    return cell;
  });
  return h("span", { class: "scale" }, cells);
}

/**
 * @param {string} name
 * @param {string} what
 * @param {HTMLElement} line
 * @param {HTMLElement[]} boxes
 * @param {HTMLElement} end
 */
function stackColumn(name, what, line, boxes, end) {
  return h("div", { class: "stack" }, h("h3", {}, name, " ", h("span", { class: "quiet" }, what)), line,
    h("div", { class: "stream" }, boxes), end);
}

/**
 * The tokens that a stack reads, to select one of them.
 *
 * @param {Context} context
 * @param {Stack} stack
 * @param {Token[]} tokens
 * @param {string} name of the state
 * @param {string} label
 */
function tokenLine({ state, signal }, stack, tokens, name, label) {
  const buttons = tokens.map((token, i) => h("button", {
    type: "button", class: `token-choice${token.special ? " special" : ""}`, onclick: () => state.set({ [name]: String(i) }),
  }, tokenText(token).replace(/^▁/, "") || "␣"));
  /** @param {KeyboardEvent} event */
  const onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && buttons[buttons.findIndex((one) => one === document.activeElement) + step];
    event.stopPropagation();
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.click();
  };
  const element = scrollFade(
    h("div", { class: "token-line", role: "group", dir: "auto", "aria-label": label, onkeydown }, buttons), signal);
  /** @param {number} at */
  const mark = (at) => {
    buttons.forEach((one, i) => one.setAttribute("aria-pressed", String(i === at)));
    setTabStop(buttons, buttons[at]);
    const top = buttons[at].offsetTop - buttons[0].offsetTop;
    const isVisible = top >= element.scrollTop && top + buttons[at].offsetHeight <= element.scrollTop + element.clientHeight;
    if (!isVisible) element.scrollTop = top;
  };
  return { element, mark };
}

/**
 * One part as a button: its name, the shape of its output, and how much it changes each token.
 *
 * @param {Context} context
 * @param {Flow} flow
 * @param {Stage} stage
 * @param {number} strongest the change that gets the strongest colour
 */
function stageBox({ state, trace }, flow, stage, strongest) {
  const cells = flow.tokens[stage.stack].map(() => h("span", {}));
  const paint = () => cells.forEach((cell, i) => {
    const share = stage.kind === "output" ? trace.probabilities[i] : flow.change(stage, i) / strongest;
    tint(cell, stage.kind === "embedding" ? null : share);
  });
  paint();
  const layer = stage.layer >= 0 ? h("span", { class: "quiet" }, `layer ${stage.layer + 1} `) : null;
  const button = h("button", {
    type: "button", class: `stage ${stage.kind}`, "aria-pressed": "false", onclick: () => state.set({ stage: stage.id }),
  }, h("span", { class: "stage-name" }, layer, stage.name), h("span", { class: "stage-shape" }, stage.shape),
  h("span", { class: "strip", "aria-hidden": "true" }, cells));
  /** @param {number} at */
  const mark = (at) => cells.forEach((cell, i) => cell.classList.toggle("lit", i === at));
  return { button, paint, mark };
}

// -------------------------------------------------------------------------------------------------
// One part

/**
 * @param {Context} context
 * @param {Flow} flow
 * @param {Stage} stage
 * @param {number} at position of the token
 * @returns {Child[]}
 */
function describe(context, flow, stage, at) {
  const token = flow.tokens[stage.stack][at];
  const name = stage.layer >= 0 ? `${stage.stack === "encoder" ? "Encoder" : "Decoder"} layer ${stage.layer + 1}: ${stage.name.toLowerCase()}`
    : stage.kind === "embedding" ? `${stage.name} of the ${stage.stack}` : stage.name;
  const { parameters } = flow.json;
  const weights = stage.kind === "output"
    ? parameters.projection ?? parameters["decoder.projection"] ?? null : parameters[stage.id] ?? null;
  const count = weights === null ? "shares the weights of an embedding" : `${grouped(weights)} weights`;
  const specific = {
    embedding: embeddingPart, attention: attentionPart, cross_attention: attentionPart, feed_forward: feedForwardPart, output: outputPart,
  }[stage.kind];
  return [
    h("h3", {}, name, " ", h("span", { class: "quiet" }, count)),
    h("p", { class: "description" }, EXPLANATIONS[stage.kind](flow.json, stage)),
    h("p", { class: "shapes" }, shapesOf(flow, stage)),
    stage.kind === "embedding" || stage.kind === "output" ? null : changeOf(flow, stage, at, token),
    ...specific(context, flow, stage, at),
    stage.kind === "output" ? null : vectorOf(context, flow, stage, at, token),
    links(context, flow, stage, at),
  ];
}

/** @type {Record<Stage["kind"], (json: ArchitectureJson, stage: Stage) => string>} what each part does */
const EXPLANATIONS = {
  embedding: ({ position, d_model }) => `Each token is replaced by a learned vector of ${d_model} numbers. `
    + (position === "sinusoidal" || position === "learned" ? "A vector for its position is added, because attention does not see the order."
      : position === "none" ? "No positions are added." : `Word order enters later: ${position} positions act inside self-attention.`),
  attention: ({ heads, pre_norm }, { stack }) => `Each token looks at ${stack === "encoder" ? "all tokens of the sentence" : "itself and the tokens before it"} `
    + `with ${heads} head${heads > 1 ? "s" : ""}, and combines their values. ${residual(pre_norm)}`,
  cross_attention: ({ heads, pre_norm }) => `Each token of the translation looks at the output of the encoder for the source, with ${heads} `
    + `head${heads > 1 ? "s" : ""}. This is the only way from the source to the translation. ${residual(pre_norm)}`,
  feed_forward: ({ d_ff, activation, pre_norm }) => `Each token passes separately through ${d_ff} neurons (${activation}) and back to the width of the model. ${residual(pre_norm)}`,
  output: () => "The last vector is compared with the vector of every token of the vocabulary. Softmax turns the scores into probabilities.",
};

/** @param {boolean} pre */
function residual(pre) {
  return pre ? "The result is added to the vector (residual connection)."
    : "The result is added to the vector, and the sum is normalized (residual connection).";
}

/** @param {Flow} flow @param {Stage} stage the shapes from input to output */
function shapesOf({ json, tokens }, stage) {
  const count = tokens[stage.stack].length;
  const keys = stage.kind === "cross_attention" ? tokens.encoder.length : count;
  const { d_model, d_ff, heads, d_k } = json;
  const size = grouped(json.embeddings[stage.stack === "encoder" ? "source" : "target"].size);
  return {
    embedding: `${count} tokens of ${size} → ${count} × ${d_model}`,
    attention: `${count} × ${d_model} → queries, keys ${heads} × ${count} × ${d_k} → weights ${heads} × ${count} × ${count} → ${count} × ${d_model}`,
    cross_attention: `queries ${heads} × ${count} × ${d_k}, keys ${heads} × ${keys} × ${d_k} → weights ${heads} × ${count} × ${keys} → ${count} × ${d_model}`,
    feed_forward: `${count} × ${d_model} → ${count} × ${d_ff} → ${count} × ${d_model}`,
    output: `${count} × ${d_model} → ${count} × ${size}`,
  }[stage.kind];
}

/**
 * @param {Flow} flow
 * @param {Stage} stage
 * @param {number} at
 * @param {Token} token
 */
function changeOf(flow, stage, at, token) {
  const [before, after] = [flow.vector(stage.stack, stage.index - 1, at), flow.vector(stage.stack, stage.index, at)];
  const cosine = before.reduce((sum, value, i) => sum + value * after[i], 0) / (length(before) * length(after) || 1);
  return h("p", { class: "change" }, "The vector of ", h("strong", {}, tokenLabel(token)), ` had length ${compact(length(before))}. This part moves it by `,
    h("strong", {}, compact(length(after.map((value, i) => value - before[i])))), ` (${percent(flow.change(stage, at))}), to length `
    + `${compact(length(after))}. Cosine before and after: ${signed(cosine)}.`);
}

/** @param {Context} context @param {Flow} flow @param {Stage} stage @param {number} at @returns {Child[]} */
function attentionPart({ trace }, flow, stage, at) {
  const site = stage.kind === "cross_attention" ? "cross_attention" : stage.stack;
  const array = trace[site];
  if (array.missing) return [];
  const element = h("div", { class: "facts" });
  const draw = () => {
    const average = array.matrix(stage.layer, "average");
    const columns = trace.columns[site];
    const weights = columns.map((token, key) => ({ token, weight: average[at * array.keys + key] }));
    weights.sort((a, b) => b.weight - a.weight);
    element.replaceChildren(h("p", { class: "quiet" }, "Attends most to (average of the heads):"),
      h("ol", { class: "shares" }, weights.slice(0, 4).map(({ token, weight }) => h("li", { class: "share" }, tokenBar(token, weight, percent(weight))))));
  };
  const loading = array.load(stage.layer);
  if (loading) loading.then(draw, () => {});
  else draw();
  return [element];
}

/** @param {Context} _ @param {Flow} flow @param {Stage} stage @param {number} at @returns {Child[]} */
function feedForwardPart(_, flow, stage, at) {
  const neurons = flow.neurons(stage, at);
  const active = neurons.filter((value) => value > 0).length;
  const order = range(neurons.length).sort((a, b) => Math.abs(neurons[b]) - Math.abs(neurons[a])).slice(0, STRONGEST);
  const most = Math.abs(neurons[order[0]]) || 1;
  return [h("div", { class: "facts" },
    h("p", { class: "quiet" }, `${active} of ${neurons.length} neurons are above 0. The strongest:`),
    h("ol", { class: "shares" }, order.map((i) => h("li", { class: "share" },
      h("span", { class: "token" }, `neuron ${i + 1}`), bar(Math.abs(neurons[i]) / most), h("span", { class: "number" }, compact(neurons[i]))))))];
}

/** @param {Context} context @param {Flow} flow @param {Stage} stage @param {number} at @returns {Child[]} */
function outputPart({ trace }, flow, stage, at) {
  return [h("div", { class: "facts" },
    h("p", { class: "quiet" }, "After ", tokenLabel(flow.tokens.decoder[at]), ", the most probable next tokens are:"),
    h("ol", { class: "shares" }, trace.candidates[at].slice(0, STRONGEST).map((one) =>
      h("li", { class: "share" }, tokenBar(one, one.probability, percent(one.probability))))))];
}

/**
 * The vector itself: a strip of colours, and its first values.
 *
 * @param {Context} context
 * @param {Flow} flow
 * @param {Stage} stage
 * @param {number} at
 * @param {Token} token
 */
function vectorOf({ signal }, flow, stage, at, token) {
  const vector = flow.vector(stage.stack, stage.index, at);
  const canvas = h("canvas", { class: "vector", role: "img", "aria-label": `The ${vector.length} values of the vector` });
  const most = Math.max(...vector.map(Math.abs)) || 1;
  const draw = () => paintDiverging(canvas, vector, vector.length, [0], range(vector.length), most);
  draw();
  onThemeChange(draw, signal);
  const table = tableToggle("Values of the vector", () => ({
    head: ["dimension", "value"], rows: Array.from(vector, (value, i) => [i + 1, signed(value)]),
  }));
  return h("div", { class: "facts" }, h("p", { class: "quiet" }, "After this part, the vector of ", tokenLabel(token), " is: "
    + `${Array.from(vector.subarray(0, FIRST_VALUES), (value) => value.toFixed(2).replace("-", "−")).join(", ")}, …`),
  canvas, table.element);
}

/**
 * Buttons that open other views at this part.
 *
 * @param {Context} context
 * @param {Flow} flow
 * @param {Stage} stage
 * @param {number} at
 */
function links({ state }, flow, stage, at) {
  const site = stage.kind === "cross_attention" ? "cross_attention" : stage.stack;
  const place = { site, layer: String(stage.layer) };
  /** @type {Record<Stage["kind"], [text: string, changes: Record<string, string>][]>} */
  const targets = {
    embedding: [["Which words are possible errors? Translate", { view: "translate" }], ["How were they learned? Training", { view: "training" }]],
    attention: [
      ["All heads: Heads", { view: "heads", ...place }],
      ["How a weight is computed: One weight", { view: "weight", ...place, query: String(at) }], ["Mute heads: Intervene", { view: "intervene" }],
    ],
    cross_attention: [
      ["All heads: Heads", { view: "heads", ...place }],
      ["How a weight is computed: One weight", { view: "weight", ...place, query: String(at) }], ["Mute heads: Intervene", { view: "intervene" }],
    ],
    feed_forward: [["What would the model predict after this layer? Lenses", { view: "lenses" }], ["How was it learned? Training", { view: "training" }]],
    output: [
      ["The search for the best translation: Beam", { view: "beam" }], ["Force another word: Intervene", { view: "intervene" }],
      ["Why this word? Lenses", { view: "lenses", output: String(at) }], ["A tour of the model", { view: "tour" }],
    ],
  };
  return h("div", { class: "links", role: "group", "aria-label": "Other views" }, targets[stage.kind].map(([text, changes]) =>
    h("button", { type: "button", class: "plain", onclick: () => state.set(changes) }, `${text} →`)));
}

// -------------------------------------------------------------------------------------------------
// Embeddings

/** @param {Context} context @param {Flow} flow @param {Stage} stage @param {number} at @returns {Child[]} */
function embeddingPart(context, flow, stage, at) {
  const json = flow.json.embeddings[stage.stack === "encoder" ? "source" : "target"];
  const token = flow.tokens[stage.stack][at];
  const near = json.neighbours[token.id] ?? [];
  const closest = near.length ? h("ol", { class: "shares" }, near.map((one) => h("li", { class: "share" }, tokenBar(one, Math.max(one.cosine, 0), signed(one.cosine)))))
    : null;
  return [
    h("div", { class: "facts" },
      h("p", { class: "quiet" }, ...(closest ? ["The vectors nearest to ", tokenLabel(token), " (cosine):"]
        : [tokenLabel(token), " is a special token. Select another one to see its nearest vectors."])), closest),
    h("details", { class: "map-of-tokens", open: !NARROW }, h("summary", {}, "Map of the embeddings"),
      embeddingMap(json, token, near.map(({ id }) => id), flow.tokens[stage.stack].map(({ id }) => id))),
  ];
}

/**
 * The 2-D map of the vocabulary. The token, its neighbours and the sentence have names; all others are dots.
 *
 * @param {EmbeddingsJson} json
 * @param {Token} token
 * @param {number[]} near
 * @param {number[]} sentence
 */
function embeddingMap(json, token, near, sentence) {
  const points = unpack(json.points);
  const xs = json.tokens.map((_, i) => points[2 * i]);
  const ys = json.tokens.map((_, i) => points[2 * i + 1]);
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  /** @param {number} i @returns {[number, number]} */
  const place = (i) => [
    12 + (xs[i] - left) / (right - left || 1) * (MAP_WIDTH - 84), MAP_HEIGHT - 12 - (ys[i] - low) / (high - low || 1) * (MAP_HEIGHT - 28)];
  const rank = new Map([...sentence.map((id) => /** @type {const} */ ([id, 1])), ...near.map((id) => /** @type {const} */ ([id, 2])), [token.id, 3]]);
  /** @type {[number, number][]} where names are, so that they do not overlap */
  const named = [];
  const dots = json.tokens.map((_, i) => i).sort((a, b) => (rank.get(json.tokens[a].id) ?? 0) - (rank.get(json.tokens[b].id) ?? 0));
  const drawn = dots.map((i) => {
    const [x, y] = place(i);
    const kind = ["other", "of-sentence", "near", "selected"][rank.get(json.tokens[i].id) ?? 0];
    return svg("circle", { class: kind, cx: x.toFixed(1), cy: y.toFixed(1), r: kind === "other" ? 2 : 4 }, svg("title", {}, tokenText(json.tokens[i])));
  });
  const labels = dots.filter((i) => rank.has(json.tokens[i].id)).reverse().map((i) => {
    const [x, y] = place(i);
    if (named.some(([a, b]) => Math.abs(a - x) < 56 && Math.abs(b - y) < 12)) return null;
    named.push([x, y]);
    return svg("text", { x: (x + 7).toFixed(1), y: (y + 4).toFixed(1), class: rank.get(json.tokens[i].id) === 3 ? "selected" : "" },
      tokenText(json.tokens[i]).replace(/^▁/, ""));
  }).filter((one) => one !== null);
  const table = tableToggle("Positions on the map", () => ({
    head: ["token", "component 1", "component 2"], rows: json.tokens.map((one, i) => [tokenLabel(one), signed(xs[i]), signed(ys[i])]),
  }));
  const [first, second] = json.variance;
  return h("figure", { class: "embedding-map" },
    svg("svg", { viewBox: `0 0 ${MAP_WIDTH} ${MAP_HEIGHT}`, role: "img", "aria-label": "Map of the embeddings" }, ...drawn, ...labels),
    h("figcaption", { class: "quiet" }, `${grouped(json.tokens.length)} of ${grouped(json.size)} tokens, by the first two principal components `
      + `(${percent(first)} and ${percent(second)} of the variance). `
      + "Amber: the selected token. Blue: its nearest vectors and the sentence."),
    table.element);
}
