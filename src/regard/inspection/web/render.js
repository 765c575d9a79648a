/**
 * The page of one trace: served, in a file, or in a notebook.
 *
 * A view is one object in VIEWS. It is built when it is first shown.
 *
 * @typedef {import("./trace.js").TraceJson} TraceJson
 * @typedef {import("./history.js").AlignmentJson} AlignmentJson
 * @typedef {import("./history.js").HistoryJson} HistoryJson
 * @typedef {import("./history.js").CurvesJson} CurvesJson
 * @typedef {{ trace(request: import("./api.js").TraceRequest): Promise<TraceJson>, history(): Promise<HistoryJson>,
 *   curves?(): Promise<{ curves: CurvesJson | null, checkpoints: number[] }>,
 *   align?(q: string, outputs: number[], step: number): Promise<AlignmentJson>,
 *   lenses?: import("./lenses.js").LensApi
 *   } & import("./trace.js").LayerSource} Api the server or the model in the file, if the page has one; only a server has
 *   the checkpoints of the run
 * @typedef {{ trace: Trace, state: State, signal: AbortSignal, api?: Api }} Context
 * @typedef {{ id: string, title: string, help: string, build(context: Context): HTMLElement,
 *   applies?(trace: Trace): boolean, next?: { text: string, view: string } }} View applies tells whether a trace has
 *   anything for this view to show; next is a link after the help text
 */

import { h, setTabStop } from "./dom.js";
import { State } from "./state.js";
import { Trace } from "./trace.js";
import { architectureView } from "./views/architecture.js";
import { attentionWeightView } from "./views/attention_weight.js";
import { beamView } from "./views/beam.js";
import { headsView } from "./views/heads.js";
import { interveneView } from "./views/intervene.js";
import { iterationsView } from "./views/iterations.js";
import { lensesView } from "./views/lenses.js";
import { tourStep, tourView } from "./views/tour.js";
import { trainingView } from "./views/training.js";
import { translateView } from "./views/translate.js";

/** @type {View[]} */
const VIEWS = [
  translateView, architectureView, headsView, beamView, iterationsView, interveneView, lensesView, attentionWeightView, trainingView, tourView,
];

/**
 * Draw a trace into an element, replacing its content.
 *
 * @param {HTMLElement} root
 * @param {TraceJson} json
 * @param {Api} [api]
 * @returns {() => void} removes it again
 */
export function render(root, json, api) {
  const trace = new Trace(json, api);
  const abort = new AbortController();
  const { signal } = abort;
  const state = new State({ view: VIEWS[0].id }, signal);
  const context = { trace, state, signal, api };
  const panels = VIEWS.filter((view) => !view.applies || view.applies(trace)).map((view) => makePanel(view, state));
  const tabs = panels.map(({ tab }) => tab);

  const show = () => {
    const current = panels.find(({ view }) => view.id === state.get("view")) ?? panels[0];
    for (const { view, tab, panel } of panels) {
      const selected = tab === current.tab;
      tab.setAttribute("aria-selected", String(selected));
      if (selected && !panel.hasChildNodes()) {
        panel.hidden = false; // a view measures its width while it is built
        panel.append(h("h2", { class: "unseen" }, view.title), helpText(view, state), view.build(context));
      }
      panel.hidden = !selected;
    }
    setTabStop(tabs, current.tab);
    // On a phone, the tabs scroll sideways.
    const bar = current.tab.parentElement;
    const { offsetLeft, offsetWidth } = current.tab;
    if (bar && bar.scrollWidth > bar.clientWidth) bar.scrollLeft = offsetLeft - bar.offsetLeft - (bar.clientWidth - offsetWidth) / 2;
  };
  root.replaceChildren(tabBar(tabs, (index) => state.set({ view: panels[index].view.id })), tourStep(context),
    ...panels.map(({ panel }) => panel));
  state.subscribe(show);
  show();
  return () => {
    abort.abort();
    root.replaceChildren();
  };
}

/** @param {View} view @param {State} state */
function helpText({ help, next }, state) {
  return h("p", { class: "help" }, help, next && " ", next && h("button", {
    type: "button", class: "plain", onclick: () => state.set({ view: next.view }),
  }, next.text));
}

/** @param {View} view @param {State} state */
function makePanel(view, state) {
  const panel = h("section", {
    id: `view-${view.id}`, class: "view", role: "tabpanel", "aria-labelledby": `tab-${view.id}`, hidden: true,
  });
  const tab = h("button", {
    id: `tab-${view.id}`, type: "button", role: "tab", "aria-controls": panel.id,
    onclick: () => state.set({ view: view.id }),
  }, view.title);
  return { view, panel, tab };
}

/** @param {HTMLButtonElement[]} tabs @param {(index: number) => void} onSelect */
function tabBar(tabs, onSelect) {
  /** @param {KeyboardEvent} event */
  const onkeydown = (event) => {
    const current = tabs.findIndex((tab) => tab.tabIndex === 0);
    const last = tabs.length - 1;
    const [previous, following] = [current ? current - 1 : last, current === last ? 0 : current + 1];
    const next = { ArrowRight: following, ArrowLeft: previous, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    onSelect(next);
    tabs[next].focus();
  };
  return h("div", { class: "tabs", role: "tablist", "aria-label": "Views", onkeydown }, tabs);
}
