/**
 * Lenses: what the model would say at each depth, why it says a token and not another, and which place of the network
 * makes two sentences differ.
 *
 * @typedef {import("../lenses.js").AttributionJson} AttributionJson
 * @typedef {import("../lenses.js").DepthLensJson} DepthLensJson
 * @typedef {import("../lenses.js").PatchingJson} PatchingJson
 * @typedef {import("../lenses.js").Stack} Stack
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../trace.js").Token} Token
 */

import { signedLegend, tint, weightLegend } from "../canvas.js";
import { NARROW, bidiText, foldingCard, h, scrollFade, selectField, setTabStop, tableToggle, tokenInProse, tokenLabel } from "../dom.js";
import { percent, signed } from "../format.js";
import { heatmap } from "../heatmap.js";
import { lensesOf, settledDepths, strongestPlace } from "../lenses.js";
import { onThemeChange } from "../theme.js";
import { errorMessage, joinBytes, runningText, tokenText, unpack } from "../trace.js";

/** what the methods are called, in the order in which they are shown */
const METHODS = /** @type {const} */ ([
  ["integrated_gradients", "integrated gradients"], ["occlusion", "occlusion"], ["gradient_x_input", "gradient × input"],
  ["alti", "ALTI+"], ["attention_rollout", "attention rollout"], ["attention", "attention"],
]);
/** methods whose shares have a sign */
const SIGNED = new Set(["integrated_gradients", "occlusion", "gradient_x_input"]);

/** @type {View} */
export const lensesView = {
  id: "lenses",
  title: "Lenses",
  help: "What would the model predict after each layer? Why this word and not another? Which activations decide?",
  applies: (trace) => trace.hasLenses,
  build,
};

/** @param {Context} context */
function build(context) {
  const { trace, api } = context;
  if (!trace.lenses && !api?.lenses) {
    return h("p", { class: "card" }, "This file has no lenses; ", h("code", {}, 'regard look RUN "…" --lenses'),
      " includes them, and ", h("code", {}, "regard serve RUN"), " computes them.");
  }
  return h("div", { class: "lenses" }, attributionCard(context), depthCard(context), patchingCard(context));
}

/** @param {() => Promise<void>} work @param {HTMLElement} status */
async function report(work, status) {
  status.className = "status";
  status.textContent = "Computing…";
  try {
    await work();
    status.textContent = "";
  } catch (error) {
    status.className = "status wrong";
    status.textContent = errorMessage(error);
  }
}

// -------------------------------------------------------------------------------------------------
// Why this word?

/** @param {Context} context */
function attributionCard(context) {
  const { trace, state, signal } = context;
  const lenses = lensesOf(context);
  const status = h("p", { class: "status", role: "status" });
  const result = h("div", { class: "attribution", "aria-live": "polite" });
  const foils = selectField("and not", [], (value) => state.set({ foil: value }));
  foils.field.hidden = true; // until there is something to choose from
  const words = runningText(trace.outputs).map(({ index, token, text, spaceBefore }) => ({
    space: spaceBefore ? " " : "",
    button: h("button", {
      type: "button", class: `word${token.special ? " special" : ""}`, hidden: text === "",
      onclick: () => state.set({ output: String(index), foil: "" }),
    }, text),
  }));
  const buttons = words.map((one) => one.button);
  const line = h("p", {
    class: "line small", dir: "auto", role: "group", "aria-label": "Token to explain", onkeydown: (/** @type {KeyboardEvent} */ event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const next = step && buttons[buttons.findIndex((one) => one === document.activeElement) + step];
      if (!next) return;
      event.preventDefault();
      next.focus();
      next.click();
    },
  }, words.flatMap((one) => [one.space, one.button]));
  const position = () => (state.get("output") === "" ? trace.leastCertain : state.index("output", trace.outputs.length));
  let shown = "";
  const update = () => {
    if (state.get("view") !== "lenses") return;
    const at = position();
    const now = `${at} ${state.get("foil")}`;
    if (now === shown) return;
    shown = now;
    buttons.forEach((one, i) => one.setAttribute("aria-pressed", String(i === at)));
    setTabStop(buttons, buttons[at]);
    const foil = state.get("foil") === "" ? null : Number(state.get("foil"));
    report(async () => {
      const found = await lenses.attribution(at, foil);
      if (shown !== now) return;
      if (!found) return;
      showFoils(foils.box, trace.candidates[found.position] ?? [], found);
      foils.box.disabled = !lenses.hasFoils;
      foils.field.hidden = false;
      result.replaceChildren(...describeAttribution(found, signal));
    }, status);
  };
  state.subscribe(update);
  requestAnimationFrame(update);
  return foldingCard("Why this word?", { important: true },
    h("p", { class: "description" }, "Select a word of the translation. Each method measures how much each word that the model "
      + "had read made it choose this token rather than the other one: blue is for it, amber is against it."),
    line, h("div", { class: "controls" }, foils.field), status, result);
}

