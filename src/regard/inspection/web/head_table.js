/**
 * What each head is worth: the scores of many sentences without it. The table is in the file, or the server computes it.
 *
 * @typedef {import("./lenses.js").Change} Change
 * @typedef {import("./lenses.js").HeadEffect} HeadEffect
 * @typedef {import("./lenses.js").HeadTableJson} HeadTableJson
 * @typedef {import("./lenses.js").HeadTableState} HeadTableState
 * @typedef {import("./render.js").Context} Context
 * @typedef {(head: string) => string} HeadName the words for SITE.LAYER.HEAD
 */

import { foldingCard, h } from "./dom.js";
import { grouped, percent } from "./format.js";
import { clearHeads, rankedHeads } from "./lenses.js";
import { errorMessage } from "./trace.js";

/** heads that are shown at first */
const SHOWN = 8;
const POLL_MILLISECONDS = 700;

/**
 * @param {Context} context
 * @param {HeadName} nameOf
 * @param {(head: string) => void} onSelect
 */
export function headTableCard({ trace, api, state, signal }, nameOf, onSelect) {
  const status = h("p", { class: "status", role: "status" });
  const body = h("div", { class: "head-worth-body" });
  const load = api?.lenses?.heads;
  const button = h("button", { type: "button", class: "primary", hidden: true, onclick: () => follow(true) }, "What is each head worth?");
  /** @param {HeadTableJson} table */
  const show = (table) => {
    button.hidden = true;
    status.textContent = "";
    body.replaceChildren(...describeTable(table, nameOf, onSelect));
  };
  /** @param {string} text @param {boolean} [wrong] */
  const say = (text, wrong = false) => {
    status.className = `status${wrong ? " wrong" : ""}`;
    status.textContent = text;
  };
  /**
   * Ask the server until the table is there.
   *
   * @param {boolean} start
   */
  const follow = async (start) => {
    if (!load) return;
    button.disabled = start;
    try {
      let now = await load(start);
      while (now.running && !signal.aborted) {
        button.hidden = true;
        say(now.done ? `Measured ${now.done} of ${now.heads} heads…` : "Translating with all heads…");
        await new Promise((resolve) => { setTimeout(resolve, POLL_MILLISECONDS); });
        now = await load(false);
      }
      if (now.table) return show(now.table);
      button.hidden = Boolean(now.problem);
      say(now.problem ? `It cannot be measured here: ${now.problem}.` : "");
    } catch (error) {
      button.hidden = false;
      say(errorMessage(error), true);
    }
    button.disabled = false;
  };
  let started = false;
  const update = () => {
    if (started || state.get("view") !== "heads") return;
    started = true;
    if (trace.headTable) show(trace.headTable);
    else follow(false);
  };
  state.subscribe(update);
  update();
  return foldingCard("What is each head worth?", { class: "head-worth" },
    h("p", { class: "description" }, "The output of one head is replaced by its mean over many sentences (mean ablation), "
      + "and the sentences are translated again. The loss in quality is what this head contributes."),
    trace.headTable || load ? "" : h("p", {}, "This file does not have the measurement; ", h("code", {}, 'regard look RUN "…" --heads'),
      " and ", h("code", {}, "regard export RUN --to html --heads"), " include it, and ", h("code", {}, "regard serve RUN"), " computes it."),
    button, status, body);
}

