/**
 * What the model is built on and how it learned: positions, rate, targets, curves, and alignment as it formed.
 *
 * @typedef {import("../course.js").AlignmentJson} AlignmentJson
 * @typedef {import("../course.js").CourseJson} CourseJson
 * @typedef {import("../course.js").CurvesJson} CurvesJson
 * @typedef {import("../course.js").Positions} Positions
 * @typedef {import("../course.js").Schedule} Schedule
 * @typedef {import("../course.js").Smoothing} Smoothing
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 */

import { chart, short } from "../chart.js";
import { onTheme, paint } from "../colour.js";
import { courseOf } from "../course.js";
import { ARROWS, fading, h, label, percent, select, share, tabular } from "../dom.js";
import { Weights, numbers } from "../trace.js";

/** milliseconds between two looks at a run that still learns */
const AGAIN = 5000;

/** @type {View} */
export const learning = {
  id: "learning",
  title: "Learning",
  help: "What the model is told about places, how it was taught, and how its alignment formed. Every number here was "
    + "made by the functions that training itself uses.",
  build,
};

/** @param {Context} context */
function build(context) {
  const element = h("div", { class: "learning" }, h("p", { class: "quiet" }, "Asking for the run…"));
  courseOf(context).then((course) => {
    if (context.signal.aborted) return;
    element.replaceChildren(...(course ? cards(context, course)
      : [h("p", { class: "card" }, "This page was made without its run. ",
        "regard look and regard serve bring it along.")]));
  }, (error) => element.replaceChildren(h("p", { class: "status wrong" }, String(error.message ?? error))));
  return element;
}

/** @param {Context} context @param {CourseJson} course */
function cards(context, course) {
  const { signal } = context;
  const { element: forming, update } = alignment(context, course);
  return [
    forming,
    curvesCard(context, course, update),
    ...positionCards(course.positions, signal),
    h("div", { class: "pair" }, scheduleCard(course, signal), smoothingCard(course.smoothing)),
  ];
}

/**
 * @param {string} title
 * @param {(Node | string)[]} parts
 */
function card(title, ...parts) {
  return h("section", { class: "card" }, h("h3", {}, title), ...parts);
}

/** @param {...(Node | string)} text */
function says(...text) {
  return h("p", { class: "says" }, ...text);
}

// ----- alignment, as it formed

