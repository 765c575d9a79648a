/**
 * Every head of every layer: three panes of thumbnails, and one head large.
 *
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../trace.js").Kind} Kind
 * @typedef {import("../trace.js").Side} Side
 * @typedef {import("../trace.js").Token} Token
 * @typedef {import("../trace.js").Trace} Trace
 * @typedef {{ kind: Kind, title: string, says: string, rows: Side, columns: Side }} Pane
 * @typedef {{ pane: Pane, layer: number, head: number, button: HTMLButtonElement, canvas: HTMLCanvasElement,
 *   drawn: boolean }} Thumb
 * @typedef {{ side: Side, index: number }} Lit a token under the pointer
 */

import { onTheme, paint, shrink } from "../colour.js";
import { ARROWS, POINT, TOUCH, fading, h, label, rove, segments, share, signNote, tabular } from "../dom.js";
import { whenThere } from "../trace.js";

/** @type {Pane[]} */
export const PANES = [
  { kind: "encoder", title: "Encoder", says: "source looks at source", rows: "source", columns: "source" },
  { kind: "decoder", title: "Decoder", says: "translation looks at itself", rows: "target", columns: "target" },
  { kind: "cross", title: "Cross", says: "translation looks at source", rows: "target", columns: "source" },
];
const SMALLEST_CELL = 18;
const LARGEST_CELL = 38;
/** the most cells of a thumbnail, either way */
const THUMB = 64;
/** keys told of a row */
const MOST = 6;

/** @type {View} */
export const heads = {
  id: "heads",
  title: "Heads",
  help: "Each small square is one attention head: a row is the token that looks (the query), a column the token "
    + `looked at (the key). Choose one to see it large${TOUCH ? "" : "; arrow keys move between heads"}.`,
  build,
};

