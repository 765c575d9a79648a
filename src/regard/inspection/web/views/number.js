/**
 * One attention weight, followed from query and key to what the head adds: in steps, and as matrices beside them.
 *
 * Everything shown is computed here, from the model's own queries, keys, values and W^O. The last word has the weight
 * the model itself computed: the two must agree.
 *
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../dom.js").Child} Child
 * @typedef {import("../trace.js").Parts} Parts
 * @typedef {import("../trace.js").Token} Token
 * @typedef {{ i: number, j: number, T: number, K: number, dk: number, dv: number, scale: number, q: Float32Array,
 *   k: Float32Array, v: Float32Array, model: Float32Array, products: Float32Array, scores: Float32Array,
 *   masked: Float32Array, weights: Float32Array, head: Float32Array }} Numbers everything of one head; matrices row by row
 */

import { onTheme, paintSigned } from "../colour.js";
import { h, label, segments, select, tabular } from "../dom.js";
import { labelledMap } from "../map.js";
import { whenThere } from "../trace.js";
import { PANES, cornerOf, rowName } from "./heads.js";

/** terms of a sum that are written out, at its start */
const TERMS = 3;
/** a weight of 0 is a mask's if its score is not so far below the others */
const FAR = 80;
/** pixels a matrix may take, and a cell of it */
const PICTURE = { width: 132, height: 104, cell: 7 };

/** @type {View} */
export const number = {
  id: "number",
  title: "One number",
  help: "Follow one attention weight: choose a cell of the map. On the left is each step for this one query and key; on "
    + "the right the same for all at once, as the paper writes it. The numbers are the model's.",
  build,
};

/** @param {Context} context */
function build({ trace, state, signal }) {
  const panes = PANES.filter((pane) => trace[pane.kind].layers && trace.parts[pane.kind]);
  if (!panes.length) {
    return h("p", { class: "card" }, "This model has no attention made of products of queries and keys.");
  }
  const chosen = () => {
    const pane = panes.find((one) => one.kind === state.get("pane")) ?? panes[panes.length - 1];
    const weights = trace[pane.kind];
    const parts = /** @type {Parts} */ (trace.parts[pane.kind]);
    const layer = state.get("layer") === "" ? weights.layers - 1 : state.place("layer", weights.layers);
    const head = state.place("head", weights.heads);
    const i = state.place("query", weights.queries);
    return { pane, weights, parts, layer, head, i, j: state.get("key") === "" ? null : state.place("key", weights.keys) };
  };

  const places = segments("Place", panes.map((pane) => [pane.kind, pane.title]), "", (pane) => state.set({ pane }));
  const controls = h("div", { class: "controls" });
  const map = labelledMap("Weights of this head", signal, {
    choose: (i, j) => state.set({ query: String(i), key: String(j) }),
  });
  const result = h("div", { class: "result", "aria-live": "polite" });
  const steps = h("ol", { class: "steps" });
  /** @type {Numbers | null} */
  let now = null;
  const table = tabular("Every key of this query", () => {
    const { pane } = chosen();
    if (!now) return { head: [], rows: [] };
    const { i, K, products, scores, masked, weights, model } = now;
    return {
      head: ["key", "q·k", "scaled", "masked", "softmax, computed here", "the model's weight"],
      rows: trace.columns[pane.kind].map((token, j) => [label(token),
        ...[products, scores, masked].map((one) => decimal(one[i * K + j])),
        weights[i * K + j].toFixed(6), model[i * K + j].toFixed(6)]),
    };
  });

  const update = () => {
    if (state.get("view") !== "number") return;
    const { pane, weights, parts, layer, head, i, j } = chosen();
    places.show(pane.kind);
    const layers = select("Layer", counted(weights.layers), (value) => state.set({ layer: value }));
    const heads = select("Head", counted(weights.heads), (value) => state.set({ head: value }));
    layers.box.value = String(layer);
    heads.box.value = String(head);
    const focused = [layers, heads].findIndex((_, n) => controls.querySelectorAll("select")[n] === document.activeElement);
    controls.replaceChildren(places, layers.field, heads.field);
    if (focused >= 0) [layers, heads][focused].box.focus();
    if (parts.query.missing) {
      steps.replaceChildren();
      result.replaceChildren(h("p", { class: "quiet" }, "The queries and keys of so large a model or so long a sentence are "
        + "not in this file. "), h("code", {}, "regard serve RUN"), " shows them.");
      return;
    }
    const inputs = [parts.query, parts.key, parts.value, ...(parts.output.missing ? [] : [parts.output])];
    whenThere([[weights, layer], ...inputs.map((one) => /** @type {[typeof one, number]} */ ([one, layer]))], (problem) => {
      const still = chosen();
      if (still.pane !== pane || still.layer !== layer || still.head !== head || still.i !== i || still.j !== j) return;
      if (problem) return result.replaceChildren(h("p", { class: "status wrong" }, problem));
      const model = weights.head(layer, head);
      const row = model.subarray(i * weights.keys, (i + 1) * weights.keys);
      const at = j ?? row.indexOf(Math.max(...row)); // none chosen: the one looked at most
      now = compute(model, parts, layer, head, i, at);
      const keys = trace.columns[pane.kind];
      map.show({
        values: now.model, rows: Array.from({ length: now.T }, (_, row) => rowName(trace, pane, row)),
        columns: keys.map(label), corner: cornerOf(pane), chosen: [i, at],
      });
      result.replaceChildren(...told(now, rowName(trace, pane, i), keys[at]));
      steps.replaceChildren(...stepsOf(now, parts, layer, head, weights.heads, signal, keys[at]));
      table.update();
    });
  };
  state.listen(update);
  requestAnimationFrame(update); // only in the page does the map have a width
  return h("div", { class: "number-view" },
    h("div", { class: "card" }, controls, h("div", { class: "beside" }, map.element, result)), steps, table.element);
}

