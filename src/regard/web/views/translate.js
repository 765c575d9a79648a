/**
 * Source and translation, word by word: what looked at what, how sure the model was, what else it might have said.
 *
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../trace.js").Side} Side
 * @typedef {import("../trace.js").Token} Token
 * @typedef {import("../trace.js").Trace} Trace
 * @typedef {{ side: Side, places: number[], short: string, says: string }} Risk of tokens; of none, of the whole
 */

import { onTheme, tint } from "../colour.js";
import { h, label, percent, rove, select, share, tabular, words } from "../dom.js";
import { running, textOf, wordsOf } from "../trace.js";

/** a probability below this is low */
const UNSURE = 0.3;
/** a word has been looked at if one token gave it so much, in the average of all layers and heads, */
const UNSEEN = 0.1;
/** or all tokens together so much */
const LITTLE = 0.3;
/** how many times as long one side may be */
const RATIO = 2;
/** more tokens than this are set smaller */
const LONG = 80;
/** words of what was said before, told with the alternatives */
const BEFORE = 4;

/** @type {View} */
export const translate = {
  id: "translate",
  title: "Translate",
  help: "Point at a word to see where the model looked while it wrote it. Choose a word of the translation to see "
    + "what else it might have said.",
  build,
};

/** @param {Context} context */
function build({ trace, state, signal }) {
  const { cross } = trace;
  const layer = () => (state.get("at") === "" ? cross.layers - 1 : state.place("at", cross.layers));
  const which = () => {
    const by = state.get("by");
    if (by === "") return "average";
    return by === "max" ? "max" : state.place("by", cross.heads);
  };
  const risks = risksOf(trace);

  /** @param {Side} side */
  const line = (side) => {
    const tokens = side === "source" ? trace.source : trace.said;
    const text = h("p", {
      class: `line ${side}${tokens.length > LONG ? " long" : ""}`, dir: "auto", role: "group",
      "aria-label": side === "source" ? "Source" : "Translation",
    });
    const spans = running(tokens).map(({ index, token, shown, space }) => {
      if (space) text.append(" ");
      const own = risks.filter((risk) => risk.side === side && risk.places.includes(index));
      const span = h("span", {
        class: `word${token.special ? " special" : ""}${own.length ? " risk" : ""}`, "data-index": index,
        title: own.map((risk) => risk.short).join("; ") || null,
      }, shown);
      if (side === "target") {
        span.setAttribute("role", "button");
        span.setAttribute("aria-label", name(token, trace.probabilities[index], own));
        span.style.setProperty("--share", String(trace.probabilities[index]));
      }
      text.append(span);
      return span;
    });
    if (!spans.length) text.append(h("span", { class: "quiet" }, "nothing"));
    return { side, text, spans };
  };
  const source = line("source");
  const target = line("target");

  // ----- light
  let map = cross.map(layer(), which());
  /** @type {{ side: Side, index: number } | null} */
  let under = null;
  const selected = () => {
    const count = target.spans.length;
    return state.get("said") === "" || !count ? null : state.place("said", count);
  };
  const light = () => {
    const chosen = selected();
    const at = under ?? (chosen === null ? null : { side: /** @type {Side} */ ("target"), index: chosen });
    source.spans.forEach((span, i) => {
      tint(span, at?.side === "target" ? map[at.index * cross.keys + i] : null);
      span.classList.toggle("lit", at?.side === "source" && at.index === i);
    });
    target.spans.forEach((span, i) => {
      tint(span, at?.side === "source" ? map[i * cross.keys + at.index] : null);
      span.classList.toggle("lit", at?.side === "target" && at.index === i);
      span.setAttribute("aria-pressed", String(i === chosen));
    });
  };
  for (const { side, text, spans } of [source, target]) {
    /** @param {Event} event */
    const index = (event) => {
      const span = /** @type {Element} */ (event.target).closest(".word");
      return span instanceof HTMLElement ? Number(span.dataset.index) : null;
    };
    /** @param {number | null} at */
    const point = (at) => {
      under = at === null ? null : { side, index: at };
      light();
    };
    /** @param {number} at */
    const choose = (at) => {
      if (side === "target") state.set({ said: at === selected() ? "" : String(at) });
    };
    text.addEventListener("pointerover", (event) => point(index(event)));
    text.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") point(null); // a finger that is lifted has not gone elsewhere
    });
    text.addEventListener("focusin", (event) => {
      const at = index(event);
      if (at === null) return;
      rove(spans, spans[at]);
      if (spans[at].matches(":focus-visible")) point(at);
    });
    text.addEventListener("focusout", () => point(null));
    text.addEventListener("click", (event) => {
      const at = index(event);
      if (at !== null) choose(at);
    });
    text.addEventListener("keydown", (event) => {
      const at = index(event);
      if (at === null) return;
      const forward = getComputedStyle(text).direction === "rtl" ? -1 : 1;
      const next = { ArrowRight: at + forward, ArrowLeft: at - forward, Home: 0, End: spans.length - 1 }[event.key];
      if (next !== undefined) spans[next]?.focus();
      else if (event.key === "Enter" || event.key === " ") choose(at);
      else return;
      event.preventDefault();
    });
    if (spans.length) rove(spans, spans[0]);
  }

  // ----- alternatives
  const others = h("div", { class: "others card", "aria-live": "polite" });
  const tell = () => {
    const at = selected();
    if (at === null) {
      others.replaceChildren(h("p", { class: "quiet" },
        "No word is chosen. The bar under each word is how probable the model found it there."));
      return;
    }
    const before = textOf(trace.said.slice(0, at)).split(" ").filter(Boolean);
    const told = (before.length > BEFORE ? "… " : "") + before.slice(-BEFORE).join(" ");
    const row = trace.candidates[at] ?? [];
    const known = row.some((one) => one.id === trace.said[at].id);
    const all = known ? row : [...row, { ...trace.said[at], probability: trace.probabilities[at] }];
    others.replaceChildren(
      h("h3", {}, told ? ["After ", words(told), " the model could say"] : "To begin, the model could say"),
      h("ol", {}, all.map((one) => {
        const said = one.id === trace.said[at].id;
        return h("li", { class: said ? "share said" : "share" }, share(one, one.probability, percent(one.probability)),
          said && h("span", { class: "quiet" }, "said"));
      })),
      known ? "" : h("p", { class: "quiet" },
        "What was said is not among the most probable here: the beam found it better as a whole."));
  };

  // ----- what to attend to
  const last = cross.layers - 1;
  const layers = select("Layer", numbered(cross.layers, (i) => (i === last ? `${i + 1}, the last` : String(i + 1))),
    (value) => state.set({ at: value === String(last) ? "" : value }));
  const ways = select("Heads", [["", "average"], ["max", "maximum"], ...numbered(cross.heads, (i) => `head ${i + 1}`)],
    (value) => state.set({ by: value }));

  const table = tabular("The translation, token by token", () => ({
    head: ["said", "probability", "looked most at", "weight", "also possible"],
    rows: trace.said.map((token, i) => {
      const row = map.subarray(i * cross.keys, (i + 1) * cross.keys);
      const most = row.indexOf(Math.max(...row));
      const rest = (trace.candidates[i] ?? []).filter((one) => one.id !== token.id).slice(0, 3);
      return [label(token), trace.probabilities[i].toFixed(4), label(trace.source[most]), row[most].toFixed(4),
        h("span", {}, ...rest.flatMap((one, j) => [j ? ", " : "", label(one), ` ${percent(one.probability)}`]))];
    }),
  }));

  const element = h("div", { class: "translate" },
    h("div", { class: "lines card" },
      h("h3", {}, "Source"), source.text, h("h3", {}, "Translation"), target.text,
      h("div", { class: "controls" }, h("span", { class: "quiet" }, "Attention of"), layers.field, ways.field)),
    h("div", { class: "under" }, others, riskNotes(trace, risks, (risk) => {
      const spans = risk.side === "source" ? source.spans : target.spans;
      spans[risk.places[0]]?.focus();
    })),
    table.element);

  const update = () => {
    layers.box.value = String(layer());
    ways.box.value = String(which() === "average" ? "" : which());
    map = cross.map(layer(), which());
    light();
    tell();
    table.update();
  };
  state.listen(update);
  onTheme(light, signal);
  update();
  return element;
}

