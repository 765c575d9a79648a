/**
 * A model that says all words at once has no beam: round by round it says the words again that it was least sure of.
 *
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 */

import { h, label } from "../dom.js";

/** @type {View} */
export const rounds = {
  id: "rounds",
  title: "Rounds",
  help: "This model says all words at once, so there is no beam. In the first round it knows none of them; in each round "
    + "after it the words it was least sure of are hidden and said again, from all the others. Those that were said in "
    + "a round stand out; a word in bold took the place of another.",
  fits: (trace) => trace.rounds.length > 0,
  build,
};

/** @param {Context} context */
function build({ trace }) {
  const places = trace.said.map((_, place) => h("th", { scope: "col" }, String(place + 1)));
  const rows = trace.rounds.map(({ read, said }, round) => h("tr", {},
    h("th", { scope: "row" }, String(round + 1)),
    said.map((token, place) => {
      const before = trace.rounds[round - 1]?.said[place];
      const again = read[place].id !== token.id ? "again" : "";
      const other = before !== undefined && before.id !== token.id;
      return h("td", { class: again }, other ? h("b", {}, label(token)) : label(token));
    })));
  return h("div", { class: "rounds card table", tabindex: 0, role: "region", "aria-label": "Round by round" },
    h("table", {}, h("caption", {}, "What was said in each round, place by place"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "round"), places)), h("tbody", {}, rows)));
}
