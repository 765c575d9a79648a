/**
 * All attention heads: thumbnails for each site, and one head enlarged.
 *
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../state.js").State} State
 * @typedef {import("../trace.js").LayerArray} LayerArray
 * @typedef {import("../trace.js").Side} Side
 * @typedef {import("../trace.js").Site} Site
 * @typedef {import("../trace.js").Token} Token
 * @typedef {import("../trace.js").Trace} Trace
 * @typedef {{ id: Site, title: string, description: string, rows: Side, columns: Side }} SiteInfo
 * @typedef {"single" | "average" | "max"} HeadMode
 * @typedef {{ site: SiteInfo, weights: LayerArray, layer: number, head: number, mode: HeadMode }} Selection
 * @typedef {{ site: SiteInfo, layer: number, head: number, button: HTMLButtonElement, canvas: HTMLCanvasElement,
 *   drawn: boolean }} Thumbnail
 * @typedef {{ row?: number, column?: number }} Cell token positions, not indices of the shown rows and columns
 * @typedef {Selection & { values: Float32Array, rows: number[], columns: number[], cellSize: number }} ShownMap
 */

import { paint, scaleBar } from "../canvas.js";
import { maxPool } from "../colour.js";
import {
  ARROWS, POINT_AT, TOUCH, clampIndex, h, segmentedControl, setTabStop, spaceSymbolNote, tableToggle, tokenBar, tokenLabel,
} from "../dom.js";
import { percent } from "../format.js";
import { behaviourOf, describeBehaviour } from "../head_behaviour.js";
import { headTableCard } from "../head_table.js";
import { fitCell, matrixFrame } from "../heatmap.js";
import { onThemeChange } from "../theme.js";
import { whenLoaded } from "../trace.js";

/** @type {SiteInfo[]} */
export const ATTENTION_SITES = [
  { id: "encoder", title: "Encoder", description: "source attends to source", rows: "source", columns: "source" },
  { id: "decoder", title: "Decoder", description: "translation attends to itself", rows: "target", columns: "target" },
  { id: "cross_attention", title: "Cross-attention", description: "translation attends to source", rows: "target",
    columns: "source" },
];
/** the most rows and columns of a thumbnail */
const THUMBNAIL_SIZE = 64;
/** keys listed for a query */
const TOP_KEYS = 6;

/** @type {View} */
export const headsView = {
  id: "heads",
  title: "Heads",
  help: "Each small square is one attention head: its rows are the tokens that attend (queries), its columns the tokens "
    + `they attend to (keys). Select a head to enlarge it${TOUCH ? "" : "; arrow keys move between heads"}.`,
  build,
};

/** @param {Context} context */
function build(context) {
  const { trace, state, signal } = context;
  if (!sitesOf(trace).length) return h("p", { class: "card" }, "This model has no attention to show.");
  const thumbnails = thumbnailGrids(context);
  const large = largeMap(context, thumbnails);
  const highlight = highlighter(trace, state, thumbnails, large);
  large.onPoint(highlight);
  thumbnails.onPointRow((site, row) => {
    if (row === null) highlight(null);
    else highlightRow(trace, state, thumbnails, large, site, row);
  });

  const modes = segmentedControl("Heads", [["single", "Single head"], ["average", "Average"], ["max", "Maximum"]],
    selectedMap(trace, state).mode, (value) => state.set({ heads: value === "single" ? "" : value }));
  const hideSpecial = h("input", {
    type: "checkbox", onchange: () => state.set({ special: hideSpecial.checked ? "hidden" : "" }),
  });
  const element = h("div", { class: "heads" },
    h("div", { class: "panes" }, thumbnails.panes.map((pane) => pane.element)),
    h("div", { class: "large card" },
      h("div", { class: "controls" }, large.title, modes,
        h("label", { class: "check" }, hideSpecial, "Hide special tokens such as </s>")),
      h("div", { class: "beside" }, large.element, large.reading), large.table),
    trace.hasLenses ? headTableCard(context, headName, (name) => {
      const [site, layer, head] = name.split(".");
      state.set({ site, layer, head, heads: "" });
      large.title.scrollIntoView({ block: "center" });
    }) : "");

  let shown = "";
  const update = () => {
    if (state.get("view") !== "heads") return;
    const now = JSON.stringify(["site", "layer", "head", "heads", "special"].map((name) => state.get(name)));
    if (now === shown) return;
    shown = now;
    hideSpecial.checked = specialHidden(state);
    modes.show(selectedMap(trace, state).mode);
    thumbnails.redraw();
    large.draw();
  };
  state.subscribe(update);
  onThemeChange(() => { thumbnails.redraw(true); large.draw(); }, signal);
  addEventListener("resize", () => large.fit(), { signal });
  requestAnimationFrame(() => { shown = ""; update(); }); // the map has a width only once it is in the page
  return element;
}

