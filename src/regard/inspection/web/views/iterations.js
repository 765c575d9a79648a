/**
 * The iterations of mask-predict (Ghazvininejad et al., 2019), for non-autoregressive models.
 *
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 */

import { h, tokenLabel } from "../dom.js";

/** @type {View} */
export const iterationsView = {
  id: "iterations",
  title: "Iterations",
  help: "This model predicts all tokens in parallel, so there is no beam. The first iteration starts from nothing but masks. "
    + "Each later one masks the least confident tokens and predicts them again from the others. Tokens predicted in an "
    + "iteration are highlighted; a bold token replaced a different one.",
  applies: (trace) => trace.nonAutoregressive,
  build,
};

/** @param {Context} context */
function build({ trace }) {
  const positions = trace.outputs.map((_, position) => h("th", { scope: "col" }, String(position + 1)));
  const rows = trace.iterations.map(({ inputs, outputs }, iteration) => h("tr", {},
    h("th", { scope: "row" }, String(iteration + 1)),
    outputs.map((token, position) => {
      const before = trace.iterations[iteration - 1]?.outputs[position];
      const predicted = inputs[position].id !== token.id ? "predicted" : "";
      const changed = before !== undefined && before.id !== token.id;
      return h("td", { class: predicted }, changed ? h("b", {}, tokenLabel(token)) : tokenLabel(token));
    })));
  return h("div", { class: "iterations card table", tabindex: 0, role: "region", "aria-label": "Iterations" },
    h("table", {}, h("caption", {}, "Tokens after each iteration, by position"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "iteration"), positions)), h("tbody", {}, rows)));
}
