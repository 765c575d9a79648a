/**
 * The beam search as a tree: one column for each step, the best candidate on top.
 *
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../beam_tree.js").TreeNode} TreeNode
 * @typedef {import("../trace.js").Trace} Trace
 */

import { bestPath, explain, explainPenalty, layOutTree, lengthPenalty, neighbour, pathTo } from "../beam_tree.js";
import {
  bidiText, h, numberedOptions, scrollFade, selectField, setTabStop, svg, tableToggle, tokenLabel,
} from "../dom.js";
import { percent, signed } from "../format.js";
import { weightLegend } from "../canvas.js";
import { heatmap } from "../heatmap.js";
import { detokenize, tokenText, whenLoaded } from "../trace.js";

/** pixels between the left edges of two columns, and between the tops of two rows */
const COLUMN = 160;
const ROW = 58;
const NODE = { width: 130, height: 46 };
/** pixels above the first row, for the names of the steps */
const HEADER = 34;

/** @type {View} */
export const beamView = {
  id: "beam",
  title: "Beam",
  help: "The search runs from left to right. Each column holds the best candidates of one step, the best on top. "
    + "Select a node to see what happened to it and why, and where the model looked at that step.",
  applies: (trace) => trace.beam.length > 0,
  build,
};

/** @param {Context} context */
function build({ trace, state, signal }) {
  const nodes = layOutTree(trace);
  const best = bestPath(trace.outputs, nodes);
  const tree = drawTree(nodes, best, signal, (node) => state.set({ node: String(node.node.id) }));
  const attention = nodeAttention(trace, state, signal);
  const detail = h("div", { class: "detail card", "aria-live": "polite" });
  const final = [...best].at(-1) ?? nodes[0];
  const selected = () => nodes.find((node) => String(node.node.id) === state.get("node")) ?? final;

  let shown = "";
  let visible = false;
  const update = () => {
    const node = selected();
    const opened = !visible;
    visible = state.get("view") === "beam";
    // A hidden element forgets its scroll position.
    if (visible && opened && state.get("node")) requestAnimationFrame(() => tree.scrollTo(selected()));
    const now = `${node.node.id} ${state.get("cross_layer")}`;
    if (!visible || now === shown) return;
    shown = now;
    tree.select(node);
    detail.replaceChildren(...describe(trace, nodes, best, node));
    attention.show(node);
    if (state.get("node")) tree.scrollTo(node); // else the search is shown from its start
  };
  state.subscribe(update);
  requestAnimationFrame(() => { shown = ""; update(); }); // the heatmap has a width only once it is in the page
  update();
  return h("div", { class: "beam" }, key(), tree.element, searchTable(nodes), detail, attention.element);
}

/** The meaning of the nodes' borders. */
function key() {
  return h("ul", { class: "key" },
    h("li", {}, h("span", { class: "sample kept" }), "kept: continued in the next step"),
    h("li", {}, h("span", { class: "sample pruned" }), "pruned"),
    h("li", {}, h("span", { class: "sample finished" }), "finished: ended with </s>"),
    h("li", {}, h("span", { class: "sample kept best" }), "path of the translation"),
    h("li", { class: "quiet" }, "numbers: probability of the token, score of the hypothesis"));
}

/** @param {TreeNode[]} nodes */
function searchTable(nodes) {
  return tableToggle("The search, step by step", () => ({
    head: ["hypothesis", "step", "rank", "token", "probability", "log-probability", "score", "state"],
    rows: nodes.slice(1).map((one) => {
      const { node, token, step, rank } = one;
      const prefix = detokenize(pathTo(one).map(({ token: each }) => each));
      return [bidiText(prefix || "–"), step, rank + 1, tokenLabel(token), Math.exp(node.log_probability).toFixed(4),
        signed(node.total), signed(node.score), node.state];
    }),
  })).element;
}

// -------------------------------------------------------------------------------------------------
// Drawing

/**
 * @param {TreeNode[]} nodes
 * @param {Set<TreeNode>} best
 * @param {AbortSignal} signal
 * @param {(node: TreeNode) => void} onSelect
 */
