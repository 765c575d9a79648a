/**
 * The one colour scale of the page: weights from 0 to 1, light to dark on paper, dark to light at night.
 *
 * Straight lines in OKLab, walked at an even pace, so equal steps in weight look like equal steps in colour. Lightness
 * goes one way only: the scale can be read without seeing hues, and in grey print.
 *
 * @typedef {[number, number, number]} Three
 */

/** The same stops stand in tests/browser. */
const STOPS = {
  light: ["#f3f2ed", "#6f9fd4", "#16245c"],
  dark: ["#23262d", "#4a78bd", "#f2f6ff"],
};

export const STEPS = 256;

/** @param {string} hex @returns {Three} */
function read(hex) {
  const number = parseInt(hex.slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

/** @param {Three} rgb 0 to 255 @returns {Three} */
export function toLab(rgb) {
  const [r, g, b] = rgb.map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

/** @param {Three} lab @returns {Three} 0 to 255 */
function fromLab([L, A, B]) {
  const l = (L + 0.3963377774 * A + 0.2158037573 * B) ** 3;
  const m = (L - 0.1055613458 * A - 0.0638541728 * B) ** 3;
  const s = (L - 0.0894841775 * A - 1.291485548 * B) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return /** @type {Three} */ (linear.map((part) => {
    const share = part <= 0.0031308 ? part * 12.92 : 1.055 * part ** (1 / 2.4) - 0.055;
    return Math.round(Math.min(Math.max(share, 0), 1) * 255);
  }));
}

/** @param {string[]} stops @returns {Three[]} */
function makeScale(stops) {
  const labs = stops.map((stop) => toLab(read(stop)));
  const lengths = labs.slice(1).map((lab, i) => Math.hypot(...lab.map((part, j) => part - labs[i][j])));
  const whole = lengths.reduce((a, b) => a + b);
  return Array.from({ length: STEPS }, (_, step) => {
    let way = (step / (STEPS - 1)) * whole;
    let i = 0;
    while (i < lengths.length - 1 && way > lengths[i]) way -= lengths[i++];
    const share = way / lengths[i];
    return fromLab(/** @type {Three} */ (labs[i].map((part, j) => part + share * (labs[i + 1][j] - part))));
  });
}

const SCALES = { light: makeScale(STOPS.light), dark: makeScale(STOPS.dark) };

/**
 * Red, green, blue, opaque, as they lie in memory.
 *
 * @param {Three[]} scale
 */
function makePixels(scale) {
  return new Uint32Array(Uint8Array.from(scale.flatMap((colour) => [...colour, 255])).buffer);
}

const PIXELS = { light: makePixels(SCALES.light), dark: makePixels(SCALES.dark) };

/** Numbers with a sign: from the same nothing to blue above zero, to amber below; the ends differ also in hue. */
const SIGNED = {
  light: { above: PIXELS.light, below: makePixels(makeScale(["#f3f2ed", "#dd9a52", "#6d2c02"])) },
  dark: {
    above: makePixels(makeScale(["#23262d", "#3f6fb8", "#a9c8ff"])),
    below: makePixels(makeScale(["#23262d", "#a55d1a", "#ffc382"])),
  },
};

/** @param {number} weight from 0 to 1 @param {boolean} dark @returns {Three} */
export function colourOf(weight, dark) {
  return SCALES[dark ? "dark" : "light"][stepOf(weight)];
}

/** @param {number} weight */
function stepOf(weight) {
  return Math.round(Math.min(Math.max(weight, 0), 1) * (STEPS - 1));
}

/** Too little to be seen as a colour beside text. */
const NOTHING = 0.02;

/**
 * Background and text of something that carries a weight.
 *
 * @param {HTMLElement} element
 * @param {number | null} weight
 */
export function tint(element, weight, dark = isDark()) {
  if (weight === null || weight < NOTHING) {
    element.style.removeProperty("background-color");
    element.style.removeProperty("color");
    return;
  }
  const colour = colourOf(weight, dark);
  element.style.backgroundColor = `rgb(${colour.join(" ")})`;
  element.style.color = toLab(colour)[0] > 0.62 ? "#16181d" : "#ffffff";
}

/**
 * One pixel a cell, row by row; style.css makes it as large as it should be.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Float32Array} weights
 * @param {number} width of a whole row of weights
 * @param {number[]} rows which rows to draw
 * @param {number[]} columns
 */
export function paint(canvas, weights, width, rows, columns, dark = isDark()) {
  canvas.width = columns.length;
  canvas.height = rows.length;
  const context = canvas.getContext("2d");
  if (!context || !rows.length || !columns.length) return;
  const image = context.createImageData(columns.length, rows.length);
  const pixels = PIXELS[dark ? "dark" : "light"];
  const data = new Uint32Array(image.data.buffer);
  let at = 0;
  for (const row of rows) {
    const start = row * width;
    for (const column of columns) data[at++] = pixels[stepOf(weights[start + column])];
  }
  context.putImageData(image, 0, 0);
}

/**
 * The same for numbers with a sign.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {Float32Array} values
 * @param {number} width
 * @param {number[]} rows
 * @param {number[]} columns
 * @param {number} greatest what gets the strongest colour, above zero and below
 */
export function paintSigned(canvas, values, width, rows, columns, greatest, dark = isDark()) {
  canvas.width = columns.length;
  canvas.height = rows.length;
  const context = canvas.getContext("2d");
  if (!context || !rows.length || !columns.length) return;
  const image = context.createImageData(columns.length, rows.length);
  const data = new Uint32Array(image.data.buffer);
  const { above, below } = SIGNED[dark ? "dark" : "light"];
  let at = 0;
  for (const row of rows) {
    for (const column of columns) {
      const value = values[row * width + column] / (greatest || 1);
      // Minus infinity, of a masked score, is no colour at all.
      data[at++] = value === -Infinity ? 0 : (value < 0 ? below : above)[stepOf(Math.abs(value))];
    }
  }
  context.putImageData(image, 0, 0);
}

/**
 * A map for a small place: of cells that fall together the greatest is kept, for a thin line must not get lost.
 *
 * @param {Float32Array} weights
 * @param {number} width of a whole row of weights
 * @param {number[]} rows
 * @param {number[]} columns
 * @param {number} most rows and columns there is room for
 * @returns {[weights: Float32Array, width: number, rows: number[], columns: number[]]}
 */
export function shrink(weights, width, rows, columns, most) {
  if (rows.length <= most && columns.length <= most) return [weights, width, rows, columns];
  const down = Math.min(rows.length, most);
  const across = Math.min(columns.length, most);
  const small = new Float32Array(down * across);
  rows.forEach((row, i) => {
    const start = Math.floor((i * down) / rows.length) * across;
    columns.forEach((column, j) => {
      const at = start + Math.floor((j * across) / columns.length);
      const weight = weights[row * width + column];
      if (weight > small[at]) small[at] = weight;
    });
  });
  return [small, across, Array.from(Array(down).keys()), Array.from(Array(across).keys())];
}

// -------------------------------------------------------------------------------------------------
// Light and dark

const night = matchMedia("(prefers-color-scheme: dark)");
/** @type {Set<() => void>} */
const listeners = new Set();

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : night.matches;
}

export function toggleTheme() {
  setTheme(isDark() ? "light" : "dark");
  try {
    localStorage.setItem("regard-theme", isDark() ? "dark" : "light");
  } catch { /* some places keep nothing, a notebook's cell for one */ }
}

/** As it was chosen the last time, if it was. */
export function recallTheme() {
  try {
    const chosen = localStorage.getItem("regard-theme");
    if (chosen === "light" || chosen === "dark") setTheme(chosen);
  } catch { /* likewise */ }
}

/** @param {string} theme */
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const listener of listeners) listener();
}

/** @param {() => void} listener @param {AbortSignal} signal */
export function onTheme(listener, signal) {
  listeners.add(listener);
  night.addEventListener("change", listener, { signal });
  signal.addEventListener("abort", () => listeners.delete(listener));
}
