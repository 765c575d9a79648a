/**
 * How the model was trained: loss curves, learning rate, label smoothing, position encoding, and the alignment of the
 * sentence at each checkpoint.
 *
 * @typedef {import("../chart.js").Chart} Chart
 * @typedef {import("../history.js").AlignmentJson} AlignmentJson
 * @typedef {import("../history.js").CurvesJson} CurvesJson
 * @typedef {import("../history.js").HistoryJson} HistoryJson
 * @typedef {import("../history.js").Positions} Positions
 * @typedef {import("../history.js").Smoothing} Smoothing
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../trace.js").Trace} Trace
 * @typedef {{ alignment: AlignmentJson, weights: LayerArray }} ShownAlignment
 */

import { divergingBar, paintDiverging, weightLegend } from "../canvas.js";
import { chart } from "../chart.js";
import {
  ARROWS, clampIndex, foldingCard, h, numberedOptions, range, selectField, tableToggle, tokenBar, tokenLabel,
} from "../dom.js";
import { compact, grouped, percent } from "../format.js";
import { heatmap } from "../heatmap.js";
import { loadHistory } from "../history.js";
import { onThemeChange } from "../theme.js";
import { LayerArray, errorMessage, unpack } from "../trace.js";

/** milliseconds between updates of a run that is still training */
const POLL_INTERVAL = 5000;
/** most points of the logged learning rate */
const LOGGED_POINTS = 40;

/** @type {View} */
export const trainingView = {
  id: "training",
  title: "Training",
  help: "How the model encodes positions, how it was trained, and how the alignment of this sentence developed. All values "
    + "come from the functions that training itself uses.",
  build,
};

/** the first card */
const FIRST = "Alignment during training";

/** @param {Context} context */
function build(context) {
  const element = h("div", { class: "training" }, h("p", { class: "quiet" }, "Loading the training history…"));
  loadHistory(context).then((history) => {
    if (context.signal.aborted) return;
    element.replaceChildren(...(history ? cards(context, history)
      : [h("p", { class: "card" }, "This page was saved without the training history. ",
        "regard look and regard serve include it.")]));
  }, (error) => element.replaceChildren(h("p", { class: "status wrong" }, errorMessage(error))));
  return element;
}

/** @param {Context} context @param {HistoryJson} history */
function cards(context, history) {
  const { signal } = context;
  const alignment = alignmentCard(context, history);
  return [
    alignment.element,
    curvesCard(context, history, alignment.setCheckpoints),
    ...positionCards(history.positions, signal),
    h("div", { class: "pair" }, scheduleCard(history, signal), smoothingCard(history.smoothing)),
  ];
}

/** @param {string} title @param {...(Node | string)} parts */
function card(title, ...parts) {
  return foldingCard(title, { important: title === FIRST }, ...parts);
}

/** @param {...(Node | string)} text */
function description(...text) {
  return h("p", { class: "description" }, ...text);
}

// -------------------------------------------------------------------------------------------------
// Alignment at the checkpoints

/** @param {Context} context @param {HistoryJson} history */
function alignmentCard(context, history) {
  const { trace, state, signal } = context;
  const title = FIRST;
  const nothing = h("p", { class: "quiet" }, history.checkpoints.length
    ? "This page was saved without the checkpoints of the run; regard look RUN \"…\" --checkpoints includes them."
    : "This run kept no checkpoints, only the final model.");
  if (!trace.cross_attention.layers || !trace.outputs.length) {
    return { element: card(title, nothing), setCheckpoints: () => {} };
  }
  const picture = alignmentPicture(context);
  const alignments = alignmentLoader(context, history);
  const slider = h("input", {
    type: "range", min: 0, step: 1, "aria-label": "Checkpoint",
    oninput: () => state.set({ step: String(steps[Number(slider.value)]) }),
  });
  const current = h("output", { class: "where" });
  let steps = history.alignments ? history.alignments.map((one) => one.step) : context.api?.align ? history.checkpoints : [];
  const selected = () => {
    const step = Number(state.get("step"));
    return steps.includes(step) ? step : steps[steps.length - 1];
  };
  const show = async () => {
    if (!steps.length) return;
    const step = selected();
    slider.max = String(steps.length - 1);
    slider.value = String(steps.indexOf(step));
    slider.setAttribute("aria-valuetext", `step ${step}`);
    current.textContent = `step ${grouped(step)}`;
    try {
      const alignment = await alignments.load(step);
      if (!signal.aborted && selected() === step) picture.show(alignment);
    } catch (error) {
      picture.showError(errorMessage(error));
    }
  };
  const body = h("div", {},
    description("The same translation, forced token by token on the model as it was at each checkpoint of the run: where it "
      + "looked, and how probable it found each token. Move the slider to go through training."),
    h("div", { class: "controls" }, h("label", { class: "field slide" }, h("span", {}, "Checkpoint"), slider, current),
      picture.layerField), ...picture.elements);
  const update = () => {
    body.hidden = !steps.length;
    nothing.hidden = !!steps.length;
    show();
  };
  let shown = "";
  state.subscribe(() => {
    const now = `${state.get("step")} ${state.get("cross_layer")}`;
    if (state.get("view") === "training" && now !== shown) show();
    shown = now;
  });
  update();
  return {
    element: card(title, body, nothing),
    /** @param {number[]} checkpoints steps of the checkpoints that exist now */
    setCheckpoints: (checkpoints) => {
      if (history.alignments || checkpoints.join() === steps.join()) return;
      steps = checkpoints;
      update();
    },
  };
}

