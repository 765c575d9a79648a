/**
 * What changes when one interferes: a word forced, heads muted, another search. Before and after side by side.
 *
 * @typedef {import("../render.js").Asked} Asked
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../trace.js").Kind} Kind
 * @typedef {import("../trace.js").Token} Token
 * @typedef {[before: number, after: number]} Pair places of the same token in two translations
 * @typedef {{ at: number, id: number | null, text: string }} Force a token, or a text, from a place on
 */

import { POINT, h, label, percent, rove, select, share, signed, tabular } from "../dom.js";
import { labelledMap } from "../map.js";
import { running, Trace, whenThere } from "../trace.js";
import { PANES, cornerOf, rowName } from "./heads.js";

/** a difference smaller than this gets no strong colour, even if it is the greatest */
const LEAST = 0.05;

/** @type {View} */
export const interfere = {
  id: "interfere",
  title: "Interfere",
  help: "Change something and see what it does: put another word in the model's mouth, mute heads, search in another way. "
    + "The translation is made anew each time.",
  build,
};

/** @param {Context} context */
function build(context) {
  if (!context.api) {
    return h("p", { class: "card" }, "Interfere needs a model: ", h("code", {}, "regard serve RUN"),
      " serves this page with one.");
  }
  const { trace, state } = context;
  const { element: results, show, status } = outcome(context);
  /** @type {{ key: string, after: Trace } | null} */
  let done = null;
  let wanted = "";

  const run = async () => {
    const asked = askFor(trace, state);
    const key = JSON.stringify(asked);
    if (wanted === key) return;
    wanted = key;
    if (!asked) {
      done = null;
      status.textContent = "";
      return show(null);
    }
    status.className = "status";
    status.textContent = "Translating again…";
    try {
      const json = await /** @type {NonNullable<typeof context.api>} */ (context.api).trace(asked);
      if (wanted !== key) return; // meanwhile something else was asked
      done = { key, after: new Trace(json, context.api) };
      status.textContent = "";
      show(done.after);
    } catch (error) {
      if (wanted !== key) return;
      status.className = "status wrong";
      status.textContent = error instanceof Error ? error.message : String(error);
    }
  };

  // All words at once: there is no word before another to force, and no beam to search by.
  const parts = trace.rounds.length ? [muting(context)] : [forcing(context), muting(context), searching(context)];
  const undo = h("button", { type: "button", class: "plain", onclick: () => state.set({
    force: "", mute: "", nbeam: "", nalpha: "", heat: "", seed: "",
  }) }, "Undo all");
  const update = () => {
    if (state.get("view") !== "interfere") return;
    for (const part of parts) part.update();
    undo.hidden = !askFor(trace, state);
    run();
    if (done && done.key === wanted) show(done.after);
  };
  state.listen(update);
  update();
  return h("div", { class: "interfere" },
    h("div", { class: "levers" }, parts.map((part) => part.element)), h("div", { class: "undo" }, undo, status), results);
}

/**
 * What to ask the model, or nothing if nothing is changed.
 *
 * @param {Trace} trace
 * @param {import("../state.js").State} state
 * @returns {Asked | null}
 */
function askFor(trace, state) {
  const force = forceOf(trace, state.get("force"));
  const mute = state.get("mute").split(",").filter(Boolean);
  const [beam, alpha, heat, seed] = ["nbeam", "nalpha", "heat", "seed"].map((name) => state.get(name));
  if (!force && !mute.length && !beam && !alpha && !heat) return null;
  const kept = force ? force.at : trace.options.forced ?? 0;
  /** @type {Asked} */
  const asked = {
    q: trace.text, beam: beam ? Number(beam) : trace.options.beam, alpha: alpha ? Number(alpha) : trace.options.alpha,
    forced: trace.said.slice(0, kept).map((token) => token.id),
  };
  if (force?.id != null) asked.forced?.push(force.id);
  if (force?.text) asked.prefix = force.text;
  if (mute.length) asked.mute = mute;
  if (heat) asked.temperature = Number(heat);
  if (heat && seed) asked.seed = Number(seed);
  return asked;
}

/**
 * As it stands in the link: `3:217` is token 217 at place 3, `3:=word` a text there, `3:` the place alone.
 *
 * @param {Trace} trace
 * @param {string} text
 * @returns {Force | null}
 */