function drawTree(nodes, best, signal, onSelect) {
  const columns = Math.max(...nodes.map((node) => node.step)) + 1;
  const height = HEADER + (Math.max(...nodes.map((node) => node.rank)) + 1) * ROW;
  const edges = drawEdges(nodes, best);
  const drawing = svg("svg", { width: columns * COLUMN, height, "aria-hidden": "true" }, ...edges.values());
  const buttons = nodes.map((node) => nodeButton(node, best.has(node), () => onSelect(node)));

  /** @param {KeyboardEvent} event */
  const onkeydown = (event) => {
    const current = nodes[buttons.findIndex((button) => button === document.activeElement)];
    const next = current && neighbour(nodes, current, event.key);
    if (!next) return;
    event.preventDefault();
    buttons[nodes.indexOf(next)].focus();
    onSelect(next);
  };
  const plane = h("div", { class: "plane", onkeydown }, drawing, ...stepNames(columns), ...buttons);
  plane.style.width = `${columns * COLUMN - (COLUMN - NODE.width) + 8}px`;
  plane.style.height = `${height}px`;
  plane.style.setProperty("--box", `${NODE.width}px`);
  const element = scrollFade(h("div", { class: "tree card", tabindex: -1 }, plane), signal);

  /** @param {TreeNode} node */
  const select = (node) => {
    const path = new Set(pathTo(node));
    nodes.forEach((one, i) => {
      buttons[i].setAttribute("aria-pressed", String(one === node));
      buttons[i].classList.toggle("path", path.has(one));
      edges.get(one)?.classList.toggle("path", path.has(one));
    });
    setTabStop(buttons, buttons[nodes.indexOf(node)]);
  };
  /** @param {TreeNode} node centred unless it is visible already */
  const scrollTo = (node) => {
    const button = buttons[nodes.indexOf(node)];
    element.scrollTo({
      left: centred(button.offsetLeft + plane.offsetLeft, NODE.width, element.scrollLeft, element.clientWidth),
      top: centred(button.offsetTop + plane.offsetTop, NODE.height, element.scrollTop, element.clientHeight),
    });
  };
  return { element, select, scrollTo };
}

/**
 * The scroll position that shows an item: unchanged if it is visible, else with the item in the middle.
 *
 * @param {number} start @param {number} size @param {number} scrolled @param {number} viewport
 */
function centred(start, size, scrolled, viewport) {
  const isVisible = start >= scrolled && start + size <= scrolled + viewport;
  return isVisible ? scrolled : start + size / 2 - viewport / 2;
}

/**
 * The edge to each node from its parent; the best path is drawn last, on top.
 *
 * @param {TreeNode[]} nodes
 * @param {Set<TreeNode>} best
 * @returns {Map<TreeNode, SVGElement>}
 */
