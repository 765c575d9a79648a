/**
 * Interventions: force a token, mute heads, change the decoding options; translations before and after, side by side.
 *
 * @typedef {import("../api.js").TraceRequest} TraceRequest
 * @typedef {import("../diff.js").Pair} Pair
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../state.js").State} State
 * @typedef {import("./heads.js").SiteInfo} SiteInfo
 * @typedef {{ element: HTMLElement, update(): void }} Card
 * @typedef {{ position: number, id: number | null, text: string }} Forced a token, or a text, at a position
 * @typedef {{ rows: Pair[], columns: Pair[], values: Float32Array, site: SiteInfo }} AttentionChange
 */

import { signedLegend } from "../canvas.js";
import { commonCells, sideBySide } from "../diff.js";
import {
  POINT_AT, foldingCard, h, numberedOptions, selectField, setTabStop, tableToggle, tokenBar, tokenLabel,
} from "../dom.js";
import { percent, signed } from "../format.js";
import { heatmap } from "../heatmap.js";
import { Trace, errorMessage, runningText, whenLoaded } from "../trace.js";
import { cornerLabels, queryLabel, selectedHead, sitesOf } from "./heads.js";

/** the strongest colour stands for at least this difference of weights, so that noise stays pale */
const MIN_COLOUR_RANGE = 0.05;
/** all interventions, as they are called in the link */
const NONE = { force: "", mute: "", new_beam: "", new_length_penalty: "", temperature: "", seed: "" };

/** @type {View} */
export const interveneView = {
  id: "intervene",
  title: "Intervene",
  help: "Change something and see what happens: force a word, mute attention heads, or change the decoding options. "
    + "The sentence is translated again after each change.",
  build,
};

/** @param {Context} context */
function build(context) {
  const { trace, state, api } = context;
  if (!api) {
    return h("p", { class: "card" }, "Interventions need a model: ", h("code", {}, "regard serve RUN"),
      " serves this page together with one.");
  }
  const comparison = comparisonCards(context);
  const status = h("p", { class: "status", role: "status" });
  /** @type {{ key: string, after: Trace } | null} */
  let result = null;
  let wanted = "";

  const run = async () => {
    const request = requestFor(trace, state);
    const key = JSON.stringify(request);
    if (wanted === key) return;
    wanted = key;
    status.className = "status";
    status.textContent = request ? "Translating again…" : "";
    if (!request) {
      result = null;
      return comparison.show(null);
    }
    try {
      const json = await api.trace(request);
      if (wanted !== key) return; // another intervention was made in the meantime
      result = { key, after: new Trace(json, api) };
      status.textContent = "";
      comparison.show(result.after);
    } catch (error) {
      if (wanted !== key) return;
      status.className = "status wrong";
      status.textContent = errorMessage(error);
    }
  };
  // A non-autoregressive model has no prefix to force and no beam.
  const cards = trace.nonAutoregressive ? [muteCard(context)] : [forceCard(context), muteCard(context), decodingCard(context)];
  const undo = h("button", { type: "button", class: "plain", onclick: () => state.set(NONE) }, "Undo all");
  const update = () => {
    if (state.get("view") !== "intervene") return;
    for (const card of cards) card.update();
    undo.hidden = !requestFor(trace, state);
    run();
    if (result && result.key === wanted) comparison.show(result.after);
  };
  state.subscribe(update);
  update();
  return h("div", { class: "intervene" },
    h("div", { class: "card result-bar" }, comparison.lines, h("div", { class: "undo" }, undo, status)),
    h("div", { class: "interventions" }, cards.map((card) => card.element)),
    comparison.element);
}

/**
 * The request for the interventions in the link; null if there are none.
 *
 * @param {Trace} trace
 * @param {State} state
 * @returns {TraceRequest | null}
 */