/**
 * @param {Float32Array} model the weights as the model computed them
 * @param {Parts} parts
 * @param {number} layer @param {number} head @param {number} i @param {number} j
 * @returns {Numbers}
 */
function compute(model, parts, layer, head, i, j) {
  const [q, k, v] = [parts.query, parts.key, parts.value].map((one) => one.head(layer, head));
  const [T, K, dk, dv, { scale }] = [parts.query.queries, parts.key.queries, parts.key.keys, parts.value.keys, parts];
  const products = new Float32Array(T * K);
  const scores = new Float32Array(T * K);
  const masked = new Float32Array(T * K);
  const weights = new Float32Array(T * K);
  const out = new Float32Array(T * dv);
  for (let row = 0; row < T; row++) {
    const at = row * K;
    let most = -Infinity;
    for (let key = 0; key < K; key++) {
      let sum = 0;
      for (let c = 0; c < dk; c++) sum += q[row * dk + c] * k[key * dk + c];
      products[at + key] = sum;
      scores[at + key] = sum * scale;
      if (model[at + key] > 0) most = Math.max(most, sum * scale);
    }
    let whole = 0;
    for (let key = 0; key < K; key++) {
      const hidden = model[at + key] === 0 && scores[at + key] > most - FAR;
      masked[at + key] = hidden ? -Infinity : scores[at + key];
      whole += Math.exp(masked[at + key] - most);
    }
    for (let key = 0; key < K; key++) {
      const weight = Math.exp(masked[at + key] - most) / whole;
      weights[at + key] = weight;
      for (let c = 0; c < dv; c++) out[row * dv + c] += weight * v[key * dv + c];
    }
  }
  return { i, j, T, K, dk, dv, scale, q, k, v, model, products, scores, masked, weights, head: out };
}