function drawEdges(nodes, best) {
  const ordered = [...nodes.filter((node) => !best.has(node)), ...nodes.filter((node) => best.has(node))];
  return new Map(ordered.flatMap((node) => {
    if (!node.parent) return [];
    const [x1, y1] = [node.parent.step * COLUMN + NODE.width, middle(node.parent)];
    const [x2, y2] = [node.step * COLUMN, middle(node)];
    const bend = (x1 + x2) / 2;
    const path = svg("path", {
      class: `edge ${node.node.state}${best.has(node) ? " best" : ""}`,
      d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}`,
    });
    return [[node, path]];
  }));
}

/** @param {number} columns */
function stepNames(columns) {
  return Array.from({ length: columns }, (_, step) => {
    const name = h("span", { class: "time" }, step ? `step ${step}` : "start");
    name.style.left = `${step * COLUMN}px`;
    return name;
  });
}

/** @param {TreeNode} treeNode @param {boolean} isBest @param {() => void} onclick */
function nodeButton(treeNode, isBest, onclick) {
  const { node, token, step } = treeNode;
  const probability = percent(Math.exp(node.log_probability));
  const score = signed(node.score);
  const button = h("button", {
    type: "button", class: `node ${node.state}${isBest ? " best" : ""}`, "data-id": node.id,
    "aria-label": step ? `${tokenText(token)}, ${probability}, score ${score}, ${node.state}` : "start", onclick,
  }, tokenLabel(token), step > 0 && h("span", { class: "numbers" }, h("span", {}, probability), h("span", {}, score)));
  button.style.left = `${step * COLUMN}px`;
  button.style.top = `${middle(treeNode) - NODE.height / 2}px`;
  return button;
}

/** @param {TreeNode} node */
function middle(node) {
  return HEADER + node.rank * ROW + NODE.height / 2;
}

// -------------------------------------------------------------------------------------------------
// The selected node

/** @param {Trace} trace @param {TreeNode[]} nodes @param {Set<TreeNode>} best @param {TreeNode} hypothesis @returns {Node[]} */
function describe(trace, nodes, best, hypothesis) {
  const { node, step } = hypothesis;
  if (!step) return [h("h3", {}, "Start"), h("p", {}, "No token has been generated yet. Every hypothesis begins here.")];
  const alpha = trace.options.length_penalty ?? 0;
  const penalty = lengthPenalty(step, alpha);
  const prefix = detokenize(pathTo(hypothesis).map((one) => one.token));
  return [
    h("h3", {}, bidiText(prefix || "(empty)"), " ", h("span", { class: `state ${node.state}` }, node.state)),
    h("p", { class: "explanation" }, explain(trace.options.beam ?? 1, nodes, best, hypothesis)),
    h("p", { class: "penalty quiet" }, explainPenalty(alpha, nodes, hypothesis)),
    h("dl", {},
      definition("Token", tokenLabel(hypothesis.token)),
      definition("Token probability", percent(Math.exp(node.log_probability))),
      definition("Log-probability of the hypothesis", signed(node.total)),
      definition(`Length penalty, ((5 + ${step}) / 6)^${alpha}`, penalty.toFixed(3)),
      definition("Score", `${signed(node.total)} / ${penalty.toFixed(3)} = ${signed(node.score)}`)),
  ];
}

/** @param {string} term @param {Node | string} value */
function definition(term, value) {
  return h("div", {}, h("dt", {}, term), h("dd", {}, value));
}

/**
 * The cross-attention of a hypothesis when its last token was predicted: the average and each head of a layer.
 *
 * @param {Trace} trace @param {Context["state"]} state @param {AbortSignal} signal
 */
function nodeAttention(trace, state, signal) {
  const { nodes } = trace;
  const keys = trace.columns.cross_attention;
  const names = ["average", ...Array.from({ length: nodes.heads }, (_, i) => `head ${i + 1}`)];
  const note = h("p", { class: "quiet" });
  const value = h("p", { class: "value", "aria-live": "polite" });
  const layers = selectField("Layer", numberedOptions(nodes.layers), (layer) => state.set({ cross_layer: layer }));
  let values = new Float32Array(0);
  const map = heatmap("Attention at this step", signal, {
    onPoint: (row, column) => value.replaceChildren(h("span", { class: "quiet" }, `${names[row]} attends to `),
      tokenLabel(keys[column]), h("strong", {}, values[row * keys.length + column].toFixed(4))),
    onLeave: () => value.replaceChildren(),
  });
  const table = tableToggle("Attention at this step: heads in rows, source tokens in columns", () => ({
    head: ["head", ...keys.map(tokenLabel)],
    rows: names.map((name, row) => [name, ...keys.map((_, column) => values[row * keys.length + column].toFixed(4))]),
  }));
  const picture = h("div", {}, map.element, weightLegend("attention weight; the row of a head sums to 1", signal), value, table.element);
  const element = h("div", { class: "node-attention card" },
    h("div", { class: "controls" }, h("h3", {}, "Where the model looked at this step"), nodes.layers > 0 && layers.field),
    note, picture);

  /** @param {TreeNode} node */
  const show = (node) => {
    const layer = state.indexOrLast("cross_layer", nodes.layers);
    const row = node.parent ? trace.parents.indexOf(node.parent.node.id) : -1;
    const reason = reasonForNoAttention(trace, node, row);
    note.textContent = reason;
    note.hidden = !reason;
    picture.hidden = Boolean(reason);
    if (reason) return;
    layers.box.value = String(layer);
    whenLoaded([[nodes, layer]], (error) => {
      note.textContent = error;
      note.hidden = !error;
      const maps = [nodes.matrix(layer, "average"), ...Array.from({ length: nodes.heads }, (_, i) => nodes.head(layer, i))];
      values = Float32Array.from(maps.flatMap((one) => [...one.subarray(row * nodes.keys, (row + 1) * nodes.keys)]));
      map.show({ values, rows: names, columns: keys.map(tokenLabel), corner: ["head", "source"] });
      value.replaceChildren();
      table.update();
    });
  };
  return { element, show };
}

/** @param {Trace} trace @param {TreeNode} node @param {number} row of its parent */
function reasonForNoAttention(trace, node, row) {
  if (!node.step) return "No token has been generated yet, so there is no attention.";
  if (trace.nodes.missing) return "These weights are too large for this file; regard serve RUN shows them.";
  return row < 0 ? "This model has no attention to the source." : "";
}
