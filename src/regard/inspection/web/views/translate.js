/**
 * Source and translation, word by word: attention, probabilities, candidates, and the source words that matter.
 *
 * @typedef {import("../dom.js").Child} Child
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../state.js").State} State
 * @typedef {import("../trace.js").Side} Side
 * @typedef {import("../trace.js").Token} Token
 * @typedef {import("../trace.js").Trace} Trace
 * @typedef {import("../warnings.js").Warning} Warning
 * @typedef {{ side: Side, text: HTMLElement, spans: HTMLElement[] }} Line
 */

import { tint, weightLegend } from "../canvas.js";
import {
  NARROW, POINT_AT, bar, bidiText, h, numberedOptions, segmentedControl, selectField, setTabStop, spaceSymbolNote, tableToggle,
  tokenBar, tokenLabel,
} from "../dom.js";
import { percent, signed } from "../format.js";
import { onThemeChange } from "../theme.js";
import { detokenize, runningText, whenLoaded } from "../trace.js";
import { findWarnings } from "../warnings.js";

/** a line with more tokens is set in smaller type */
const LONG_LINE = 80;
/** words of context in the heading of the candidates */
const CONTEXT_WORDS = 4;
/** source words listed for a selected output */
const LISTED_WORDS = 6;
/** warnings listed in full */
const LISTED_WARNINGS = NARROW ? 4 : 8;

/** @type {View} */
export const translateView = {
  id: "translate",
  title: "Translate",
  help: "How this model translates a sentence. Select a word of the translation: the colour shows where the model attended when it "
    + `generated the word. Below are the alternatives and the source words that it depends on. ${POINT_AT} other words to compare.`,
  next: { text: "New here? Take the tour →", view: "tour" },
  build,
};

/** @param {Context} context */
function build({ trace, state, signal }) {
  const warnings = findWarnings(trace);
  const scores = pairScores(trace, state);
  const source = makeLine(trace, "source", warnings);
  const target = makeLine(trace, "target", warnings);
  const selected = () => {
    const count = target.spans.length;
    if (!count) return null;
    return state.get("output") === "" ? trace.leastCertain : state.index("output", count);
  };
  const tintWords = wordTinter(source, target, scores, selected);
  for (const line of [source, target]) {
    handleLine(line, tintWords.point, (index) => {
      if (line.side === "target") state.set({ output: String(index) });
    });
  }
  const candidates = h("div", { class: "candidates card", "aria-live": "polite" });
  const occlusion = h("div", { class: "occlusion card", "aria-live": "polite" });
  const table = tableToggle("The translation, token by token", () => tokenTable(trace, scores));
  const controls = colourControls(trace, state, scores, signal);
  const element = h("div", { class: "translate" },
    h("div", { class: "lines card" },
      h("h3", {}, "Source"), source.text, h("h3", {}, "Translation"), target.text, controls.element),
    h("div", { class: "under" }, candidates, warningList(trace, warnings, (warning) => {
      const spans = warning.side === "source" ? source.spans : target.spans;
      spans[warning.positions[0]]?.focus();
    })),
    occlusion, table.element);

  const update = () => {
    controls.update();
    scores.load((error) => {
      controls.showError(error);
      tintWords.update();
      occlusion.replaceChildren(...occlusionCard(trace, scores, selected()));
      table.update();
    });
    candidates.replaceChildren(...candidateList(trace, selected()));
  };
  state.subscribe(update);
  onThemeChange(tintWords.update, signal);
  update();
  return element;
}

// -------------------------------------------------------------------------------------------------
// How strongly a source token and an output are related

/**
 * The attention of a layer, or the effect of occlusion, for each pair of source token and output.
 *
 * @param {Trace} trace
 * @param {State} state
 */
function pairScores({ cross_attention: attention, source, occlusion }, state) {
  /** whether there is a weight for each output and each source token */
  const hasAttention = attention.layers > 0 && attention.keys === source.length;
  const showsOcclusion = () => Boolean(occlusion) && (!hasAttention || state.get("colour") === "occlusion");
  /** the word of each source token; -1 for special tokens */
  const wordOf = source.map((_, i) => occlusion?.words.findIndex((word) => word.includes(i)) ?? -1);
  const layer = () => state.indexOrLast("cross_layer", attention.layers);
  /** @returns {number | "average" | "max"} */
  const head = () => {
    const value = state.get("cross_head");
    if (value === "") return "average";
    return value === "max" ? "max" : state.index("cross_head", attention.heads);
  };
  let matrix = new Float32Array(attention.queries * attention.keys);
  return {
    hasAttention, showsOcclusion, layer, head,
    /** @param {number} output @param {number} position in the source */
    weight: (output, position) => (hasAttention ? matrix[output * attention.keys + position] : 0),
    /** @param {number} position in the source @param {number} output */
    strength: (position, output) => {
      if (occlusion && showsOcclusion()) return wordOf[position] < 0 ? 0 : occlusion.drop(wordOf[position], output);
      return hasAttention ? matrix[output * attention.keys + position] : 0;
    },
    /** @param {(error: string) => void} callback called unless another layer was selected in the meantime */
    load: (callback) => {
      const wanted = layer();
      whenLoaded(hasAttention ? [[attention, wanted]] : [], (error) => {
        if (layer() !== wanted) return;
        if (hasAttention) matrix = attention.matrix(wanted, head());
        callback(error);
      });
    },
  };
}

