/**
 * What the page says about the model.
 *
 * @typedef {{ name: string, languages: { source: string | null, target: string | null }, parameters: number,
 *   scores: string[], examples: string[], lenses: boolean }} ModelInfo as `model_info` of page_data.py writes it
 */

import { grouped } from "./format.js";

/** @param {ModelInfo} info name, languages, size and score in one line */
export function describeModel({ name, languages: { source, target }, parameters, scores }) {
  const size = parameters < 1e6 ? `${grouped(Math.round(parameters / 1000))} thousand parameters`
    : `${(parameters / 1e6).toFixed(1)} million parameters`;
  return [name, source && target && `${source} to ${target}`, size, ...scores].filter(Boolean).join(" · ");
}