/** @param {Context} context @param {CourseJson} course */
function alignment({ trace, state, signal, api }, course) {
  const title = "Alignment as it formed";
  /** @type {Map<number, Promise<AlignmentJson>>} */
  const known = new Map((course.alignments ?? []).map((one) => [one.step, Promise.resolve(one)]));
  let steps = course.alignments ? [...known.keys()] : api ? course.checkpoints : [];
  const nothing = h("p", { class: "quiet" });
  const none = () => {
    nothing.textContent = course.checkpoints.length
      ? "This page was made without the run's checkpoints: regard look RUN \"…\" --checkpoints brings them along."
      : "This run keeps no checkpoints, only the finished model: there is no past to show.";
    return nothing;
  };
  if (!trace.cross.layers || !trace.said.length) return { element: card(title, none()), update: () => {} };

  const canvas = h("canvas", { id: "forming", "aria-hidden": "true" });
  const cells = h("div", { class: "cells" }, canvas);
  const map = h("div", { class: "map", tabindex: 0, role: "region", "aria-label": "Cross attention at the chosen step" },
    h("div", { class: "sheet" },
      h("div", { class: "corner" }, h("span", {}, "said"), h("span", {}, "source")),
      h("div", { class: "columns" }, trace.source.map((token) => h("div", {}, label(token)))),
      h("div", { class: "rows" }, trace.said.map((token) => h("div", {}, label(token)))), cells));
  fading(map, signal);
  map.style.setProperty("--across", String(trace.source.length));
  map.style.setProperty("--down", String(trace.said.length));
  const slider = h("input", { type: "range", min: 0, step: 1, "aria-label": "Checkpoint", oninput: () => choose() });
  const where = h("output", { class: "where" });
  const told = h("p", { class: "quiet", "aria-live": "polite" });
  const shares = h("div", { class: "shares" });
  const last = trace.cross.layers - 1;
  const layers = select("Layer", Array.from({ length: last + 1 }, (_, i) => [String(i), String(i + 1)]),
    (value) => state.set({ at: value === String(last) ? "" : value }));
  const layer = () => (state.get("at") === "" ? last : state.place("at", last + 1));
  const chosen = () => {
    const asked = Number(state.get("step"));
    return steps.includes(asked) ? asked : steps[steps.length - 1];
  };
  /** @type {{ one: AlignmentJson, weights: Weights } | null} */
  let shown = null;
  const values = () => shown && shown.weights.map(Math.min(layer(), shown.weights.layers - 1), 0);

  const table = tabular("Cross attention at the chosen step, average of the layer's heads", () => {
    const now = values();
    return {
      head: ["said", "probability", ...trace.source.map(label)],
      rows: now && shown ? trace.said.map((token, row) => [label(token), /** @type {AlignmentJson} */ (shown?.one).probabilities[row].toFixed(4),
        ...trace.source.map((_, column) => now[row * trace.source.length + column].toFixed(3))]) : [],
    };
  });
  const draw = () => {
    const now = values();
    if (!now || !shown) return;
    paint(canvas, now, trace.source.length, Array.from(trace.said.keys()), Array.from(trace.source.keys()));
    const mean = Math.exp(shown.one.probabilities.reduce((sum, p) => sum + Math.log(Math.max(p, 1e-30)), 0) / trace.said.length);
    told.textContent = `After ${shown.one.step.toLocaleString("en")} steps the tokens of this translation had these `
      + `probabilities, ${percent(mean)} in the geometric mean:`;
    const { probabilities } = shown.one;
    shares.replaceChildren(...trace.said.map((token, i) =>
      h("div", { class: "share" }, share(token, probabilities[i], percent(probabilities[i])))));
    table.update();
  };
  const choose = () => state.set({ step: String(steps[Number(slider.value)]) });
  const show = async () => {
    if (!steps.length) return;
    const step = chosen();
    slider.max = String(steps.length - 1);
    slider.value = String(steps.indexOf(step));
    slider.setAttribute("aria-valuetext", `step ${step}`);
    where.textContent = `step ${step.toLocaleString("en")}`;
    layers.box.value = String(layer());
    try {
      const asked = known.get(step) ?? /** @type {import("../render.js").Api} */ (api).align(
        trace.text, trace.said.map((token) => token.id), step);
      known.set(step, asked);
      const one = await asked;
      if (signal.aborted || chosen() !== step) return;
      if (shown?.one !== one) shown = { one, weights: new Weights(one.cross) };
      draw();
    } catch (error) {
      known.delete(step);
      told.textContent = error instanceof Error ? error.message : String(error);
    }
  };
  const body = h("div", {},
    says("The same translation, forced word by word on the model as it was at each checkpoint the run keeps: where it "
      + "looked then, and how probable it found each word. Move the slider to see it form."),
    h("div", { class: "controls" }, h("label", { class: "field slide" }, h("span", {}, "Checkpoint"), slider, where), layers.field),
    h("div", { class: "beside" }, map, h("aside", { class: "reading" }, told, shares)), table.element);
  const element = card(title, body, none());
  const fill = () => {
    body.hidden = !steps.length;
    nothing.hidden = !!steps.length;
    show();
  };
  let before = "";
  state.listen(() => {
    const now = `${state.get("step")} ${state.get("at")}`;
    if (state.get("view") === "learning" && now !== before) show();
    before = now;
  });
  onTheme(draw, signal);
  fill();
  return {
    element,
    /** @param {number[]} now checkpoints there are */
    update: (now) => {
      if (course.alignments || now.join() === steps.join()) return;
      steps = now;
      fill();
    },
  };
}

