/**
 * The server this page came from.
 *
 * Where it wants a key, a person is asked for it once; it is kept for as long as this tab lives, and nowhere else.
 *
 * @typedef {import("./course.js").AlignmentJson} AlignmentJson
 * @typedef {import("./course.js").CourseJson} CourseJson
 * @typedef {import("./course.js").CurvesJson} CurvesJson
 */

import { h } from "./dom.js";

const KEEP = "regard-key";
let key = recall();
/** @type {Promise<void> | null} all requests that were refused wait for the same answer */
let asking = null;

const field = h("input", { type: "password", name: "key", autocomplete: "off", required: true });
const why = h("span", { class: "quiet" });
/** Stands in the page, hidden until a key is wanted. */
export const keyForm = h("form", { class: "wanted card", hidden: true },
  h("label", { class: "field grow" }, h("span", {}, "API key"), field),
  h("button", { type: "submit", class: "primary" }, "Use this key"), why);

/**
 * What the server answers, as it comes.
 *
 * @param {string} path
 * @param {object} [body] none: it is only asked
 * @param {AbortSignal} [signal]
 * @returns {Promise<Response>}
 */
export async function request(path, body, signal) {
  for (;;) {
    /** @type {Record<string, string>} */
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body) headers["content-type"] = "application/json";
    const used = key;
    let answer;
    try {
      answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Error("The server does not answer.");
    }
    if (answer.status !== 401 && answer.status !== 403) return answer;
    if (used === key) await wanted();
  }
}

/**
 * The JSON the server answers; what went wrong is thrown in its words.
 *
 * @param {string} path
 * @param {object} [body]
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export async function ask(path, body, signal) {
  const answer = await request(path, body, signal);
  if (!answer.ok) throw await problem(answer);
  return answer.json();
}

/** @param {Response} answer that is no success */
async function problem(answer) {
  const told = await answer.json().catch(() => ({}));
  return new Error(told.error ?? `The server answered ${answer.status}.`);
}

/**
 * What the two languages are called, where that is known; no key is needed to ask.
 *
 * @returns {Promise<{ source: string | null, target: string | null }>}
 */
export async function languages() {
  const { source, target } = (await ask("frontend/settings")).language;
  /** @param {{ code: string, name: string }} one called by its code where it has no name */
  const named = ({ code, name }) => (name === code ? null : name);
  return { source: named(source), target: named(target) };
}

/** @returns {Promise<CourseJson>} */
export function course() {
  return ask("v1/run");
}

/** @returns {Promise<{ curves: CurvesJson | null, checkpoints: number[] }>} */
export function curves() {
  return ask("v1/run/curves");
}

/**
 * @param {string} q
 * @param {number[]} said
 * @param {number} step
 * @returns {Promise<AlignmentJson>}
 */
export function align(q, said, step) {
  return ask("v1/align", { q, said, step });
}

/**
 * The numbers of one layer of a trace that the server keeps.
 *
 * @param {string} id
 * @param {string} place
 * @param {number} number of the layer
 * @param {string} [part]
 * @returns {Promise<Float32Array>}
 */
export async function layer(id, place, number, part) {
  const answer = await request(`v1/trace/${id}/${place}/${number}${part ? `/${part}` : ""}`);
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error ?? `The server answered ${answer.status}.`);
  return new Float32Array(await answer.arrayBuffer());
}

/**
 * The translation of a text as it is made: told again with each word.
 *
 * @param {string} q
 * @param {(text: string) => void} tell
 * @param {AbortSignal} signal
 */
export async function live(q, tell, signal) {
  const answer = await request("v1/live", { q }, signal);
  if (!answer.ok || !answer.body) throw await problem(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop() ?? "";
    for (const event of events) {
      const data = JSON.parse(/^data: (.*)$/m.exec(event)?.[1] ?? "{}");
      if (data.error) throw new Error(data.error);
      if (data.text !== undefined && !signal.aborted) tell(data.text);
    }
  }
}

/** Ask the person, once for all that wait. */
function wanted() {
  asking ??= new Promise((done) => {
    why.textContent = key ? "That key is not one of this server's." : "This server wants a key.";
    keyForm.hidden = false;
    field.focus();
    keyForm.addEventListener("submit", (event) => {
      event.preventDefault();
      key = field.value;
      field.value = "";
      try {
        sessionStorage.setItem(KEEP, key);
      } catch { /* then it is asked for again */ }
      keyForm.hidden = true;
      asking = null;
      done();
    }, { once: true });
  });
  return asking;
}

function recall() {
  try {
    return sessionStorage.getItem(KEEP) ?? "";
  } catch {
    return "";
  }
}
