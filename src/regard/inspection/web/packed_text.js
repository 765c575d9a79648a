/** Bytes that inspection/html_page.py has written as text. */

const SURROGATES = 0xd800;
/** characters that an HTML parser replaces or interprets */
const RESERVED = [0x0000, 0x000d, 0x003c];
/** numbers of escaped characters: surrogates come first, then reserved characters, then bytes */
const FIRST_RESERVED = 0x800;
const FIRST_BYTE = FIRST_RESERVED + RESERVED.length;

/**
 * The bytes of a text: two for each character. Characters above U+FFFF are the escaped ones.
 *
 * @param {string} text
 * @returns {Uint8Array}
 */
export function unpackText(text) {
  const pairs = new Uint16Array(text.length); // every machine that browsers run on is little-endian
  let [count, odd] = [0, 0];
  for (let i = 0; i < text.length; i++) {
    let unit = text.charCodeAt(i);
    if ((unit & 0xf800) === SURROGATES) {
      const number = ((unit & 0x3ff) << 10) | (text.charCodeAt(++i) & 0x3ff);
      if (number < FIRST_RESERVED) unit = SURROGATES + number;
      else if (number < FIRST_BYTE) unit = RESERVED[number - FIRST_RESERVED];
      else [unit, odd] = [number - FIRST_BYTE, 1]; // the last byte, which has no other
    }
    pairs[count++] = unit;
  }
  return new Uint8Array(pairs.buffer, 0, count * 2 - odd);
}

/**
 * @param {Uint8Array} bytes compressed
 * @returns {Response} the result, as bytes, text or JSON
 */
export function inflate(bytes) {
  const { DecompressionStream } = /** @type {any} */ (globalThis); // tsc 4.8 does not know it
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")));
}
