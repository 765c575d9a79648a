/**
 * Requests to the server that the page was loaded from.
 *
 * If the server requires an API key, the reader is asked for it once. It is stored for this tab only.
 *
 * @typedef {import("./history.js").AlignmentJson} AlignmentJson
 * @typedef {import("./history.js").CurvesJson} CurvesJson
 * @typedef {import("./history.js").HistoryJson} HistoryJson
 * @typedef {import("./trace.js").TraceJson} TraceJson
 * @typedef {import("./render.js").Api & { loaded: Promise<any>,
 *   info(): Promise<import("./model_info.js").ModelInfo | null>,
 *   trace(request: TraceRequest, onTranslation?: (text: string) => void): Promise<TraceJson>,
 *   translateLive(q: string, onText: (text: string) => void, signal: AbortSignal): Promise<void> }} Backend what
 *   translates: the server, or the model in the file (local_model.js); onTranslation gets the translation before the rest
 * @typedef {{ q: string, beam?: number, length_penalty?: number, prefix?: string, forced?: number[],
 *   temperature?: number, seed?: number, mute?: string[] }} TraceRequest
 */

import { h } from "./dom.js";

const STORAGE_KEY = "regard-key";
let apiKey = restoreKey();
/** @type {Promise<void> | null} shared by all requests that wait for a key */
let asking = null;

const keyInput = h("input", { type: "password", name: "key", autocomplete: "off", required: true });
const keyNote = h("span", { class: "quiet" });
/** Hidden until the server asks for a key. */
export const keyForm = h("form", { class: "api-key card", "aria-label": "Access to this server", hidden: true },
  h("label", { class: "field grow" }, h("span", {}, "API key"), keyInput),
  h("button", { type: "submit", class: "primary" }, "Use this key"), keyNote);

/**
 * Send a request; ask for an API key if it is refused without one.
 *
 * @param {string} path
 * @param {object} [body] sent as JSON; without it the request is a GET
 * @param {AbortSignal} [signal]
 * @returns {Promise<Response>} a successful response; an error of the server is thrown with its reason
 */
async function request(path, body, signal) {
  for (;;) {
    /** @type {Record<string, string>} */
    const headers = apiKey ? { authorization: `Bearer ${apiKey}` } : {};
    if (body) headers["content-type"] = "application/json";
    const used = apiKey;
    let response;
    try {
      response = await fetch(path, {
        method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal,
      });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Error("The server does not respond. Is regard serve still running?");
    }
    if (response.ok) return response;
    if (response.status !== 401 && response.status !== 403) {
      const { error } = await response.json().catch(() => ({}));
      throw new Error(error ?? `The server responded with status ${response.status}.`);
    }
    if (used === apiKey) await askForKey();
  }
}

/** @param {string} path @param {object} [body] @returns {Promise<any>} */
async function requestJson(path, body) {
  return (await request(path, body)).json();
}

/** @returns {Promise<import("./model_info.js").ModelInfo>} */
function info() {
  return requestJson("v1/model");
}

/** @type {import("./lenses.js").LensApi} */
const lenses = {
  depth: (q, outputs) => requestJson("v1/lens/depth", { q, outputs }),
  architecture: (q, outputs) => requestJson("v1/lens/architecture", { q, outputs }),
  attribution: (q, outputs, position, foil) => requestJson("v1/lens/attribution", { q, outputs, position, foil }),
  patching: (q, other) => requestJson("v1/lens/patching", { q, other }),
  heads: (start) => requestJson("v1/lens/heads", start ? {} : undefined),
};

/** @param {TraceRequest} body @returns {Promise<TraceJson>} */
function trace(body) {
  return requestJson("v1/trace", body);
}

/** @returns {Promise<HistoryJson>} */
function history() {
  return requestJson("v1/run");
}

/** @returns {Promise<{ curves: CurvesJson | null, checkpoints: number[] }>} */
function curves() {
  return requestJson("v1/run/curves");
}

/**
 * The cross-attention of a checkpoint while it is forced to produce these outputs.
 *
 * @param {string} q
 * @param {number[]} outputs token ids
 * @param {number} step of the checkpoint
 * @returns {Promise<AlignmentJson>}
 */
function align(q, outputs, step) {
  return requestJson("v1/align", { q, outputs, step });
}

/**
 * One layer of an array of a trace that the server has cached.
 *
 * @param {string} id of the trace
 * @param {string} site
 * @param {number} number of the layer
 * @param {string} [projection]
 * @returns {Promise<Float32Array>}
 */
async function layer(id, site, number, projection) {
  const response = await request(`v1/trace/${id}/${site}/${number}${projection ? `/${projection}` : ""}`);
  return new Float32Array(await response.arrayBuffer());
}

/**
 * Translate a text and report the translation after each decoding step.
 *
 * @param {string} q
 * @param {(text: string) => void} onText
 * @param {AbortSignal} signal
 */
async function translateLive(q, onText, signal) {
  const response = await request("v1/live", { q }, signal);
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop() ?? "";
    for (const event of events) {
      const data = JSON.parse(/^data: (.*)$/m.exec(event)?.[1] ?? "{}");
      if (data.error) throw new Error(data.error);
      if (data.text !== undefined && !signal.aborted) onText(data.text);
    }
  }
}

/** Show the form for the key, once for all requests that wait. */
function askForKey() {
  asking ??= new Promise((resolve) => {
    keyNote.textContent = apiKey ? "This server does not accept that key." : "This server requires an API key.";
    keyForm.hidden = false;
    keyInput.focus();
    keyForm.addEventListener("submit", (event) => {
      event.preventDefault();
      apiKey = keyInput.value;
      keyInput.value = "";
      try {
        sessionStorage.setItem(STORAGE_KEY, apiKey);
      } catch { /* without storage, it is asked for again after a reload */ }
      keyForm.hidden = true;
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
}

function restoreKey() {
  try {
    return sessionStorage.getItem(STORAGE_KEY) ?? "";
  } catch {
    return "";
  }
}

/** @type {Backend} */
export const server = { loaded: Promise.resolve(), info, lenses, trace, history, curves, align, layer, translateLive };