function requestFor(trace, state) {
  const forced = parseForced(trace, state.get("force"));
  const mute = state.get("mute").split(",").filter(Boolean);
  const [beam, lengthPenalty, temperature, seed] = ["new_beam", "new_length_penalty", "temperature", "seed"]
    .map((name) => state.get(name));
  if (!forced && !mute.length && !beam && !lengthPenalty && !temperature) return null;
  const prefixLength = forced ? forced.position : trace.options.forced ?? 0;
  /** @type {TraceRequest} */
  const request = { q: trace.text, forced: trace.outputs.slice(0, prefixLength).map((token) => token.id) };
  if (forced?.id != null) request.forced?.push(forced.id);
  if (forced?.text) request.prefix = forced.text;
  if (mute.length) request.mute = mute;
  // Options that are not changed here are those of the form.
  const [beamOrForm, penaltyOrForm] = [beam || state.get("beam"), lengthPenalty || state.get("length_penalty")];
  const samples = Number(temperature) > 0; // sampling has no beam and no length penalty
  if (beamOrForm && !samples) request.beam = Number(beamOrForm);
  if (penaltyOrForm && !samples) request.length_penalty = Number(penaltyOrForm);
  if (temperature) request.temperature = Number(temperature);
  if (temperature && seed) request.seed = Number(seed);
  return request;
}

/**
 * The forced token of the link: `3:217` is token 217 at position 3, `3:=word` a text there, `3:` the position alone.
 *
 * @param {Trace} trace
 * @param {string} link
 * @returns {Forced | null}
 */
function parseForced(trace, link) {
  const match = /^(\d+):(?:(\d+)|=(.+))$/s.exec(link);
  if (!match || Number(match[1]) >= trace.outputs.length) return null;
  return { position: Number(match[1]), id: match[2] ? Number(match[2]) : null, text: match[3] ?? "" };
}

// -------------------------------------------------------------------------------------------------
// Interventions

/** @param {Context} context @returns {Card} */
function forceCard({ trace, state }) {
  const line = h("p", { class: "line small", dir: "auto", role: "group", "aria-label": "Translation: select a position" });
  const words = runningText(trace.outputs).map(({ index, token, text, spaceBefore }) => {
    if (spaceBefore) line.append(" ");
    const word = h("button", {
      type: "button", class: `word${token.special ? " special" : ""}`, onclick: () => state.set({ force: `${index}:` }),
    }, text);
    line.append(word);
    return word;
  });
  moveWithArrows(line, words, words.length);
  const selected = () => {
    const position = Number.parseInt(state.get("force"), 10);
    return Number.isNaN(position) || position >= words.length ? null : position;
  };
  const input = h("input", { type: "text", dir: "auto", placeholder: "another word", "aria-label": "Another word" });
  const form = h("form", { class: "typed", onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    if (input.value.trim()) state.set({ force: `${selected()}:=${input.value.trim()}` });
  } }, input, h("button", { type: "submit", class: "plain" }, "Force"));
  const choice = h("div", { class: "choice" });

  /** @type {string | null} the link that the choice was made for */
  let shown = null;
  const update = () => {
    const position = selected();
    words.forEach((word, i) => word.setAttribute("aria-pressed", String(i === position)));
    if (words.length) setTabStop(words, words[position ?? 0]);
    if (shown === state.get("force")) return;
    shown = state.get("force");
    if (position === null) {
      choice.replaceChildren(h("p", { class: "quiet" }, "Select a position; the words before it are kept."));
      return;
    }
    const focused = choice.contains(document.activeElement) ? document.activeElement?.textContent : null;
    input.value = parseForced(trace, state.get("force"))?.text ?? "";
    choice.replaceChildren(candidateButtons(trace, state, position), form);
    Array.from(choice.querySelectorAll("button")).find((one) => focused && one.textContent === focused)?.focus();
  };
  return { element: foldingCard("Force a word", { important: true }, line, choice), update };
}

/** @param {Trace} trace @param {State} state @param {number} position */
function candidateButtons(trace, state, position) {
  const forced = parseForced(trace, state.get("force"));
  const candidates = trace.candidates[position].filter((one) => !one.special);
  return h("div", { class: "choices", role: "group", "aria-label": "Force instead" }, candidates.map((one) =>
    h("button", {
      type: "button", class: "share", "aria-pressed": one.id === forced?.id,
      onclick: () => state.set({ force: `${position}:${one.id}` }),
    }, tokenBar(one, one.probability, percent(one.probability)),
    h("span", { class: "quiet" }, one.id === trace.outputs[position].id ? "chosen" : ""))));
}