function forceOf(trace, text) {
  const found = /^(\d+):(?:(\d+)|=(.+))$/s.exec(text);
  if (!found || Number(found[1]) >= trace.said.length) return null;
  return { at: Number(found[1]), id: found[2] ? Number(found[2]) : null, text: found[3] ?? "" };
}

// -------------------------------------------------------------------------------------------------
// What can be changed

/** @param {Context} context */
function forcing({ trace, state }) {
  const text = h("p", { class: "line small", dir: "auto", role: "group", "aria-label": "Translation: choose a place" });
  const spans = running(trace.said).map(({ index, token, shown, space }) => {
    if (space) text.append(" ");
    const span = h("button", {
      type: "button", class: `word${token.special ? " special" : ""}`, onclick: () => state.set({ force: `${index}:` }),
    }, shown);
    text.append(span);
    return span;
  });
  walk(text, spans, () => spans.length);
  const choice = h("div", { class: "choice" });
  const typed = h("input", { type: "text", dir: "auto", placeholder: "another word", "aria-label": "Another word" });
  const form = h("form", { class: "typed", onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    if (typed.value.trim()) state.set({ force: `${at()}:=${typed.value.trim()}` });
  } }, typed, h("button", { type: "submit", class: "plain" }, "Say it"));
  const at = () => {
    const place = Number.parseInt(state.get("force"), 10);
    return Number.isNaN(place) || place >= spans.length ? null : place;
  };
  /** @type {string | null} what the choice was made for */
  let before = null;
  const update = () => {
    const place = at();
    const force = forceOf(trace, state.get("force"));
    spans.forEach((span, i) => span.setAttribute("aria-pressed", String(i === place)));
    if (spans.length) rove(spans, spans[place ?? 0]);
    if (before === state.get("force")) return;
    before = state.get("force");
    if (place === null) {
      choice.replaceChildren(h("p", { class: "quiet" }, "Choose a place; the words before it are kept."));
      return;
    }
    typed.value = force?.text ?? "";
    const held = choice.contains(document.activeElement) ? document.activeElement?.textContent : null;
    choice.replaceChildren(
      h("div", { class: "choices", role: "group", "aria-label": "Say instead" },
        trace.candidates[place].filter((one) => !one.special).map((one) => {
          const said = one.id === trace.said[place].id;
          return h("button", {
            type: "button", class: "share", "aria-pressed": one.id === force?.id,
            onclick: () => state.set({ force: `${place}:${one.id}` }),
          }, share(one, one.probability, percent(one.probability)), h("span", { class: "quiet" }, said ? "said" : ""));
        })), form);
    const again = Array.from(choice.querySelectorAll("button")).find((one) => held && one.textContent === held);
    again?.focus();
  };
  return { element: h("section", { class: "card" }, h("h3", {}, "Force a word"), text, choice), update };
}

/** @param {Context} context */
function muting({ trace, state }) {
  const muted = () => new Set(state.get("mute").split(",").filter(Boolean));
  /** @type {{ name: string, button: HTMLButtonElement }[]} */
  const all = [];
  const grids = PANES.filter((pane) => trace[pane.kind].layers).map((pane) => {
    const { layers, heads } = trace[pane.kind];
    const grid = h("div", { class: "switches", role: "group", "aria-label": `${pane.title}: heads to mute` });
    grid.style.setProperty("--heads", String(heads));
    const buttons = Array.from({ length: layers * heads }, (_, i) => {
      const [layer, head] = [Math.floor(i / heads), i % heads];
      const name = `${pane.kind}.${layer}.${head}`;
      const button = h("button", {
        type: "button", class: "switch", "aria-label": `Mute ${pane.title.toLowerCase()} layer ${layer + 1}, head ${head + 1}`,
        title: `Layer ${layer + 1}, head ${head + 1}`,
        onclick: () => {
          const now = muted();
          if (!now.delete(name)) now.add(name);
          // What is chosen to be heard is what is looked at.
          state.set({ mute: [...now].join(","), pane: pane.kind, layer: String(layer), head: String(head) });
        },
      }, `${layer + 1}.${head + 1}`);
      all.push({ name, button });
      return button;
    });
    grid.append(...buttons);
    walk(grid, buttons, () => heads);
    rove(buttons, buttons[0]);
    return h("div", {}, h("h4", {}, pane.title), grid);
  });
  const update = () => {
    const now = muted();
    for (const one of all) one.button.setAttribute("aria-pressed", String(now.has(one.name)));
  };
  return {
    element: h("section", { class: "card" }, h("h3", {}, "Mute heads"),
      h("p", { class: "quiet" }, "Layer.head. A muted head still looks, but what it finds is left out."), grids),
    update,
  };
}