/** @typedef {ReturnType<typeof pairScores>} PairScores */

// -------------------------------------------------------------------------------------------------
// The two lines

/** @param {Trace} trace @param {Side} side @param {Warning[]} warnings @returns {Line} */
function makeLine(trace, side, warnings) {
  const tokens = side === "source" ? trace.source : trace.outputs;
  const text = h("p", {
    class: `line ${side}${tokens.length > LONG_LINE ? " long" : ""}`, dir: "auto", role: "group",
    "aria-label": side === "source" ? "Source" : "Translation",
  });
  const spans = runningText(tokens).map(({ index, token, text: shown, spaceBefore }) => {
    if (spaceBefore) text.append(" ");
    const own = warnings.filter((warning) => warning.side === side && warning.positions.includes(index));
    const span = h("span", {
      class: `word${token.special ? " special" : ""}${own.length ? " warning" : ""}`, "data-index": index,
      title: own.map((warning) => warning.short).join("; ") || null,
    }, shown);
    if (side === "target") {
      span.setAttribute("role", "button");
      span.setAttribute("aria-label", accessibleName(token, trace.probabilities[index], own));
      span.style.setProperty("--share", String(trace.probabilities[index]));
    }
    text.append(span);
    return span;
  });
  if (!spans.length) text.append(h("span", { class: "quiet" }, "(empty)"));
  return { side, text, spans };
}

/** @param {Token} token @param {number} probability @param {Warning[]} warnings */
function accessibleName(token, probability, warnings) {
  const text = token.special ? `special token ${token.text}` : detokenize([token]) || "space";
  return [text, percent(probability), ...warnings.map((warning) => warning.short)].join(", ");
}

/**
 * Colours the words of one line by their relation to the word under the pointer, or to the selected one.
 *
 * @param {Line} source @param {Line} target @param {PairScores} scores @param {() => number | null} selected
 */
function wordTinter(source, target, scores, selected) {
  /** @type {{ side: Side, index: number } | null} */
  let pointed = null;
  const update = () => {
    const output = selected();
    const word = pointed ?? (output === null ? null : { side: /** @type {Side} */ ("target"), index: output });
    source.spans.forEach((span, i) => {
      tint(span, word?.side === "target" ? scores.strength(i, word.index) : null);
      span.classList.toggle("lit", word?.side === "source" && word.index === i);
    });
    target.spans.forEach((span, i) => {
      tint(span, word?.side === "source" ? scores.strength(word.index, i) : null);
      span.classList.toggle("lit", word?.side === "target" && word.index === i);
      span.setAttribute("aria-pressed", String(i === output));
    });
  };
  /** @param {Side} side @param {number | null} index */
  const point = (side, index) => {
    pointed = index === null ? null : { side, index };
    update();
  };
  return { update, point };
}

/**
 * Pointer and keyboard on the words of a line.
 *
 * @param {Line} line
 * @param {(side: Side, index: number | null) => void} onPoint
 * @param {(index: number) => void} onSelect
 */
function handleLine({ side, text, spans }, onPoint, onSelect) {
  /** @param {Event} event */
  const indexOf = (event) => {
    const span = /** @type {Element} */ (event.target).closest(".word");
    return span instanceof HTMLElement ? Number(span.dataset.index) : null;
  };
  text.addEventListener("pointerover", (event) => onPoint(side, indexOf(event)));
  text.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") onPoint(side, null); // a lifted finger still points at its word
  });
  text.addEventListener("focusin", (event) => {
    const index = indexOf(event);
    if (index === null) return;
    setTabStop(spans, spans[index]);
    if (spans[index].matches(":focus-visible")) onPoint(side, index);
  });
  text.addEventListener("focusout", () => onPoint(side, null));
  text.addEventListener("click", (event) => {
    const index = indexOf(event);
    if (index !== null) onSelect(index);
  });
  text.addEventListener("keydown", (event) => {
    const index = indexOf(event);
    if (index === null) return;
    const forward = getComputedStyle(text).direction === "rtl" ? -1 : 1;
    const next = { ArrowRight: index + forward, ArrowLeft: index - forward, Home: 0, End: spans.length - 1 }[event.key];
    if (next !== undefined) spans[next]?.focus();
    else if (event.key === "Enter" || event.key === " ") onSelect(index);
    else return;
    event.preventDefault();
  });
  if (spans.length) setTabStop(spans, spans[0]);
}

