/**
 * How one attention weight is computed, from query and key to the output of the head: step by step, and as matrices.
 *
 * Everything is computed here from the model's queries, keys, values and W^O, and compared with the weight that the
 * model computed itself.
 *
 * @typedef {import("../render.js").Context} Context
 * @typedef {import("../render.js").View} View
 * @typedef {import("../attention.js").AttentionSteps} AttentionSteps
 * @typedef {import("../dom.js").Child} Child
 * @typedef {import("../trace.js").Projections} Projections
 * @typedef {import("../trace.js").Token} Token
 * @typedef {import("../trace.js").Trace} Trace
 * @typedef {{ row?: number, column?: number }} Cell
 * @typedef {(name: Child | Child[], values: Float32Array, rows: number, columns: number, cell?: Cell) => HTMLElement
 *   } DrawMatrix
 */

import { computeAttention, matmul, transpose } from "../attention.js";
import { divergingBar, paintDiverging, weightLegend } from "../canvas.js";
import { foldingCard, h, numberedOptions, range, segmentedControl, selectField, tableToggle, tokenLabel } from "../dom.js";
import { compact, decimal, scientific, subscript } from "../format.js";
import { heatmap } from "../heatmap.js";
import { onThemeChange } from "../theme.js";
import { whenLoaded } from "../trace.js";
import { cornerLabels, queryLabel, selectedHead, sitesOf } from "./heads.js";

/** terms written out at the beginning of a sum */
const TERMS = 3;
/** size of a matrix and the largest size of its cells, in pixels */
const MATRIX = { width: 132, height: 104, cell: 7 };
/** difference from the model's weight that float32 rounding can explain */
const TOLERANCE = 1e-4;

/** @type {View} */
export const attentionWeightView = {
  id: "weight",
  title: "One weight",
  help: "How one attention weight is computed. Select a cell of the map. On the left is each step for this query and this "
    + "key; on the right is the same step for all of them at once, as in the paper. All values are the model's own.",
  build,
};

/** @param {Context} context */
function build({ trace, state, signal }) {
  const sites = sitesOf(trace).filter((site) => trace.projections[site.id]);
  if (!sites.length) {
    return h("p", { class: "card" }, "This model has no attention that is computed from products of queries and keys.");
  }
  const selection = () => {
    const { site, weights, layer, head } = selectedHead(trace, state, sites);
    const projections = /** @type {Projections} */ (trace.projections[site.id]);
    const key = state.get("key") === "" ? null : state.index("key", weights.keys);
    return { site, weights, projections, layer, head, query: state.index("query", weights.queries), key };
  };
  const siteControl = segmentedControl("Site", sites.map((site) => [site.id, site.title]), "", (site) => state.set({ site }));
  const controls = h("div", { class: "controls" });
  const map = heatmap("Weights of this head", signal, {
    onSelect: (query, key) => state.set({ query: String(query), key: String(key) }),
  });
  const result = h("div", { class: "result", "aria-live": "polite" });
  const steps = h("ol", { class: "steps" });
  /** @type {AttentionSteps | null} */
  let shown = null;
  const table = tableToggle("All keys of this query", () =>
    (shown ? keyTable(trace.columns[selection().site.id], shown) : { head: [], rows: [] }));

  const showLoaded = () => {
    const { site, weights, projections, layer, head, query, key } = selection();
    const model = weights.head(layer, head);
    const row = model.subarray(query * weights.keys, (query + 1) * weights.keys);
    const selectedKey = key ?? row.indexOf(Math.max(...row)); // by default the key with the largest weight
    const computed = computeAttention(model, projections, layer, head, query, selectedKey);
    shown = computed;
    const keys = trace.columns[site.id];
    map.show({
      values: model, rows: range(computed.T).map((one) => queryLabel(trace, site, one)),
      columns: keys.map(tokenLabel), corner: cornerLabels(site), selected: [query, selectedKey],
    });
    result.replaceChildren(...compareWithModel(computed, queryLabel(trace, site, query), keys[selectedKey]));
    steps.replaceChildren(...attentionSteps(computed, projections, layer, head, weights.heads, signal, keys[selectedKey]));
    table.update();
  };
  const update = () => {
    if (state.get("view") !== "weight") return;
    const current = selection();
    const { site, weights, projections, layer, head } = current;
    siteControl.show(site.id);
    showControls(controls, siteControl, weights.layers, weights.heads, layer, head, state);
    if (projections.query.missing) {
      steps.replaceChildren();
      result.replaceChildren(h("p", { class: "quiet" }, "The queries and keys are too large for this file. "),
        h("code", {}, "regard serve RUN"), " shows them.");
      return;
    }
    const arrays = [weights, projections.query, projections.key, projections.value,
      ...(projections.output.missing ? [] : [projections.output])];
    whenLoaded(arrays.map((array) => [array, layer]), (error) => {
      const now = selection();
      const names = /** @type {const} */ (["site", "layer", "head", "query", "key"]);
      if (names.some((name) => now[name] !== current[name])) return;
      if (error) return result.replaceChildren(h("p", { class: "status wrong" }, error));
      showLoaded();
    });
  };
  state.subscribe(update);
  requestAnimationFrame(update); // the map has a width only once it is in the page
  return h("div", { class: "weight-view" },
    h("div", { class: "card" }, controls, h("div", { class: "beside" }, map.element, h("div", { class: "reading" }, weightLegend("attention weight", signal), result))),
    h("p", { class: "legend matrix-legend" }, "−", divergingBar(signal), "+",
      h("span", {}, "In the small matrices, blue is positive and amber negative. Each has its own scale, written below it.")),
    steps, table.element);
}