// ----- the run

/** @param {Context} context @param {CourseJson} course @param {(steps: number[]) => void} news */
function curvesCard({ state, signal, api }, course, news) {
  if (!course.curves || !(course.curves.learned.length || course.curves.valid.length)) {
    return card("How it learned", h("p", { class: "quiet" }, "There is no log beside this model, so there are no curves."));
  }
  let now = course.curves;
  const measure = (now.measure ?? "score").toUpperCase();
  const loss = chart("Loss by step", lossLines(now), signal);
  const score = chart(`${measure} by step`, scoreLines(now, measure), signal);
  const status = h("p", { class: "says", "aria-live": "polite" });
  const smoothed = course.smoothing.epsilon ? " The training loss counts the smoothed labels, the validation loss does not." : "";
  const table = tabular("The log, by step", () => ({
    head: ["step", "loss", "rate", "validation loss", measure],
    rows: logRows(now),
  }));
  const tell = () => {
    const best = [...now.valid].reverse().find((one) => one.best);
    const done = now.learned[now.learned.length - 1]?.step ?? 0;
    status.textContent = [
      now.finished ? `Finished after ${done.toLocaleString("en")} steps.`
        : `Still learning, or stopped: ${done.toLocaleString("en")} of ${(now.steps ?? 0).toLocaleString("en")} steps so far.`,
      best && `Best at step ${best.step.toLocaleString("en")}: validation loss ${short(best.loss)}`
        + `${best.score === null ? "" : `, ${measure} ${best.score.toFixed(1)}`}.`,
    ].filter(Boolean).join(" ") + smoothed;
  };
  tell();
  if (api && !now.finished) {
    const timer = setInterval(async () => {
      if (state.get("view") !== "learning" || document.hidden) return;
      const told = await api.curves().catch(() => null);
      if (!told?.curves || signal.aborted) return;
      now = told.curves;
      loss.show(lossLines(now));
      score.show(scoreLines(now, measure));
      table.update();
      tell();
      news(told.checkpoints);
      if (now.finished) clearInterval(timer);
    }, AGAIN);
    signal.addEventListener("abort", () => clearInterval(timer));
  }
  return card("How it learned", status, h("div", { class: "pair bare" }, loss.element, score.element), table.element);
}

/** @param {CurvesJson} curves @returns {import("../chart.js").Chart} */
function lossLines({ learned, valid }) {
  return { x: "step", lines: [
    { name: "training loss", points: learned.map((one) => [one.step, one.loss]) },
    { name: "validation loss", points: valid.map((one) => [one.step, one.loss]), kind: "dashed", rank: 2 },
  ] };
}

/** @param {CurvesJson} curves @param {string} measure @returns {import("../chart.js").Chart} */
function scoreLines({ valid }, measure) {
  /** @type {[number, number][]} */
  const points = valid.flatMap((one) => (one.score === null ? [] : [[one.step, one.score]]));
  const scores = points.map(([, one]) => one);
  // From 90 to 99 would be a flat line over nothing: where all are far from 0, the axis begins near the least.
  const zero = points.length < 2 || Math.min(...scores) < Math.max(...scores) / 2;
  return { x: "step", lines: [{ name: measure, points }], zero, empty: "No validation yet." };
}

/** @param {CurvesJson} curves */
function logRows({ learned, valid }) {
  const steps = [...new Set([...learned, ...valid].map((one) => one.step))].sort((a, b) => a - b);
  return steps.map((step) => {
    const step1 = learned.find((one) => one.step === step);
    const seen = valid.find((one) => one.step === step);
    return [step.toLocaleString("en"), step1?.loss.toFixed(4) ?? "", step1 ? step1.rate.toExponential(3) : "",
      seen?.loss.toFixed(4) ?? "", seen?.score?.toFixed(2) ?? ""];
  });
}

// ----- positions

