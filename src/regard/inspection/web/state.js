/**
 * What is being looked at. It stands in the address after `#`, so that every state has a link.
 *
 * @typedef {Record<string, string>} Values
 */

export class State {
  /** @param {Values} defaults not written into the link @param {AbortSignal} signal */
  constructor(defaults, signal) {
    this.defaults = defaults;
    /** @type {Values} */
    this.values = { ...defaults, ...fromHash() };
    /** @type {Set<() => void>} */
    this.listeners = new Set();
    addEventListener("hashchange", () => {
      this.values = { ...this.defaults, ...fromHash() };
      this.tell();
    }, { signal });
  }

  /** @param {string} name */
  get(name) {
    return this.values[name] ?? "";
  }

  /**
   * A whole number from 0 up to, not including, a limit.
   *
   * @param {string} name
   * @param {number} limit
   */
  place(name, limit) {
    const value = Number.parseInt(this.get(name), 10);
    return Number.isNaN(value) ? 0 : Math.min(Math.max(value, 0), limit - 1);
  }

  /** @param {Values} changes */
  set(changes) {
    this.values = { ...this.values, ...changes };
    const kept = Object.entries(this.values).filter(([name, value]) => value !== (this.defaults[name] ?? ""));
    try {
      history.replaceState(null, "", `#${new URLSearchParams(kept)}`);
    } catch { /* a frame without an address */ }
    this.tell();
  }

  /**
   * Be where a link leads.
   *
   * @param {URLSearchParams} link
   */
  go(link) {
    this.values = {};
    this.set({ ...this.defaults, ...Object.fromEntries(link) });
  }

  /** @param {() => void} listener */
  listen(listener) {
    this.listeners.add(listener);
  }

  tell() {
    for (const listener of this.listeners) listener();
  }
}

/** @returns {Values} */
function fromHash() {
  return Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
}