/** @param {Numbers} n @param {Node} query @param {Token} key @returns {Node[]} */
function told({ i, j, K, weights, model }, query, key) {
  const [here, there] = [weights[i * K + j], model[i * K + j]];
  const apart = Math.abs(here - there);
  const agree = apart < 1e-4;
  return [
    h("p", { class: "value" }, query, h("span", { class: "quiet" }, " looks at "), label(key),
      h("strong", {}, there.toFixed(4))),
    h("p", { class: agree ? "quiet check-sum" : "check-sum status wrong" },
      agree ? "Computed here from q and k: " : "Computed here, by the paper's formula: ", here.toFixed(6),
      ". The model's weight: ", there.toFixed(6), ". ",
      !agree ? "They differ: this model's weights are not the softmax of these scores alone."
        : apart ? `Apart by ${apart.toExponential(0).replace("-", "−")}: the rounding of float32.`
          : "The same to the last bit."),
  ];
}

/**
 * @param {Numbers} n
 * @param {Parts} parts
 * @param {number} layer @param {number} head @param {number} heads
 * @param {AbortSignal} signal
 * @param {Token} key
 */
function stepsOf(n, parts, layer, head, heads, signal, key) {
  const { i, j, T, K, dk, dv, scale, q, k, v, products, scores, masked, weights } = n;
  const at = i * K + j;
  const row = masked.subarray(i * K, (i + 1) * K);
  const rowOf = weights.subarray(i * K, (i + 1) * K);
  /** @param {Child | Child[]} name @param {Float32Array} values @param {number} down @param {number} across @param {Lit} [lit] */
  const picture = (name, values, down, across, lit = {}) => matrix(name, values, down, across, lit, signal);
  const cell = { row: i, column: j };
  const scaled = Math.abs(scale * Math.sqrt(dk) - 1) < 1e-6;
  const QK = () => [v_("Q"), v_("K"), h("sup", {}, "T")];
  const root = () => (scaled ? [" / √", v_("d", "k")] : []);
  const z = n.head.subarray(i * dv, (i + 1) * dv);
  const exps = Array.from(row, (score) => Math.exp(score));
  const whole = exps.reduce((sum, one) => sum + one, 0);
  const many = masked.some((score) => score === -Infinity);

  const steps = [
    step("Compare: how well does the query fit the key?",
      [line(v_("q", "i"), " · ", v_("k", "j"), " = Σ", h("sub", {}, "c"), " ", v_("q", "ic"), v_("k", "jc"),
        shape(`(${dk}) · (${dk}) → one number`)),
      sum(Array.from({ length: dk }, (_, c) => [q[i * dk + c], k[j * dk + c]]), products[at])],
      [picture(v_("Q"), q, T, dk, { row: i }), "·", picture([v_("K"), h("sup", {}, "T")], turned(k, K, dk), dk, K,
        { column: j }), "=", picture(QK(), products, T, K, cell)]),
    step("Scale, so that large widths do not saturate the softmax",
      [line(v_("s", "ij"), " = ", v_("q", "i"), " · ", v_("k", "j"), ...(scaled ? root() : [" × ", String(scale)]),
        shape(scaled ? `√${dk} = ${Math.sqrt(dk).toFixed(4)}` : "this model does not scale by the root of its width")),
      line(decimal(products[at]), scaled ? ` / ${Math.sqrt(dk).toFixed(4)}` : ` × ${scale}`, " = ",
        h("strong", {}, decimal(scores[at])))],
      [picture(QK(), products, T, K, cell), scaled ? `/ √${dk} =` : `× ${scale} =`,
        picture([...QK(), ...root()], scores, T, K, cell)]),
    step("Mask: what may not be seen is minus infinity",
      [line(masked[at] === -Infinity
        ? ["The key may not be seen from here: ", v_("s", "ij"), " = −∞, and the weight will be 0."]
        : [many ? "The key may be seen from here: " : "Nothing is hidden in this place: ", v_("s", "ij"), " stays ",
          h("strong", {}, decimal(scores[at])), "."])],
      [picture("mask", masked, T, K, cell), h("span", { class: "quiet" },
        many ? "empty cells are −∞" : "no cell is −∞")]),
    step("Softmax: positive, and together 1",
      [line(v_("a", "ij"), " = exp(", v_("s", "ij"), ") / Σ", h("sub", {}, "j′"), " exp(", v_("s", "ij′"), ")",
        shape(`over ${K} keys`)),
      line(`exp(${decimal(row[j])}) = ${short(exps[j])};  Σ = `, terms(exps.map(short)), ` = ${short(whole)}`),
      line(`${short(exps[j])} / ${short(whole)} = `, h("strong", {}, weights[at].toFixed(4)))],
      ["softmax", picture("by rows", masked, T, K, cell), "=", picture(v_("A"), weights, T, K, cell)]),
    step("Take as much of the value",
      [line(v_("z", "i"), " = Σ", h("sub", {}, "j"), " ", v_("a", "ij"), v_("v", "j"), shape(`(${K}) · (${K}, ${dv}) → (${dv})`)),
        line("of ", label(key), ": ", `${weights[at].toFixed(4)} × `, vector(v.subarray(j * dv, (j + 1) * dv)), " = ",
          vector(v.subarray(j * dv, (j + 1) * dv).map((one) => one * weights[at]))),
        line("its first number, of all keys: "),
        sum(Array.from(rowOf, (weight, key_) => [weight, v[key_ * dv]]), z[0])],
      [picture(v_("A"), weights, T, K, { row: i }), "·", picture(v_("V"), v, K, dv, { row: j }), "=",
        picture(["head", h("sub", {}, head + 1)], n.head, T, dv, { row: i })]),
  ];
  if (parts.output.missing) {
    steps.push(step(["Through W", h("sup", {}, "O")], [line("The matrices W", h("sup", {}, "O"), " of so large a model are not in this file; ",
      h("code", {}, "regard serve RUN"), " shows them.")], []));
    return steps;
  }
  const W = parts.output.head(layer, head);
  const d = parts.output.keys;
  const added = product(n.head, W, T, dv, d);
  const WO = () => [v_("W"), h("sup", {}, "O"), h("sub", {}, head + 1)];
  steps.push(step(["Through W", h("sup", {}, "O"), ", and add what the other heads say"],
    [line(v_("z", "i"), " ", ...WO(), shape(`(${dv}) · (${dv}, ${d}) → (${d})`)),
      line("its first number: "),
      sum(Array.from(z, (one, c) => [one, W[c * d]]), added[i * d]),
      line("the whole: ", vector(added.subarray(i * d, (i + 1) * d))),
      line(h("span", { class: "quiet" }, `Concat(head₁ … head${sub(heads)}) W`, h("sup", {}, "O"),
        ` is the sum of ${heads} such vectors: each head has its own ${dv} rows of W`, h("sup", {}, "O"), "."))],
    [picture(["head", h("sub", {}, head + 1)], n.head, T, dv, { row: i }), "·",
      picture(WO(), W, dv, d), "=", picture("added", added, T, d, { row: i })]));
  return steps;
}

