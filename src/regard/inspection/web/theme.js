/**
 * The light and the dark theme: the system's setting, unless the reader has chosen one.
 *
 * @typedef {import("./colour.js").Theme} Theme
 */

const STORAGE_KEY = "regard-theme";
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
/** @type {Set<() => void>} */
const listeners = new Set();

/** @returns {Theme} */
export function currentTheme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen) return chosen === "dark" ? "dark" : "light";
  return prefersDark.matches ? "dark" : "light";
}

export function toggleTheme() {
  const theme = currentTheme() === "dark" ? "light" : "dark";
  setTheme(theme);
  try {
    localStorage.setItem(STORAGE_KEY, theme);
  } catch { /* there is no storage in a sandboxed frame, such as a notebook cell */ }
}

/** Use the theme chosen last time, if there is one. */
export function restoreTheme() {
  try {
    const chosen = localStorage.getItem(STORAGE_KEY);
    if (chosen === "light" || chosen === "dark") setTheme(chosen);
  } catch { /* no storage, as above */ }
}

/** @param {Theme} theme */
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  for (const listener of listeners) listener();
}

/** @param {() => void} listener @param {AbortSignal} signal */
export function onThemeChange(listener, signal) {
  listeners.add(listener);
  prefersDark.addEventListener("change", listener, { signal });
  signal.addEventListener("abort", () => listeners.delete(listener));
}