// -------------------------------------------------------------------------------------------------
// Selection

/** @param {Trace} trace */
export function sitesOf(trace) {
  return ATTENTION_SITES.filter((site) => trace[site.id].layers);
}

/**
 * The site, layer and head of the link; by default the last layer of the last site.
 *
 * @param {Trace} trace
 * @param {State} state
 * @param {SiteInfo[]} [sites] to select from; at least one
 */
export function selectedHead(trace, state, sites = sitesOf(trace)) {
  const site = sites.find((one) => one.id === state.get("site")) ?? sites[sites.length - 1];
  const weights = trace[site.id];
  return { site, weights, layer: state.indexOrLast("layer", weights.layers), head: state.index("head", weights.heads) };
}

/** @param {Trace} trace @param {State} state @returns {Selection} */
function selectedMap(trace, state) {
  const mode = state.get("heads");
  return { ...selectedHead(trace, state), mode: mode === "average" || mode === "max" ? mode : "single" };
}

/** @param {State} state */
function specialHidden(state) {
  return state.get("special") === "hidden";
}

/**
 * The rows and columns to show. A row of the decoder counts as special if its output is.
 *
 * @param {Trace} trace
 * @param {SiteInfo} site
 * @param {State} state
 */
function shownCells(trace, site, state) {
  /** @param {Token[]} tokens */
  const shown = (tokens) => {
    const all = tokens.map((_, i) => i);
    const some = specialHidden(state) ? all.filter((i) => !tokens[i].special) : all;
    return some.length ? some : all;
  };
  const rows = shown(site.rows === "source" ? trace.source : trace.outputs);
  return { rows, columns: shown(trace.columns[site.id]) };
}

/**
 * Whether each column of a site is a token, and not a mixture of tokens.
 *
 * @param {Trace} trace
 * @param {SiteInfo} site
 */
function columnsAreTokens(trace, site) {
  const tokens = site.columns === "source" ? trace.source : trace.inputs;
  return trace.columns[site.id].length === tokens.length;
}

// -------------------------------------------------------------------------------------------------
// Labels

/** @param {string} name SITE.LAYER.HEAD, counted from 0 */
function headName(name) {
  const [id, layer, head] = name.split(".");
  return `${ATTENTION_SITES.find((site) => site.id === id)?.title ?? id}, layer ${Number(layer) + 1}, head ${Number(head) + 1}`;
}

/**
 * The label of a query; for the decoder, its input and its output.
 *
 * @param {Trace} trace
 * @param {SiteInfo} site
 * @param {number} row
 */
export function queryLabel(trace, site, row) {
  if (site.rows === "source") return tokenLabel(trace.source[row]);
  return h("span", { class: "step" }, h("span", { class: "input" }, tokenLabel(trace.inputs[row])),
    h("span", { class: "arrow" }, " → "), tokenLabel(trace.outputs[row]));
}

