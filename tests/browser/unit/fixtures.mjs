/** Small traces and tokens for the unit tests. */

/** @param {string[]} texts tokens with ids from 10; texts in angle brackets are special */
export function tokens(...texts) {
  const ids = new Map();
  return texts.map((text) => {
    if (!ids.has(text)) ids.set(text, [...text].reduce((sum, sign) => sum * 31 + sign.codePointAt(0), 7) % 100_003);
    return { id: ids.get(text), text, special: /^<\/?\w+>$/.test(text) };
  });
}

/** @param {number[]} values @param {number[]} shape */
export function packFloats(values, shape) {
  const bytes = new Uint8Array(Float32Array.from(values).buffer);
  return { shape, format: "float32", data: Buffer.from(bytes).toString("base64") };
}

/** @param {number[]} bytes @param {number[]} shape @param {number} max */
export function packBytes(bytes, shape, max) {
  return { shape, format: "uint8", max, data: Buffer.from(Uint8Array.from(bytes)).toString("base64") };
}