/** @param {Child | Child[]} title @param {Child[]} left @param {Child[]} right */
function step(title, left, right) {
  return h("li", { class: "card step-card" }, h("h3", {}, title), h("div", { class: "forms" },
    h("div", { class: "form" }, left),
    h("div", { class: "matrices", "aria-hidden": "true" }, right.map((one) => (one instanceof Node ? one : h("span", {}, one))))));
}

/** @param {string} name @param {string} [index] */
function v_(name, index) {
  return h("var", {}, name, index && h("sub", {}, index));
}

/** @param {...(Child | Child[])} children */
function line(...children) {
  return h("p", { class: "formula" }, ...children);
}

/** @param {string} text */
function shape(text) {
  return h("span", { class: "shape" }, text);
}

/**
 * A sum of products: its first terms, its last, and what it comes to.
 *
 * @param {[number, number][]} pairs
 * @param {number} whole
 */
function sum(pairs, whole) {
  return line(terms(pairs.map(([a, b]) => `${decimal(a)} × ${decimal(b)}`)), " = ", h("strong", {}, decimal(whole)));
}

/** @param {string[]} all */
function terms(all) {
  const bracket = all.map((term) => (term.startsWith("−") ? `(${term})` : term));
  if (all.length <= TERMS + 2) return bracket.join(" + ");
  return `${bracket.slice(0, TERMS).join(" + ")} + … ${all.length - TERMS - 1} more … + ${bracket[all.length - 1]}`;
}

