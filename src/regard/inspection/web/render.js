/**
 * The page for one trace, in all of its uses: served, in a file, in a notebook.
 *
 * A view is one object in ALL. It is built when it is first shown.
 *
 * @typedef {import("./trace.js").TraceJson} TraceJson
 * @typedef {{ q: string, beam?: number, alpha?: number, prefix?: string, forced?: number[], temperature?: number,
 *   seed?: number, mute?: string[] }} Asked
 * @typedef {import("./trace.js").Source} Source
 * @typedef {import("./course.js").AlignmentJson} AlignmentJson
 * @typedef {import("./course.js").CourseJson} CourseJson
 * @typedef {import("./course.js").CurvesJson} CurvesJson
 * @typedef {{ trace(asked: Asked): Promise<TraceJson>, course(): Promise<CourseJson>,
 *   curves(): Promise<{ curves: CurvesJson | null, checkpoints: number[] }>,
 *   align(q: string, said: number[], step: number): Promise<AlignmentJson> } & Source} Api a model that can be asked more
 * @typedef {{ trace: Trace, state: State, signal: AbortSignal, api?: Api }} Context
 * @typedef {{ id: string, title: string, help: string, build(context: Context): HTMLElement,
 *   fits?(trace: Trace): boolean }} View a view that does not fit a trace has nothing to show of it
 */

import { h, rove } from "./dom.js";
import { State } from "./state.js";
import { Trace } from "./trace.js";
import { beam } from "./views/beam.js";
import { heads } from "./views/heads.js";
import { interfere } from "./views/interfere.js";
import { learning } from "./views/learning.js";
import { guide, story } from "./views/story.js";
import { number } from "./views/number.js";
import { rounds } from "./views/rounds.js";
import { translate } from "./views/translate.js";

/** @type {View[]} */
const ALL = [translate, heads, beam, rounds, interfere, number, learning, story];

/**
 * Draw a trace into an element, in place of what is there.
 *
 * @param {HTMLElement} root
 * @param {TraceJson} json
 * @param {Api} [api]
 * @returns {() => void} takes it away again
 */
export function render(root, json, api) {
  const trace = new Trace(json, api);
  const ending = new AbortController();
  const { signal } = ending;
  const state = new State({ view: ALL[0].id }, signal);
  const context = { trace, state, signal, api };
  const views = ALL.filter((view) => !view.fits || view.fits(trace));

  const parts = views.map((view) => {
    const panel = h("section", {
      id: `view-${view.id}`, class: "view", role: "tabpanel", "aria-labelledby": `tab-${view.id}`, hidden: true,
    });
    const tab = h("button", {
      id: `tab-${view.id}`, type: "button", role: "tab", "aria-controls": panel.id,
      onclick: () => state.set({ view: view.id }),
    }, view.title);
    return { view, panel, tab };
  });
  const tabs = parts.map((part) => part.tab);

  /** @param {KeyboardEvent} event */
  const move = (event) => {
    const now = tabs.findIndex((tab) => tab.tabIndex === 0);
    const last = tabs.length - 1;
    const [before, after] = [now ? now - 1 : last, now === last ? 0 : now + 1];
    const next = { ArrowRight: after, ArrowLeft: before, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    state.set({ view: views[next].id });
    tabs[next].focus();
  };
  const bar = h("div", { class: "tabs", role: "tablist", "aria-label": "Views", onkeydown: move }, tabs);

  const show = () => {
    const chosen = parts.find((part) => part.view.id === state.get("view")) ?? parts[0];
    for (const part of parts) {
      const on = part === chosen;
      part.tab.setAttribute("aria-selected", String(on));
      if (on && !part.panel.hasChildNodes()) {
        part.panel.hidden = false; // a view measures its place while it is built
        part.panel.append(h("p", { class: "help" }, part.view.help), part.view.build(context));
      }
      part.panel.hidden = !on;
    }
    rove(tabs, chosen.tab);
  };
  root.replaceChildren(bar, guide(context), ...parts.map((part) => part.panel));
  state.listen(show);
  show();
  return () => {
    ending.abort();
    root.replaceChildren();
  };
}
