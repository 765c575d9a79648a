/**
 * Entry point: draw the trace embedded in the file, or show a form and request traces from the model in the file or from
 * the server.
 *
 * @typedef {import("./api.js").Backend} Backend
 * @typedef {import("./api.js").TraceRequest} TraceRequest
 * @typedef {import("./trace.js").TraceJson} TraceJson
 */

import { keyForm, server } from "./api.js";
import { h } from "./dom.js";
import { modelInFile } from "./local_model.js";
import { describeModel } from "./model_info.js";
import { render } from "./render.js";
import { restoreTheme, toggleTheme } from "./theme.js";
import { errorMessage } from "./trace.js";

/** what the form sends; also in the link */
const FIELDS = /** @type {const} */ (["q", "beam", "length_penalty", "prefix"]);
/** selections that belong to one sentence */
const SELECTIONS = ["output", "read", "node", "force", "query", "key"];
/** milliseconds without a keystroke before the text is translated live */
const TYPING_PAUSE = 250;

const page = /** @type {HTMLElement} */ (document.getElementById("page"));
const embedded = document.getElementById("trace");
const model = modelInFile();

restoreTheme();
const about = h("p", { class: "about" });
const view = h("main", {});
page.append(
  h("header", { class: "top" },
    h("h1", { class: "name" }, "Regard"), about,
    h("button", { type: "button", class: "plain theme", onclick: toggleTheme }, "Light / dark")),
  embedded || model ? "" : keyForm,
  embedded ? "" : translateForm(model ?? server),
  view,
  h("footer", {}, h("p", {},
    "Attention shows where a model looks. By itself it does not explain the output.")),
);
if (embedded) {
  /** @type {TraceJson} */
  const json = JSON.parse(embedded.textContent ?? "");
  document.title = `${json.text.slice(0, 60)} · Regard`;
  if (json.history?.model) about.textContent = describeModel(json.history.model);
  render(view, json);
}

/**
 * The form of a page with a model.
 *
 * @param {Backend} backend
 */
function translateForm(backend) {
  const { fields, text, options } = formFields();
  const into = h("span", { class: "into" });
  const button = h("button", { type: "submit", class: "primary" }, "Translate", into);
  const status = h("p", { class: "status", role: "status" });
  /** @param {string} message */
  const fail = (message) => {
    live.element.hidden = true;
    status.className = "status wrong";
    status.textContent = message;
  };
  const live = liveTranslation(text, backend, (message) => {
    if (message) fail(message);
    else status.textContent = "";
  });

  /** @type {(() => void) | undefined} */
  let close;
  /** @param {Event} event */
  const onsubmit = async (event) => {
    event.preventDefault();
    const request = readRequest(fields);
    live.stop();
    if (!request.q.trim()) return fail("Write a sentence to translate.");
    button.disabled = true;
    status.className = "status";
    status.textContent = "Translating…";
    try {
      const json = await backend.trace(request, live.show);
      close?.();
      writeLink(request);
      close = render(view, json, backend);
      status.textContent = "";
      live.element.hidden = true;
    } catch (error) {
      fail(errorMessage(error));
    } finally {
      button.disabled = false;
    }
  };
  const examples = h("div", { class: "examples", role: "group", "aria-label": "Examples", hidden: true });
  const form = h("form", { class: "ask", "aria-label": "Translate", onsubmit }, text, button, options, live.element, status, examples);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  const follow = followLinks(form, fields);
  backend.info().then((info) => {
    if (!info) return follow("");
    about.textContent = describeModel(info);
    document.title = `${info.name} · Regard`;
    if (info.languages.source) text.placeholder = `A sentence in ${info.languages.source}`;
    if (info.languages.target) into.textContent = ` into ${info.languages.target}`;
    examples.hidden = !info.examples.length;
    examples.append(...info.examples.map((example) => h("button", {
      type: "button", class: "example", dir: "auto", onclick: () => {
        text.value = example;
        form.requestSubmit();
      },
    }, example)));
    follow(info.examples[0] ?? "");
  }, () => follow(""));
  return form;
}