/**
 * What the labels of rows and columns are. On a narrow screen style.css hides the inputs.
 *
 * @param {SiteInfo} site
 * @returns {[rows: import("../dom.js").Child, columns: string]}
 */
export function cornerLabels(site) {
  return [site.rows === "target" ? h("span", {}, h("span", { class: "input" }, "input → "), "output") : "query", "key"];
}

// -------------------------------------------------------------------------------------------------
// Thumbnails

/** @param {Context} context */
function thumbnailGrids({ trace, state, signal }) {
  /** @type {Thumbnail[]} */
  const thumbnails = [];
  /** @type {(site: SiteInfo, row: number | null) => void} */
  let pointRow = () => {};
  /** @param {Thumbnail} thumbnail */
  const draw = (thumbnail) => {
    const weights = trace[thumbnail.site.id];
    thumbnail.drawn = true;
    whenLoaded([[weights, thumbnail.layer]], (error) => {
      if (error) return;
      const { rows, columns } = shownCells(trace, thumbnail.site, state);
      const values = weights.head(thumbnail.layer, thumbnail.head);
      paint(thumbnail.canvas, ...maxPool(values, weights.keys, rows, columns, THUMBNAIL_SIZE));
    });
  };
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const thumbnail = thumbnails.find((one) => one.canvas === entry.target);
      if (entry.isIntersecting && thumbnail && !thumbnail.drawn) draw(thumbnail);
    }
  }, { rootMargin: "200px" });
  signal.addEventListener("abort", () => observer.disconnect());

  /** @param {Thumbnail} thumbnail */
  const select = ({ site, layer, head }) => state.set({ site: site.id, layer: String(layer), head: String(head) });
  const panes = ATTENTION_SITES.map((site) => {
    const weights = trace[site.id];
    const own = thumbnailsOf(site, weights, select);
    thumbnails.push(...own);
    const grid = thumbnailGrid(site, weights, own, select);
    const element = h("section", { class: "pane", "data-site": site.id },
      h("h3", {}, site.title, " ", h("span", { class: "quiet" }, site.description)),
      weights.layers ? grid : h("p", { class: "quiet" }, "This model has none."));
    return { site, element };
  });
  for (const thumbnail of thumbnails) {
    observer.observe(thumbnail.canvas);
    thumbnail.canvas.addEventListener("pointermove", (event) => {
      const box = thumbnail.canvas.getBoundingClientRect();
      const { rows } = shownCells(trace, thumbnail.site, state);
      const row = rows[Math.floor(((event.clientY - box.top) / box.height) * rows.length)];
      if (row !== undefined) pointRow(thumbnail.site, row);
    });
    thumbnail.canvas.addEventListener("pointerleave", () => pointRow(thumbnail.site, null));
  }

  let drawnHidden = specialHidden(state);
  return {
    panes,
    /** @param {Selection} selection */
    mark: (selection) => markSelected(thumbnails, selection),
    /** @param {(site: SiteInfo, row: number | null) => void} listener */
    onPointRow: (listener) => { pointRow = listener; },
    /** Draw all thumbnails again if the shown rows changed, or in any case with `force`. */
    redraw: (force = false) => {
      if (!force && drawnHidden === specialHidden(state)) return;
      drawnHidden = specialHidden(state);
      for (const thumbnail of thumbnails) if (thumbnail.drawn) draw(thumbnail);
    },
  };
}

/** @typedef {ReturnType<typeof thumbnailGrids>} Thumbnails */

/**
 * @param {SiteInfo} site
 * @param {LayerArray} weights
 * @param {(thumbnail: Thumbnail) => void} onSelect
 * @returns {Thumbnail[]}
 */