/** @param {Positions | { kind: string, map: null }} positions @param {AbortSignal} signal */
function positionCards(positions, signal) {
  if (positions.map) return [h("div", { class: "pair" }, positionsCard(positions, signal), distanceCard(positions, signal))];
  return [card("Where a word stands", says(
    `This model adds no fixed pattern to its words (model.position: ${positions.kind}): `,
    positions.kind === "none" ? "it is not told their order." : "their places have their say inside it."))];
}

/** @param {Positions} positions @param {AbortSignal} signal */
function positionsCard({ kind, map }, signal) {
  const [length, width] = map.shape;
  const values = numbers(map);
  const greatest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9);
  const scaled = values.map((value) => (value / greatest + 1) / 2);
  const canvas = h("canvas", { id: "positions", "aria-hidden": "true" });
  const told = h("p", { class: "told", "aria-live": "polite" }, " ");
  const field = h("div", { class: "waves", tabindex: 0, role: "application",
    "aria-label": "Position map: arrow keys move, the value is read out" }, canvas);
  const draw = () => paint(canvas, scaled, width, Array.from(Array(length).keys()), Array.from(Array(width).keys()));
  let cursor = [0, 0];
  /** @param {number} position @param {number} dimension */
  const tell = (position, dimension) => {
    cursor = [Math.min(Math.max(position, 0), length - 1), Math.min(Math.max(dimension, 0), width - 1)];
    told.textContent = `position ${cursor[0]}, dimension ${cursor[1]}: ${values[cursor[0] * width + cursor[1]].toFixed(4)}`;
  };
  field.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    tell(Math.floor(((event.clientY - box.top) / box.height) * length), Math.floor(((event.clientX - box.left) / box.width) * width));
  });
  field.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (!step) return;
    event.preventDefault();
    tell(cursor[0] + step[0], cursor[1] + step[1]);
  });
  draw();
  onTheme(draw, signal);
  const table = tabular("What is added at each position, by dimension", () => ({
    head: ["position", ...Array(width).keys()],
    rows: Array.from({ length }, (_, row) => [row, ...Array.from(values.subarray(row * width, (row + 1) * width), (value) => value.toFixed(3))]),
  }));
  return card("Where a word stands",
    says(kind === "sinusoidal"
      ? "Attention alone knows no order, so each position gets a pattern of waves, added to the word: sine and cosine side by side, fast in the low dimensions, slow in the high ones."
      : `What the ${kind} positions of this model add to the word, by position and dimension.`),
    h("div", { class: "wavemap" }, h("span", { class: "axis-name down" }, "position →"), field,
      h("span", { class: "axis-name" }, `dimension → (${width})`)),
    h("div", { class: "legend" }, `−${short(greatest)}`, scale(signal), short(greatest), told), table.element);
}

/** @param {AbortSignal} signal */
function scale(signal) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const steps = Float32Array.from({ length: 64 }, (_, i) => i / 63);
  const draw = () => paint(canvas, steps, 64, [0], Array.from(steps.keys()));
  draw();
  onTheme(draw, signal);
  return canvas;
}

/** @param {Positions} positions @param {AbortSignal} signal */
function distanceCard({ kind, distances, mean, least, most }, signal) {
  const spread = Math.max(...most.map((high, i) => high - least[i]));
  const own = mean[distances.indexOf(0)];
  const drawing = chart("Dot product of two positions, by their distance", {
    x: "distance",
    lines: [{ name: "dot product", points: distances.map((distance, i) => [distance, mean[i]]) }],
    band: distances.map((distance, i) => [distance, least[i], most[i]]),
    height: 290, zero: false, write: (value) => value.toFixed(2),
  }, signal);
  const alone = spread < 1e-3 * Math.max(1, Math.abs(own));
  return card("How alike two places are",
    says(`The dot product of the patterns of two positions. At distance 0 it is ${short(own)}. `, alone
      ? `It depends on the distance alone (over all pairs it differs by ${short(spread)} at most), and is the same to the left and to the right: direction is lost.`
      : `It is not a function of the distance alone: at one distance it differs by up to ${short(spread)} (the band).`,
    kind === "sinusoidal" ? " After W_Q and W_K, which are learned, it need not stay so." : ""),
    drawing.element,
    tabular("Dot product by distance", () => ({
      head: ["distance", "mean", "least", "most"],
      rows: distances.map((distance, i) => [String(distance).replace("-", "−"), mean[i].toFixed(4), least[i].toFixed(4), most[i].toFixed(4)]),
    })).element);
}