/**
 * Alignments by step, from the file or from the server.
 *
 * @param {Context} context
 * @param {HistoryJson} history
 */
function alignmentLoader({ trace, api }, history) {
  /** @type {Map<number, Promise<AlignmentJson>>} */
  const cache = new Map((history.alignments ?? []).map((one) => [one.step, Promise.resolve(one)]));
  return {
    /** @param {number} step @returns {Promise<AlignmentJson>} */
    load: (step) => {
      const known = cache.get(step);
      if (known) return known;
      if (!api?.align) return Promise.reject(new Error("This checkpoint is not in this file."));
      const loading = api.align(trace.text, trace.outputs.map((token) => token.id), step);
      cache.set(step, loading);
      loading.catch(() => cache.delete(step));
      return loading;
    },
  };
}

/**
 * Cross-attention and probabilities at one checkpoint.
 *
 * @param {Context} context
 */
function alignmentPicture({ trace, state, signal }) {
  const { source, outputs, cross_attention: { layers } } = trace;
  const value = h("p", { class: "value small", "aria-live": "polite" });
  const map = heatmap("Cross-attention at the selected step", signal, {
    id: "alignment",
    onPoint: (row, column) => value.replaceChildren(
      tokenLabel(outputs[row]), h("span", { class: "quiet" }, " attends to "), tokenLabel(source[column]),
      h("strong", {}, matrix()?.[row * source.length + column].toFixed(3) ?? "")),
    onLeave: () => value.replaceChildren("\u00a0"),
  });
  const status = h("p", { class: "quiet", "aria-live": "polite" });
  const probabilities = h("div", { class: "shares" });
  const layer = () => state.indexOrLast("cross_layer", layers);
  const layerField = selectField("Layer", numberedOptions(layers),
    (value) => state.set({ cross_layer: value === String(layers - 1) ? "" : value }));
  /** @type {ShownAlignment | null} */
  let shown = null;
  const matrix = () => shown && shown.weights.matrix(Math.min(layer(), shown.weights.layers - 1), 0);
  const table = tableToggle("Cross-attention at the selected step, averaged over the heads of the layer", () => ({
    head: ["output", "probability", ...source.map(tokenLabel)],
    rows: alignmentTable(trace, matrix(), shown?.alignment.probabilities ?? []),
  }));
  const draw = () => {
    const values = matrix();
    layerField.box.value = String(layer());
    if (!values || !shown) return;
    const { step, probabilities: each } = shown.alignment;
    map.show({ values, rows: outputs.map(tokenLabel), columns: source.map(tokenLabel), corner: ["output", "source"] });
    status.textContent = `Probabilities of the tokens of this translation after ${grouped(step)} steps; `
      + `their geometric mean is ${percent(geometricMean(each))}:`;
    probabilities.replaceChildren(...outputs.map((token, i) =>
      h("div", { class: "share" }, tokenBar(token, each[i], percent(each[i])))));
    table.update();
  };
  return {
    elements: [h("div", { class: "beside" }, h("div", {}, map.element, weightLegend("attention weight, averaged over the heads", signal), value), h("aside", { class: "reading" }, status, probabilities)), table.element],
    layerField: layerField.field,
    /** @param {AlignmentJson} alignment */
    show: (alignment) => {
      if (shown?.alignment !== alignment) shown = { alignment, weights: new LayerArray(alignment.cross_attention) };
      draw();
    },
    /** @param {string} error */
    showError: (error) => { status.textContent = error; },
  };
}

