/**
 * A matrix with names on its rows and columns, of which one cell can be pointed at or chosen.
 *
 * @typedef {import("./dom.js").Child} Child
 * @typedef {{ values: Float32Array, rows: Child[], columns: Child[], corner?: [rows: Child, columns: Child],
 *   chosen?: [row: number, column: number] | null, greatest?: number }} Content values row by row; with a greatest, they
 *   have a sign, and it is the strongest colour's
 */

import { onTheme, paint, paintSigned } from "./colour.js";
import { ARROWS, fading, h } from "./dom.js";

const SMALLEST = 16;
const LARGEST = 34;

/**
 * @param {string} name for those who cannot see it
 * @param {AbortSignal} signal
 * @param {{ point?(row: number, column: number): void, leave?(): void, choose?(row: number, column: number): void }} on
 */
export function labelledMap(name, signal, on) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const field = h("div", {
    class: "cells", tabindex: 0, role: "application", "aria-label": `${name}: arrow keys move, the value is read out`,
  }, canvas, h("div", { class: "light row" }), h("div", { class: "light column" }), h("div", { class: "light cell" }));
  const rows = h("div", { class: "rows" });
  const columns = h("div", { class: "columns" });
  const corner = h("div", { class: "corner" });
  const sheet = h("div", { class: "sheet" }, corner, columns, rows, field);
  const element = fading(h("div", { class: "map", tabindex: -1 }, sheet), signal);
  /** @type {Content} */
  let content = { values: new Float32Array(0), rows: [], columns: [] };
  let cell = LARGEST;
  /** @type {[number, number]} */
  let cursor = [0, 0];

  const draw = () => {
    const [down, across] = [content.rows.length, content.columns.length];
    const [all, each] = [Array.from(Array(down).keys()), Array.from(Array(across).keys())];
    if (content.greatest === undefined) paint(canvas, content.values, across, all, each);
    else paintSigned(canvas, content.values, across, all, each, content.greatest);
  };
  /** @param {[number, number] | null} at */
  const light = (at) => {
    element.classList.toggle("lit-row", at !== null);
    element.classList.toggle("lit-column", at !== null);
    if (at) {
      element.style.setProperty("--row", String(at[0]));
      element.style.setProperty("--column", String(at[1]));
    }
    [rows, columns].forEach((labels, side) => {
      Array.from(labels.children).forEach((one, i) => one.classList.toggle("lit", at !== null && i === at[side]));
    });
  };
  /** @param {Content} next */
  const show = (next) => {
    content = next;
    const [down, across] = [next.rows.length, next.columns.length];
    corner.replaceChildren(h("span", {}, next.corner?.[0] ?? "query"), h("span", {}, next.corner?.[1] ?? "key"));
    rows.replaceChildren(...next.rows.map((one) => h("div", {}, one)));
    columns.replaceChildren(...next.columns.map((one) => h("div", {}, one)));
    const space = (element.clientWidth || 560) - (rows.offsetWidth || 130);
    cell = Math.min(Math.max(Math.floor(space / Math.max(across, 1)), SMALLEST), LARGEST);
    element.style.setProperty("--cell", `${cell}px`);
    element.style.setProperty("--across", String(across));
    element.style.setProperty("--down", String(down));
    cursor = next.chosen ?? [0, 0];
    draw();
    light(next.chosen ?? null);
  };

  /** @param {MouseEvent} event @returns {[number, number] | null} */
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const at = [Math.floor((event.clientY - box.top) / cell), Math.floor((event.clientX - box.left) / cell)];
    const inside = at[0] >= 0 && at[1] >= 0 && at[0] < content.rows.length && at[1] < content.columns.length;
    return inside ? [at[0], at[1]] : null;
  };
  field.addEventListener("pointermove", (event) => {
    const at = under(event);
    if (!at || !on.point) return;
    light(at);
    on.point(...at);
  });
  field.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "touch" || !on.point) return; // a finger that is lifted has not gone elsewhere
    light(content.chosen ?? null);
    on.leave?.();
  });
  field.addEventListener("click", (event) => {
    const at = under(event);
    if (at) on.choose?.(...at);
  });
  field.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (!step) return;
    event.preventDefault();
    /** @param {number} place @param {number} count */
    const inside = (place, count) => Math.min(Math.max(place, 0), count - 1);
    cursor = [inside(cursor[0] + step[0], content.rows.length), inside(cursor[1] + step[1], content.columns.length)];
    light(cursor);
    (on.choose ?? on.point)?.(...cursor);
  });
  onTheme(draw, signal);
  return { element, show, field };
}
