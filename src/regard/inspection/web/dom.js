/**
 * Elements and small components. Text is always inserted as text, never parsed as HTML.
 *
 * @typedef {import("./trace.js").Token} Token
 * @typedef {Node | string | number | null | undefined | false} Child
 */

import { tokenText } from "./trace.js";

const SVG = "http://www.w3.org/2000/svg";

/** whether the main input is a finger, which cannot hover */
export const TOUCH = matchMedia("(pointer: coarse)").matches;

/** the verb for looking at something */
export const POINT_AT = TOUCH ? "Touch" : "Point at";

/**
 * Row and column offsets of the arrow keys.
 *
 * @type {Record<string, [number, number]>}
 */
export const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

// -------------------------------------------------------------------------------------------------
// Elements

/**
 * Create an element. Properties that are functions become event listeners (`onclick`), all others attributes.
 *
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  setProperties(element, properties);
  appendChildren(element, children.flat());
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
  setProperties(element, properties);
  appendChildren(element, children);
  return element;
}

/** @param {Element} element @param {Record<string, any>} properties */
function setProperties(element, properties) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, String(value));
    }
  }
}

/** @param {Element} element @param {Child[]} children */
function appendChildren(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/**
 * User text in any writing direction, isolated from the text around it.
 *
 * @param {string} text
 */
export function bidiText(text) {
  return h("bdi", { dir: "auto" }, text);
}

// -------------------------------------------------------------------------------------------------
// Tokens

/**
 * A token with all of its characters; the symbol for a leading space is faint.
 *
 * @param {Token} token
 */
export function tokenLabel(token) {
  const { special } = token;
  const text = tokenText(token);
  const label = h("bdi", { class: special ? "piece special" : "piece", dir: "auto" });
  const spaces = special ? 0 : text.length - text.replace(/^▁+/, "").length;
  if (spaces) label.append(h("span", { class: "space" }, text.slice(0, spaces)));
  label.append(text.slice(spaces));
  return label;
}

/**
 * A token in a sentence: in italics, without the symbol for a leading space.
 *
 * @param {Token} token
 */
export function tokenInProse(token) {
  if (token.special) return tokenLabel(token);
  return h("bdi", { class: "piece in-prose", dir: "auto" }, tokenText(token).replace(/^▁+(?=[^▁])/, ""));
}

/**
 * Explains the symbol for a leading space; null if none of the tokens has it.
 *
 * @param {Token[]} tokens
 */
export function spaceSymbolNote(tokens) {
  const present = tokens.some((token) => !token.special && token.text.startsWith("▁"));
  return present ? h("p", { class: "quiet space-note" }, "▁ marks the beginning of a word.") : null;
}

/**
 * A token with a value from 0 to 1, as a bar and as text.
 *
 * @param {Token} token
 * @param {number} value
 * @param {string} text
 */
export function tokenBar(token, value, text) {
  return [h("span", { class: "token" }, tokenLabel(token)), bar(value), h("span", { class: "number" }, text)];
}

/** @param {number} value from 0 to 1 */
export function bar(value) {
  const element = h("span", { class: "bar" });
  element.style.setProperty("--share", String(value));
  return element;
}

// -------------------------------------------------------------------------------------------------
// Controls

/**
 * A choice between a few options, as buttons side by side.
 *
 * @param {string} name
 * @param {[value: string, text: string][]} options
 * @param {string} selected
 * @param {(value: string) => void} onSelect
 */
export function segmentedControl(name, options, selected, onSelect) {
  const buttons = options.map(([value, text]) =>
    h("button", {
      type: "button", "data-value": value, "aria-pressed": value === selected,
      onclick: () => { show(value); onSelect(value); },
    }, text));
  /** @param {string} value */
  const show = (value) => {
    for (const one of buttons) one.setAttribute("aria-pressed", String(one.dataset.value === value));
  };
  show(selected);
  return Object.assign(h("div", { class: "segments", role: "group", "aria-label": name }, buttons), { show });
}

/**
 * A labelled drop-down list.
 *
 * @param {string} name
 * @param {[value: string, text: string][]} options
 * @param {(value: string) => void} onSelect
 */
export function selectField(name, options, onSelect) {
  const box = h("select", { onchange: () => onSelect(box.value) },
    options.map(([value, text]) => h("option", { value }, text)));
  return { box, field: h("label", { class: "field" }, h("span", {}, name), box) };
}

/**
 * Options for indices, which are counted from 1 on the page.
 *
 * @param {number} count
 * @param {(number: number) => string} [text]
 * @returns {[value: string, text: string][]}
 */
export function numberedOptions(count, text = String) {
  return Array.from({ length: count }, (_, i) => [String(i), text(i + 1)]);
}

/**
 * A button that shows the values of a picture as a table. The table is built when it is opened.
 *
 * @param {string} caption
 * @param {() => { head: Child[], rows: Child[][] }} content the first cell of each row is its heading
 */
export function tableToggle(caption, content) {
  const region = h("div", { class: "table", tabindex: 0, role: "region", "aria-label": caption, hidden: true });
  const button = h("button", { type: "button", class: "plain", "aria-expanded": "false", onclick: () => {
    region.hidden = !region.hidden;
    update();
  } }, "Show as table");
  const update = () => {
    button.setAttribute("aria-expanded", String(!region.hidden));
    button.textContent = region.hidden ? "Show as table" : "Hide table";
    if (region.hidden) return region.replaceChildren();
    const { head, rows } = content();
    region.replaceChildren(h("table", {}, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, head.map((one) => h("th", { scope: "col" }, one)))),
      h("tbody", {}, rows.map(([first, ...rest]) =>
        h("tr", {}, h("th", { scope: "row" }, first), rest.map((one) => h("td", {}, one)))))));
  };
  return { element: h("div", { class: "tabular" }, button, region), update };
}