/** @param {Float32Array} values */
function vector(values) {
  const few = Array.from(values.subarray(0, TERMS), decimal);
  return `(${few.join(", ")}${values.length > TERMS ? ", …" : ""})`;
}

/** @param {number} value */
function decimal(value) {
  return value === -Infinity ? "−∞" : value.toFixed(4).replace(/^-(?!0\.0000$)/, "−").replace(/^-/, "");
}

/** @param {number} value of any size */
function short(value) {
  return value !== 0 && (value >= 1e5 || value < 1e-3) ? value.toExponential(3).replace("-", "−") : value.toFixed(4);
}

/** @param {number} count */
function sub(count) {
  return String(count).replace(/\d/g, (digit) => "₀₁₂₃₄₅₆₇₈₉"[Number(digit)]);
}

/** @param {number} count @returns {[string, string][]} */
function counted(count) {
  return Array.from({ length: count }, (_, i) => [String(i), String(i + 1)]);
}

/** @param {Float32Array} values @param {number} rows @param {number} columns */
function turned(values, rows, columns) {
  return Float32Array.from(values, (_, at) => values[(at % rows) * columns + Math.floor(at / rows)]);
}

/** @param {Float32Array} a @param {Float32Array} b @param {number} rows @param {number} inner @param {number} columns */
function product(a, b, rows, inner, columns) {
  const result = new Float32Array(rows * columns);
  for (let row = 0; row < rows; row++) {
    for (let c = 0; c < inner; c++) {
      const factor = a[row * inner + c];
      for (let column = 0; column < columns; column++) result[row * columns + column] += factor * b[c * columns + column];
    }
  }
  return result;
}

/**
 * A matrix as a small picture with its name and shape; a row, a column or a cell of it may be marked.
 *
 * @typedef {{ row?: number, column?: number }} Lit
 * @param {Child | Child[]} name
 * @param {Float32Array} values
 * @param {number} down
 * @param {number} across
 * @param {Lit} lit
 * @param {AbortSignal} signal
 */
function matrix(name, values, down, across, lit, signal) {
  const canvas = h("canvas", {});
  const greatest = values.reduce((most, one) => (one === -Infinity ? most : Math.max(most, Math.abs(one))), 0);
  const draw = () => paintSigned(canvas, values, across, Array.from(Array(down).keys()), Array.from(Array(across).keys()), greatest);
  draw();
  onTheme(draw, signal);
  const cell = Math.min(PICTURE.cell, PICTURE.width / across, PICTURE.height / down);
  const picture = h("div", { class: "matrix" }, canvas);
  picture.style.width = `${Math.max(cell * across, 8)}px`;
  picture.style.height = `${Math.max(cell * down, 8)}px`;
  if (lit.row !== undefined || lit.column !== undefined) {
    const mark = h("div", { class: "marked" });
    /** @param {number | undefined} place @param {number} count */
    const span = (place, count) => (place === undefined ? [0, 100] : [(place / count) * 100, 100 / count]);
    const [[top, height], [left, width]] = [span(lit.row, down), span(lit.column, across)];
    Object.assign(mark.style, { top: `${top}%`, height: `${height}%`, left: `${left}%`, width: `${width}%` });
    picture.append(mark);
  }
  return h("figure", {}, picture, h("figcaption", {}, h("span", {}, name), h("span", { class: "quiet" }, `${down} × ${across}`)));
}