/** @param {Context} context @returns {Card} */
function muteCard({ trace, state }) {
  const muted = () => new Set(state.get("mute").split(",").filter(Boolean));
  /** @type {{ name: string, button: HTMLButtonElement }[]} */
  const switches = [];
  const grids = sitesOf(trace).map((site) => {
    const { layers, heads } = trace[site.id];
    const grid = h("div", { class: "switches", role: "group", "aria-label": `${site.title}: heads to mute` });
    grid.style.setProperty("--heads", String(heads));
    const buttons = Array.from({ length: layers * heads }, (_, i) => {
      const [layer, head] = [Math.floor(i / heads), i % heads];
      const name = `${site.id}.${layer}.${head}`;
      const button = h("button", {
        type: "button", class: "switch", title: `Layer ${layer + 1}, head ${head + 1}`,
        "aria-label": `Mute ${site.title.toLowerCase()} layer ${layer + 1}, head ${head + 1}`,
        onclick: () => {
          const names = muted();
          if (!names.delete(name)) names.add(name);
          // Also select the head, so that its attention is compared below.
          state.set({ mute: [...names].join(","), site: site.id, layer: String(layer), head: String(head) });
        },
      }, `${layer + 1}.${head + 1}`);
      switches.push({ name, button });
      return button;
    });
    grid.append(...buttons);
    moveWithArrows(grid, buttons, heads);
    setTabStop(buttons, buttons[0]);
    return h("div", {}, h("h4", {}, site.title), grid);
  });
  return {
    element: foldingCard("Mute heads", { important: true },
      h("p", { class: "quiet" }, "Layer.head. A muted head still computes its attention, but its output is set to zero."), grids),
    update: () => {
      const names = muted();
      for (const one of switches) one.button.setAttribute("aria-pressed", String(names.has(one.name)));
    },
  };
}

/** @param {Context} context @returns {Card} */
function decodingCard({ trace, state }) {
  /** @param {string} name @param {string} text @param {Record<string, any>} limits @param {string | number} placeholder */
  const field = (name, text, limits, placeholder) => {
    const box = h("input", {
      type: "number", placeholder, ...limits,
      onchange: () => state.set({ [name]: box.validity.valid ? box.value : "" }),
    });
    return { name, box, element: h("label", { class: "field" }, h("span", {}, text), box) };
  };
  const fields = [
    field("new_beam", "Beam size", { min: 1, max: 20, step: 1 }, trace.options.beam),
    field("new_length_penalty", "Length penalty α", { min: 0, max: 10, step: 0.1 }, trace.options.length_penalty),
    field("temperature", "Temperature", { min: 0, max: 10, step: 0.1 }, "0"),
    field("seed", "Seed", { min: 0, max: 1e9, step: 1 }, trace.options.seed),
  ];
  return {
    element: foldingCard("Change the decoding options", { class: "decoding" },
      h("p", { class: "quiet" }, "With a temperature above 0, tokens are sampled at random instead of searched for with a "
        + "beam; a higher temperature gives more varied results."), ...fields.map((one) => one.element)),
    update: () => {
      for (const one of fields) if (one.box !== document.activeElement) one.box.value = state.get(one.name);
      const samples = Number(state.get("temperature")) > 0;
      fields[0].box.disabled = fields[1].box.disabled = samples;
      fields[3].box.disabled = !samples;
    },
  };
}

/**
 * Arrow keys move the focus between buttons in rows.
 *
 * @param {HTMLElement} container
 * @param {HTMLButtonElement[]} buttons
 * @param {number} columns buttons in a row
 */
function moveWithArrows(container, buttons, columns) {
  container.addEventListener("keydown", (event) => {
    const current = buttons.findIndex((one) => one === document.activeElement);
    const forward = getComputedStyle(container).direction === "rtl" ? -1 : 1;
    const step = { ArrowRight: forward, ArrowLeft: -forward, ArrowDown: columns, ArrowUp: -columns }[event.key];
    const next = step === undefined || current < 0 ? undefined : buttons[current + step];
    if (!next) return;
    event.preventDefault();
    setTabStop(buttons, next);
    next.focus();
  });
}

// -------------------------------------------------------------------------------------------------
// Before and after

