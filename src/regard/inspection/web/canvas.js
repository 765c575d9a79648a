/** Drawing with the colour scales: matrices on a canvas, and backgrounds behind text. */

import { colourOf, divergingPixelOf, pixelOf, toOklab } from "./colour.js";
import { h } from "./dom.js";
import { currentTheme, onThemeChange } from "./theme.js";

/** a weight below this is not visible as a background of text */
const MIN_VISIBLE = 0.02;

/**
 * Set the background of an element to the colour of a weight, and its text to black or white.
 *
 * @param {HTMLElement} element
 * @param {number | null} weight from 0 to 1; null: no background
 */
export function tint(element, weight) {
  if (weight === null || weight < MIN_VISIBLE) {
    element.style.removeProperty("background-color");
    element.style.removeProperty("color");
    return;
  }
  const colour = colourOf(weight, currentTheme());
  element.style.backgroundColor = `rgb(${colour.join(" ")})`;
  element.style.color = toOklab(colour)[0] > 0.62 ? "#16181d" : "#ffffff";
}

/**
 * Draw weights from 0 to 1, one pixel for each cell; style.css scales the canvas.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Float32Array} weights row-major
 * @param {number} width length of a row of weights
 * @param {number[]} rows the rows to draw
 * @param {number[]} columns
 */
export function paint(canvas, weights, width, rows, columns) {
  const theme = currentTheme();
  fill(canvas, rows, columns, (row, column) => pixelOf(weights[row * width + column], theme));
}

/**
 * Draw values with a sign.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Float32Array} values row-major
 * @param {number} width length of a row of values
 * @param {number[]} rows
 * @param {number[]} columns
 * @param {number} max the absolute value that gets the strongest colour
 */
export function paintDiverging(canvas, values, width, rows, columns, max) {
  const theme = currentTheme();
  fill(canvas, rows, columns, (row, column) => divergingPixelOf(values[row * width + column] / (max || 1), theme));
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {number[]} rows
 * @param {number[]} columns
 * @param {(row: number, column: number) => number} pixel
 */
function fill(canvas, rows, columns, pixel) {
  canvas.width = columns.length;
  canvas.height = rows.length;
  const context = canvas.getContext("2d");
  if (!context || !rows.length || !columns.length) return;
  const image = context.createImageData(columns.length, rows.length);
  const data = new Uint32Array(image.data.buffer);
  let index = 0;
  for (const row of rows) for (const column of columns) data[index++] = pixel(row, column);
  context.putImageData(image, 0, 0);
}

/**
 * What the colours of weights mean: the scale from 0 to 1, and its unit.
 *
 * @param {string} unit
 * @param {AbortSignal} signal
 */
export function weightLegend(unit, signal) {
  return h("p", { class: "legend" }, "0", scaleBar(signal), "1", h("span", {}, unit));
}

/**
 * What the colours of values with a sign mean.
 *
 * @param {[low: string, high: string]} ends the texts beside the scale
 * @param {string} unit
 * @param {AbortSignal} signal
 */
export function signedLegend([low, high], unit, signal) {
  return h("p", { class: "legend" }, low, divergingBar(signal), high, h("span", {}, unit));
}

/**
 * A canvas with the colour scale from 0 to 1, for legends.
 *
 * @param {AbortSignal} signal
 */
export function scaleBar(signal) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const steps = Float32Array.from({ length: 64 }, (_, i) => i / 63);
  const draw = () => paint(canvas, steps, 64, [0], Array.from(steps.keys()));
  draw();
  onThemeChange(draw, signal);
  return canvas;
}

/**
 * A canvas with the diverging colour scale from -1 to 1, for legends.
 *
 * @param {AbortSignal} signal
 */
export function divergingBar(signal) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const steps = Float32Array.from({ length: 65 }, (_, i) => i / 32 - 1);
  const draw = () => paintDiverging(canvas, steps, 65, [0], Array.from(steps.keys()), 1);
  draw();
  onThemeChange(draw, signal);
  return canvas;
}
