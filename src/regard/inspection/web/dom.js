/**
 * Elements, made from plain values. Text goes in as text: nothing here reads HTML.
 *
 * @typedef {import("./trace.js").Token} Token
 * @typedef {Node | string | number | null | undefined | false} Child
 */

const SVG = "http://www.w3.org/2000/svg";

/** Whether a finger does what a mouse does elsewhere: it can touch, but not hover, and rarely has keys beside it. */
export const TOUCH = matchMedia("(pointer: coarse)").matches;

/** How one looks at a thing here. */
export const POINT = TOUCH ? "Touch" : "Point at";

/**
 * What a key adds to a row and a column.
 *
 * @type {Record<string, [number, number]>}
 */
export const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

/**
 * An element: properties that are functions listen (`onclick`), `class` and the rest are attributes.
 *
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  give(element, properties);
  fill(element, children.flat());
  return element;
}

/**
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...Child} children
 * @returns {SVGElement}
 */
export function svg(tag, properties = {}, ...children) {
  const element = /** @type {SVGElement} */ (document.createElementNS(SVG, tag));
  give(element, properties);
  fill(element, children);
  return element;
}

/** @param {Element} element @param {Record<string, any>} properties */
function give(element, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, String(value));
    }
  }
}

/** @param {Element} element @param {Child[]} children */
function fill(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/**
 * Text of a person, in any direction, that leaves the text around it in its place.
 *
 * @param {string} text
 */
export function words(text) {
  return h("bdi", { dir: "auto" }, text);
}

/**
 * A token as a label: all of its signs, but the sign for a space is quiet.
 *
 * @param {Token} token
 */
export function label(token) {
  const { text, special } = token;
  const name = h("bdi", { class: special ? "piece special" : "piece", dir: "auto" });
  const spaces = special ? 0 : text.length - text.replace(/^▁+/, "").length;
  if (spaces) name.append(h("span", { class: "space" }, text.slice(0, spaces)));
  name.append(text.slice(spaces));
  return name;
}

/**
 * What the sign before many tokens means; nothing where none of them has it.
 *
 * @param {Token[]} tokens
 */
export function signNote(tokens) {
  const there = tokens.some((token) => !token.special && token.text.startsWith("▁"));
  return there ? h("p", { class: "quiet sign" }, "▁ marks the beginning of a word.") : null;
}

/**
 * A token with its share of 1, as a bar and a number.
 *
 * @param {Token} token
 * @param {number} value from 0 to 1
 * @param {string} text of the value
 */
export function share(token, value, text) {
  const bar = h("span", { class: "bar" });
  bar.style.setProperty("--share", String(value));
  return [h("span", { class: "token" }, label(token)), bar, h("span", { class: "number" }, text)];
}

/**
 * A choice of one among a few, as buttons side by side.
 *
 * @param {string} name
 * @param {[value: string, text: string][]} options
 * @param {string} chosen
 * @param {(value: string) => void} choose
 */
export function segments(name, options, chosen, choose) {
  const buttons = options.map(([value, text]) =>
    h("button", {
      type: "button", "data-value": value, "aria-pressed": value === chosen,
      onclick: () => { show(value); choose(value); },
    }, text));
  /** @param {string} value */
  const show = (value) => {
    for (const one of buttons) one.setAttribute("aria-pressed", String(one.dataset.value === value));
  };
  show(chosen);
  return Object.assign(h("div", { class: "segments", role: "group", "aria-label": name }, buttons), { show });
}

/**
 * @param {string} name
 * @param {[value: string, text: string][]} options
 * @param {(value: string) => void} choose
 */
export function select(name, options, choose) {
  const box = h("select", { onchange: () => choose(box.value) },
    options.map(([value, text]) => h("option", { value }, text)));
  return { box, field: h("label", { class: "field" }, h("span", {}, name), box) };
}

/**
 * The text behind a picture: a button, and a table that is made when it is asked for.
 *
 * @param {string} caption
 * @param {() => { head: Child[], rows: Child[][] }} content the first cell of each row is its heading
 */
export function tabular(caption, content) {
  const place = h("div", { class: "table", tabindex: 0, role: "region", "aria-label": caption, hidden: true });
  const button = h("button", { type: "button", class: "plain", "aria-expanded": "false", onclick: () => {
    place.hidden = !place.hidden;
    update();
  } }, "Show as table");
  const update = () => {
    button.setAttribute("aria-expanded", String(!place.hidden));
    button.textContent = place.hidden ? "Show as table" : "Hide table";
    if (place.hidden) return place.replaceChildren();
    const { head, rows } = content();
    place.replaceChildren(h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head.map((one) => h("th", { scope: "col" }, one)))),
      h("tbody", {}, rows.map(([first, ...rest]) =>
        h("tr", {}, h("th", { scope: "row" }, first), rest.map((one) => h("td", {}, one)))))));
  };
  return { element: h("div", { class: "tabular" }, button, place), update };
}

/**
 * An element that scrolls fades where there is more: style.css is told on which sides.
 *
 * @template {HTMLElement} T
 * @param {T} element
 * @param {AbortSignal} signal
 * @returns {T}
 */
export function fading(element, signal) {
  const look = () => {
    const { scrollLeft, scrollTop, scrollWidth, scrollHeight, clientWidth, clientHeight } = element;
    element.classList.toggle("more-left", scrollLeft > 1);
    element.classList.toggle("more-right", scrollLeft + clientWidth < scrollWidth - 1);
    element.classList.toggle("more-above", scrollTop > 1);
    element.classList.toggle("more-below", scrollTop + clientHeight < scrollHeight - 1);
  };
  element.classList.add("fading");
  element.addEventListener("scroll", look, { passive: true });
  const size = new ResizeObserver(look);
  for (const one of [element, ...element.children]) size.observe(one);
  signal.addEventListener("abort", () => size.disconnect());
  return element;
}

/**
 * One stop for the Tab key in a group; arrows move inside it.
 *
 * @param {HTMLElement[]} items
 * @param {HTMLElement} chosen
 */
export function rove(items, chosen) {
  for (const item of items) item.tabIndex = item === chosen ? 0 : -1;
}

/** @param {number} value from 0 to 1 */
export function percent(value) {
  const hundred = value * 100;
  if (hundred > 0 && hundred < 0.1) return "<0.1%";
  return `${hundred.toFixed(hundred < 10 || (hundred > 99 && hundred < 100) ? 1 : 0)}%`;
}

/** @param {number} value */
export function signed(value) {
  return value.toFixed(3).replace("-", "−");
}