function thumbnailsOf(site, { layers, heads }, onSelect) {
  return Array.from({ length: layers * heads }, (_, i) => {
    const [layer, head] = [Math.floor(i / heads), i % heads];
    const canvas = h("canvas", { "aria-hidden": "true" });
    const button = h("button", {
      type: "button", class: "thumb", title: `Layer ${layer + 1}, head ${head + 1}`,
      "aria-label": `${site.title}, layer ${layer + 1}, head ${head + 1}`, onclick: () => onSelect(thumbnail),
    }, canvas);
    /** @type {Thumbnail} */
    const thumbnail = { site, layer, head, button, canvas, drawn: false };
    return thumbnail;
  });
}

/**
 * The thumbnails of a site, layers in rows and heads in columns; arrow keys move the selection.
 *
 * @param {SiteInfo} site
 * @param {LayerArray} weights
 * @param {Thumbnail[]} thumbnails
 * @param {(thumbnail: Thumbnail) => void} onSelect
 */
function thumbnailGrid(site, weights, thumbnails, onSelect) {
  /** @param {KeyboardEvent} event */
  const onkeydown = (event) => {
    const step = ARROWS[event.key];
    const current = thumbnails.find((one) => one.button === document.activeElement);
    if (!step || !current) return;
    event.preventDefault();
    const next = thumbnails.find((one) => one.layer === current.layer + step[0] && one.head === current.head + step[1]);
    if (!next) return;
    next.button.focus();
    onSelect(next);
  };
  const grid = h("div", { class: "grid", role: "group", "aria-label": `${site.title}: heads`, onkeydown });
  grid.style.setProperty("--heads", String(weights.heads));
  grid.append(h("span", {}));
  for (let head = 0; head < weights.heads; head++) grid.append(h("span", { class: "axis" }, h("span", { class: "word-of-axis" }, "head "), head + 1));
  for (const { layer, head, button } of thumbnails) {
    if (!head) grid.append(h("span", { class: "axis layer" }, `layer ${layer + 1}`));
    grid.append(button);
  }
  return grid;
}

/** @param {Thumbnail[]} thumbnails @param {Selection} selection */
function markSelected(thumbnails, { site, layer, head, mode }) {
  for (const one of thumbnails) {
    const inLayer = one.site === site && one.layer === layer;
    one.button.setAttribute("aria-pressed", String(inLayer && (mode !== "single" || one.head === head)));
  }
  for (const each of ATTENTION_SITES) {
    const own = thumbnails.filter((one) => one.site === each);
    const current = (each === site && own.find((one) => one.layer === layer && one.head === head)) || own[0];
    if (current) setTabStop(own.map((one) => one.button), current.button);
  }
}

// -------------------------------------------------------------------------------------------------
// The enlarged head

/** @param {Context} context @param {Thumbnails} thumbnails */
function largeMap({ trace, state, signal }, thumbnails) {
  const frame = matrixFrame("Cells", signal, "map");
  const title = h("h3", { class: "which" });
  const reading = cellReading(trace, signal);
  /** @returns {ShownMap} */
  const measure = () => {
    const selection = selectedMap(trace, state);
    const { weights, layer, head, mode } = selection;
    const { rows, columns } = shownCells(trace, selection.site, state);
    const values = weights.matrix(layer, mode === "single" ? head : mode);
    return { ...selection, values, rows, columns, cellSize: fitCell(frame, rows.length, columns.length) };
  };
  let shown = measure();
  const table = tableToggle("Attention weights: queries in rows, keys in columns", () => weightTable(trace, shown));
  /** @type {(cell: Cell | null) => void} */
  let highlight = () => {};
  let labelled = "";

  const drawLoaded = () => {
    shown = measure();
    const { site, weights, mode, values, rows, columns } = shown;
    thumbnails.mark(shown);
    title.textContent = titleOf(shown);
    paint(frame.canvas, values, weights.keys, rows, columns);
    frame.element.style.setProperty("--across", String(columns.length));
    frame.element.style.setProperty("--down", String(rows.length));
    const labels = `${site.id} ${mode} ${specialHidden(state)}`;
    if (labelled !== labels) {
      labelled = labels;
      labelMap(trace, frame, shown);
      reading.describeScale(shown);
    }
    reading.describeHead(shown);
    shown.cellSize = fitCell(frame, rows.length, columns.length); // the labels may have changed the space
    frame.element.style.setProperty("--cell", `${shown.cellSize}px`);
    table.update();
    highlight(null);
  };
  const draw = () => {
    const selection = selectedMap(trace, state);
    whenLoaded([[selection.weights, selection.layer]], (error) => {
      const now = selectedMap(trace, state);
      if (now.weights !== selection.weights || now.layer !== selection.layer) return;
      frame.element.hidden = Boolean(error);
      drawLoaded();
      if (error) reading.showError(error);
    });
  };
  return {
    element: frame.element, title, reading: reading.element, table: table.element, frame, draw,
    shown: () => shown,
    fit: () => { if (frame.element.clientWidth && measure().cellSize !== shown.cellSize) draw(); },
    /** @param {Cell | null} cell */
    describe: (cell) => reading.show(shown, cell),
    /** @param {(cell: Cell | null) => void} listener */
    onPoint: (listener) => {
      highlight = listener;
      handleCells(trace, state, frame, () => shown, listener);
    },
  };
}