/** @param {Token} token @param {number} probability @param {Risk[]} risks */
function name(token, probability, risks) {
  const text = token.special ? `mark ${token.text}` : textOf([token]) || "space";
  return [text, percent(probability), ...risks.map((risk) => risk.short)].join(", ");
}

/**
 * @param {number} count
 * @param {(i: number) => string} text
 * @returns {[value: string, text: string][]}
 */
function numbered(count, text) {
  return Array.from({ length: count }, (_, i) => [String(i), text(i)]);
}

/**
 * What to look at twice. Signs, not proofs.
 *
 * @param {Trace} trace
 * @returns {Risk[]}
 */
export function risksOf(trace) {
  return [...unsure(trace), ...repeated(trace), ...unseen(trace), ...strange(trace)];
}

/** @param {Trace} trace @returns {Risk[]} */
function unsure({ probabilities, said }) {
  return said.flatMap((token, place) => {
    const probability = probabilities[place];
    if (probability >= UNSURE) return [];
    const says = `was said with a probability of only ${percent(probability)}`;
    return [{ side: /** @type {Side} */ ("target"), places: [place], short: "low probability", says }];
  });
}

/**
 * The same word, or the same two or three words, twice in a row.
 *
 * @param {Trace} trace
 * @returns {Risk[]}
 */