/** @param {Trace} trace @param {Float32Array | null} weights @param {number[]} probabilities */
function alignmentTable({ source, outputs }, weights, probabilities) {
  if (!weights) return [];
  return outputs.map((token, row) => [tokenLabel(token), probabilities[row].toFixed(4),
    ...source.map((_, column) => weights[row * source.length + column].toFixed(3))]);
}

/** @param {number[]} values */
function geometricMean(values) {
  return Math.exp(values.reduce((sum, value) => sum + Math.log(Math.max(value, 1e-30)), 0) / values.length);
}

// -------------------------------------------------------------------------------------------------
// Curves

/** @param {Context} context @param {HistoryJson} history @param {(checkpoints: number[]) => void} onCheckpoints */
function curvesCard({ state, signal, api }, history, onCheckpoints) {
  const title = "Training curves";
  if (!history.curves || !(history.curves.train.length || history.curves.valid.length)) {
    return card(title, h("p", { class: "quiet" }, "This model has no training log, so there are no curves."));
  }
  let curves = history.curves;
  const metric = (curves.metric ?? "score").toUpperCase();
  const loss = chart("Loss by step", lossChart(curves), signal);
  const score = chart(`${metric} by step`, scoreChart(curves, metric), signal);
  const status = h("p", { class: "description", "aria-live": "polite" });
  const smoothed = history.smoothing.epsilon > 0;
  const table = tableToggle("The log, by step", () => ({
    head: ["step", "loss", "learning rate", "validation loss", metric], rows: logTable(curves),
  }));
  const update = () => { status.textContent = progress(curves, metric, smoothed); };
  update();
  const latestCurves = api?.curves;
  if (latestCurves && !curves.finished) {
    const timer = setInterval(async () => {
      if (state.get("view") !== "training" || document.hidden) return;
      const latest = await latestCurves().catch(() => null);
      if (!latest?.curves || signal.aborted) return;
      curves = latest.curves;
      loss.show(lossChart(curves));
      score.show(scoreChart(curves, metric));
      table.update();
      update();
      onCheckpoints(latest.checkpoints);
      if (curves.finished) clearInterval(timer);
    }, POLL_INTERVAL);
    signal.addEventListener("abort", () => clearInterval(timer));
  }
  return card(title, status, h("div", { class: "pair bare" }, loss.element, score.element), table.element);
}

/** @param {CurvesJson} curves @param {string} metric @param {boolean} smoothed */
function progress({ train, valid, finished, steps }, metric, smoothed) {
  const best = [...valid].reverse().find((one) => one.best);
  const done = train[train.length - 1]?.step ?? 0;
  const sentences = [finished ? `Finished after ${grouped(done)} steps.`
    : `Still training, or interrupted: ${grouped(done)} of ${grouped(steps ?? 0)} steps so far.`];
  if (best) {
    sentences.push(`Best at step ${grouped(best.step)}: validation loss ${compact(best.loss)}${
      best.score === null ? "" : `, ${metric} ${best.score.toFixed(1)}`}.`);
  }
  if (smoothed) sentences.push("The training loss includes label smoothing, the validation loss does not.");
  return sentences.join(" ");
}

/** @param {CurvesJson} curves @returns {Chart} */
function lossChart({ train, valid }) {
  return { x: "step", lines: [
    { name: "training loss", points: train.map((one) => [one.step, one.loss]) },
    { name: "validation loss", points: valid.map((one) => [one.step, one.loss]), kind: "dashed", rank: 2 },
  ] };
}

/** @param {CurvesJson} curves @param {string} metric @returns {Chart} */
function scoreChart({ valid }, metric) {
  /** @type {[number, number][]} */
  const points = valid.flatMap((one) => (one.score === null ? [] : [[one.step, one.score]]));
  return { x: "step", lines: [{ name: metric, points }], empty: "No validation yet." };
}