/**
 * @param {HTMLElement} controls @param {HTMLElement} siteControl @param {number} layers @param {number} heads
 * @param {number} layer @param {number} head @param {Context["state"]} state
 */
function showControls(controls, siteControl, layers, heads, layer, head, state) {
  const fields = [
    selectField("Layer", numberedOptions(layers), (value) => state.set({ layer: value })),
    selectField("Head", numberedOptions(heads), (value) => state.set({ head: value })),
  ];
  [layer, head].forEach((value, i) => { fields[i].box.value = String(value); });
  const focused = Array.from(controls.querySelectorAll("select")).findIndex((one) => one === document.activeElement);
  controls.replaceChildren(siteControl, ...fields.map((one) => one.field));
  if (focused >= 0) fields[focused].box.focus();
}

/** @param {Token[]} keys @param {AttentionSteps} steps */
function keyTable(keys, { i, K, products, scores, masked, weights, model }) {
  return {
    head: ["key", "q·k", "scaled", "masked", "softmax, computed here", "weight of the model"],
    rows: keys.map((token, j) => [tokenLabel(token),
      ...[products, scores, masked].map((one) => decimal(one[i * K + j])),
      weights[i * K + j].toFixed(6), model[i * K + j].toFixed(6)]),
  };
}

/** @param {AttentionSteps} steps @param {Node} query @param {Token} key @returns {Node[]} */
function compareWithModel({ i, j, K, weights, model }, query, key) {
  const [computed, actual] = [weights[i * K + j], model[i * K + j]];
  const difference = Math.abs(computed - actual);
  const agree = difference < TOLERANCE;
  return [
    h("p", { class: "value" }, query, h("span", { class: "quiet" }, " attends to "), tokenLabel(key),
      h("strong", {}, actual.toFixed(4))),
    h("p", { class: agree ? "quiet comparison" : "comparison status wrong" },
      agree ? "Computed here from q and k: " : "Computed here with the paper's formula: ", computed.toFixed(6),
      ". Computed by the model: ", actual.toFixed(6), ". ",
      !agree ? "They differ: the weights of this model are not the softmax of these scores alone."
        : difference ? `The difference of ${difference.toExponential(0).replace("-", "−")} is float32 rounding.`
          : "They are identical to the last bit."),
  ];
}

// -------------------------------------------------------------------------------------------------
// The steps

/**
 * @param {AttentionSteps} steps @param {Projections} projections
 * @param {number} layer @param {number} head @param {number} heads
 * @param {AbortSignal} signal
 * @param {Token} key
 */
function attentionSteps(steps, projections, layer, head, heads, signal, key) {
  /** @type {DrawMatrix} */
  const draw = (name, values, rows, columns, cell = {}) => matrix(name, values, rows, columns, cell, signal);
  return [
    dotProductStep(steps, draw),
    scaleStep(steps, draw),
    maskStep(steps, draw),
    softmaxStep(steps, draw),
    valueStep(steps, draw, head, key),
    outputStep(steps, draw, projections.output, layer, head, heads),
  ];
}

/** @param {AttentionSteps} steps @param {DrawMatrix} draw */
function dotProductStep({ i, j, T, K, dk, q, k, products }, draw) {
  return step("Dot product of query and key",
    [line(variable("q", "i"), " · ", variable("k", "j"), " = Σ", h("sub", {}, "c"), " ", variable("q", "ic"),
      variable("k", "jc"), shape(`(${dk}) · (${dk}) → scalar`)),
    sumOfProducts(range(dk).map((c) => [q[i * dk + c], k[j * dk + c]]), products[i * K + j])],
    [draw(variable("Q"), q, T, dk, { row: i }), "·",
      draw([variable("K"), h("sup", {}, "T")], transpose(k, K, dk), dk, K, { column: j }), "=",
      draw(queryKey(), products, T, K, { row: i, column: j })]);
}