function repeated({ said }) {
  const groups = wordsOf(said).filter((places) => !said[places[0]].special);
  const texts = groups.map((places) => textOf(places.map((place) => said[place])).trim().toLowerCase());
  /** @type {Risk[]} */
  const risks = [];
  for (let i = 1; i < texts.length; i++) {
    for (const size of [1, 2, 3]) {
      if (i < size || i + size > texts.length) break;
      const now = texts.slice(i, i + size).join(" ");
      const before = texts.slice(i - size, i).join(" ");
      if (now === before && /\p{L}/u.test(now)) {
        risks.push({ side: "target", places: groups[i], short: "repetition", says: "repeats what stands before it" });
        break;
      }
    }
  }
  return risks;
}

/**
 * Words of the source that were hardly looked at.
 *
 * @param {Trace} trace
 * @returns {Risk[]}
 */
function unseen({ source, cross }) {
  if (!cross.queries) return [];
  const most = new Float32Array(source.length);
  const whole = new Float32Array(source.length);
  const maps = Array.from({ length: cross.layers }, (_, layer) => cross.map(layer, "average"));
  for (let i = 0; i < cross.queries * cross.keys; i++) {
    const weight = maps.reduce((sum, map) => sum + map[i], 0) / cross.layers;
    const key = i % cross.keys;
    most[key] = Math.max(most[key], weight);
    whole[key] += weight;
  }
  return wordsOf(source).flatMap((places) => {
    const text = textOf(places.map((place) => source[place]));
    const all = places.reduce((sum, place) => sum + whole[place], 0);
    const seen = all >= LITTLE || places.some((place) => most[place] >= UNSEEN);
    if (source[places[0]].special || !/[\p{L}\p{N}]/u.test(text) || seen) return [];
    return [{
      side: /** @type {Side} */ ("source"), places, short: "almost no attention",
      says: "got almost no attention: it may be missing from the translation",
    }];
  });
}

/** @param {Trace} trace @returns {Risk[]} */
function strange({ source, said }) {
  const [before, after] = [source, said].map((tokens) => tokens.filter((token) => !token.special).length);
  if (Math.max(before, after) < 6 || (after <= RATIO * before && before <= RATIO * after)) return [];
  const says = `The translation has ${after} tokens for ${before} of the source.`;
  return [{ side: "target", places: [], short: "length", says }];
}

/** @param {Trace} trace @param {Risk[]} risks @param {(risk: Risk) => void} go */
function riskNotes(trace, risks, go) {
  const LONGEST = 8;
  if (!risks.length) {
    return h("div", { class: "notes card" }, h("h3", {}, "Nothing suspicious"), h("p", { class: "quiet" },
      "No improbable word, no repetition, every source word looked at, lengths alike."));
  }
  return h("div", { class: "notes card" }, h("h3", {}, "Worth a second look"),
    h("ul", {}, risks.slice(0, LONGEST).map((risk) => {
      if (!risk.places.length) return h("li", {}, risk.says);
      const tokens = risk.places.map((place) => (risk.side === "source" ? trace.source : trace.said)[place]);
      const text = textOf(tokens).trim() || tokens[0].text;
      const button = h("button", { type: "button", class: "plain", onclick: () => go(risk) }, words(text));
      return h("li", {}, button, ` ${risk.says}.`);
    })),
    risks.length > LONGEST && h("p", { class: "quiet" }, `and ${risks.length - LONGEST} more, underlined above.`));
}
