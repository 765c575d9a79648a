/**
 * A line chart that fills the available width. The pointer or the arrow keys read values off it.
 *
 * @typedef {{ name: string, points: [x: number, y: number][], kind?: "solid" | "dots" | "dashed", rank?: 1 | 2 }} Line
 * @typedef {{ x: string, lines: Line[], band?: [x: number, low: number, high: number][], height?: number,
 *   write?: (value: number) => string, empty?: string }} Chart
 *   x: name of the x axis, which begins at 0 if it counts steps; band: a shaded range; empty: text if there are no points. The y axis always includes 0.
 * @typedef {{ width: number, height: number, xs: number[], yTicks: number[], toX(x: number): number,
 *   toY(y: number): number }} Scales
 */

import { clampIndex, h, svg } from "./dom.js";
import { compact, ticks } from "./format.js";

const MARGIN = { left: 52, right: 20, top: 12, bottom: 38 };
const DEFAULT_HEIGHT = 220;
const NARROW = 420;

/**
 * @param {string} name accessible name
 * @param {Chart} content
 * @param {AbortSignal} signal
 */
export function chart(name, content, signal) {
  let current = content;
  /** @type {number | null} the x value that is read off */
  let cursor = null;
  const drawing = svg("svg", { role: "img", "aria-label": name });
  const readout = h("p", { class: "readout", "aria-live": "polite" });
  const plot = h("div", { class: "plot", tabindex: 0, role: "application", "aria-label": `${name}: arrow keys read values` },
    drawing);
  const element = h("figure", { class: "chart" }, plot, h("figcaption", {}, legend(current.lines), readout));

  const draw = () => {
    const width = plot.clientWidth;
    if (!width) return;
    const height = current.height ?? DEFAULT_HEIGHT;
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("height", String(height));
    drawing.replaceChildren(...drawChart(current, width, height, cursor));
  };
  const update = () => {
    readout.textContent = cursor === null ? " " : readValues(current, cursor);
    draw();
  };
  /** @param {number | null} x */
  const moveCursor = (x) => { cursor = x; update(); };
  plot.addEventListener("pointermove", (event) => {
    const xs = xValues(current);
    if (!xs.length) return;
    const box = plot.getBoundingClientRect();
    const fraction = (event.clientX - box.left - MARGIN.left) / (box.width - MARGIN.left - MARGIN.right);
    const first = startOf(current.x, xs);
    const x = first + fraction * (xs[xs.length - 1] - first);
    moveCursor(xs.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best)));
  });
  plot.addEventListener("pointerleave", () => moveCursor(null));
  plot.addEventListener("blur", () => moveCursor(null));
  plot.addEventListener("keydown", (event) => {
    const xs = xValues(current);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !xs.length) return;
    event.preventDefault();
    const index = cursor === null ? (step > 0 ? -1 : xs.length) : xs.indexOf(cursor);
    moveCursor(xs[clampIndex(index + step, xs.length)]);
  });
  const size = new ResizeObserver(draw);
  size.observe(plot);
  signal.addEventListener("abort", () => size.disconnect());
  update();
  return {
    element,
    /** @param {Chart} next */
    show: (next) => { current = next; update(); },
  };
}

/** @param {Chart} chart */
function xValues({ lines }) {
  return [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
}

/**
 * Where the x axis begins. Charts of steps all begin at 0, so that they can be compared.
 *
 * @param {string} axis
 * @param {number[]} xs
 */
function startOf(axis, xs) {
  return axis === "step" ? Math.min(0, xs[0]) : xs[0];
}

/** @param {Chart} chart @param {number} x */
function readValues({ x: axis, lines, write = compact }, x) {
  const values = lines.flatMap((line) => {
    const point = line.points.find(([one]) => one === x);
    return point ? [`${line.name} ${write(point[1])}`] : [];
  });
  return `${axis} ${compact(x)}: ${values.join(", ")}`;
}

/** @param {Chart} content @param {number} width @param {number} height @param {number | null} cursor */
function drawChart(content, width, height, cursor) {
  const xs = xValues(content);
  if (!xs.length) {
    return [svg("text", { x: width / 2, y: height / 2, class: "none" }, content.empty ?? "No values yet.")];
  }
  const scales = makeScales(content, xs, width, height);
  const parts = [...drawAxes(content.x, scales), ...drawBand(content.band ?? [], scales),
    ...content.lines.flatMap((line) => drawLine(line, scales))];
  if (cursor !== null) {
    const x = scales.toX(cursor);
    parts.push(svg("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: height - MARGIN.bottom }));
  }
  return parts;
}

/**
 * @param {Chart} content @param {number[]} xs @param {number} width @param {number} height
 * @returns {Scales}
 */
function makeScales({ x, lines, band = [] }, xs, width, height) {
  const ys = [...lines.flatMap((line) => line.points.map(([, y]) => y)), ...band.flatMap(([, low, high]) => [low, high])];
  const first = startOf(x, xs);
  const last = xs[xs.length - 1] === first ? first + 1 : xs[xs.length - 1];
  const yTicks = ticks(Math.min(...ys, 0), Math.max(...ys, 0), 4);
  const [bottom, top] = [yTicks[0], yTicks[yTicks.length - 1]];
  return {
    width, height, xs: [first, last], yTicks,
    toX: (x) => MARGIN.left + ((x - first) / (last - first)) * (width - MARGIN.left - MARGIN.right),
    toY: (y) => height - MARGIN.bottom - ((y - bottom) / (top - bottom)) * (height - MARGIN.top - MARGIN.bottom),
  };
}

/** @param {string} name of the x axis @param {Scales} scales */
function drawAxes(name, { width, height, xs: [first, last], yTicks, toX, toY }) {
  const right = width - MARGIN.right;
  const parts = yTicks.flatMap((y) => [
    svg("line", { class: y === 0 ? "axis-line" : "rule", x1: MARGIN.left, x2: right, y1: toY(y), y2: toY(y) }),
    svg("text", { class: "tick y", x: MARGIN.left - 8, y: toY(y) }, compact(y)),
  ]);
  for (const x of ticks(first, last, width < NARROW ? 3 : 6)) {
    if (x < first || x > last) continue;
    parts.push(svg("text", { class: "tick x", x: toX(x), y: height - MARGIN.bottom + 17 }, compact(x)));
  }
  return [...parts, svg("text", { class: "tick x unit", x: right, y: height - 6 }, name)];
}

/** @param {[x: number, low: number, high: number][]} band @param {Scales} scales */
function drawBand(band, { toX, toY }) {
  if (!band.length) return [];
  const upper = band.map(([x, , high]) => `${toX(x)},${toY(high)}`);
  const lower = [...band].reverse().map(([x, low]) => `${toX(x)},${toY(low)}`);
  return [svg("polygon", { class: "band", points: [...upper, ...lower].join(" ") })];
}

/** @param {Line} line @param {Scales} scales */
function drawLine({ points, kind = "solid", rank = 1 }, { toX, toY }) {
  const places = points.map(([x, y]) => [toX(x), toY(y)]);
  if (kind === "dots" || places.length === 1) {
    return places.map(([x, y]) => svg("circle", { class: `dot rank${rank}`, cx: x, cy: y, r: 3.5 }));
  }
  return [svg("polyline", { class: `curve ${kind} rank${rank}`, points: places.map((place) => place.join(",")).join(" ") })];
}

/** @param {Line[]} lines */
function legend(lines) {
  return h("ul", { class: "lines-key" }, lines.map((line) =>
    h("li", {}, h("span", { class: `stroke ${line.kind ?? "solid"} rank${line.rank ?? 1}` }), line.name)));
}