/** @param {Context} context */
function searching({ trace, state }) {
  /** @param {string} name @param {string} text @param {Record<string, any>} limits @param {string | number} usual */
  const field = (name, text, limits, usual) => {
    const box = h("input", {
      type: "number", placeholder: usual, ...limits,
      onchange: () => state.set({ [name]: box.validity.valid ? box.value : "" }),
    });
    return { name, box, element: h("label", { class: "field" }, h("span", {}, text), box) };
  };
  const { beam, alpha } = trace.options;
  const fields = [
    field("nbeam", "Beam", { min: 1, max: 20, step: 1 }, beam),
    field("nalpha", "Length penalty α", { min: 0, max: 10, step: 0.1 }, alpha),
    field("heat", "Temperature", { min: 0, max: 10, step: 0.1 }, "0"),
    field("seed", "Seed", { min: 0, max: 1e9, step: 1 }, "1"),
  ];
  const update = () => {
    for (const one of fields) if (one.box !== document.activeElement) one.box.value = state.get(one.name);
    fields[3].box.disabled = !Number(state.get("heat"));
  };
  return {
    element: h("section", { class: "card searching" }, h("h3", {}, "Search in another way"),
      h("p", { class: "quiet" }, "With a temperature above 0, words are drawn at random, the more freely the higher; "
        + "there is no beam then."), ...fields.map((one) => one.element)),
    update,
  };
}

/**
 * Arrow keys move among buttons that stand in rows.
 *
 * @param {HTMLElement} place
 * @param {HTMLButtonElement[]} buttons
 * @param {() => number} across buttons in a row
 */
function walk(place, buttons, across) {
  place.addEventListener("keydown", (event) => {
    const at = buttons.findIndex((one) => one === document.activeElement);
    const forward = getComputedStyle(place).direction === "rtl" ? -1 : 1;
    const step = { ArrowRight: forward, ArrowLeft: -forward, ArrowDown: across(), ArrowUp: -across() }[event.key];
    const next = step === undefined || at < 0 ? undefined : buttons[at + step];
    if (!next) return;
    event.preventDefault();
    rove(buttons, next);
    next.focus();
  });
}

// -------------------------------------------------------------------------------------------------
// What came of it