/** @param {Context} context */
function comparisonCards(context) {
  const { trace } = context;
  const lines = h("div", { class: "before-after" });
  const list = h("div", { class: "pairs", tabindex: 0, role: "region", "aria-label": "Probabilities" });
  const folded = foldingCard("Probability of each token", {}, list);
  /** @type {Trace | null} */
  let after = null;
  const table = tableToggle("Token by token, before and after", () => ({
    head: ["before", "probability", "after", "probability"],
    rows: after ? probabilityTable(trace, after) : [],
  }));
  const attention = attentionChangeCard(context);

  /** @param {Trace | null} next */
  const show = (next) => {
    for (const one of [folded, attention.element, table.element]) one.hidden = !next;
    if (!next) lines.replaceChildren(translationLine("Before", trace, () => true), nothingChanged());
    const isNew = next && next !== after;
    after = next;
    if (isNew) {
      const pairs = sideBySide(trace.outputs, next.outputs);
      const same = pairs.filter((pair) => isSame(trace, next, pair));
      const [unchangedBefore, unchangedAfter] = [0, 1].map((side) => new Set(same.map((pair) => pair[side])));
      lines.replaceChildren(translationLine("Before", trace, (i) => unchangedBefore.has(i)),
        translationLine("After", next, (j) => unchangedAfter.has(j)));
      list.replaceChildren(...pairs.map((pair) => probabilityPair(trace, next, pair)));
      table.update();
    }
    attention.show(next);
  };
  show(null);
  return { lines, element: h("div", { class: "outcome" }, folded, table.element, attention.element), show };
}

/** @param {Trace} before @param {Trace} after @param {readonly [number | null, number | null]} pair */
function isSame(before, after, [i, j]) {
  return i !== null && j !== null && before.outputs[i].id === after.outputs[j].id;
}

function nothingChanged() {
  return h("div", {}, h("h3", {}, "After"), h("p", { class: "quiet" }, "Nothing is changed yet: force a word or mute a head below."));
}

/** @param {string} title @param {Trace} trace @param {(position: number) => boolean} isUnchanged */
function translationLine(title, trace, isUnchanged) {
  const line = h("p", { class: "line small", dir: "auto" });
  for (const { index, token, text, spaceBefore } of runningText(trace.outputs)) {
    if (spaceBefore) line.append(" ");
    line.append(h(isUnchanged(index) ? "span" : "mark", { class: `output${token.special ? " special" : ""}` }, text));
  }
  const total = trace.probabilities.reduce((sum, one) => sum + Math.log(one), 0);
  const count = trace.outputs.length;
  return h("div", {}, h("h3", {}, `${title}: log-probability ${signed(total)}, ${count} ${count === 1 ? "token" : "tokens"}`), line);
}

/** @param {Trace} before @param {Trace} after @param {readonly [number | null, number | null]} pair */
function probabilityPair(before, after, pair) {
  /** @param {Trace} trace @param {number | null} position */
  const cell = (trace, position) => h("div", { class: "share" }, position === null ? null
    : tokenBar(trace.outputs[position], trace.probabilities[position], percent(trace.probabilities[position])));
  return h("div", { class: isSame(before, after, pair) ? "compare" : "compare changed" },
    cell(before, pair[0]), cell(after, pair[1]));
}

/** @param {Trace} before @param {Trace} after */
function probabilityTable(before, after) {
  /** @param {Trace} trace @param {number | null} position */
  const cells = (trace, position) => (position === null ? ["–", "–"]
    : [tokenLabel(trace.outputs[position]), trace.probabilities[position].toFixed(4)]);
  return sideBySide(before.outputs, after.outputs).map(([i, j]) => [...cells(before, i), ...cells(after, j)]);
}

// -------------------------------------------------------------------------------------------------
// The change of one head's attention