/** @param {HeadTableJson} table @param {HeadName} nameOf @param {(head: string) => void} onSelect @returns {Node[]} */
function describeTable(table, nameOf, onSelect) {
  const heads = rankedHeads(table);
  /** @type {{ title: string, digits: number, of(effect: HeadEffect): Change | null }[]} */
  const all = [
    { title: "log-probability per token", digits: 2, of: (effect) => effect.log_probability },
    { title: "BLEU", digits: 1, of: (effect) => effect.bleu },
    { title: `correct ${table.tested}, points`, digits: 1, of: (effect) => effect.correct },
  ];
  const scores = all.filter(({ of }) => heads.some(of));
  const ranges = scores.map(({ of }) => rangeOf(heads.flatMap((effect) => of(effect) ?? [])));
  const rows = heads.map((effect, rank) => h("tr", { hidden: rank >= SHOWN },
    h("th", { scope: "row" }, h("button", { type: "button", class: "plain", onclick: () => onSelect(effect.head) }, nameOf(effect.head)),
      h("span", { class: "quiet" }, `${effect.behaviour.name} ${percent(effect.behaviour.share)}`)),
    scores.map(({ digits, of }, i) => {
      const change = of(effect);
      return h("td", {}, change && changeBar(change, ranges[i]), change && changeText(change, digits));
    })));
  const more = h("button", { type: "button", class: "plain", hidden: heads.length <= SHOWN, onclick: () => {
    for (const row of rows) row.hidden = false;
    more.remove();
  } }, `Show all ${heads.length} heads`);
  return [
    h("p", { class: "finding" }, explainTable(table, heads, nameOf)),
    h("div", { class: "table head-table", tabindex: 0, role: "region", "aria-label": "What each head is worth" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "without"), scores.map(({ title }) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, rows))),
    more, h("p", { class: "legend" }, "Bars: the change in the score; lines: its 95% interval over the sentences."),
  ];
}

/** @param {HeadTableJson} table @param {HeadEffect[]} heads @param {HeadName} nameOf */
function explainTable({ bleu, sentences, correct, tested }, heads, nameOf) {
  const clear = clearHeads(heads);
  const right = correct ? ` and ${correct[0]} of ${correct[1]} ${tested} correct` : "";
  const base = `${grouped(sentences)} sentences, BLEU ${bleu.toFixed(1)}${right} with all heads. `;
  const worst = correct && [...heads].sort((one, other) => (one.correct?.[0] ?? 0) - (other.correct?.[0] ?? 0))[0];
  const wrong = correct && worst?.correct ? Math.round(-worst.correct[0] / 100 * correct[1]) : 0;
  const more = worst && wrong > 0 ? ` Most ${tested} become wrong, ${wrong} of them, without this head: ${nameOf(worst.head)}.` : "";
  if (!clear.length) return `${base}BLEU does not clearly fall without any single head.${more}`;
  const [first] = clear;
  const rest = heads.length - clear.length;
  return `${base}BLEU falls most, by ${(-first.bleu[0]).toFixed(1)}, without this head: ${nameOf(first.head)}. It clearly falls without ${
    clear.length} of the ${heads.length} heads${rest ? `; for the other ${rest}, its interval includes 0 or it rises` : ""}.${more}`;
}

/** @param {number[]} values @returns {[low: number, high: number]} with 0 in it */
function rangeOf(values) {
  const [low, high] = [Math.min(0, ...values), Math.max(0, ...values)];
  return low === high ? [-1, 0] : [low, high];
}

/** @param {Change} change @param {[low: number, high: number]} range */
function changeBar([value, low, high], [from, to]) {
  const place = (/** @type {number} */ one) => (one - from) / (to - from);
  const element = h("span", { class: `change-bar${value < 0 ? "" : " gain"}`, "aria-hidden": "true" });
  const places = { zero: place(0), start: place(Math.min(0, value)), end: place(Math.max(0, value)), low: place(low), high: place(high) };
  for (const [name, at] of Object.entries(places)) element.style.setProperty(`--${name}`, String(at));
  return element;
}

/** @param {Change} change @param {number} digits */
function changeText([value, low, high], digits) {
  return h("span", { class: "change" }, h("b", {}, number(value, digits)), " ",
    h("span", { class: "quiet" }, `${number(low, digits)} to ${number(high, digits)}`));
}

/** @param {number} value @param {number} digits */
function number(value, digits) {
  const text = value.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
}