// ----- how it is taught

/** @type {Record<string, string>} */
const FORMULAS = {
  paper: "rate · d^−½ · min(step^−½, step · warmup^−1.5): a straight rise, then a fall with the root of the step.",
  constant: "a straight rise through the warm-up, then always the same.",
  cosine: "a straight rise through the warm-up, then half a cosine wave down to nothing at the last step.",
};

/** @param {CourseJson} course @param {AbortSignal} signal */
function scheduleCard({ schedule, curves }, signal) {
  const { kind, warmup, rate, width, steps, rates } = schedule;
  const logged = curves?.learned ?? [];
  const every = Math.max(1, Math.ceil(logged.length / 40));
  /** @type {import("../chart.js").Line[]} */
  const lines = [{ name: "recipe", points: steps.map((step, i) => [step, rates[i]]) }];
  if (logged.length) {
    lines.push({ name: "logged", kind: "dots", rank: 2,
      points: logged.filter((_, i) => i % every === 0).map((one) => [one.step, one.rate]) });
  }
  const drawing = chart("Learning rate by step", { x: "step", lines, write: (value) => value.toExponential(2) }, signal);
  return card("How fast it may change",
    says(`Schedule ${kind}: ${FORMULAS[kind] ?? ""} Rate ${short(rate)}, warm-up ${warmup.toLocaleString("en")} steps${kind === "paper" ? `, d = ${width}` : ""}.`),
    drawing.element,
    tabular("Learning rate by step", () => ({
      head: ["step", "rate"], rows: steps.map((step, i) => [step.toLocaleString("en"), rates[i].toExponential(4)]),
    })).element);
}

/** @param {Smoothing} smoothing */
function smoothingCard({ epsilon, over, targets }) {
  const few = Math.min(...targets.map((one) => one.classes));
  const names = { all: "ε over all K classes", others: "ε over the K − 1 others" };
  const bars = targets.filter((one) => one.classes === few).map((one) =>
    h("div", { class: "target" },
      h("p", {}, names[one.over], one.over === over ? h("span", { class: "chip" }, "this model's") : ""),
      h("div", { class: "bars", "aria-hidden": "true" }, Array.from({ length: few }, (_, i) => {
        const value = i === 1 ? one.right : one.other;
        const bar = h("div", { class: i === 1 ? "column right" : "column" }, h("span", {}, value.toFixed(value && value < 0.1 ? 3 : 2)));
        bar.style.setProperty("--share", String(value));
        return bar;
      }))));
  const whole = targets.find((one) => one.classes !== few && one.over === over) ?? targets[0];
  return card("What it is asked to say",
    says(epsilon ? `The right word is not asked for with certainty: label smoothing takes ε = ${epsilon} from it and spreads it out. `
      + `Two conventions are in use; below, what one target becomes among ${few} classes.`
      : "This recipe smooths no labels: the right word is asked for with certainty, by both conventions."),
    h("div", { class: "targets" }, bars),
    says(`Among the ${whole.classes.toLocaleString("en")} entries of this model's vocabulary the right one is wanted at `
      + `${whole.right.toFixed(4)}, each other at ${short(whole.other)}.`),
    tabular("Targets under label smoothing", () => ({
      head: ["convention", "classes K", "the right one", "each other"],
      rows: targets.map((one) => [names[one.over], one.classes.toLocaleString("en"), one.right.toPrecision(6), one.other.toPrecision(4)]),
    })).element);
}