/** @param {Context} context */
function attentionChangeCard({ trace, state, signal }) {
  const reading = h("div", { class: "reading", "aria-live": "polite" });
  const controls = h("div", { class: "controls" });
  /** @type {Trace | null} */
  let after = null;
  /** @type {AttentionChange | null} */
  let shown = null;
  const colourRange = () =>
    shown?.values.reduce((max, one) => Math.max(max, Math.abs(one)), MIN_COLOUR_RANGE) ?? MIN_COLOUR_RANGE;
  const explainColours = () => reading.replaceChildren(
    signedLegend([`−${colourRange().toFixed(2)}`, `+${colourRange().toFixed(2)}`], "change of the attention weight", signal),
    h("p", { class: "quiet" }, "Blue is more attention than before, amber is less. Rows are the tokens that both translations "
      + `have in common. ${POINT_AT} a cell for its values.`));
  const map = heatmap("Change of attention", signal, {
    onPoint: (row, column) => {
      if (shown && after) reading.replaceChildren(readChange(after, state, shown, row, column));
    },
    onLeave: explainColours,
  });
  const table = tableToggle("Change of attention: queries in rows, keys in columns",
    () => (shown && after ? changeTable(trace, after, shown) : { head: [], rows: [] }));
  const element = h("div", { class: "card attention-change" }, h("h3", {}, "Change of attention"), controls, h("div", { class: "beside" }, map.element, reading), table.element);

  const draw = () => {
    const sites = sitesOf(trace);
    element.hidden = !after || !sites.length;
    if (!after || !sites.length) return;
    const current = after;
    const { site, layer, head } = selectedHead(trace, state);
    showHeadControls(controls, trace, state);
    whenLoaded([[trace[site.id], layer], [current[site.id], layer]], (error) => {
      const now = selectedHead(trace, state);
      if (after !== current || now.site !== site || now.layer !== layer || now.head !== head) return;
      if (error) return reading.replaceChildren(h("p", { class: "status wrong" }, error));
      const change = attentionChange(trace, current, state);
      shown = change;
      map.show({
        values: change.values, rows: change.rows.map(([, j]) => queryLabel(current, site, j)),
        columns: change.columns.map(([, j]) => tokenLabel(current.columns[site.id][j])),
        corner: cornerLabels(site), max: colourRange(),
      });
      explainColours();
      table.update();
    });
  };
  /** @param {Trace | null} next */
  const show = (next) => {
    after = next;
    draw();
  };
  return { element, show };
}

/**
 * Drop-down lists for site, layer and head. They are made again, because the site decides how many layers there are.
 *
 * @param {HTMLElement} controls @param {Trace} trace @param {State} state
 */
function showHeadControls(controls, trace, state) {
  const { site, weights, layer, head } = selectedHead(trace, state);
  const fields = [
    selectField("Attention", sitesOf(trace).map((one) => [one.id, one.title]), (value) => state.set({ site: value })),
    selectField("Layer", numberedOptions(weights.layers), (value) => state.set({ layer: value })),
    selectField("Head", numberedOptions(weights.heads), (value) => state.set({ head: value })),
  ];
  [site.id, layer, head].forEach((value, i) => { fields[i].box.value = String(value); });
  const focused = Array.from(controls.querySelectorAll("select")).findIndex((one) => one === document.activeElement);
  controls.replaceChildren(...fields.map((one) => one.field));
  if (focused >= 0) fields[focused].box.focus();
}

/** @param {Trace} before @param {Trace} after @param {State} state @returns {AttentionChange} */
function attentionChange(before, after, state) {
  const { site } = selectedHead(before, state);
  const { rows, columns } = commonCells(before, after, site.id);
  const values = Float32Array.from({ length: rows.length * columns.length }, (_, i) => {
    const [row, column] = [rows[Math.floor(i / columns.length)], columns[i % columns.length]];
    return weightAt(after, state, row[1], column[1]) - weightAt(before, state, row[0], column[0]);
  });
  return { rows, columns, values, site };
}

/** @param {Trace} trace @param {State} state @param {number} row @param {number} column */
function weightAt(trace, state, row, column) {
  const { weights, layer, head } = selectedHead(trace, state);
  return weights.head(layer, head)[row * weights.keys + column];
}

/** @param {Trace} after @param {State} state @param {AttentionChange} change @param {number} row @param {number} column */
function readChange(after, state, { site, rows, columns, values }, row, column) {
  const difference = values[row * columns.length + column];
  const now = weightAt(after, state, rows[row][1], columns[column][1]);
  return h("p", { class: "value" }, queryLabel(after, site, rows[row][1]), h("span", { class: "quiet" }, " attends to "),
    tokenLabel(after.columns[site.id][columns[column][1]]),
    h("strong", {}, `${(now - difference).toFixed(3)} → ${now.toFixed(3)}`));
}

/** @param {Trace} before @param {Trace} after @param {AttentionChange} change */
function changeTable(before, after, { site, rows, columns, values }) {
  return {
    head: ["query", ...columns.map(([, j]) => tokenLabel(after.columns[site.id][j]))],
    rows: rows.map(([, j], row) => [tokenLabel(site.rows === "source" ? before.source[j] : after.outputs[j]),
      ...columns.map((_, column) => signed(values[row * columns.length + column]))]),
  };
}
