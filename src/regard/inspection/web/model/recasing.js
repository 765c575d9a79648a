/**
 * Recasing of texts in capitals, as data/recasing.py does it. Placeholders, tags, URLs and e-mail addresses keep their
 * case.
 */

const LETTERS = "\\p{L}\\p{N}_";
const UNSPACED = "\\u0e00-\\u0eff\\u1000-\\u109f\\u1780-\\u17ff\\u2e80-\\u9fff\\uf900-\\ufaff\\uff66-\\uff9f\\u{20000}-\\u{323af}";
/** the placeholders of data/protected_spans.py */
const PLACEHOLDERS = new RegExp([
  "\\{\\{[^{}\\n]+\\}\\}", "[$%]?\\{[^{}\\s][^{}\\n]*\\}", "\\{\\}",
  `%(?:\\([${LETTERS}]+\\)|\\d+\\$)?[\\-+#0]*\\d*(?:\\.\\d+)?l{0,2}[diouxXeEfgGcs@](?!(?![${UNSPACED}])\\p{L})`,
  `</?[A-Za-z][${LETTERS}.:\\-]*(?:\\s+[${LETTERS}.:\\-]+(?:=(?:"[^"]*"|'[^']*'|[^\\s"'>]+))?)*\\s*/?>`,
  `&(?:[${LETTERS}]+|#\\d+);`,
  `(?<![${LETTERS}])(?:https?|ftp)://[^\\s<>"']*[^\\s<>"'.,;:!?)\\]}]`, `(?<![${LETTERS}])www\\.[^\\s<>"']*[^\\s<>"'.,;:!?)\\]}]`,
  `(?<![${LETTERS}.+\\-])[${LETTERS}.+\\-]+@[${LETTERS}\\-]+(?:\\.[${LETTERS}\\-]+)+`,
].join("|"), "gu");
const SENTENCE_START = new RegExp(`(?:^|[.!?…]['"”’»)\\]]*\\s)[^${LETTERS}]*(\\p{L})`, "gu");
const CAPITAL_GEORGIAN = /[\u1c90-\u1cbf]/;
/** words with two capitals or more in an all-caps text; one alone may be an acronym */
const MIN_WORDS = 2;

/** @param {string} text */
export function isUpperCase(text) {
  const outside = text.replace(PLACEHOLDERS, " ");
  const hasCapitals = outside === outside.toUpperCase() && outside !== outside.toLowerCase();
  return hasCapitals && !/\p{Lo}/u.test(outside.replace(/[ªº]/g, ""));
}

/** @param {string} text whether it is in upper case, and long enough to be no acronym */
export function isAllCaps(text) {
  if (!isUpperCase(text)) return false;
  const words = text.replace(PLACEHOLDERS, " ").split(/\s+/);
  return words.filter((word) => (word.match(/\p{Lu}/gu) ?? []).length > 1).length >= MIN_WORDS;
}

/** @param {string} text @returns {string} in lower case, with a capital at the beginning of each sentence */
export function sentenceCase(text) {
  const lower = mapOutside(text, (part) => part.toLowerCase().replaceAll("i\u0307", "i"));
  const spans = spansOf(lower);
  return lower.replace(SENTENCE_START, (whole, letter, index) => {
    const place = index + whole.length - letter.length;
    if (spans.some(({ start, end }) => start <= place && place < end)) return whole;
    return whole.slice(0, -letter.length) + titleCase(letter);
  });
}

/** @param {string} text */
export function upperCase(text) {
  return mapOutside(text, (part) => part.toUpperCase());
}

/**
 * JavaScript knows no title case of letters such as ǆ: they become capitals.
 *
 * @param {string} letter
 */
function titleCase(letter) {
  const [first, ...rest] = letter.toUpperCase();
  return CAPITAL_GEORGIAN.test(first) ? letter : first + rest.join("").toLowerCase();
}

/** @param {string} text @param {(part: string) => string} change */
function mapOutside(text, change) {
  let [changed, end] = ["", 0];
  for (const span of spansOf(text)) {
    changed += change(text.slice(end, span.start)) + text.slice(span.start, span.end);
    end = span.end;
  }
  return changed + change(text.slice(end));
}

/** @param {string} text */
function spansOf(text) {
  return [...text.matchAll(PLACEHOLDERS)].map(({ 0: { length }, index: start = 0 }) => ({ start, end: start + length }));
}