/** @param {HTMLSelectElement} box @param {Token[]} candidates @param {AttributionJson} found */
function showFoils(box, candidates, { token, foil }) {
  const others = candidates.filter((one) => one.id !== token.id && one.id !== foil.id);
  box.replaceChildren(...[foil, ...others].map((one) => h("option", { value: one.id }, tokenText(one).replace(/^▁/, ""))));
  box.value = String(foil.id);
}

/** @param {AttributionJson} found @param {AbortSignal} signal @returns {Node[]} */
function describeAttribution(found, signal) {
  const words = [...found.source_words, ...found.target_words];
  const methods = METHODS.filter(([id]) => found.scores[id]);
  const table = tableToggle("Contributions of the words, by method", () => ({
    head: ["word", ...methods.map(([, name]) => name)],
    rows: words.map((word, i) => [bidiText(word), ...methods.map(([id]) => signed(found.scores[id][i]))]),
  }));
  return [
    h("p", { class: "finding" }, ...explainAttribution(found, words)),
    ...attributionMap(found, words, methods, signal),
    signedLegend(["against", "for"], "each method has a colour scale of its own", signal),
    found.target_words.length ? h("p", { class: "legend" }, h("span", { class: "of-target" }, "blue words"), "are those of the translation so far")
      : h("span", {}),
    table.element, agreementNote(found),
  ];
}

/**
 * Methods in rows and words in columns; on a phone the other way round, because it is narrow.
 *
 * @param {AttributionJson} found @param {string[]} words @param {(typeof METHODS)[number][]} methods
 * @param {AbortSignal} signal
 * @returns {Node[]}
 */
function attributionMap({ scores, source_words }, words, methods, signal) {
  const reading = h("p", { class: "value small", "aria-live": "polite" }, "\u00a0");
  /** @type {(row: number, column: number) => [method: number, word: number]} */
  const placeOf = (row, column) => (NARROW ? [column, row] : [row, column]);
  const map = heatmap("Share of each word", signal, {
    onPoint: (row, column) => {
      const [method, word] = placeOf(row, column);
      const [id, name] = methods[method];
      reading.replaceChildren(bidiText(words[word]), h("span", { class: "quiet" }, ` ${name} `),
        h("strong", {}, SIGNED.has(id) ? signed(scores[id][word]) : scores[id][word].toFixed(3)));
    },
    onLeave: () => reading.replaceChildren("\u00a0"),
  });
  const names = methods.map(([, name]) => name);
  const labels = words.map((word, i) => h("span", { class: i < source_words.length ? "" : "of-target" }, bidiText(word)));
  const [rows, columns] = NARROW ? [labels, names] : [names, labels];
  const values = Float32Array.from({ length: words.length * methods.length }, (_, i) => {
    const [method, word] = placeOf(Math.floor(i / columns.length), i % columns.length);
    const shares = scores[methods[method][0]];
    return shares[word] / Math.max(...shares.map(Math.abs), 1e-9);
  });
  requestAnimationFrame(() => map.show({ values, rows, columns, corner: NARROW ? ["word", "method"] : ["method", "word"], max: 1 }));
  return [map.element, reading];
}

/** @param {AttributionJson} found @param {string[]} words */
function explainAttribution({ token, foil, difference, scores, completeness, source_words }, words) {
  const methods = ["integrated_gradients", "occlusion"];
  const share = (/** @type {number} */ i) => methods.reduce((sum, id) =>
    sum + scores[id][i] / Math.max(...scores[id].map(Math.abs), 1e-9), 0) / methods.length;
  const order = words.map((word, i) => ({ word, i, share: share(i) })).sort((a, b) => b.share - a.share);
  const best = order.filter((one, rank) => rank < 3 && one.share > 0.3 * order[0].share);
  const sum = scores.integrated_gradients.reduce((total, one) => total + one, 0);
  return [
    tokenInProse(token), " rather than ", tokenInProse(foil), ` by ${difference.toFixed(1)} in logits`,
    best.length ? ": mostly because of " : "", ...best.flatMap(({ word, i }, rank) => [
      rank ? (rank === best.length - 1 ? " and " : ", ") : "", "“", h("b", {}, bidiText(word)), "”",
      i < source_words.length ? "" : " in the translation"]), ". ",
    h("span", { class: "quiet" }, `Integrated gradients add up to ${sum.toFixed(2)}, the change from a sentence of neutral words, `
      + `with an error of ${percent(completeness)}.`, scores.alti ? "" : " ALTI+ is left out, because it does not support this network."),
  ];
}