/** @param {Context} context */
function outcome({ trace, state, signal }) {
  const status = h("p", { class: "status", role: "status" });
  const lines = h("div", { class: "two" });
  const list = h("div", { class: "card pairs", tabindex: 0, role: "region", "aria-label": "Probabilities" });
  const reading = h("div", { class: "reading", "aria-live": "polite" });
  const controls = h("div", { class: "controls" });
  const nothing = h("p", { class: "quiet" }, "Nothing is changed yet.");
  /** @type {Trace | null} */
  let after = null;
  /** @type {{ rows: Pair[], columns: Pair[], values: Float32Array, pane: (typeof PANES)[number] } | null} */
  let drawn = null;

  /** @param {number} row @param {number} column */
  const tell = (row, column) => {
    if (!drawn || !after) return;
    const { pane, rows, columns, values } = drawn;
    const difference = values[row * columns.length + column];
    const now = weight(after, pane.kind, state, rows[row][1], columns[column][1]);
    reading.replaceChildren(h("p", { class: "value" }, rowName(after, pane, rows[row][1]),
      h("span", { class: "quiet" }, " looks at "), label(after.columns[pane.kind][columns[column][1]]),
      h("strong", {}, `${(now - difference).toFixed(3)} → ${now.toFixed(3)}`)));
  };
  const rest = () => reading.replaceChildren(h("p", { class: "quiet" },
    `Blue is more attention than before, amber less; the strongest colour is ${strongest().toFixed(2)}. `
    + `Rows are the words that both translations have. ${POINT} a cell for its numbers.`));
  const strongest = () => drawn?.values.reduce((most, one) => Math.max(most, Math.abs(one)), LEAST) ?? LEAST;
  const map = labelledMap("Change of attention", signal, { point: tell, leave: rest });
  const words_ = tabular("Word by word, before and after", () => ({
    head: ["before", "probability", "after", "probability"],
    rows: after ? aligned(trace, after).map(([i, j]) => [
      i === null ? "–" : label(trace.said[i]), i === null ? "–" : trace.probabilities[i].toFixed(4),
      j === null || !after ? "–" : label(after.said[j]), j === null || !after ? "–" : after.probabilities[j].toFixed(4)]) : [],
  }));
  const changes = tabular("Change of attention: queries on rows, keys on columns", () => {
    if (!drawn || !after) return { head: [], rows: [] };
    const { rows, columns, values, pane } = drawn;
    const { said, columns: keys } = after;
    return {
      head: ["query", ...columns.map(([, j]) => label(keys[pane.kind][j]))],
      rows: rows.map(([, j], row) => [label(pane.rows === "source" ? trace.source[j] : said[j]),
        ...columns.map((_, column) => signed(values[row * columns.length + column]))]),
    };
  });
  const attention = h("div", { class: "card" }, controls, h("div", { class: "beside" }, map.element, reading), changes.element);

  const drawMap = () => {
    if (!after) return;
    const then = after;
    const now = chosenHead(trace, state);
    attention.hidden = !now;
    if (!now) return;
    const { pane, layer, head } = now;
    const { layers, heads } = trace[pane.kind];
    const boxes = [
      select("Attention of", PANES.filter((one) => trace[one.kind].layers).map((one) => [one.kind, one.title]),
        (value) => state.set({ pane: value })),
      select("Layer", counted(layers), (value) => state.set({ layer: value })),
      select("Head", counted(heads), (value) => state.set({ head: value })),
    ];
    [pane.kind, layer, head].forEach((value, i) => { boxes[i].box.value = String(value); });
    const held = Array.from(controls.querySelectorAll("select")).findIndex((one) => one === document.activeElement);
    controls.replaceChildren(...boxes.map((one) => one.field));
    if (held >= 0) boxes[held].box.focus();
    whenThere([[trace[pane.kind], layer], [then[pane.kind], layer]], (problem) => {
      if (after !== then || JSON.stringify(chosenHead(trace, state)) !== JSON.stringify(now)) return;
      if (problem) return reading.replaceChildren(h("p", { class: "status wrong" }, problem));
      const { rows, columns } = matched(trace, then, pane.kind);
      const values = Float32Array.from({ length: rows.length * columns.length }, (_, i) => {
        const [row, column] = [rows[Math.floor(i / columns.length)], columns[i % columns.length]];
        return weight(then, pane.kind, state, row[1], column[1]) - weight(trace, pane.kind, state, row[0], column[0]);
      });
      drawn = { rows, columns, values, pane };
      map.show({
        values, rows: rows.map(([, j]) => rowName(then, pane, j)),
        columns: columns.map(([, j]) => label(then.columns[pane.kind][j])),
        corner: cornerOf(pane), greatest: strongest(),
      });
      rest();
      changes.update();
    });
  };

  /** @param {Trace | null} now */
  const show = (now) => {
    for (const one of [lines, list, attention, words_.element]) one.hidden = !now;
    nothing.hidden = Boolean(now);
    if (now && now !== after) {
      after = now;
      const pairs = aligned(trace, now);
      const same = new Set(pairs.filter((pair) => equal(trace, now, pair)).flatMap(([i, j]) => [`b${i}`, `a${j}`]));
      lines.replaceChildren(
        sentence("Before", trace, (i) => same.has(`b${i}`)), sentence("After", now, (j) => same.has(`a${j}`)));
      list.replaceChildren(h("h3", {}, "How probable each word was"), ...pairRows(trace, now, pairs));
      words_.update();
    }
    after = now;
    drawMap();
  };
  show(null);
  return { element: h("div", { class: "outcome" }, nothing, lines, list, words_.element, attention), show, status };
}

/** @param {Trace} before @param {Trace} after @param {readonly [number | null, number | null]} pair */
function equal(before, after, [i, j]) {
  return i !== null && j !== null && before.said[i].id === after.said[j].id;
}