/** The inputs of the form, by name. */
function formFields() {
  const text = h("textarea", {
    name: "q", rows: 1, dir: "auto", required: true, placeholder: "A sentence to translate", "aria-label": "Text",
  });
  const fields = {
    q: text,
    beam: h("input", { name: "beam", type: "number", min: 1, max: 64, step: 1, placeholder: "default" }),
    length_penalty: h("input", {
      name: "length_penalty", type: "number", min: 0, max: 10, step: 0.1, placeholder: "default",
    }),
    prefix: h("input", { name: "prefix", type: "text", dir: "auto", placeholder: "optional" }),
  };
  const options = h("details", { class: "options" }, h("summary", {}, "Options"), h("div", { class: "row" },
    h("label", { class: "field" }, h("span", {}, "Beam size"), fields.beam),
    h("label", { class: "field" }, h("span", {}, "Length penalty"), fields.length_penalty),
    h("label", { class: "field grow" }, h("span", {}, "Translation begins with"), fields.prefix)));
  return { fields, text, options };
}

/** @typedef {ReturnType<typeof formFields>["fields"]} Fields */

/** @param {Fields} fields @returns {TraceRequest} */
function readRequest({ q, beam, length_penalty, prefix }) {
  /** @type {TraceRequest} */
  const request = { q: q.value };
  if (beam.value) request.beam = beam.valueAsNumber;
  if (length_penalty.value) request.length_penalty = length_penalty.valueAsNumber;
  if (prefix.value) request.prefix = prefix.value;
  return request;
}

/**
 * Show the translation while the reader types. A new keystroke cancels the request before it.
 *
 * @param {HTMLTextAreaElement} text
 * @param {Backend} backend
 * @param {(message: string) => void} report shows why there is no translation; "" if there is one
 */
function liveTranslation(text, backend, report) {
  const element = h("p", { class: "live", dir: "auto", "aria-label": "Translation so far", hidden: true });
  let typing = new AbortController();
  text.addEventListener("input", () => {
    typing.abort();
    typing = new AbortController();
    const { signal } = typing;
    setTimeout(() => {
      if (signal.aborted) return;
      element.hidden = !text.value.trim();
      if (element.hidden) return;
      report("");
      backend.translateLive(text.value, (partial) => { element.textContent = partial; }, signal).catch((error) => {
        if (!signal.aborted) report(errorMessage(error));
      });
    }, TYPING_PAUSE);
  });
  /** @param {string} translation */
  const show = (translation) => {
    element.textContent = translation;
    element.hidden = false;
  };
  return { element, show, stop: () => typing.abort() };
}

/**
 * Submit the sentence of the link when the page opens, and when the link changes. A link has the sentence after `#q=`,
 * or after `?text=`, which is easier to write by hand.
 *
 * @param {HTMLFormElement} form
 * @param {Fields} fields
 * @returns {(example: string) => void} call it once the page is ready; the example is translated if no link has a sentence
 */
function followLinks(form, fields) {
  const linked = new URLSearchParams(location.search).get("text") ?? "";
  let first = true;
  /** @param {string} example */
  const follow = (example) => {
    const link = new URLSearchParams(location.hash.slice(1));
    const before = JSON.stringify(readRequest(fields));
    if (first && fields.q.value && !link.has("q")) return; // the reader has begun to type
    for (const name of FIELDS) fields[name].value = link.get(name) ?? "";
    const details = form.querySelector("details");
    if (details && FIELDS.some((name) => name !== "q" && fields[name].value)) details.open = true;
    fields.q.value ||= linked || example;
    if (fields.q.value && JSON.stringify(readRequest(fields)) !== before) form.requestSubmit();
    first = false;
  };
  addEventListener("hashchange", () => follow(""));
  return follow;
}

/**
 * Write a request into the link. For a new sentence, selections of the old one are dropped.
 *
 * @param {TraceRequest} request
 */
function writeLink(request) {
  const before = new URLSearchParams(location.hash.slice(1));
  const now = new URLSearchParams(before);
  for (const name of FIELDS) now.delete(name);
  for (const [name, value] of Object.entries(request)) now.set(name, String(value));
  if (FIELDS.some((name) => before.get(name) !== now.get(name))) {
    for (const name of SELECTIONS) now.delete(name);
  }
  history.replaceState(null, "", `#${now}`);
}