/** @param {AttributionJson} found */
function agreementNote({ agreement, scores }) {
  const methods = METHODS.filter(([id]) => scores[id]);
  /** @param {string} a @param {string} b */
  const value = (a, b) => agreement.find(([x, y]) => (x === a && y === b) || (x === b && y === a))?.[2];
  const means = methods.map(([id, name]) => {
    const others = methods.flatMap(([other]) => value(id, other) ?? []);
    return { name, mean: others.reduce((sum, one) => sum + one, 0) / Math.max(1, others.length) };
  });
  const table = tableToggle("Agreement of the methods: rank correlation of the sizes of their shares", () => ({
    head: ["method", ...methods.map(([, name]) => name)],
    rows: methods.map(([a, name]) => [name, ...methods.map(([b]) => (a === b ? "1" : signed(value(a, b) ?? 0)))]),
  }));
  const [most, fewest] = [Math.max(...means.map((one) => one.mean)), Math.min(...means.map((one) => one.mean))];
  return h("div", { class: "agreement quiet" },
    `The methods need not agree. Mean rank correlation with the others: ${means.map((one) =>
      `${one.name} ${one.mean.toFixed(2)}`).join(", ")}. `, most - fewest > 0.3 ? "Trust results on which several methods agree." : "", table.element);
}

// -------------------------------------------------------------------------------------------------
// What would be said at each depth

/** @param {Context} context */
function depthCard(context) {
  const { state, signal } = context;
  const lenses = lensesOf(context);
  const status = h("p", { class: "status", role: "status" });
  const body = h("div", {});
  let started = false;
  const update = () => {
    if (started || state.get("view") !== "lenses") return;
    started = true;
    report(async () => {
      const found = await lenses.depth();
      if (!found) return;
      body.replaceChildren(
        weightLegend("probability of the token that was generated in the end", signal),
        h("h4", {}, "After each layer of the decoder (logit lens)"), depthTable("Tokens after each layer of the decoder", found.logit_lens, signal),
        h("p", { class: "finding" }, explainDepth(found.logit_lens)),
        h("h4", {}, "The decoder reads each layer of the encoder (DecoderLens)"), depthTable("Tokens for each layer of the encoder", found.decoder_lens, signal),
        translationsByDepth(found.decoder_lens));
    }, status);
  };
  state.subscribe(update);
  update();
  return foldingCard("What would the model predict at each depth?", {},
    h("p", { class: "description" }, "Each cell is the most probable token at that depth, while the model generates the token "
      + "at the top of the column."),
    status, body);
}

/** @param {string} name @param {DepthLensJson} lens @param {AbortSignal} signal */
function depthTable(name, { outputs, depths, candidates, probabilities }, signal) {
  const values = unpack(probabilities);
  const shown = joinBytes(outputs);
  /** @type {[HTMLElement, number][]} */
  const cells = [];
  const rows = depths.map((each, depth) => h("tr", {}, h("th", { scope: "row" }, each), shown.map((token, position) => {
    const best = candidates[depth][position];
    const value = values[depth * shown.length + position];
    const cell = h("td", {
      class: best[0].id === token.id ? "same" : "",
      title: `${best.map((one) => `${tokenText(one)} ${percent(one.probability)}`).join(", ")}; ${tokenText(token)} ${percent(value)}`,
    }, tokenLabel(best[0].id === token.id ? token : best[0]));
    cells.push([cell, value]);
    return cell;
  }))).reverse();
  const draw = () => cells.forEach(([cell, value]) => tint(cell, value));
  draw();
  onThemeChange(draw, signal);
  const head = h("tr", {}, h("td", {}), shown.map((token) => h("th", { scope: "col" }, tokenLabel(token))));
  return scrollFade(h("div", { class: "table depth-table", tabindex: 0, role: "region", "aria-label": name },
    h("table", {}, h("thead", {}, head), h("tbody", {}, rows))), signal);
}

/** @param {DepthLensJson} lens */
function explainDepth(lens) {
  const settled = settledDepths(lens);
  const last = lens.depths.length - 1;
  const early = settled.filter((depth) => depth < last).length;
  return `${early} of ${settled.length} tokens are settled before the last layer; the others are decided in it.`;
}

/** @param {DepthLensJson} lens */
function translationsByDepth({ depths, translations }) {
  return h("dl", { class: "by-depth" }, translations.map((text, depth) =>
    h("div", {}, h("dt", {}, depths[depth]), h("dd", {}, bidiText(text || "(empty)")))).reverse());
}

// -------------------------------------------------------------------------------------------------
// Activation patching

