/**
 * A matrix with labels on its rows and columns. One cell can be pointed at or selected.
 *
 * @typedef {import("./dom.js").Child} Child
 * @typedef {{ values: Float32Array, rows: Child[], columns: Child[], corner?: [rows: Child, columns: Child],
 *   selected?: [row: number, column: number] | null, max?: number }} Content values are row-major; with a max, they
 *   have a sign, and max gets the strongest colour
 */

import { paint, paintDiverging } from "./canvas.js";
import { ARROWS, NARROW, clampIndex, h, range, scrollFade } from "./dom.js";
import { onThemeChange } from "./theme.js";

/** on the screen of a phone, 20 columns and their labels */
const MIN_CELL = 12;
const MAX_CELL = NARROW ? 24 : 34;
/** share of the window's height that a map fills at most, as in style.css */
const MAX_HEIGHT = 0.75;

/**
 * The elements of a labelled matrix: a canvas under highlights for a row, a column and a cell.
 *
 * @param {string} name accessible name of the cells
 * @param {AbortSignal} signal
 * @param {string} [id] of the canvas
 */
export function matrixFrame(name, signal, id) {
  const canvas = h("canvas", { id, "aria-hidden": "true" });
  const cells = h("div", {
    class: "cells", tabindex: 0, role: "application", "aria-label": `${name}: arrow keys move, the value is read out`,
  }, canvas, ...["row", "column", "cell"].map((kind) => h("div", { class: `highlight ${kind}` })));
  const rows = h("div", { class: "rows" });
  const columns = h("div", { class: "columns" });
  const corner = h("div", { class: "corner" });
  const element = scrollFade(
    h("div", { class: "map", tabindex: -1 }, h("div", { class: "sheet" }, corner, columns, rows, cells)), signal);
  return { element, canvas, cells, rows, columns, corner };
}

/**
 * The size of the cells with which the whole matrix is visible, or the smallest one if that is larger.
 *
 * @param {ReturnType<typeof matrixFrame>} frame with its labels
 * @param {number} down rows
 * @param {number} across columns
 */
export function fitCell({ element, rows, columns }, down, across) {
  const width = (element.clientWidth || 560) - (rows.offsetWidth || 130);
  const height = innerHeight * MAX_HEIGHT - (columns.offsetHeight || 80);
  const size = Math.floor(Math.min(width / Math.max(across, 1), height / Math.max(down, 1)));
  return Math.min(Math.max(size, MIN_CELL), MAX_CELL);
}

/**
 * @param {string} name accessible name
 * @param {AbortSignal} signal
 * @param {{ id?: string, onPoint?(row: number, column: number): void, onLeave?(): void,
 *   onSelect?(row: number, column: number): void }} options id: of the canvas
 */
export function heatmap(name, signal, { id, onPoint, onLeave, onSelect }) {
  const frame = matrixFrame(name, signal, id);
  const { element, canvas, cells, rows, columns, corner } = frame;
  /** @type {Content} */
  let content = { values: new Float32Array(0), rows: [], columns: [] };
  let cellSize = MAX_CELL;
  /** @type {[number, number]} */
  let cursor = [0, 0];

  const draw = () => {
    const [height, width] = [content.rows.length, content.columns.length];
    if (content.max === undefined) paint(canvas, content.values, width, range(height), range(width));
    else paintDiverging(canvas, content.values, width, range(height), range(width), content.max);
  };
  /** @param {[number, number] | null} cell */
  const highlight = (cell) => {
    element.classList.toggle("lit-row", cell !== null);
    element.classList.toggle("lit-column", cell !== null);
    if (cell) {
      element.style.setProperty("--row", String(cell[0]));
      element.style.setProperty("--column", String(cell[1]));
    }
    [rows, columns].forEach((labels, side) => {
      Array.from(labels.children).forEach((one, i) => one.classList.toggle("lit", cell !== null && i === cell[side]));
    });
  };
  /** @param {Content} next */
  const show = (next) => {
    content = next;
    const [height, width] = [next.rows.length, next.columns.length];
    corner.replaceChildren(h("span", {}, next.corner?.[0] ?? "query"), h("span", {}, next.corner?.[1] ?? "key"));
    rows.replaceChildren(...next.rows.map((one) => h("div", {}, one)));
    columns.replaceChildren(...next.columns.map((one) => h("div", {}, one)));
    cellSize = fitCell(frame, height, width);
    element.style.setProperty("--cell", `${cellSize}px`);
    element.style.setProperty("--across", String(width));
    element.style.setProperty("--down", String(height));
    cursor = next.selected ?? [0, 0];
    draw();
    highlight(next.selected ?? null);
  };

  /** @param {MouseEvent} event @returns {[number, number] | null} */
  const cellUnder = (event) => {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / cellSize);
    const column = Math.floor((event.clientX - box.left) / cellSize);
    const inside = row >= 0 && column >= 0 && row < content.rows.length && column < content.columns.length;
    return inside ? [row, column] : null;
  };
  cells.addEventListener("pointermove", (event) => {
    const cell = cellUnder(event);
    if (!cell || !onPoint) return;
    highlight(cell);
    onPoint(...cell);
  });
  cells.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "touch" || !onPoint) return; // a lifted finger still points at its cell
    highlight(content.selected ?? null);
    onLeave?.();
  });
  cells.addEventListener("click", (event) => {
    const cell = cellUnder(event);
    if (cell) onSelect?.(...cell);
  });
  cells.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (!step) return;
    event.preventDefault();
    cursor = [clampIndex(cursor[0] + step[0], content.rows.length), clampIndex(cursor[1] + step[1], content.columns.length)];
    highlight(cursor);
    (onSelect ?? onPoint)?.(...cursor);
  });
  onThemeChange(draw, signal);
  return { element, show };
}