/** @param {Context} context */
function build({ trace, state, signal }) {
  const some = PANES.filter((one) => trace[one.kind].layers);
  if (!some.length) return h("p", { class: "card" }, "This model has no attention to show.");
  const chosen = () => {
    const pane = some.find((one) => one.kind === state.get("pane")) ?? some[some.length - 1];
    const weights = trace[pane.kind];
    const layer = state.get("layer") === "" ? weights.layers - 1 : state.place("layer", weights.layers);
    const asked = state.get("heads");
    /** @type {"one" | "average" | "max"} */
    const way = asked === "average" || asked === "max" ? asked : "one";
    return {
      pane, weights, layer, head: state.place("head", weights.heads), way,
    };
  };
  const hidden = () => state.get("marks") === "hidden";
  /** @param {Pane} pane @returns {boolean} whether each column is a token, and not a number */
  const worded = (pane) => trace.columns[pane.kind].length === tokensOf(trace, pane.columns).length;

  // ----- thumbnails
  /** @type {Thumb[]} */
  const thumbs = [];
  /** @param {Thumb} thumb */
  const drawThumb = (thumb) => {
    const weights = trace[thumb.pane.kind];
    thumb.drawn = true;
    whenThere([[weights, thumb.layer]], (problem) => {
      if (problem) return;
      const { rows, columns } = places(trace, thumb.pane, hidden());
      paint(thumb.canvas, ...shrink(weights.head(thumb.layer, thumb.head), weights.keys, rows, columns, THUMB));
    });
  };
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const thumb = thumbs.find((one) => one.canvas === entry.target);
      if (entry.isIntersecting && thumb && !thumb.drawn) drawThumb(thumb);
    }
  }, { rootMargin: "200px" });
  signal.addEventListener("abort", () => seen.disconnect());

  const panes = PANES.map((pane) => {
    const weights = trace[pane.kind];
    const grid = h("div", { class: "grid", role: "group", "aria-label": `${pane.title}: heads`, onkeydown: move });
    grid.style.setProperty("--heads", String(weights.heads));
    grid.append(h("span", { class: "axis corner" }, "layer"));
    for (let head = 0; head < weights.heads; head++) grid.append(h("span", { class: "axis" }, head + 1));
    for (let layer = 0; layer < weights.layers; layer++) {
      grid.append(h("span", { class: "axis" }, layer + 1));
      for (let head = 0; head < weights.heads; head++) {
        const canvas = h("canvas", { "aria-hidden": "true" });
        const button = h("button", {
          type: "button", class: "thumb", title: `Layer ${layer + 1}, head ${head + 1}`,
          "aria-label": `${pane.title}, layer ${layer + 1}, head ${head + 1}`,
          onclick: () => state.set({ pane: pane.kind, layer: String(layer), head: String(head) }),
        }, canvas);
        thumbs.push({ pane, layer, head, button, canvas, drawn: false });
        grid.append(button);
        seen.observe(canvas);
      }
    }
    const element = h("section", { class: "pane", "data-kind": pane.kind },
      h("h3", {}, pane.title, " ", h("span", { class: "quiet" }, pane.says)),
      weights.layers ? grid : h("p", { class: "quiet" }, "This model has none here."));
    return { pane, element };
  });

  /** @param {KeyboardEvent} event */
  function move(event) {
    const step = ARROWS[event.key];
    const now = thumbs.find((one) => one.button === document.activeElement);
    if (!step || !now) return;
    event.preventDefault();
    const next = thumbs.find((one) =>
      one.pane === now.pane && one.layer === now.layer + step[0] && one.head === now.head + step[1]);
    if (!next) return;
    next.button.focus();
    state.set({ pane: next.pane.kind, layer: String(next.layer), head: String(next.head) });
  }

  // ----- one head, large
  const canvas = h("canvas", { id: "map", "aria-hidden": "true" });
  const field = h("div", {
    class: "cells", tabindex: 0, role: "application", "aria-label": "Cells: arrow keys move, the value is read out",
  }, canvas, h("div", { class: "light row" }), h("div", { class: "light column" }), h("div", { class: "light cell" }));
  const rowLabels = h("div", { class: "rows" });
  const columnLabels = h("div", { class: "columns" });
  const corner = h("div", { class: "corner" });
  const sheet = h("div", { class: "sheet" }, corner, columnLabels, rowLabels, field);
  const map = fading(h("div", { class: "map", tabindex: -1 }, sheet), signal);
  const title = h("h3", { class: "which" });
  const value = h("p", { class: "value", "aria-live": "polite" });
  const shares = h("div", { class: "shares" });
  const sum = h("span", { class: "quiet" });
  const table = tabular("Attention weights: queries on rows, keys on columns", () => {
    const { columns, rows, pane, weights, values } = large;
    const keys = trace.columns[pane.kind];
    return {
      head: ["query", ...columns.map((column) => label(keys[column]))],
      rows: rows.map((row) => [rowName(trace, pane, row),
        ...columns.map((column) => values[row * weights.keys + column].toFixed(4))]),
    };
  });

  /** @param {number} across cells beside one another, which shall fit if they can */
  const cellFor = (across) => {
    const space = (map.clientWidth || 600) - (rowLabels.offsetWidth || 150);
    return Math.min(Math.max(Math.floor(space / across), SMALLEST_CELL), LARGEST_CELL);
  };
  const measure = () => {
    const now = chosen();
    const { rows, columns } = places(trace, now.pane, hidden());
    const values = now.weights.map(now.layer, now.way === "one" ? now.head : now.way);
    return { ...now, values, rows, columns, cell: cellFor(columns.length) };
  };
  let large = measure();
  /** what the labels were made for */
  let labelled = "";

  const draw = () => {
    const now = chosen();
    whenThere([[now.weights, now.layer]], (problem) => {
      const still = chosen();
      if (still.weights !== now.weights || still.layer !== now.layer) return;
      map.hidden = Boolean(problem);
      drawLarge();
      if (problem) value.replaceChildren(h("span", { class: "status wrong" }, problem));
    });
  };
  const drawLarge = () => {
    large = measure();
    const { pane, weights, layer, head, way, values, rows, columns } = large;
    for (const one of thumbs) {
      const row = one.pane === pane && one.layer === layer;
      one.button.setAttribute("aria-pressed", String(row && (way !== "one" || one.head === head)));
    }
    for (const one of PANES) {
      const own = thumbs.filter((thumb) => thumb.pane === one);
      const stop = (one === pane && own.find((thumb) => thumb.layer === layer && thumb.head === head)) || own[0];
      if (stop) rove(own.map((thumb) => thumb.button), stop.button);
    }
    const all = `of ${weights.heads} heads`;
    const which = { one: `head ${head + 1}`, average: `average ${all}`, max: `maximum ${all}` }[way];
    title.textContent = `${pane.title}, layer ${layer + 1}, ${which}`;
    paint(canvas, values, weights.keys, rows, columns);
    map.style.setProperty("--across", String(columns.length));
    map.style.setProperty("--down", String(rows.length));
    const now = `${pane.kind} ${way} ${hidden()}`;
    if (labelled !== now) {
      labelled = now;
      const keys = trace.columns[pane.kind];
      const row = values.subarray(0, weights.keys).reduce((sum, weight) => sum + weight, 0);
      const sums = way === "one" && Math.abs(row - 1) < 0.02;
      sum.textContent = `attention weight${sums ? "; a head's row sums to 1" : ""}${
        weights.rounded ? "; rounded to 8 bits in this file, within 0.004" : ""}`;
      corner.replaceChildren(...cornerOf(pane).map((one) => h("span", {}, one)));
      rowLabels.replaceChildren(...rows.map((row) => h("div", { "data-index": row }, rowName(trace, pane, row))));
      columnLabels.replaceChildren(...columns.map((column) => h("div", { "data-index": column }, label(keys[column]))));
    }
    large.cell = cellFor(columns.length); // now that its labels are there
    map.style.setProperty("--cell", `${large.cell}px`);
    table.update();
    light(null);
  };

  // ----- what is under the pointer
  /**
   * the cell the keyboard is at, as places in rows and columns
   *
   * @type {[number, number]}
   */
  let cursor = [0, 0];

  /** @param {{ row?: number, column?: number } | null} at tokens of the large map */
  const light = (at) => {
    const { pane } = large;
    /** @type {Lit[]} */
    const lit = [];
    if (at?.row !== undefined) lit.push({ side: pane.rows, index: at.row });
    else if (at?.column !== undefined && worded(pane)) lit.push({ side: pane.columns, index: at.column });
    for (const one of panes) {
      const shown = places(trace, one.pane, hidden());
      const { rows, columns } = one.pane;
      const index = (/** @type {Side} */ side) => lit.find((each) => each.side === side)?.index;
      mark(one.element, "row", shown.rows, index(rows));
      mark(one.element, "column", shown.columns, rows === columns || !worded(one.pane) ? undefined : index(columns));
    }
    mark(map, "row", large.rows, at?.row);
    mark(map, "column", large.columns, at?.column);
    for (const [labels, index] of /** @type {const} */ ([[rowLabels, at?.row], [columnLabels, at?.column]])) {
      for (const each of labels.children) each.classList.toggle("lit", each.getAttribute("data-index") === `${index}`);
    }
    tell(at);
  };

  /** @param {{ row?: number, column?: number } | null} at */
  const tell = (at) => {
    const { pane, weights, values, rows, columns } = large;
    if (at?.row === undefined) {
      value.replaceChildren(h("span", { class: "quiet" },
        TOUCH ? `${POINT} a cell for its value and for what its row looks at most.`
          : `${POINT} a cell for its value, or at a row for what it looks at most.`,
        followable() && (TOUCH ? " One number, above, follows a value from query and key on."
          : " A double click, or Enter, follows the number from query and key on.")));
      shares.replaceChildren();
      return;
    }
    const keys = trace.columns[pane.kind];
    const row = at.row;
    /** @param {number} column */
    const weight = (column) => values[row * weights.keys + column];
    value.replaceChildren(rowName(trace, pane, row), h("span", { class: "quiet" }, " looks at "));
    if (at.column !== undefined) {
      value.append(label(keys[at.column]), " ", h("strong", {}, weight(at.column).toFixed(4)));
    }
    const best = [...columns].sort((a, b) => weight(b) - weight(a)).slice(0, MOST);
    shares.replaceChildren(...best.map((column) =>
      h("div", { class: "share" }, share(keys[column], weight(column), weight(column).toFixed(3)))));
    cursor = [rows.indexOf(row), at.column === undefined ? cursor[1] : columns.indexOf(at.column)];
  };

  /** @param {PointerEvent} event */
  const point = (event) => {
    const box = canvas.getBoundingClientRect();
    const row = large.rows[Math.floor((event.clientY - box.top) / large.cell)];
    const column = large.columns[Math.floor((event.clientX - box.left) / large.cell)];
    if (row !== undefined && column !== undefined) light({ row, column });
  };
  const followable = () => large.way === "one" && Boolean(trace.parts[large.pane.kind]);
  /** Go to the view that takes the weight under the light apart. */
  const follow = () => {
    const { pane, layer, head, rows, columns } = large;
    if (!followable()) return;
    state.set({
      view: "number", pane: pane.kind, layer: String(layer), head: String(head), query: String(rows[cursor[0]]),
      key: String(columns[cursor[1]]),
    });
  };
  field.addEventListener("dblclick", follow);
  field.addEventListener("pointermove", point);
  field.addEventListener("pointerdown", point);
  field.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (event.key === "Enter") follow();
    if (!step) return;
    event.preventDefault();
    const { rows, columns } = large;
    /** @param {number} place @param {number} count */
    const inside = (place, count) => Math.min(Math.max(place, 0), count - 1);
    cursor = [inside(cursor[0] + step[0], rows.length), inside(cursor[1] + step[1], columns.length)];
    light({ row: rows[cursor[0]], column: columns[cursor[1]] });
  });
  field.addEventListener("focus", () => {
    cursor = [0, 0];
    if (field.matches(":focus-visible")) light({ row: large.rows[0], column: large.columns[0] });
  });
  for (const [labels, name] of /** @type {const} */ ([[rowLabels, "row"], [columnLabels, "column"]])) {
    labels.addEventListener("pointerover", (event) => {
      const one = /** @type {Element} */ (event.target).closest("[data-index]");
      if (one instanceof HTMLElement) light({ [name]: Number(one.dataset.index) });
    });
  }
  map.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") light(null); // a finger that is lifted has not gone elsewhere
  });
  field.addEventListener("blur", () => light(null));
  // A row of a thumbnail lights that row everywhere too.
  for (const thumb of thumbs) {
    thumb.canvas.addEventListener("pointermove", (event) => {
      const box = thumb.canvas.getBoundingClientRect();
      const { rows } = places(trace, thumb.pane, hidden());
      const index = rows[Math.floor(((event.clientY - box.top) / box.height) * rows.length)];
      if (index === undefined) return;
      for (const one of panes) {
        const shown = places(trace, one.pane, hidden());
        const row = one.pane.rows === thumb.pane.rows;
        const column = !row && one.pane.columns === thumb.pane.rows && worded(one.pane);
        mark(one.element, "row", shown.rows, row ? index : undefined);
        mark(one.element, "column", shown.columns, column ? index : undefined);
      }
      mark(map, "row", large.rows, large.pane.rows === thumb.pane.rows ? index : undefined);
    });
    thumb.canvas.addEventListener("pointerleave", () => light(null));
  }

  const way = segments("Heads", [["one", "Single head"], ["average", "Average"], ["max", "Maximum"]], chosen().way,
    (value) => state.set({ heads: value === "one" ? "" : value }));
  const marks = h("input", { type: "checkbox", onchange: () => state.set({ marks: marks.checked ? "hidden" : "" }) });
  const element = h("div", { class: "heads" },
    h("div", { class: "panes" }, panes.map((one) => one.element)),
    h("div", { class: "large card" },
      h("div", { class: "controls" }, title, way,
        h("label", { class: "check" }, marks, "Hide marks such as </s>")),
      h("div", { class: "beside" }, map, h("aside", { class: "reading" },
        legend(signal, sum), signNote([...trace.source, ...trace.said]), value, shares)),
      table.element));

  let before = "";
  const update = () => {
    if (state.get("view") !== "heads") return;
    const now = JSON.stringify(["pane", "layer", "head", "heads", "marks"].map((name) => state.get(name)));
    if (now === before) return;
    before = now;
    marks.checked = hidden();
    way.show(chosen().way);
    if (thumbs.some((one) => one.drawn)) redrawThumbs();
    draw();
  };
  let drawnHidden = hidden();
  const redrawThumbs = (all = false) => {
    if (!all && drawnHidden === hidden()) return;
    drawnHidden = hidden();
    for (const one of thumbs) if (one.drawn) drawThumb(one);
  };
  state.listen(update);
  onTheme(() => { redrawThumbs(true); draw(); }, signal);
  addEventListener("resize", () => { if (map.clientWidth && measure().cell !== large.cell) draw(); }, { signal });
  // Only in the page does the map have a width.
  requestAnimationFrame(() => { before = ""; update(); });
  return element;
}

