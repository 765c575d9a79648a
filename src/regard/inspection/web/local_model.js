/**
 * The model inside the file, with the same functions as the server (api.js). It runs in a worker whose code is also in
 * the file, so the page stays responsive.
 *
 * @typedef {import("./api.js").Backend} Backend
 * @typedef {import("./history.js").HistoryJson} HistoryJson
 * @typedef {import("./model/translator.js").TranslatorJson} TranslatorJson
 * @typedef {import("./model/worker.js").Call} Call
 * @typedef {import("./model/worker.js").Reply} Reply
 * @typedef {import("./model_info.js").ModelInfo} ModelInfo
 * @typedef {(method: Call["method"], parameters: any[], onPartial?: (text: string) => void) => Promise<any>} CallWorker
 * @typedef {{ resolve(result: any): void, reject(error: Error): void, onPartial?: (text: string) => void }} Waiting
 */

import { inflate, unpackText } from "./packed_text.js";

/**
 * The model of the file; null if it has none.
 *
 * @returns {Backend | null}
 */
export function modelInFile() {
  const [model, weights, worker] = ["model", "weights", "worker"].map((id) => document.getElementById(id)?.textContent);
  if (!model || !weights || !worker) return null;
  /** @type {Promise<ModelInfo & { history: HistoryJson } & TranslatorJson>} */
  const description = inflate(unpackText(model)).json();
  const code = inflate(unpackText(worker)).text();
  const started = code.then(startWorker);
  /** @type {CallWorker} */
  const call = async (...parameters) => (await started)(...parameters);
  const loaded = description.then((json) => call("load", [json, weights]));
  loaded.catch(() => {}); // every other call fails with this error
  return {
    loaded,
    info: () => description,
    history: async () => (await description).history,
    trace: async (request, onTranslation) => (await loaded, call("trace", [request], onTranslation)),
    layer: (...parameters) => call("layer", parameters),
    lenses: {
      depth: (...parameters) => call("depth", parameters), attribution: (...parameters) => call("attribution", parameters),
      patching: (...parameters) => call("patching", parameters), architecture: (...parameters) => call("architecture", parameters),
    },
    translateLive: async (q, onText, signal) => {
      await loaded;
      if (signal.aborted) return;
      const text = await call("translate", [q]);
      if (!signal.aborted) onText(text);
    },
  };
}

/**
 * A function that calls the methods of the worker.
 *
 * @param {string} code
 * @returns {CallWorker}
 */
function startWorker(code) {
  const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
  const worker = new Worker(url);
  /** @type {Map<number, Waiting>} */
  const waiting = new Map();
  let calls = 0;
  worker.addEventListener("message", ({ data }) => {
    const { id, result, error, partial } = /** @type {Reply} */ (data);
    const one = waiting.get(id);
    if (partial !== undefined) return one?.onPartial?.(partial);
    waiting.delete(id);
    if (error === undefined) one?.resolve(result);
    else one?.reject(new Error(error));
  });
  worker.addEventListener("error", (event) => {
    for (const one of waiting.values()) one.reject(new Error(event.message || "The model could not be started."));
    waiting.clear();
  });
  return (method, parameters, onPartial) => new Promise((resolve, reject) => {
    const id = calls++;
    waiting.set(id, { resolve, reject, onPartial });
    worker.postMessage({ id, method, parameters });
  });
}
