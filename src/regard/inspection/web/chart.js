/**
 * Lines over one axis, drawn for the width there is. The pointer, or the arrow keys, read values off.
 *
 * @typedef {{ name: string, points: [x: number, y: number][], kind?: "solid" | "dots" | "dashed", rank?: 1 | 2 }} Line
 * @typedef {{ x: string, lines: Line[], band?: [x: number, low: number, high: number][], height?: number,
 *   zero?: boolean, write?: (value: number) => string, empty?: string }} Chart
 */

import { h, svg } from "./dom.js";

const LEFT = 52;
const RIGHT = 20;
const TOP = 12;
const BOTTOM = 38;

/**
 * @param {string} name read out for those who do not see it
 * @param {Chart} content
 * @param {AbortSignal} signal
 */
export function chart(name, content, signal) {
  let now = content;
  /**
   * the place of the values that are told, along x
   *
   * @type {number | null}
   */
  let at = null;
  const drawing = svg("svg", { role: "img", "aria-label": name });
  const told = h("p", { class: "told", "aria-live": "polite" });
  const field = h("div", { class: "plot", tabindex: 0, role: "application", "aria-label": `${name}: arrow keys read values` },
    drawing);
  const element = h("figure", { class: "chart" }, field, h("figcaption", {}, legend(now.lines), told));

  const xs = () => [...new Set(now.lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const draw = () => {
    const width = field.clientWidth;
    if (!width) return;
    const height = now.height ?? 220;
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("height", String(height));
    const all = xs();
    if (!all.length) {
      drawing.replaceChildren(svg("text", { x: width / 2, y: height / 2, class: "none" }, now.empty ?? "Nothing yet."));
      return;
    }
    const ys = [...now.lines.flatMap((line) => line.points.map(([, y]) => y)), ...(now.band ?? []).flatMap(([, a, b]) => [a, b])];
    const [x0, x1] = [all[0], all[all.length - 1] === all[0] ? all[0] + 1 : all[all.length - 1]];
    const steps = ticks(Math.min(...ys, now.zero === false ? Infinity : 0), Math.max(...ys), 4);
    const [y0, y1] = [steps[0], steps[steps.length - 1]];
    /** @param {number} x */
    const right = (x) => LEFT + ((x - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
    /** @param {number} y */
    const down = (y) => height - BOTTOM - ((y - y0) / (y1 - y0)) * (height - TOP - BOTTOM);
    const parts = steps.flatMap((y) => [
      svg("line", { class: y === 0 ? "axis-line" : "rule", x1: LEFT, x2: width - RIGHT, y1: down(y), y2: down(y) }),
      svg("text", { class: "tick y", x: LEFT - 8, y: down(y) }, short(y)),
    ]);
    for (const x of ticks(x0, x1, width < 420 ? 3 : 6)) {
      if (x >= x0 && x <= x1) parts.push(svg("text", { class: "tick x", x: right(x), y: height - BOTTOM + 17 }, short(x)));
    }
    parts.push(svg("text", { class: "tick x unit", x: width - RIGHT, y: height - 6 }, now.x));
    if (now.band?.length) {
      const there = now.band.map(([x, , high]) => `${right(x)},${down(high)}`);
      const back = [...now.band].reverse().map(([x, low]) => `${right(x)},${down(low)}`);
      parts.push(svg("polygon", { class: "band", points: [...there, ...back].join(" ") }));
    }
    for (const line of now.lines) {
      const places = line.points.map(([x, y]) => [right(x), down(y)]);
      if (line.kind === "dots") {
        parts.push(...places.map(([x, y]) => svg("circle", { class: `dot rank${line.rank ?? 1}`, cx: x, cy: y, r: 3.5 })));
      } else if (places.length === 1) {
        parts.push(svg("circle", { class: `dot rank${line.rank ?? 1}`, cx: places[0][0], cy: places[0][1], r: 3.5 }));
      } else {
        parts.push(svg("polyline", { class: `curve ${line.kind ?? "solid"} rank${line.rank ?? 1}`, points: places.map((p) => p.join(",")).join(" ") }));
      }
    }
    if (at !== null) {
      const x = right(at);
      parts.push(svg("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: height - BOTTOM }));
    }
    drawing.replaceChildren(...parts);
  };

  const tell = () => {
    const write = now.write ?? short;
    if (at === null) {
      told.textContent = " ";
    } else {
      const found = now.lines.flatMap((line) => {
        const point = line.points.find(([x]) => x === at);
        return point ? [`${line.name} ${write(point[1])}`] : [];
      });
      told.textContent = `${now.x} ${short(at)}: ${found.join(", ")}`;
    }
    draw();
  };
  field.addEventListener("pointermove", (event) => {
    const all = xs();
    if (!all.length) return;
    const box = field.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    const x = all[0] + share * (all[all.length - 1] - all[0]);
    at = all.reduce((best, one) => (Math.abs(one - x) < Math.abs(best - x) ? one : best));
    tell();
  });
  const leave = () => { at = null; tell(); };
  field.addEventListener("pointerleave", leave);
  field.addEventListener("blur", leave);
  field.addEventListener("keydown", (event) => {
    const all = xs();
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !all.length) return;
    event.preventDefault();
    const place = at === null ? (step > 0 ? -1 : all.length) : all.indexOf(at);
    at = all[Math.min(Math.max(place + step, 0), all.length - 1)];
    tell();
  });
  const size = new ResizeObserver(draw);
  size.observe(field);
  signal.addEventListener("abort", () => size.disconnect());
  tell();
  return {
    element,
    /** @param {Chart} content */
    show: (content) => { now = content; tell(); },
  };
}

/** @param {Line[]} lines */
function legend(lines) {
  return h("ul", { class: "lines-key" }, lines.map((line) =>
    h("li", {}, h("span", { class: `stroke ${line.kind ?? "solid"} rank${line.rank ?? 1}` }), line.name)));
}

/**
 * Round numbers that reach around a span, about so many.
 *
 * @param {number} low
 * @param {number} high
 * @param {number} count
 */
export function ticks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? rough;
  const first = Math.floor(low / step + 1e-9);
  const last = Math.ceil((low + span) / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/**
 * A number in few signs; a large one, such as a step, whole and as the page's sentences write it.
 *
 * @param {number} value
 */
export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1000 ? Math.round(value).toLocaleString("en")
    : size < 0.001 ? value.toExponential(1).replace("e-", "e−")
      : String(Number(value.toPrecision(3)));
  return text.replace(/^-/, "−");
}