/** whether the screen is a phone's: views then begin with most of their cards closed, so that they are short */
export const NARROW = matchMedia("(max-width: 520px)").matches;

/**
 * A card that can be closed. On a phone, it is closed unless it is important.
 *
 * @param {Child | Child[]} title
 * @param {{ class?: string, important?: boolean }} options
 * @param {...(Child | Child[])} children
 */
export function foldingCard(title, { class: name = "", important = false }, ...children) {
  return h("details", { class: `card folding ${name}`, open: important || !NARROW },
    h("summary", {}, h("h3", {}, title)), h("div", { class: "folded" }, ...children));
}

// -------------------------------------------------------------------------------------------------
// Behaviour

/**
 * Mark the sides on which a scrolling element has more content; style.css fades them.
 *
 * @template {HTMLElement} T
 * @param {T} element
 * @param {AbortSignal} signal
 * @returns {T}
 */
export function scrollFade(element, signal) {
  const update = () => {
    const { scrollLeft, scrollTop, scrollWidth, scrollHeight, clientWidth, clientHeight } = element;
    element.classList.toggle("more-left", scrollLeft > 1);
    element.classList.toggle("more-right", scrollLeft + clientWidth < scrollWidth - 1);
    element.classList.toggle("more-above", scrollTop > 1);
    element.classList.toggle("more-below", scrollTop + clientHeight < scrollHeight - 1);
  };
  element.classList.add("fading");
  element.addEventListener("scroll", update, { passive: true });
  const size = new ResizeObserver(update);
  for (const one of [element, ...element.children]) size.observe(one);
  signal.addEventListener("abort", () => size.disconnect());
  return element;
}

/**
 * Roving tabindex: the Tab key stops once in a group, and arrow keys move inside it.
 *
 * @param {HTMLElement[]} items
 * @param {HTMLElement} current
 */
export function setTabStop(items, current) {
  for (const item of items) item.tabIndex = item === current ? 0 : -1;
}

/** @param {number} index @param {number} length */
export function clampIndex(index, length) {
  return Math.min(Math.max(index, 0), length - 1);
}

/** @param {number} length */
export function range(length) {
  return Array.from(Array(length).keys());
}