/** @param {AttentionSteps} steps @param {DrawMatrix} draw */
function scaleStep({ i, j, T, K, dk, scale, products, scores }, draw) {
  const usesRoot = Math.abs(scale * Math.sqrt(dk) - 1) < 1e-6;
  const root = Math.sqrt(dk).toFixed(4);
  const divisor = () => (usesRoot ? [" / √", variable("d", "k")] : []);
  const cell = { row: i, column: j };
  return step("Scale, so that large dimensions do not saturate the softmax",
    [line(variable("s", "ij"), " = ", variable("q", "i"), " · ", variable("k", "j"),
      ...(usesRoot ? divisor() : [" × ", String(scale)]),
      shape(usesRoot ? `√${dk} = ${root}` : "this model does not scale by the square root of d_k")),
    line(decimal(products[i * K + j]), usesRoot ? ` / ${root}` : ` × ${scale}`, " = ",
      h("strong", {}, decimal(scores[i * K + j])))],
    [draw(queryKey(), products, T, K, cell), usesRoot ? `/ √${dk} =` : `× ${scale} =`,
      draw([...queryKey(), ...divisor()], scores, T, K, cell)]);
}

/** @param {AttentionSteps} steps @param {DrawMatrix} draw */
function maskStep({ i, j, T, K, scores, masked }, draw) {
  const score = masked[i * K + j];
  const anyMasked = masked.some((one) => one === -Infinity);
  return step("Mask: scores of hidden keys become minus infinity",
    [line(score === -Infinity
      ? ["This key is masked: ", variable("s", "ij"), " = −∞, so its weight will be 0."]
      : [anyMasked ? "This key is not masked: " : "No key is masked here: ", variable("s", "ij"), " stays ",
        h("strong", {}, decimal(scores[i * K + j])), "."])],
    [draw("masked", masked, T, K, { row: i, column: j }),
      h("span", { class: "quiet" }, anyMasked ? "empty cells are −∞" : "no cell is −∞")]);
}

/** @param {AttentionSteps} steps @param {DrawMatrix} draw */
function softmaxStep({ i, j, T, K, masked, weights }, draw) {
  const row = masked.subarray(i * K, (i + 1) * K);
  const exponentials = Array.from(row, (score) => Math.exp(score));
  const total = exponentials.reduce((sum, one) => sum + one, 0);
  const cell = { row: i, column: j };
  return step("Softmax: weights are positive and sum to 1",
    [line(variable("a", "ij"), " = exp(", variable("s", "ij"), ") / Σ", h("sub", {}, "j′"), " exp(",
      variable("s", "ij′"), ")", shape(`over ${K} keys`)),
    line(`exp(${decimal(row[j])}) = ${scientific(exponentials[j])};  Σ = `, terms(exponentials.map(scientific)),
      ` = ${scientific(total)}`),
    line(`${scientific(exponentials[j])} / ${scientific(total)} = `, h("strong", {}, weights[i * K + j].toFixed(4)))],
    ["softmax", draw("by rows", masked, T, K, cell), "=", draw(variable("A"), weights, T, K, cell)]);
}

/** @param {AttentionSteps} steps @param {DrawMatrix} draw @param {number} head @param {Token} key */
function valueStep({ i, j, T, K, dv, v, weights, head: outputs }, draw, head, key) {
  const weight = weights[i * K + j];
  const value = v.subarray(j * dv, (j + 1) * dv);
  return step("Weighted sum of the values",
    [line(variable("z", "i"), " = Σ", h("sub", {}, "j"), " ", variable("a", "ij"), variable("v", "j"),
      shape(`(${K}) · (${K}, ${dv}) → (${dv})`)),
    line("contribution of ", tokenLabel(key), `: ${weight.toFixed(4)} × `, vector(value), " = ",
      vector(value.map((one) => one * weight))),
    line("first component, over all keys: "),
    sumOfProducts(range(K).map((one) => [weights[i * K + one], v[one * dv]]), outputs[i * dv])],
    [draw(variable("A"), weights, T, K, { row: i }), "·", draw(variable("V"), v, K, dv, { row: j }), "=",
      draw(["head", h("sub", {}, head + 1)], outputs, T, dv, { row: i })]);
}

/**
 * @param {AttentionSteps} steps @param {DrawMatrix} draw @param {import("../trace.js").LayerArray} output
 * @param {number} layer @param {number} head @param {number} heads
 */
