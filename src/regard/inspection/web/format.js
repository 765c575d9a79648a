/** Numbers as the page writes them. */

/** @param {number} value from 0 to 1 */
export function percent(value) {
  const hundred = value * 100;
  if (hundred > 0 && hundred < 0.1) return "<0.1%";
  if (hundred >= 99.95 && hundred < 100) return ">99.9%";
  return `${hundred.toFixed(hundred < 10 || (hundred > 99 && hundred < 100) ? 1 : 0)}%`;
}

/**
 * Three decimals, with a proper minus sign.
 *
 * @param {number} value
 */
export function signed(value) {
  return value.toFixed(3).replace("-", "−");
}

/**
 * Four decimals, with a proper minus sign and without negative zero.
 *
 * @param {number} value
 */
export function decimal(value) {
  return value === -Infinity ? "−∞" : value.toFixed(4).replace(/^-(?!0\.0000$)/, "−").replace(/^-/, "");
}

/**
 * Three significant digits; a large number, such as a step, is rounded and grouped.
 *
 * @param {number} value
 */
export function compact(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1000 ? grouped(Math.round(value))
    : size < 0.001 ? value.toExponential(1).replace("e-", "e−")
      : String(Number(value.toPrecision(3)));
  return text.replace(/^-/, "−");
}

/**
 * Four decimals, or scientific notation for very large and very small values.
 *
 * @param {number} value
 */
export function scientific(value) {
  return value !== 0 && (value >= 1e5 || value < 1e-3) ? value.toExponential(3).replace("-", "−") : value.toFixed(4);
}

/**
 * With commas between thousands.
 *
 * @param {number} value a whole number
 */
export function grouped(value) {
  return value.toLocaleString("en");
}

/**
 * In subscript digits.
 *
 * @param {number} value a whole number
 */
export function subscript(value) {
  return String(value).replace(/\d/g, (digit) => "₀₁₂₃₄₅₆₇₈₉"[Number(digit)]);
}

/**
 * About `count` round numbers that cover a range.
 *
 * @param {number} low
 * @param {number} high
 * @param {number} count
 */
export function ticks(low, high, count) {
  const range = high - low || Math.abs(high) || 1;
  const rough = range / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? rough;
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil((low + range) / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}
