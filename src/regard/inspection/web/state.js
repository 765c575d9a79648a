/**
 * The state of the page. It is stored in the URL after `#`, so every state has a link.
 *
 * @typedef {Record<string, string>} Values
 */

export class State {
  /** @param {Values} defaults values that are not written into the link @param {AbortSignal} signal */
  constructor(defaults, signal) {
    this.defaults = defaults;
    /** @type {Values} */
    this.values = { ...defaults, ...readHash() };
    /** @type {Set<() => void>} */
    this.listeners = new Set();
    addEventListener("hashchange", () => {
      this.values = { ...this.defaults, ...readHash() };
      this.notify();
    }, { signal });
  }

  /** @param {string} name */
  get(name) {
    return this.values[name] ?? "";
  }

  /**
   * A value as an index from 0 to length - 1.
   *
   * @param {string} name
   * @param {number} length
   */
  index(name, length) {
    const value = Number.parseInt(this.get(name), 10);
    return Number.isNaN(value) ? 0 : Math.min(Math.max(value, 0), length - 1);
  }

  /**
   * Like `index`; the last index if there is no value.
   *
   * @param {string} name
   * @param {number} length
   */
  indexOrLast(name, length) {
    return this.get(name) === "" ? length - 1 : this.index(name, length);
  }

  /** @param {Values} changes */
  set(changes) {
    this.values = { ...this.values, ...changes };
    const written = Object.entries(this.values).filter(([name, value]) => value !== (this.defaults[name] ?? ""));
    try {
      history.replaceState(null, "", `#${new URLSearchParams(written)}`);
    } catch { /* a sandboxed frame has no URL of its own */ }
    this.notify();
  }

  /**
   * Replace the state by that of a link.
   *
   * @param {URLSearchParams} link
   */
  replace(link) {
    this.values = {};
    this.set({ ...this.defaults, ...Object.fromEntries(link) });
  }

  /** @param {() => void} listener */
  subscribe(listener) {
    this.listeners.add(listener);
  }

  notify() {
    for (const listener of this.listeners) listener();
  }
}

/** @returns {Values} */
function readHash() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}