/** @param {Trace} trace @param {Side} side @returns {Token[]} */
function tokensOf(trace, side) {
  return side === "source" ? trace.source : trace.read;
}

/**
 * A query as it is named: of the decoder, the token read and the token said there.
 *
 * @param {Trace} trace
 * @param {Pane} pane
 * @param {number} row
 */
export function rowName(trace, pane, row) {
  if (pane.rows === "source") return label(trace.source[row]);
  return h("span", { class: "step" }, h("span", { class: "read" }, label(trace.read[row])),
    h("span", { class: "arrow" }, " → "), label(trace.said[row]));
}

/**
 * What the names of rows and columns are. A narrow screen has room only for the token said: style.css hides what was read.
 *
 * @param {Pane} pane
 * @returns {[rows: import("../dom.js").Child, columns: string]}
 */
export function cornerOf(pane) {
  return [pane.rows === "target" ? h("span", {}, h("span", { class: "read" }, "read → "), "said") : "query", "key"];
}

/**
 * The rows and columns to show. A row of the decoder counts as a mark if what it says is one.
 *
 * @param {Trace} trace
 * @param {Pane} pane
 * @param {boolean} hide marks
 */
function places(trace, pane, hide) {
  /** @param {Token[]} tokens */
  const shown = (tokens) => {
    const all = tokens.map((_, i) => i);
    const some = hide ? all.filter((i) => !tokens[i].special) : all;
    return some.length ? some : all;
  };
  const rows = shown(pane.rows === "source" ? trace.source : trace.said);
  return { rows, columns: shown(trace.columns[pane.kind]) };
}

/**
 * Where a light falls, for style.css.
 *
 * @param {HTMLElement} element
 * @param {"row" | "column"} name
 * @param {number[]} shown
 * @param {number | undefined} index
 */
function mark(element, name, shown, index) {
  const at = index === undefined ? -1 : shown.indexOf(index);
  element.classList.toggle(`lit-${name}`, at >= 0);
  if (at < 0) return;
  element.style.setProperty(`--${name}`, String(at));
  element.style.setProperty(`--${name}s`, String(shown.length));
}

/** @param {AbortSignal} signal @param {HTMLElement} says */
function legend(signal, says) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const steps = Float32Array.from({ length: 64 }, (_, i) => i / 63);
  const draw = () => paint(canvas, steps, 64, [0], Array.from(steps.keys()));
  draw();
  onTheme(draw, signal);
  return h("div", { class: "legend" }, "0", canvas, "1", says);
}