/**
 * What the colours show: attention of a layer and head, or occlusion.
 *
 * @param {Trace} trace @param {State} state @param {PairScores} scores @param {AbortSignal} signal
 */
function colourControls({ cross_attention: attention, occlusion }, state, scores, signal) {
  const last = attention.layers - 1;
  const layers = selectField("layer",
    numberedOptions(attention.layers, (number) => (number === last + 1 ? `${number} (last)` : String(number))),
    (value) => state.set({ cross_layer: value === String(last) ? "" : value }));
  const heads = selectField("heads",
    [["", "average"], ["max", "maximum"], ...numberedOptions(attention.heads, (number) => `head ${number}`)],
    (value) => state.set({ cross_head: value }));
  const colour = segmentedControl("Colour shows", [["", "attention"], ["occlusion", "occlusion"]], "",
    (value) => state.set({ colour: value }));
  const status = h("p", { class: "status wrong", role: "status", hidden: true });
  const { hasAttention } = scores;
  const unit = h("span", {});
  const legend = weightLegend("", signal);
  legend.append(unit);
  const element = h("div", { class: "controls" },
    hasAttention && occlusion && h("span", { class: "quiet" }, "Colour shows"), hasAttention && occlusion && colour,
    hasAttention && layers.field, hasAttention && heads.field,
    !hasAttention && h("span", { class: "quiet" }, "This model has no attention to source words."), status,
    h("div", { class: "colour-key" }, legend, h("p", { class: "legend" }, h("span", { class: "under-word" }),
      "probability of the word")));
  return {
    element,
    update: () => {
      layers.box.value = String(scores.layer());
      heads.box.value = String(scores.head() === "average" ? "" : scores.head());
      const occluded = scores.showsOcclusion();
      colour.show(occluded ? "occlusion" : "");
      layers.field.hidden = heads.field.hidden = occluded;
      unit.textContent = occluded ? "probability that is lost without the source word" : "attention weight";
    },
    /** @param {string} error */
    showError: (error) => {
      status.textContent = error;
      status.hidden = !error;
    },
  };
}

// -------------------------------------------------------------------------------------------------
// The selected word

/** @param {Trace} trace @param {number | null} output @returns {(Node | string)[]} */
function candidateList(trace, output) {
  if (output === null) return [h("p", { class: "quiet" }, "The translation is empty.")];
  const token = trace.outputs[output];
  const likely = trace.candidates[output] ?? [];
  const listed = likely.some((one) => one.id === token.id);
  const all = listed ? likely : [...likely, { ...token, probability: trace.probabilities[output] }];
  return [
    h("h3", {}, candidateHeading(trace, output)),
    h("ol", {}, all.map((one) => {
      const chosen = one.id === token.id;
      return h("li", { class: chosen ? "share chosen" : "share" }, tokenBar(one, one.probability, percent(one.probability)),
        chosen && h("span", { class: "quiet" }, "chosen"));
    })),
    listed ? "" : h("p", { class: "quiet" },
      "The chosen token is not among the most probable ones: beam search preferred it for the translation as a whole."),
    spaceSymbolNote(all) ?? "",
  ];
}

/** @param {Trace} trace @param {number} output @returns {Child | Child[]} */
function candidateHeading(trace, output) {
  if (trace.nonAutoregressive) return `Most probable tokens at position ${output + 1}`;
  const words = detokenize(trace.outputs.slice(0, output)).split(" ").filter(Boolean);
  if (!words.length) return "Most probable first tokens";
  const context = (words.length > CONTEXT_WORDS ? "… " : "") + words.slice(-CONTEXT_WORDS).join(" ");
  return ["Most probable tokens after “", bidiText(context), "”"];
}

/**
 * Attention and occlusion of the selected output, side by side.
 *
 * @param {Trace} trace @param {PairScores} scores @param {number | null} output
 * @returns {(Node | string)[]}
 */