/** @param {string} title @param {Trace} trace @param {(place: number) => boolean} same */
function sentence(title, trace, same) {
  const text = h("p", { class: "line small", dir: "auto" });
  for (const { index, token, shown, space } of running(trace.said)) {
    if (space) text.append(" ");
    const changed = !same(index);
    text.append(h(changed ? "mark" : "span", { class: `said${token.special ? " special" : ""}` }, shown));
  }
  const log = trace.probabilities.reduce((sum, one) => sum + Math.log(one), 0);
  return h("section", { class: "card" }, h("h3", {}, title), text,
    h("p", { class: "quiet" }, `log-probability ${signed(log)}, ${trace.said.length} tokens`));
}

/** @param {Trace} before @param {Trace} after @param {(readonly [number | null, number | null])[]} pairs */
function pairRows(before, after, pairs) {
  /** @param {Trace} trace @param {number | null} place */
  const cell = (trace, place) => h("div", { class: "share" }, place === null ? null
    : share(trace.said[place], trace.probabilities[place], percent(trace.probabilities[place])));
  return pairs.map(([i, j]) => h("div", { class: equal(before, after, [i, j]) ? "compare" : "compare changed" },
    cell(before, i), cell(after, j)));
}

/**
 * @param {Trace} trace
 * @param {import("../state.js").State} state
 */
function chosenHead(trace, state) {
  const panes = PANES.filter((one) => trace[one.kind].layers);
  if (!panes.length) return null;
  const pane = panes.find((one) => one.kind === state.get("pane")) ?? panes[panes.length - 1];
  const { layers, heads } = trace[pane.kind];
  const layer = state.get("layer") === "" ? layers - 1 : state.place("layer", layers);
  return { pane, layer, head: state.place("head", heads) };
}

/**
 * @param {Trace} trace @param {Kind} kind
 * @param {import("../state.js").State} state
 * @param {number} row @param {number} column
 */
function weight(trace, kind, state, row, column) {
  const now = chosenHead(trace, state);
  return now ? trace[kind].head(now.layer, now.head)[row * trace[kind].keys + column] : 0;
}

/**
 * The rows and columns that both have.
 *
 * @param {Trace} before @param {Trace} after @param {Kind} kind
 * @returns {{ rows: Pair[], columns: Pair[] }}
 */
function matched(before, after, kind) {
  const said = common(before.said, after.said);
  /** @type {Pair[]} */
  const keys = before.columns[kind].map((_, i) => [i, i]);
  if (kind === "encoder") return { rows: before.source.map((_, i) => [i, i]), columns: keys };
  if (kind === "cross") return { rows: said, columns: keys };
  /** @type {Pair[]} */
  const read = [[0, 0], ...said.map(([i, j]) => /** @type {Pair} */ ([i + 1, j + 1]))];
  return { rows: said, columns: read.filter(([i, j]) => i < before.read.length && j < after.read.length) };
}

/**
 * The longest common subsequence of two translations.
 *
 * @param {Token[]} a
 * @param {Token[]} b
 * @returns {Pair[]}
 */
function common(a, b) {
  const width = b.length + 1;
  const best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      best[i * width + j] = a[i].id === b[j].id ? best[(i + 1) * width + j + 1] + 1
        : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  /** @type {Pair[]} */
  const pairs = [];
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i].id === b[j].id) pairs.push([i++, j++]);
    else if (best[(i + 1) * width + j] >= best[i * width + j + 1]) i++;
    else j++;
  }
  return pairs;
}

/**
 * All tokens of both, side by side: equal ones together, a changed one beside what took its place.
 *
 * @param {Trace} before
 * @param {Trace} after
 * @returns {[number | null, number | null][]}
 */
function aligned(before, after) {
  /** @type {[number | null, number | null][]} */
  const rows = [];
  let [i, j] = [0, 0];
  for (const [a, b] of [...common(before.said, after.said), [before.said.length, after.said.length]]) {
    while (i < a || j < b) rows.push([i < a ? i++ : null, j < b ? j++ : null]);
    if (a < before.said.length) rows.push([i++, j++]);
  }
  return rows;
}

/** @param {number} count @returns {[string, string][]} */
function counted(count) {
  return Array.from({ length: count }, (_, i) => [String(i), String(i + 1)]);
}