/** @param {CurvesJson} curves */
function logTable({ train, valid }) {
  const steps = [...new Set([...train, ...valid].map((one) => one.step))].sort((a, b) => a - b);
  return steps.map((step) => {
    const training = train.find((one) => one.step === step);
    const validation = valid.find((one) => one.step === step);
    return [grouped(step), training?.loss.toFixed(4) ?? "", training?.learning_rate.toExponential(3) ?? "",
      validation?.loss.toFixed(4) ?? "", validation?.score?.toFixed(2) ?? ""];
  });
}

// -------------------------------------------------------------------------------------------------
// Position encoding

/** @param {Positions | { kind: string, map: null }} positions @param {AbortSignal} signal */
function positionCards(positions, signal) {
  if (positions.map) return [h("div", { class: "pair" }, positionCard(positions, signal), distanceCard(positions, signal))];
  return [card("Position encoding", description(
    `This model adds no fixed pattern to its embeddings (model.position: ${positions.kind}): `,
    positions.kind === "none" ? "it has no information about word order." : "positions act inside attention instead."))];
}

/** @param {Positions} positions @param {AbortSignal} signal */
function positionCard({ kind, map }, signal) {
  const [length, width] = map.shape;
  const values = unpack(map);
  const max = values.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9);
  const readout = h("p", { class: "readout", "aria-live": "polite" }, " ");
  const table = tableToggle("Position encoding by position and dimension", () => ({
    head: ["position", ...range(width)],
    rows: range(length).map((row) =>
      [row, ...Array.from(values.subarray(row * width, (row + 1) * width), (value) => value.toFixed(3))]),
  }));
  return card("Position encoding",
    description(kind === "sinusoidal"
      ? "Attention alone ignores word order, so a pattern of sine and cosine waves is added to each embedding: fast waves in "
        + "the low dimensions, slow ones in the high dimensions."
      : `What the ${kind} position encoding of this model adds to each embedding, by position and dimension.`),
    h("div", { class: "position-map" }, h("span", { class: "axis-name down" }, "position →"),
      positionMap(values, length, width, max, readout, signal),
      h("span", { class: "axis-name" }, `dimension → (${width})`)),
    h("div", { class: "legend" }, `−${compact(max)}`, divergingBar(signal), compact(max), readout), table.element);
}

/**
 * @param {Float32Array} values @param {number} length @param {number} width @param {number} max
 * @param {HTMLElement} readout
 * @param {AbortSignal} signal
 */
function positionMap(values, length, width, max, readout, signal) {
  const canvas = h("canvas", { id: "positions", "aria-hidden": "true" });
  const field = h("div", { class: "waves", tabindex: 0, role: "application",
    "aria-label": "Position map: arrow keys move, the value is read out" }, canvas);
  const draw = () => paintDiverging(canvas, values, width, range(length), range(width), max);
  let cursor = [0, 0];
  /** @param {number} position @param {number} dimension */
  const moveTo = (position, dimension) => {
    cursor = [clampIndex(position, length), clampIndex(dimension, width)];
    const value = values[cursor[0] * width + cursor[1]];
    readout.textContent = `position ${cursor[0]}, dimension ${cursor[1]}: ${value.toFixed(4)}`;
  };
  field.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    moveTo(Math.floor(((event.clientY - box.top) / box.height) * length),
      Math.floor(((event.clientX - box.left) / box.width) * width));
  });
  field.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (!step) return;
    event.preventDefault();
    moveTo(cursor[0] + step[0], cursor[1] + step[1]);
  });
  draw();
  onThemeChange(draw, signal);
  return field;
}

/** @param {Positions} positions @param {AbortSignal} signal */
function distanceCard({ kind, distances, mean, min, max }, signal) {
  const spread = Math.max(...max.map((high, i) => high - min[i]));
  const atZero = mean[distances.indexOf(0)];
  const drawing = chart("Dot product of two positions, by distance", {
    x: "distance",
    lines: [{ name: "dot product", points: distances.map((distance, i) => [distance, mean[i]]) }],
    band: distances.map((distance, i) => [distance, min[i], max[i]]),
    height: 290, write: (value) => value.toFixed(2),
  }, signal);
  const onlyDistance = spread < 1e-3 * Math.max(1, Math.abs(atZero));
  return card("Similarity of positions",
    description(`The dot product of the encodings of two positions. At distance 0 it is ${compact(atZero)}. `, onlyDistance
      ? `It depends only on the distance (pairs at the same distance differ by at most ${compact(spread)}) and is symmetric, `
        + "so it does not tell left from right."
      : `It does not depend on the distance alone: pairs at the same distance differ by up to ${compact(spread)} (the band).`,
    kind === "sinusoidal" ? " The learned matrices W_Q and W_K can change both." : ""),
    drawing.element,
    tableToggle("Dot product by distance", () => ({
      head: ["distance", "mean", "minimum", "maximum"],
      rows: distances.map((distance, i) =>
        [String(distance).replace("-", "−"), mean[i].toFixed(4), min[i].toFixed(4), max[i].toFixed(4)]),
    })).element);
}

