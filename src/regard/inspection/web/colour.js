/**
 * Colour scales: attention weights from 0 to 1, light to dark in the light theme, dark to light in the dark theme.
 *
 * A scale is a polyline in OKLab with steps of equal length, so equal steps in weight look like equal steps in colour.
 * Its lightness is monotonic: it can be read without seeing hues, and in greyscale print.
 *
 * @typedef {[number, number, number]} Triple
 * @typedef {"light" | "dark"} Theme
 */

/** tests/browser/test_page.py has the same stops. */
const STOPS = {
  light: ["#f3f2ed", "#6f9fd4", "#16245c"],
  dark: ["#23262d", "#4a78bd", "#f2f6ff"],
};

const STEPS = 256;

/** @param {string} hex @returns {Triple} */
function parseHex(hex) {
  const number = parseInt(hex.slice(1), 16);
  return [number >> 16, (number >> 8) & 255, number & 255];
}

/** @param {Triple} rgb 0 to 255 @returns {Triple} OKLab */
export function toOklab(rgb) {
  const [r, g, b] = rgb.map((part) => {
    const value = part / 255;
    return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
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

/** @param {Triple} oklab @returns {Triple} 0 to 255 */
export function fromOklab([L, A, B]) {
  const l = (L + 0.3963377774 * A + 0.2158037573 * B) ** 3;
  const m = (L - 0.1055613458 * A - 0.0638541728 * B) ** 3;
  const s = (L - 0.0894841775 * A - 1.291485548 * B) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return /** @type {Triple} */ (linear.map((part) => {
    const value = part <= 0.0031308 ? part * 12.92 : 1.055 * part ** (1 / 2.4) - 0.055;
    return Math.round(Math.min(Math.max(value, 0), 1) * 255);
  }));
}

/** @param {string[]} stops @returns {Triple[]} */
function makeScale(stops) {
  const labs = stops.map((stop) => toOklab(parseHex(stop)));
  const lengths = labs.slice(1).map((lab, i) => Math.hypot(...lab.map((part, j) => part - labs[i][j])));
  const total = lengths.reduce((a, b) => a + b);
  return Array.from({ length: STEPS }, (_, step) => {
    let distance = (step / (STEPS - 1)) * total;
    let i = 0;
    while (i < lengths.length - 1 && distance > lengths[i]) distance -= lengths[i++];
    const fraction = distance / lengths[i];
    return fromOklab(/** @type {Triple} */ (labs[i].map((part, j) => part + fraction * (labs[i + 1][j] - part))));
  });
}

const SCALES = { light: makeScale(STOPS.light), dark: makeScale(STOPS.dark) };

/**
 * The colours of a scale as opaque RGBA pixels.
 *
 * @param {Triple[]} scale
 */
function makePixels(scale) {
  return new Uint32Array(Uint8Array.from(scale.flatMap((colour) => [...colour, 255])).buffer);
}

const PIXELS = { light: makePixels(SCALES.light), dark: makePixels(SCALES.dark) };

/** Diverging scales from the same zero: blue for positive values, amber for negative ones. */
const DIVERGING = {
  light: { positive: PIXELS.light, negative: makePixels(makeScale(["#f3f2ed", "#dd9a52", "#6d2c02"])) },
  dark: {
    positive: makePixels(makeScale(["#23262d", "#3f6fb8", "#a9c8ff"])),
    negative: makePixels(makeScale(["#23262d", "#a55d1a", "#ffc382"])),
  },
};

/** @param {number} weight clamped to 0 to 1 @returns {number} index in a scale */
function stepOf(weight) {
  return Math.round(Math.min(Math.max(weight, 0), 1) * (STEPS - 1));
}

/** @param {number} weight from 0 to 1 @param {Theme} theme @returns {Triple} */
export function colourOf(weight, theme) {
  return SCALES[theme][stepOf(weight)];
}

/** @param {number} weight from 0 to 1 @param {Theme} theme */
export function pixelOf(weight, theme) {
  return PIXELS[theme][stepOf(weight)];
}

/** @param {number} value from -1 to 1; minus infinity, a masked score, is transparent @param {Theme} theme */
export function divergingPixelOf(value, theme) {
  if (value === -Infinity) return 0;
  return DIVERGING[theme][value < 0 ? "negative" : "positive"][stepOf(Math.abs(value))];
}

/**
 * Shrink a matrix to fit a thumbnail by taking maxima, so that a thin line does not get lost.
 *
 * @param {Float32Array} weights
 * @param {number} width length of a row of weights
 * @param {number[]} rows the rows to show
 * @param {number[]} columns
 * @param {number} limit number of rows and columns that fit
 * @returns {[weights: Float32Array, width: number, rows: number[], columns: number[]]}
 */
export function maxPool(weights, width, rows, columns, limit) {
  if (rows.length <= limit && columns.length <= limit) return [weights, width, rows, columns];
  const down = Math.min(rows.length, limit);
  const across = Math.min(columns.length, limit);
  const pooled = new Float32Array(down * across);
  rows.forEach((row, i) => {
    const start = Math.floor((i * down) / rows.length) * across;
    columns.forEach((column, j) => {
      const index = start + Math.floor((j * across) / columns.length);
      const weight = weights[row * width + column];
      if (weight > pooled[index]) pooled[index] = weight;
    });
  });
  return [pooled, across, Array.from(Array(down).keys()), Array.from(Array(across).keys())];
}
