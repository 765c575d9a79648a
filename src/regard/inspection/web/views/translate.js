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
import { POINT, h, label, percent, rove, segments, select, share, signNote, signed, tabular, words } from "../dom.js";
import { running, textOf, whenThere, wordsOf } from "../trace.js";

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
/** source words told with a chosen word */
const NEEDED = 6;

/** @type {View} */
export const translate = {
  id: "translate",
  title: "Translate",
  help: `${POINT} a word to see where the model looked while it wrote it. Choose a word of the translation to see `
    + "what else it might have said, and which source words it needs.",
  build,
};

/** @param {Context} context */
function build({ trace, state, signal }) {
  const { cross, occlusion } = trace;
  /** whether there is attention to show: from each token said to each of the source */
  const looks = cross.layers > 0 && cross.keys === trace.source.length;
  const occluded = () => Boolean(occlusion) && (!looks || state.get("light") === "occlusion");
  /** the word each source token belongs to; marks belong to none */
  const wordAt = trace.source.map((_, i) => occlusion?.words.findIndex((word) => word.includes(i)) ?? -1);
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
  let map = new Float32Array(cross.queries * cross.keys);
  /**
   * How strongly a pair lights up: the attention, or the fall in probability.
   *
   * @param {number} from place in the source
   * @param {number} said
   */
  const strength = (from, said) => {
    if (occlusion && occluded()) return wordAt[from] < 0 ? 0 : occlusion.fall(wordAt[from], said);
    return looks ? map[said * cross.keys + from] : 0;
  };
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
      tint(span, at?.side === "target" ? strength(i, at.index) : null);
      span.classList.toggle("lit", at?.side === "source" && at.index === i);
    });
    target.spans.forEach((span, i) => {
      tint(span, at?.side === "source" ? strength(at.index, i) : null);
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
      h("h3", {}, trace.rounds.length ? `At place ${at + 1} the model could say`
        : told ? ["After “", words(told), "” the model could say"] : "To begin, the model could say"),
      h("ol", {}, all.map((one) => {
        const said = one.id === trace.said[at].id;
        return h("li", { class: said ? "share said" : "share" }, share(one, one.probability, percent(one.probability)),
          said && h("span", { class: "quiet" }, "said"));
      })),
      known ? "" : h("p", { class: "quiet" },
        "What was said is not among the most probable here: the beam found it better as a whole."),
      signNote(all) ?? "");
  };

  // ----- what a word looked at, and what it needs
  const needs = h("div", { class: "needs card", "aria-live": "polite" });
  const compare = () => {
    const at = selected();
    const said = at === null ? null : trace.said[at];
    const told = [h("h3", {}, "Attention is not an explanation by itself")];
    if (!occlusion) {
      needs.replaceChildren(...told, h("p", { class: "quiet" },
        "Occlusion, which leaves out one source word at a time, was not computed: the sentence is too long for a model of "
        + "this size."));
      return;
    }
    told.push(h("p", { class: "quiet" },
      "Occlusion asks the model again with one source word left out and the translation given. What becomes less "
      + "probable needed that word, looked at or not."));
    if (at === null || !said) {
      needs.replaceChildren(...told, h("p", {}, "Choose a word of the translation to compare the two."));
      return;
    }
    const rows = occlusion.words.map((places, word) => ({
      text: textOf(places.map((place) => trace.source[place])).trim(), fall: occlusion.fall(word, at),
      seen: looks ? places.reduce((sum, place) => sum + map[at * cross.keys + place], 0) : 0,
    }));
    const most = rows.sort((a, b) => Math.max(b.seen, Math.abs(b.fall)) - Math.max(a.seen, Math.abs(a.fall)))
      .slice(0, NEEDED);
    const left = occlusion.words.length - most.length;
    needs.replaceChildren(...told,
      h("div", { class: "need heading" }, h("span", {}, "source word"), h("span", {}, "attention"), h("span", {}),
        h("span", { class: "lost" }, "probability of ", label(said), " lost without it")),
      ...most.map((one) => h("div", { class: "need" }, h("span", { class: "token" }, words(one.text)),
        looks ? bar(one.seen) : h("span", {}), h("span", { class: "number" }, looks ? one.seen.toFixed(2) : "–"),
        bar(Math.max(one.fall, 0)), h("span", { class: "number" }, change(trace.probabilities[at], one.fall)))),
      left > 0 ? h("p", { class: "quiet" },
        `These ${most.length} source words count most here, by the one or the other. There are ${left} more.`) : "");
  };

  // ----- what to attend to
  const last = cross.layers - 1;
  const layers = select("Layer", numbered(cross.layers, (i) => (i === last ? `${i + 1}, the last` : String(i + 1))),
    (value) => state.set({ at: value === String(last) ? "" : value }));
  const ways = select("Heads", [["", "average"], ["max", "maximum"], ...numbered(cross.heads, (i) => `head ${i + 1}`)],
    (value) => state.set({ by: value }));

  const shown = segments("Colour shows", [["", "attention"], ["occlusion", "occlusion"]], "",
    (value) => state.set({ light: value }));

  const table = tabular("The translation, token by token", () => ({
    head: ["said", "probability", "looked most at", "weight", "needs most", "fall", "also possible"],
    rows: trace.said.map((token, i) => {
      const row = map.subarray(i * cross.keys, (i + 1) * cross.keys);
      const most = row.indexOf(Math.max(...row));
      const rest = (trace.candidates[i] ?? []).filter((one) => one.id !== token.id).slice(0, 3);
      const falls = occlusion?.words.map((_, word) => occlusion.fall(word, i)) ?? [];
      const needed = falls.indexOf(Math.max(...falls));
      const word = occlusion?.words[needed]?.map((place) => trace.source[place]);
      return [label(token), trace.probabilities[i].toFixed(4), looks ? label(trace.source[most]) : "–",
        looks ? row[most].toFixed(4) : "–", word ? words(textOf(word).trim()) : "–", word ? signed(falls[needed]) : "–",
        h("span", {}, ...rest.flatMap((one, j) => [j ? ", " : "", label(one), ` ${percent(one.probability)}`]))];
    }),
  }));
  const problem = h("p", { class: "status wrong", role: "status", hidden: true });

  const element = h("div", { class: "translate" },
    h("div", { class: "lines card" },
      h("h3", {}, "Source"), source.text, h("h3", {}, "Translation"), target.text,
      h("div", { class: "controls" }, looks && occlusion && h("span", { class: "quiet" }, "Colour shows"),
        looks && occlusion && shown, looks && h("span", { class: "quiet" }, "Attention of"), looks && layers.field,
        looks && ways.field, !looks && h("span", { class: "quiet" }, "This model has no attention to source words here."),
        problem)),
    h("div", { class: "under" }, others, riskNotes(trace, risks, (risk) => {
      const spans = risk.side === "source" ? source.spans : target.spans;
      spans[risk.places[0]]?.focus();
    })),
    needs, table.element);

  const update = () => {
    layers.box.value = String(layer());
    ways.box.value = String(which() === "average" ? "" : which());
    shown.show(occluded() ? "occlusion" : "");
    const wanted = layer();
    whenThere(looks ? [[cross, wanted]] : [], (wrong) => {
      problem.textContent = wrong;
      problem.hidden = !wrong;
      if (layer() !== wanted) return;
      if (looks) map = cross.map(wanted, which());
      light();
      compare();
      table.update();
    });
    tell();
  };
  state.listen(update);
  onTheme(light, signal);
  update();
  return element;
}

/** @param {number} value from 0 to 1 */
function bar(value) {
  const element = h("span", { class: "bar" });
  element.style.setProperty("--share", String(value));
  return element;
}

/** @param {number} before @param {number} fall */
function change(before, fall) {
  return `${percent(before)} → ${percent(Math.max(before - fall, 0))}`;
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
function unseen({ source, coverage: { most, whole } }) {
  if (!most.length) return [];
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
