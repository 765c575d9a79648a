/**
 * Runs the model of an exported HTML file in node, without a browser.
 *
 *     node benchmarks/html_export.mjs FILE.html [--plain] < requests.jsonl > results.jsonl
 *
 * A request is JSON: {"translate": TEXT}, {"encode": TEXT}, {"attribution": [TEXT, IDS, POSITION, FOIL]}, or
 * {"trace": {"q": TEXT, …}, "arrays": true}. Arrays may also be "attention", without projections. With --plain, no WebAssembly is used.
 * The first result is about loading. Each has the CPU seconds it took, which do not depend on other programs.
 */

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

import { inflate, unpackText } from "../src/regard/inspection/web/packed_text.js";
import { unpack } from "../src/regard/inspection/web/trace.js";
import { attribution } from "../src/regard/inspection/web/model/attribution.js";
import { Translator } from "../src/regard/inspection/web/model/translator.js";

const html = readFileSync(process.argv[2], "utf16le");
const allowWasm = process.argv[3] !== "--plain";

/** @param {string} id @returns {Uint8Array} */
function element(id) {
  const found = new RegExp(`<script type="[^"]*" id="${id}">([^<]*)</script>`).exec(html);
  if (!found) throw new Error(`${process.argv[2]}: no element ${id}`);
  return unpackText(found[1]);
}

/**
 * The layers of each array of a trace.
 *
 * @param {any} trace
 * @param {true | "attention"} which
 * @returns {Record<string, number[][]>}
 */
function arrays(trace, which) {
  const names = ["encoder", "decoder", "cross_attention", "nodes"];
  const found = Object.fromEntries(names.map((site) => [site, layers(trace, site)]));
  for (const site of which === true ? Object.keys(trace.projections) : []) {
    for (const name of ["query", "key", "value", "output"]) found[`${site}.${name}`] = layers(trace, site, name);
  }
  return found;
}

/** @param {any} trace @param {string} site @param {string} [projection] */
function layers(trace, site, projection) {
  const [count] = (projection ? trace.projections[site][projection] : trace[site]).shape;
  return Array.from({ length: count }, (_, layer) => Array.from(model.layer(trace.id, site, layer, projection)));
}

let start = process.cpuUsage();
const model = await Translator.load(await inflate(element("model")).json(), element("weights"), allowWasm);
const reply = (/** @type {object} */ result) => {
  const { user, system } = process.cpuUsage(start);
  console.log(JSON.stringify({ cpu_seconds: (user + system) / 1e6, ...result }));
};
reply({ wasm: model.network.weights.memory.usesWasm });
for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  start = process.cpuUsage();
  if (request.translate !== undefined) {
    reply({ translation: model.translate(request.translate) });
  } else if (request.attribution !== undefined) {
    const [text, outputs, position, foil] = request.attribution;
    reply(await attribution(model, text, outputs, position, foil));
  } else if (request.encode !== undefined) {
    const ids = model.source.encode(request.encode);
    reply({ ids, text: model.source.decode(ids) });
  } else {
    const trace = model.trace(request.trace);
    const occlusion = trace.occlusion && Array.from(unpack(trace.occlusion.probabilities));
    reply({ trace, occlusion, ...(request.arrays ? { arrays: arrays(trace, request.arrays) } : {}) });
  }
}