/** @typedef {ReturnType<typeof largeMap>} LargeMap */
/** @typedef {ReturnType<typeof matrixFrame>} Frame */

/** @param {ShownMap} shown */
function titleOf({ site, weights, layer, head, mode }) {
  const heads = `of ${weights.heads} heads`;
  const which = { single: `head ${head + 1}`, average: `average ${heads}`, max: `maximum ${heads}` }[mode];
  return `${site.title}, layer ${layer + 1}, ${which}`;
}

/** @param {Trace} trace @param {Frame} frame @param {ShownMap} shown */
function labelMap(trace, frame, { site, rows, columns }) {
  const keys = trace.columns[site.id];
  frame.corner.replaceChildren(...cornerLabels(site).map((one) => h("span", {}, one)));
  frame.rows.replaceChildren(...rows.map((row) => h("div", { "data-index": row }, queryLabel(trace, site, row))));
  frame.columns.replaceChildren(...columns.map((column) => h("div", { "data-index": column }, tokenLabel(keys[column]))));
}

/** @param {Trace} trace @param {ShownMap} shown */
function weightTable(trace, { site, weights, values, rows, columns }) {
  const keys = trace.columns[site.id];
  return {
    head: ["query", ...columns.map((column) => tokenLabel(keys[column]))],
    rows: rows.map((row) => [queryLabel(trace, site, row),
      ...columns.map((column) => values[row * weights.keys + column].toFixed(4))]),
  };
}

/**
 * Pointer and keyboard on the cells and labels of the map. A double click or Enter opens the weight's own view.
 *
 * @param {Trace} trace @param {State} state @param {Frame} frame
 * @param {() => ShownMap} shown
 * @param {(cell: Cell | null) => void} highlight
 */
