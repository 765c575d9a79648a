/**
 * The model in a thread of its own, so that the page stays responsive. A message is a call of one of its methods.
 *
 * @typedef {import("./translator.js").TranslatorJson} TranslatorJson
 * @typedef {{ id: number, method: "load" | "translate" | "trace" | "layer" | "depth" | "attribution" | "patching"
 *   | "architecture", parameters: any[] }} Call
 * @typedef {{ id: number, result?: any, error?: string, partial?: string }} Reply partial: the translation, while the rest of
 *   a trace is computed
 */

import { unpackText } from "../packed_text.js";
import { errorMessage } from "../trace.js";
import { architecture } from "./activations.js";
import { attribution } from "./attribution.js";
import { depthLenses, patching } from "./lenses.js";
import { Translator } from "./translator.js";

/** @type {Translator | null} */
let model = null;

addEventListener("message", async ({ data: { id, method, parameters } }) => {
  /** @type {Reply} */
  let reply;
  try {
    reply = { id, result: await call(method, parameters, (partial) => postMessage({ id, partial })) };
  } catch (error) {
    reply = { id, error: errorMessage(error) };
  }
  postMessage(reply);
});

/** @param {Call["method"]} method @param {any[]} parameters @param {(text: string) => void} onTranslation */
async function call(method, parameters, onTranslation) {
  if (method === "load") {
    const [json, weights] = parameters;
    model = await Translator.load(json, unpackText(weights));
    return model.network.weights.memory.usesWasm;
  }
  if (!model) throw new Error("The model is not loaded.");
  if (method === "translate") return model.translate(parameters[0]);
  if (method === "trace") return model.trace(parameters[0], onTranslation);
  if (method === "depth") return depthLenses(model, parameters[0], parameters[1]);
  if (method === "patching") return patching(model, parameters[0], parameters[1]);
  if (method === "attribution") {
    const [text, outputs, position, foil] = parameters;
    return attribution(model, text, outputs, position, foil);
  }
  if (method === "architecture") return architecture(model, parameters[0], parameters[1]);
  const [id, site, layer, projection] = parameters;
  return model.layer(id, site, layer, projection);
}
