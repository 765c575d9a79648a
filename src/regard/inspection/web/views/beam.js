/**
 * The search as a tree: one step a column, the best of the step at its top.
 *
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../trace.js").SearchNode} SearchNode
 * @typedef {import("../trace.js").Token} Token
 * @typedef {import("../trace.js").Trace} Trace
 * @typedef {{ node: SearchNode, token: Token, step: number, rank: number, children: Place[],
 *   parent: Place | null }} Place
 */

import { fading, h, label, percent, rove, select, signed, svg, tabular, words } from "../dom.js";
import { labelledMap } from "../map.js";
import { textOf, whenThere } from "../trace.js";

const WIDTH = 160;
const HEIGHT = 58;
const BOX = { width: 130, height: 46 };
const TOP = 34;
const END = "</s>";

/** @type {View} */
export const beam = {
  id: "beam",
  title: "Beam",
  help: "The search goes from left to right. At each step the best continuations of all live hypotheses stand in a "
    + "column, the best at the top. Choose one to see what became of it and why, and where the model looked just then.",
  fits: (trace) => trace.beam.length > 0,
  build,
};

/** @param {Context} context */
function build({ trace, state, signal }) {
  const places = layOut(trace);
  const best = bestWay(trace, places);
  const columns = Math.max(...places.map((place) => place.step)) + 1;
  const tallest = Math.max(...places.map((place) => place.rank)) + 1;

  const drawing = svg("svg", { width: columns * WIDTH, height: TOP + tallest * HEIGHT, "aria-hidden": "true" });
  /** @type {Map<Place, SVGElement>} */
  const edges = new Map();
  for (const pass of [false, true]) { // the best way lies on top
    for (const place of places) {
      const { parent, node } = place;
      if (!parent || best.has(place) !== pass) continue;
      const [x1, y1] = [parent.step * WIDTH + BOX.width, middle(parent)];
      const [x2, y2] = [place.step * WIDTH, middle(place)];
      const bend = (x1 + x2) / 2;
      const edge = svg("path", {
        class: `edge ${node.state}${pass ? " best" : ""}`, d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`,
      });
      edges.set(place, edge);
      drawing.append(edge);
    }
  }
  const steps = Array.from({ length: columns }, (_, step) => {
    const name = h("span", { class: "time" }, step ? `step ${step}` : "start");
    name.style.left = `${step * WIDTH}px`;
    return name;
  });
  const nodes = places.map((place) => {
    const { node, token, step } = place;
    const probability = percent(Math.exp(node.log_probability));
    const score = signed(node.score);
    const button = h("button", {
      type: "button", class: `node ${node.state}${best.has(place) ? " best" : ""}`, "data-id": node.id,
      "aria-label": step ? `${token.text}, ${probability}, score ${score}, ${node.state}` : "start",
      onclick: () => state.set({ node: String(node.id) }),
    }, label(token), step > 0 && h("span", { class: "numbers" }, h("span", {}, probability), h("span", {}, score)));
    button.style.left = `${step * WIDTH}px`;
    button.style.top = `${middle(place) - BOX.height / 2}px`;
    return button;
  });

  const plane = h("div", { class: "plane", onkeydown: (/** @type {KeyboardEvent} */ event) => {
    const now = places[nodes.findIndex((node) => node === document.activeElement)];
    const next = now && neighbour(places, now, event.key);
    if (!next) return;
    event.preventDefault();
    nodes[places.indexOf(next)].focus();
    state.set({ node: String(next.node.id) });
  } }, drawing, ...steps, ...nodes);
  plane.style.width = `${columns * WIDTH - (WIDTH - BOX.width) + 8}px`;
  plane.style.height = `${TOP + tallest * HEIGHT}px`;
  plane.style.setProperty("--box", `${BOX.width}px`);
  const tree = fading(h("div", { class: "tree card", tabindex: -1 }, plane), signal);
  /** @param {Place} place brought into the middle, if it is not in sight */
  const bring = (place) => {
    const { scrollLeft, scrollTop, clientWidth, clientHeight } = tree;
    const button = nodes[places.indexOf(place)];
    /** @param {number} from @param {number} size @param {number} scrolled @param {number} room */
    const sought = (from, size, scrolled, room) =>
      (from >= scrolled && from + size <= scrolled + room ? scrolled : from + size / 2 - room / 2);
    tree.scrollTo({
      left: sought(button.offsetLeft + plane.offsetLeft, BOX.width, scrollLeft, clientWidth),
      top: sought(button.offsetTop + plane.offsetTop, BOX.height, scrollTop, clientHeight),
    });
  };

  const detail = h("div", { class: "detail card", "aria-live": "polite" });
  const last = [...best].at(-1) ?? places[0];
  const chosen = () => places.find((place) => String(place.node.id) === state.get("node")) ?? last;
  let before = "";
  let open = false;
  const update = () => {
    const place = chosen();
    const opens = !open;
    open = state.get("view") === "beam";
    if (open && opens) requestAnimationFrame(() => bring(chosen())); // hidden, it forgot where it was
    const now = `${place.node.id} ${state.get("at")}`;
    if (state.get("view") !== "beam" || now === before) return;
    before = now;
    const way = new Set(wayTo(place));
    places.forEach((one, i) => {
      nodes[i].setAttribute("aria-pressed", String(one === place));
      nodes[i].classList.toggle("way", way.has(one));
      edges.get(one)?.classList.toggle("way", way.has(one));
    });
    rove(nodes, nodes[places.indexOf(place)]);
    detail.replaceChildren(...describe(trace, places, best, place));
    looked.show(place);
    bring(place);
  };
  const looked = attention(trace, state, signal);

  const table = tabular("The search, step by step", () => ({
    head: ["so far", "step", "rank", "token", "probability", "log-probability", "score", "became"],
    rows: places.slice(1).map((place) => {
      const { node, token, step, rank } = place;
      const prefix = textOf(wayTo(place).map((one) => one.token));
      return [words(prefix || "–"), step, rank + 1, label(token), Math.exp(node.log_probability).toFixed(4),
        signed(node.total), signed(node.score), node.state];
    }),
  }));
  state.listen(update);
  requestAnimationFrame(() => { before = ""; update(); }); // only in the page does the map have a width
  update();
  return h("div", { class: "beam" },
    h("ul", { class: "key" },
      h("li", {}, h("span", { class: "sample kept" }), "kept: goes on"),
      h("li", {}, h("span", { class: "sample pruned" }), "pruned: given up"),
      h("li", {}, h("span", { class: "sample finished" }), "finished: said the end"),
      h("li", {}, h("span", { class: "sample kept best" }), "the way to the translation"),
      h("li", { class: "quiet" }, "numbers: probability of the token, score of the whole")),
    tree, table.element, detail, looked.element);
}

/** @param {Place} place */
function middle(place) {
  return TOP + place.rank * HEIGHT + BOX.height / 2;
}

/**
 * Nodes come step by step, the best first.
 *
 * @param {Trace} trace
 * @returns {Place[]}
 */
function layOut(trace) {
  /** @type {Map<number, Place>} */
  const known = new Map();
  /** @type {number[]} */
  const counts = [];
  for (const node of trace.beam) {
    const parent = node.parent === null ? null : known.get(node.parent) ?? null;
    const step = parent ? parent.step + 1 : 0;
    counts[step] = (counts[step] ?? -1) + 1;
    const token = trace.tokens[node.token] ?? { id: node.token, text: `#${node.token}`, special: false };
    /** @type {Place} */
    const place = { node, token, step, rank: counts[step], children: [], parent };
    parent?.children.push(place);
    known.set(node.id, place);
  }
  return [...known.values()];
}

/**
 * From the first token on.
 *
 * @param {Place} place
 * @returns {Place[]}
 */
function wayTo(place) {
  const way = [];
  for (let at = place; at.parent; at = at.parent) way.push(at);
  return way.reverse();
}

/**
 * The nodes that became the translation.
 *
 * @param {Trace} trace
 * @param {Place[]} places
 * @returns {Set<Place>}
 */
function bestWay(trace, places) {
  const said = trace.said.map((token) => token.id).join(" ");
  const ends = places.filter((place) => place.step === trace.said.length && place.node.token === trace.said.at(-1)?.id)
    .filter((place) => wayTo(place).map((one) => one.node.token).join(" ") === said);
  return new Set(ends.length ? [places[0], ...wayTo(ends[0])] : []);
}

/** @param {Place[]} places @param {Place} now @param {string} key @returns {Place | null | undefined} */
function neighbour(places, now, key) {
  if (key === "ArrowLeft") return now.parent;
  if (key === "ArrowRight") return now.children.find((place) => place.node.state === "kept") ?? now.children[0];
  const step = { ArrowUp: -1, ArrowDown: 1 }[key];
  return step === undefined ? null : places.find((place) => place.step === now.step && place.rank === now.rank + step);
}

/** @param {Trace} trace @param {Place[]} places @param {Set<Place>} best @param {Place} place @returns {Node[]} */
function describe(trace, places, best, place) {
  const { node, step } = place;
  if (!step) return [h("h3", {}, "The start"), h("p", {}, "Nothing is said yet. Every hypothesis begins here.")];
  const alpha = trace.options.alpha ?? 0;
  const penalty = ((5 + step) / 6) ** alpha;
  const prefix = textOf(wayTo(place).map((one) => one.token));
  return [
    h("h3", {}, words(prefix || "(nothing)"), " ", h("span", { class: `state ${node.state}` }, node.state)),
    h("p", { class: "why" }, why(trace, places, best, place)),
    h("p", { class: "penalty quiet" }, penaltyOf(trace, places, place)),
    h("dl", {},
      fact("Token", label(place.token)),
      fact("Its probability", percent(Math.exp(node.log_probability))),
      fact("Log-probability of the whole", signed(node.total)),
      fact(`Length penalty, ((5 + ${step}) / 6)^${alpha}`, penalty.toFixed(3)),
      fact("Score", `${signed(node.total)} / ${penalty.toFixed(3)} = ${signed(node.score)}`)),
  ];
}

/**
 * What the length penalty changed.
 *
 * @param {Trace} trace @param {Place[]} places @param {Place} place
 */
function penaltyOf(trace, places, { node }) {
  if (!trace.options.alpha) return "There is no length penalty here (α = 0).";
  if (node.state !== "finished") {
    return "All continuations of one step are equally long, so the length penalty changes nothing in their order.";
  }
  const finished = places.filter((place) => place.node.state === "finished");
  const better = finished.filter((place) => place.node.score > node.score).length;
  const likelier = finished.filter((place) => place.node.total > node.total).length;
  if (finished.length === 1) return "The length penalty changes nothing: nothing else finished.";
  if (likelier === better) return "The length penalty changes nothing in its place: by log-probability alone it is the same.";
  return `Without the length penalty, by log-probability alone, it would be number ${likelier + 1}${
    likelier ? "" : ", and the translation"}.`;
}

/**
 * Where a hypothesis looked in the source while it was given its last token: the average and each head of a layer.
 *
 * @param {Trace} trace @param {Context["state"]} state @param {AbortSignal} signal
 */
function attention(trace, state, signal) {
  const { nodes } = trace;
  const note = h("p", { class: "quiet" });
  const value = h("p", { class: "value", "aria-live": "polite" });
  const layers = select("Layer", Array.from({ length: nodes.layers }, (_, i) => [String(i), String(i + 1)]),
    (layer) => state.set({ at: layer }));
  const names = ["average", ...Array.from({ length: nodes.heads }, (_, i) => `head ${i + 1}`)];
  let values = new Float32Array(0);
  const keys = trace.columns.cross;
  const map = labelledMap("Attention of this step", signal, {
    point: (row, column) => value.replaceChildren(h("span", { class: "quiet" }, `${names[row]} looks at `),
      label(keys[column]), h("strong", {}, values[row * keys.length + column].toFixed(4))),
    leave: () => value.replaceChildren(),
  });
  const table = tabular("Attention of this step: heads on rows, source on columns", () => ({
    head: ["head", ...keys.map(label)],
    rows: names.map((name, row) => [name, ...keys.map((_, column) => values[row * keys.length + column].toFixed(4))]),
  }));
  const picture = h("div", {}, map.element, value, table.element);
  const element = h("div", { class: "looked card" },
    h("div", { class: "controls" }, h("h3", {}, "Where it looked just then"), nodes.layers > 0 && layers.field), note, picture);

  /** @param {Place} place */
  const show = (place) => {
    const layer = state.get("at") === "" ? nodes.layers - 1 : state.place("at", nodes.layers);
    const row = place.parent ? trace.parents.indexOf(place.parent.node.id) : -1;
    const text = !place.step ? "Nothing is said yet, so nothing was looked at." : nodes.missing
      ? "There is too much of it for this file; regard serve RUN shows it."
      : row < 0 ? "This model has no attention to the source." : "";
    note.textContent = text;
    note.hidden = !text;
    picture.hidden = Boolean(text);
    if (text) return;
    layers.box.value = String(layer);
    whenThere([[nodes, layer]], (problem) => {
      note.textContent = problem;
      note.hidden = !problem;
      const maps = [nodes.map(layer, "average"), ...Array.from({ length: nodes.heads }, (_, i) => nodes.head(layer, i))];
      values = Float32Array.from(maps.flatMap((one) => [...one.subarray(row * nodes.keys, (row + 1) * nodes.keys)]));
      map.show({ values, rows: names, columns: keys.map(label), corner: ["head", "source"] });
      value.replaceChildren();
      table.update();
    });
  };
  return { element, show };
}

/** @param {string} name @param {Node | string} value */
function fact(name, value) {
  return h("div", {}, h("dt", {}, name), h("dd", {}, value));
}

/**
 * In a sentence, what became of a hypothesis; search/beam.py has the rules.
 *
 * @param {Trace} trace @param {Place[]} places @param {Set<Place>} best @param {Place} place
 */
function why(trace, places, best, { node, token, step, rank }) {
  const beam = trace.options.beam ?? 1;
  const among = places.filter((place) => place.step === step);
  const standing = `It is number ${rank + 1} of the ${among.length} continuations looked at in step ${step}`;
  if (node.state === "finished") {
    const finished = places.filter((place) => place.node.state === "finished");
    const better = finished.filter((place) => place.node.score > node.score).length;
    const place = finished.length === 1
      ? "It is the only finished hypothesis"
      : `It said the end; by score it is number ${better + 1} of the ${finished.length} finished hypotheses`;
    return `${place}${best.has(places[node.id]) ? ", and so the translation" : ""}.`;
  }
  if (node.state === "kept" && node.id === [...best].at(-1)?.node.id) {
    return "The search came to its greatest length without an end: this was the best so far, and was cut off here.";
  }
  if (node.state === "kept") {
    const place = rank < beam ? `among the best ${beam}` : `one of the best ${beam} that do not end`;
    return `${standing}: ${place}, so it goes on.`;
  }
  if (token.text === END && rank >= beam) {
    return `${standing}. An end counts only among the first ${beam}, so this one is given up.`;
  }
  const better = among.filter((place) => place.rank < rank && place.node.state === "kept").length;
  if (better >= beam) return `${standing}. The beam has room for ${beam}, taken by better ones.`;
  return `${standing}. The search ended with this step, so nothing went on from here.`;
}