function handleCells(trace, state, frame, shown, highlight) {
  const { element, canvas, cells } = frame;
  /** @type {[number, number]} indices of the shown rows and columns */
  let cursor = [0, 0];
  const atCursor = () => ({ row: shown().rows[cursor[0]], column: shown().columns[cursor[1]] });
  /** @param {PointerEvent} event */
  const point = (event) => {
    const { rows, columns, cellSize } = shown();
    const box = canvas.getBoundingClientRect();
    const at = [Math.floor((event.clientY - box.top) / cellSize), Math.floor((event.clientX - box.left) / cellSize)];
    if (rows[at[0]] === undefined || columns[at[1]] === undefined) return;
    cursor = [at[0], at[1]];
    highlight(atCursor());
  };
  const openWeight = () => {
    const { site, layer, head } = shown();
    const { row, column } = atCursor();
    if (!hasProjections(trace, shown())) return;
    state.set({
      view: "weight", site: site.id, layer: String(layer), head: String(head), query: String(row), key: String(column),
    });
  };
  cells.addEventListener("dblclick", openWeight);
  cells.addEventListener("pointermove", point);
  cells.addEventListener("pointerdown", point);
  cells.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (event.key === "Enter") openWeight();
    if (!step) return;
    event.preventDefault();
    const { rows, columns } = shown();
    cursor = [clampIndex(cursor[0] + step[0], rows.length), clampIndex(cursor[1] + step[1], columns.length)];
    highlight(atCursor());
  });
  cells.addEventListener("focus", () => {
    cursor = [0, 0];
    if (cells.matches(":focus-visible")) highlight(atCursor());
  });
  cells.addEventListener("blur", () => highlight(null));
  for (const [labels, name] of /** @type {const} */ ([[frame.rows, "row"], [frame.columns, "column"]])) {
    labels.addEventListener("pointerover", (event) => {
      const label = /** @type {Element} */ (event.target).closest("[data-index]");
      if (!(label instanceof HTMLElement)) return;
      const index = Number(label.dataset.index);
      if (name === "row") cursor = [shown().rows.indexOf(index), cursor[1]];
      highlight({ [name]: index });
    });
  }
  element.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") highlight(null); // a lifted finger still points at its cell
  });
}

/** @param {Trace} trace @param {Selection} selection whether the weights can be followed from queries and keys */
function hasProjections(trace, { site, mode }) {
  return mode === "single" && Boolean(trace.projections[site.id]);
}

// -------------------------------------------------------------------------------------------------
// Reading values

/**
 * The panel beside the map: the colour scale, the weight of a cell, and the top keys of its row.
 *
 * @param {Trace} trace
 * @param {AbortSignal} signal
 */
function cellReading(trace, signal) {
  const scaleNote = h("span", { class: "quiet" });
  const value = h("p", { class: "value", "aria-live": "polite" });
  const topKeys = h("div", { class: "shares" });
  const behaviour = h("p", { class: "behaviour" });
  const element = h("aside", { class: "reading" }, behaviour,
    h("div", { class: "legend" }, "0", scaleBar(signal), "1", scaleNote),
    spaceSymbolNote([...trace.source, ...trace.outputs]), value, topKeys);

  /** @param {ShownMap} shown @param {Cell | null} cell */
  const show = (shown, cell) => {
    if (cell?.row === undefined) {
      value.replaceChildren(h("span", { class: "quiet" }, instructions(hasProjections(trace, shown))));
      topKeys.replaceChildren();
      return;
    }
    const { site, weights, values, columns } = shown;
    const keys = trace.columns[site.id];
    const row = values.subarray(cell.row * weights.keys, (cell.row + 1) * weights.keys);
    value.replaceChildren(queryLabel(trace, site, cell.row), h("span", { class: "quiet" }, " attends to "));
    if (cell.column !== undefined) {
      value.append(tokenLabel(keys[cell.column]), " ", h("strong", {}, row[cell.column].toFixed(4)));
    }
    const best = [...columns].sort((a, b) => row[b] - row[a]).slice(0, TOP_KEYS);
    topKeys.replaceChildren(...best.map((column) =>
      h("div", { class: "share" }, tokenBar(keys[column], row[column], row[column].toFixed(3)))));
  };
  return {
    element, show,
    /** @param {string} error */
    showError: (error) => value.replaceChildren(h("span", { class: "status wrong" }, error)),
    /** @param {ShownMap} shown */
    describeHead: ({ site, mode, values }) => {
      const found = mode === "single" ? behaviourOf(site.id, trace.columns[site.id], values) : null;
      behaviour.textContent = found ? describeBehaviour(found, percent) : "";
      behaviour.hidden = !found;
    },
    /** @param {ShownMap} shown */
    describeScale: ({ weights, values, mode }) => {
      const sum = values.subarray(0, weights.keys).reduce((total, weight) => total + weight, 0);
      const normalized = mode === "single" && Math.abs(sum - 1) < 0.02;
      scaleNote.textContent = `attention weight${normalized ? "; the row of a head sums to 1" : ""}${
        weights.quantized ? "; quantized to 8 bits in this file, accurate to 0.004" : ""}`;
    },
  };
}