// -------------------------------------------------------------------------------------------------
// Learning rate and label smoothing

/** @type {Record<string, string>} */
const SCHEDULES = {
  noam: "learning_rate · d_model^−½ · min(step^−½, step · warmup^−1.5): linear warmup, then decay with the inverse square "
    + "root of the step.",
  constant: "linear warmup, then constant.",
  cosine: "linear warmup, then cosine decay to zero at the last step.",
};

/** @param {HistoryJson} history @param {AbortSignal} signal */
function scheduleCard({ schedule, curves }, signal) {
  const { kind, warmup, learning_rate: base, d_model: dModel, steps, learning_rates: rates } = schedule;
  const logged = curves?.train ?? [];
  const every = Math.max(1, Math.ceil(logged.length / LOGGED_POINTS));
  /** @type {import("../chart.js").Line[]} */
  const lines = [{ name: "recipe", points: steps.map((step, i) => [step, rates[i]]) }];
  if (logged.length) {
    lines.push({ name: "logged", kind: "dots", rank: 2,
      points: logged.filter((_, i) => i % every === 0).map((one) => [one.step, one.learning_rate]) });
  }
  const drawing = chart("Learning rate by step", { x: "step", lines, write: (value) => value.toExponential(2) }, signal);
  return card("Learning rate",
    description(`Schedule ${kind}: ${SCHEDULES[kind] ?? ""} Here, learning_rate is ${compact(base)}, warmup is ${
      grouped(warmup)} steps${kind === "noam" ? ` and d_model is ${dModel}` : ""}.`),
    drawing.element,
    tableToggle("Learning rate by step", () => ({
      head: ["step", "learning rate"], rows: steps.map((step, i) => [grouped(step), rates[i].toExponential(4)]),
    })).element);
}

/** @param {Smoothing} smoothing */
function smoothingCard({ epsilon, over, targets }) {
  const few = Math.min(...targets.map((one) => one.classes));
  const names = { all: "ε over all K classes", others: "ε over the K − 1 others" };
  const examples = targets.filter((one) => one.classes === few).map((one) =>
    h("div", { class: "target" },
      h("p", {}, names[one.over], one.over === over ? h("span", { class: "chip" }, "used here") : ""),
      distributionBars(few, one.correct, one.other)));
  const whole = targets.find((one) => one.classes !== few && one.over === over) ?? targets[0];
  return card("Label smoothing",
    description(epsilon ? `The target is not a one-hot distribution: label smoothing takes ε = ${epsilon} from the correct `
      + `token and spreads it over the others. There are two conventions; below is a target with ${few} classes for each of them.`
      : "This recipe uses no label smoothing: the target is a one-hot distribution under both conventions."),
    h("div", { class: "targets" }, examples),
    description(`In this model's vocabulary of ${grouped(whole.classes)} tokens, the target is ${whole.correct.toFixed(4)} for `
      + `the correct token and ${compact(whole.other)} for each of the others.`),
    tableToggle("Targets with label smoothing", () => ({
      head: ["convention", "classes K", "correct token", "each other token"],
      rows: targets.map((one) => [names[one.over], grouped(one.classes), one.correct.toPrecision(6), one.other.toPrecision(4)]),
    })).element);
}

/**
 * A target distribution as a bar chart; the second class is the correct one.
 *
 * @param {number} classes @param {number} correct @param {number} other
 */
function distributionBars(classes, correct, other) {
  return h("div", { class: "bars", "aria-hidden": "true" }, range(classes).map((i) => {
    const value = i === 1 ? correct : other;
    const column = h("div", { class: i === 1 ? "column correct" : "column" },
      h("span", {}, value.toFixed(value && value < 0.1 ? 3 : 2)));
    column.style.setProperty("--share", String(value));
    return column;
  }));
}