function occlusionCard(trace, scores, output) {
  const { occlusion } = trace;
  const heading = h("h3", {}, "Attention alone is not an explanation");
  if (!occlusion) {
    return [heading, h("p", { class: "quiet" },
      "Occlusion, which removes one source word at a time, was not computed: the sentence is too long for a model of "
      + "this size.")];
  }
  const introduction = h("p", { class: "quiet" },
    "Occlusion runs the model again with one source word removed, on the same translation. An output that becomes less "
    + "probable depends on that word, whether the model attended to it or not.");
  if (output === null) return [heading, introduction];
  const rows = occlusionRows(trace, scores, output);
  const listed = rows.slice(0, LISTED_WORDS);
  const rest = rows.length - listed.length;
  return [heading, introduction,
    h("div", { class: "occlusion-row heading" }, h("span", {}, "source word"), h("span", {}, "attention"), h("span", {}),
      h("span", { class: "drop" }, "probability that ", tokenLabel(trace.outputs[output]), " loses without it")),
    ...listed.map(({ text, attention, drop }) => h("div", { class: "occlusion-row" },
      h("span", { class: "token" }, bidiText(text)), scores.hasAttention ? bar(attention) : h("span", {}),
      h("span", { class: "number" }, scores.hasAttention ? attention.toFixed(2) : "–"),
      bar(Math.max(drop, 0)), h("span", { class: "number" }, probabilityChange(trace.probabilities[output], drop)))),
    rest > 0 ? h("p", { class: "quiet" },
      `These are the ${listed.length} source words with the most attention or the largest effect; ${rest} more are not shown.`) : ""];
}

/** @param {Trace} trace @param {PairScores} scores @param {number} output most important word first */
function occlusionRows(trace, scores, output) {
  const { occlusion } = trace;
  if (!occlusion) return [];
  return occlusion.words.map((positions, word) => ({
    text: detokenize(positions.map((position) => trace.source[position])).trim(),
    drop: occlusion.drop(word, output),
    attention: positions.reduce((sum, position) => sum + scores.weight(output, position), 0),
  })).sort((a, b) => Math.max(b.attention, Math.abs(b.drop)) - Math.max(a.attention, Math.abs(a.drop)));
}

/** @param {number} before @param {number} drop */
function probabilityChange(before, drop) {
  return `${percent(before)} → ${percent(Math.max(before - drop, 0))}`;
}

/** @param {Trace} trace @param {PairScores} scores */
function tokenTable(trace, scores) {
  const { occlusion, source } = trace;
  return {
    head: ["output", "probability", "attends most to", "weight", "depends most on", "drop in probability", "other candidates"],
    rows: trace.outputs.map((token, i) => {
      const weights = source.map((_, position) => scores.weight(i, position));
      const most = weights.indexOf(Math.max(...weights));
      const others = (trace.candidates[i] ?? []).filter((one) => one.id !== token.id).slice(0, 3);
      const drops = occlusion?.words.map((_, word) => occlusion.drop(word, i)) ?? [];
      const largest = drops.indexOf(Math.max(...drops));
      const word = occlusion?.words[largest]?.map((position) => source[position]);
      return [tokenLabel(token), trace.probabilities[i].toFixed(4),
        scores.hasAttention ? tokenLabel(source[most]) : "–", scores.hasAttention ? weights[most].toFixed(4) : "–",
        word ? bidiText(detokenize(word).trim()) : "–", word ? signed(drops[largest]) : "–",
        h("span", {}, ...others.flatMap((one, j) => [j ? ", " : "", tokenLabel(one), ` ${percent(one.probability)}`]))];
    }),
  };
}

// -------------------------------------------------------------------------------------------------
// Warnings

/** @param {Trace} trace @param {Warning[]} warnings @param {(warning: Warning) => void} onSelect */
function warningList(trace, warnings, onSelect) {
  if (!warnings.length) {
    return h("div", { class: "warnings card" }, h("h3", {}, "No warnings"), h("p", { class: "quiet" },
      "No improbable words, no repetitions, every source word was attended to, and the lengths are similar."));
  }
  return h("div", { class: "warnings card" }, h("h3", {}, "Worth checking"),
    h("ul", {}, warnings.slice(0, LISTED_WARNINGS).map((warning) => {
      if (!warning.positions.length) return h("li", {}, warning.text);
      const line = warning.side === "source" ? trace.source : trace.outputs;
      const tokens = warning.positions.map((position) => line[position]);
      const text = detokenize(tokens).trim() || tokens[0].text;
      const button = h("button", { type: "button", class: "plain", onclick: () => onSelect(warning) }, bidiText(text));
      return h("li", {}, button, ` ${warning.text}.`);
    })),
    warnings.length > LISTED_WARNINGS
      && h("p", { class: "quiet" }, `and ${warnings.length - LISTED_WARNINGS} more, underlined above.`));
}