/** @param {Context} context */
function patchingCard(context) {
  const { trace, state, signal } = context;
  const lenses = lensesOf(context);
  if (!lenses.hasPatching && !lenses.patching) return "";
  const status = h("p", { class: "status", role: "status" });
  const result = h("div", { "aria-live": "polite" });
  const input = h("input", { type: "text", dir: "auto", "aria-label": "Another sentence", required: true });
  const other = () => state.get("against") || (lenses.patching?.texts[1] ?? "");
  let shown = "";
  const update = () => {
    if (state.get("view") !== "lenses" || shown === other()) return;
    shown = other();
    input.value = shown;
    const now = shown;
    if (now) card.open = true;
    card.classList.toggle("compared", now !== "");
    report(async () => {
      const found = now ? await lenses.patch(now) : null;
      if (shown === now) result.replaceChildren(...(found ? describePatching(found, signal) : []));
    }, status);
  };
  const form = h("form", { class: "typed", onsubmit: (/** @type {Event} */ event) => {
    event.preventDefault();
    state.set({ against: input.value });
  } }, input, h("button", { type: "submit", class: "primary" }, "Compare"));
  input.value = other() || trace.text;
  input.disabled = !lenses.hasPatching;
  state.subscribe(update);
  requestAnimationFrame(update);
  const card = foldingCard("What makes two sentences differ?", { class: "patching" },
    h("p", { class: "description" }, "Write a sentence that differs in one word, and whose translation differs. The model then "
      + "reads that sentence, but at one place it gets the vector of the sentence above (activation patching). The "
      + "stronger the blue, the more that place turns the translation back."),
    lenses.hasPatching ? form : h("p", {}, bidiText(other())), status, result);
  return card;
}

/** @param {PatchingJson} json @param {AbortSignal} signal @returns {Node[]} */
function describePatching(json, signal) {
  const effects = { encoder: unpack(json.effects.encoder), decoder: unpack(json.effects.decoder) };
  return [
    h("p", { class: "finding" }, ...explainPatching(json, effects)),
    signedLegend(["−1", "1"], "share of the difference that comes back; 1: as if this sentence had been read", signal),
    h("div", { class: "pair" }, /** @type {Stack[]} */ (["encoder", "decoder"]).map((stack) =>
      patchMap(json, stack, effects[stack], signal))),
  ];
}

/** @param {PatchingJson} json @param {Record<Stack, Float32Array>} effects */
function explainPatching(json, effects) {
  const { tokens, labels } = json;
  const { stack, depth, position, effect, takenOver } = strongestPlace(json, effects);
  const [first, second] = labels[stack][position];
  return ["The first difference is ", tokenInProse(tokens[0]), " instead of ", tokenInProse(tokens[1]),
    ". The place that carries it: ", h("b", {}, `${stack} layer ${depth}`), " at ", h("b", {}, tokenInProse(first)),
    ...(first.id === second.id ? [] : [" in place of ", tokenInProse(second)]),
    `. Its vector alone brings back ${percent(Math.min(effect, 1))} of the difference.`,
    takenOver === null ? "" : ` The decoder takes it over in layer ${takenOver}.`];
}

/** @param {PatchingJson} json @param {Stack} stack @param {Float32Array} effects @param {AbortSignal} signal */
function patchMap({ labels, effects: packed }, stack, effects, signal) {
  const [depths, positions] = packed[stack].shape;
  const names = Array.from({ length: depths }, (_, i) => (i ? `layer ${i}` : "embedding")).reverse();
  const rows = Float32Array.from({ length: effects.length }, (_, i) =>
    effects[(depths - 1 - Math.floor(i / positions)) * positions + (i % positions)]);
  const value = h("p", { class: "value small", "aria-live": "polite" }, "\u00a0");
  const tokens = joinBytes(labels[stack].map(([first]) => first));
  const map = heatmap(`Effect of patching, ${stack}`, signal, {
    onPoint: (row, column) => value.replaceChildren(h("span", { class: "quiet" }, `${names[row]} at `), tokenLabel(tokens[column]),
      h("strong", {}, ` ${signed(rows[row * positions + column])}`)),
    onLeave: () => value.replaceChildren("\u00a0"),
  });
  const table = tableToggle(`Effect of patching, ${stack}: depths in rows, positions in columns`, () => ({
    head: ["depth", ...tokens.map(tokenLabel)],
    rows: names.map((name, row) => [name, ...tokens.map((_, column) => signed(rows[row * positions + column]))]),
  }));
  requestAnimationFrame(() => map.show({
    values: rows, rows: names, columns: tokens.map(tokenLabel), corner: ["depth", stack === "encoder" ? "source" : "input"], max: 1,
  }));
  return h("div", {}, h("h4", {}, stack === "encoder" ? "Encoder: source positions" : "Decoder: tokens read so far"),
    map.element, value, table.element);
}