/** @param {boolean} followable */
function instructions(followable) {
  if (TOUCH) {
    return `${POINT_AT} a cell for its weight and the keys that its row attends to most.${
      followable ? " The tab “One weight” shows how a weight is computed." : ""}`;
  }
  return `${POINT_AT} a cell for its weight, or at a row for the keys that it attends to most.${
    followable ? " Double-click a cell, or press Enter, to see how its weight is computed." : ""}`;
}

// -------------------------------------------------------------------------------------------------
// Highlighting

/**
 * Highlights a row and a column of the large map, and the same tokens in all thumbnails.
 *
 * @param {Trace} trace @param {State} state @param {Thumbnails} thumbnails @param {LargeMap} large
 * @returns {(cell: Cell | null) => void}
 */
function highlighter(trace, state, thumbnails, large) {
  return (cell) => {
    const { site, rows, columns } = large.shown();
    /** @type {{ side: Side, index: number } | null} */
    let token = null;
    if (cell?.row !== undefined) token = { side: site.rows, index: cell.row };
    else if (cell?.column !== undefined && columnsAreTokens(trace, site)) {
      token = { side: site.columns, index: cell.column };
    }
    for (const pane of thumbnails.panes) {
      const shown = shownCells(trace, pane.site, state);
      /** @param {Side} side */
      const index = (side) => (token?.side === side ? token.index : undefined);
      const square = pane.site.rows === pane.site.columns;
      setHighlight(pane.element, "row", shown.rows, index(pane.site.rows));
      setHighlight(pane.element, "column", shown.columns,
        square || !columnsAreTokens(trace, pane.site) ? undefined : index(pane.site.columns));
    }
    setHighlight(large.element, "row", rows, cell?.row);
    setHighlight(large.element, "column", columns, cell?.column);
    highlightLabels(large.frame.rows, cell?.row);
    highlightLabels(large.frame.columns, cell?.column);
    large.describe(cell);
  };
}

/**
 * Highlight the row under the pointer in a thumbnail wherever the same token is a row or a column.
 *
 * @param {Trace} trace @param {State} state @param {Thumbnails} thumbnails @param {LargeMap} large
 * @param {SiteInfo} site @param {number} row
 */
function highlightRow(trace, state, thumbnails, large, site, row) {
  for (const pane of thumbnails.panes) {
    const shown = shownCells(trace, pane.site, state);
    const isRow = pane.site.rows === site.rows;
    const isColumn = !isRow && pane.site.columns === site.rows && columnsAreTokens(trace, pane.site);
    setHighlight(pane.element, "row", shown.rows, isRow ? row : undefined);
    setHighlight(pane.element, "column", shown.columns, isColumn ? row : undefined);
  }
  const { site: largeSite, rows } = large.shown();
  setHighlight(large.element, "row", rows, largeSite.rows === site.rows ? row : undefined);
}

/**
 * Tell style.css which row or column to highlight.
 *
 * @param {HTMLElement} element
 * @param {"row" | "column"} name
 * @param {number[]} shown
 * @param {number | undefined} index
 */
function setHighlight(element, name, shown, index) {
  const at = index === undefined ? -1 : shown.indexOf(index);
  element.classList.toggle(`lit-${name}`, at >= 0);
  if (at < 0) return;
  element.style.setProperty(`--${name}`, String(at));
  element.style.setProperty(`--${name}s`, String(shown.length));
}

/** @param {HTMLElement} labels @param {number | undefined} index */
function highlightLabels(labels, index) {
  for (const label of labels.children) label.classList.toggle("lit", label.getAttribute("data-index") === `${index}`);
}
