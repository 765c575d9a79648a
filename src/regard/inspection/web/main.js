/**
 * Where the page begins: a trace that stands in the file is drawn; else a form asks the server for one.
 *
 * @typedef {import("./render.js").Asked} Asked
 * @typedef {import("./trace.js").TraceJson} TraceJson
 */

import { recallTheme, toggleTheme } from "./colour.js";
import { h } from "./dom.js";
import { render } from "./render.js";
import { align, ask as server, course, curves, keyForm, languages, layer, live } from "./server.js";

const page = /** @type {HTMLElement} */ (document.getElementById("page"));
const embedded = document.getElementById("trace");
/** milliseconds without a key before what was typed is translated */
const PAUSE = 250;

recallTheme();
const view = h("main", {});
page.append(
  h("header", { class: "top" },
    h("p", { class: "name" }, "Regard"),
    h("p", { class: "motto" }, "What a translator looks at"),
    h("button", { type: "button", class: "plain theme", onclick: toggleTheme }, "Light / dark")),
  embedded ? "" : keyForm,
  embedded ? "" : ask(),
  view,
  h("footer", {}, h("p", {},
    "Attention shows where a model looked. By itself it is not an explanation of what it said.")),
);
if (embedded) {
  /** @type {TraceJson} */
  const json = JSON.parse(embedded.textContent ?? "");
  document.title = `${json.text.slice(0, 60)} · Regard`;
  render(view, json);
}

/** The form of the served page. */
function ask() {
  const text = h("textarea", {
    name: "q", rows: 2, dir: "auto", required: true, placeholder: "A sentence to translate",
  });
  const beam = h("input", { name: "beam", type: "number", min: 1, max: 64, step: 1, placeholder: "auto" });
  const alpha = h("input", { name: "alpha", type: "number", min: 0, max: 10, step: 0.1, placeholder: "auto" });
  const prefix = h("input", { name: "prefix", type: "text", dir: "auto", placeholder: "anything" });
  const button = h("button", { type: "submit", class: "primary" }, "Translate");
  const status = h("p", { class: "status", role: "status" });
  languages().then(({ source, target }) => {
    if (source) text.placeholder = `A sentence in ${source}`;
    if (target) button.textContent = `Translate into ${target}`;
  }, () => {}); // then they stay unnamed
  const growing = h("p", { class: "growing", dir: "auto", "aria-label": "Translation so far", hidden: true });
  /** @type {(() => void) | undefined} */
  let close;

  const asking = () => {
    /** @type {Asked} */
    const asked = { q: text.value };
    if (beam.value) asked.beam = beam.valueAsNumber;
    if (alpha.value) asked.alpha = alpha.valueAsNumber;
    if (prefix.value) asked.prefix = prefix.value;
    return asked;
  };
  /** @param {Event} event */
  const submit = async (event) => {
    event.preventDefault();
    const asked = asking();
    typing.abort();
    button.disabled = true;
    status.className = "status";
    status.textContent = "Translating…";
    try {
      const json = await trace(asked);
      close?.();
      remember(asked);
      close = render(view, json, { trace, course, curves, align, layer });
      status.textContent = "";
      growing.hidden = true;
    } catch (error) {
      status.className = "status wrong";
      status.textContent = error instanceof Error ? error.message : String(error);
    } finally {
      button.disabled = false;
    }
  };
  // While a person types, the translation is shown as it is made; what was typed before is not waited for.
  let typing = new AbortController();
  text.addEventListener("input", () => {
    typing.abort();
    typing = new AbortController();
    const { signal } = typing;
    setTimeout(() => {
      if (signal.aborted) return;
      growing.hidden = !text.value.trim();
      if (growing.hidden) return;
      live(text.value, (told) => { growing.textContent = told; }, signal).catch((error) => {
        if (!signal.aborted) growing.textContent = error instanceof Error ? error.message : String(error);
      });
    }, PAUSE);
  });
  const form = h("form", { class: "ask", onsubmit: submit },
    h("label", { class: "field wide" }, h("span", {}, "Text"), text), growing,
    h("div", { class: "row" },
      h("label", { class: "field" }, h("span", {}, "Beam"), beam),
      h("label", { class: "field" }, h("span", {}, "Length penalty"), alpha),
      h("label", { class: "field grow" }, h("span", {}, "Begins with"), prefix),
      button),
    status);
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  // A link brings its sentence along, also one that is followed while the page is open.
  const follow = () => {
    const linked = new URLSearchParams(location.hash.slice(1));
    const before = JSON.stringify(asking());
    text.value = linked.get("q") ?? "";
    beam.value = linked.get("beam") ?? "";
    alpha.value = linked.get("alpha") ?? "";
    prefix.value = linked.get("prefix") ?? "";
    if (text.value && JSON.stringify(asking()) !== before) form.requestSubmit();
  };
  addEventListener("hashchange", follow);
  setTimeout(follow);
  return form;
}

/**
 * Put what was asked into the link; what was chosen in another sentence means nothing in this one.
 *
 * @param {Asked} asked
 */
function remember(asked) {
  const before = new URLSearchParams(location.hash.slice(1));
  const now = new URLSearchParams(before);
  for (const name of ["q", "beam", "alpha", "prefix"]) now.delete(name);
  for (const [name, value] of Object.entries(asked)) now.set(name, String(value));
  if (["q", "beam", "alpha", "prefix"].some((name) => before.get(name) !== now.get(name))) {
    for (const name of ["said", "node", "force", "query", "key"]) now.delete(name);
  }
  history.replaceState(null, "", `#${now}`);
}

/** @param {Asked} asked @returns {Promise<TraceJson>} */
function trace(asked) {
  return server("v1/trace", asked);
}