function outputStep({ i, T, dv, head: outputs }, draw, output, layer, head, heads) {
  const superscript = () => h("sup", {}, "O");
  if (output.missing) {
    return step(["Output projection W", superscript()],
      [line("The W", superscript(), " matrices are too large for this file; ", h("code", {}, "regard serve RUN"),
        " shows them.")], []);
  }
  const W = output.head(layer, head);
  const d = output.keys;
  const added = matmul(outputs, W, T, dv, d);
  const z = outputs.subarray(i * dv, (i + 1) * dv);
  const name = () => [variable("W"), superscript(), h("sub", {}, head + 1)];
  return step(["Output projection W", superscript(), ", added to the other heads"],
    [line(variable("z", "i"), " ", ...name(), shape(`(${dv}) · (${dv}, ${d}) → (${d})`)),
      line("first component: "),
      sumOfProducts(Array.from(z, (one, c) => [one, W[c * d]]), added[i * d]),
      line("whole vector: ", vector(added.subarray(i * d, (i + 1) * d))),
      line(h("span", { class: "quiet" }, `Concat(head₁ … head${subscript(heads)}) W`, superscript(),
        ` is the sum of ${heads} such vectors: each head has its own ${dv} rows of W`, superscript(), "."))],
    [draw(["head", h("sub", {}, head + 1)], outputs, T, dv, { row: i }), "·",
      draw(name(), W, dv, d), "=", draw("added", added, T, d, { row: i })]);
}

// -------------------------------------------------------------------------------------------------
// Formulas and matrices

/** @param {Child | Child[]} title @param {Child[]} formulas @param {Child[]} matrices */
function step(title, formulas, matrices) {
  return h("li", {}, foldingCard(title, { class: "step-card" }, h("div", { class: "forms" },
    h("div", { class: "form" }, formulas),
    h("div", { class: "matrices" }, matrices.map((one) => (one instanceof Node ? one : h("span", {}, one)))))));
}

function queryKey() {
  return [variable("Q"), variable("K"), h("sup", {}, "T")];
}

/** @param {string} name @param {string} [index] */
function variable(name, index) {
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
 * A sum of products: its first terms, its last one, and the result.
 *
 * @param {[number, number][]} pairs
 * @param {number} total
 */
function sumOfProducts(pairs, total) {
  return line(terms(pairs.map(([a, b]) => `${decimal(a)} × ${decimal(b)}`)), " = ", h("strong", {}, decimal(total)));
}

/** @param {string[]} all */
function terms(all) {
  const bracketed = all.map((term) => (term.startsWith("−") ? `(${term})` : term));
  if (all.length <= TERMS + 2) return bracketed.join(" + ");
  return `${bracketed.slice(0, TERMS).join(" + ")} + … ${all.length - TERMS - 1} more … + ${bracketed[all.length - 1]}`;
}

/** @param {Float32Array} values */
function vector(values) {
  const first = Array.from(values.subarray(0, TERMS), decimal);
  return `(${first.join(", ")}${values.length > TERMS ? ", …" : ""})`;
}

/**
 * A matrix as a small picture with its name and shape; a row, a column or a cell of it can be marked.
 *
 * @param {Child | Child[]} name
 * @param {Float32Array} values
 * @param {number} rows
 * @param {number} columns
 * @param {Cell} cell
 * @param {AbortSignal} signal
 */
function matrix(name, values, rows, columns, cell, signal) {
  const canvas = h("canvas", { "aria-hidden": "true" });
  const max = values.reduce((most, one) => (one === -Infinity ? most : Math.max(most, Math.abs(one))), 0);
  const draw = () => paintDiverging(canvas, values, columns, range(rows), range(columns), max);
  draw();
  onThemeChange(draw, signal);
  const size = Math.min(MATRIX.cell, MATRIX.width / columns, MATRIX.height / rows);
  const picture = h("div", { class: "matrix" }, canvas);
  picture.style.width = `${Math.max(size * columns, 8)}px`;
  picture.style.height = `${Math.max(size * rows, 8)}px`;
  if (cell.row !== undefined || cell.column !== undefined) {
    const mark = h("div", { class: "marked" });
    const [[top, height], [left, width]] = [percentRange(cell.row, rows), percentRange(cell.column, columns)];
    Object.assign(mark.style, { top: `${top}%`, height: `${height}%`, left: `${left}%`, width: `${width}%` });
    picture.append(mark);
  }
  return h("figure", {}, picture,
    h("figcaption", {}, h("span", {}, name), h("span", { class: "quiet" }, `${rows} × ${columns}`),
      h("span", { class: "quiet" }, `up to ±${compact(max)}`)));
}

/**
 * Start and size, in percent, of one of `count` equal parts; of all of them without an index.
 *
 * @param {number | undefined} index
 * @param {number} count
 */
function percentRange(index, count) {
  return index === undefined ? [0, 100] : [(index / count) * 100, 100 / count];
}
