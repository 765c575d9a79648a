/**
 * The training history of the model, as training_history.py writes it: computed by the functions that training itself
 * uses.
 *
 * @typedef {import("./render.js").Context} Context
 * @typedef {import("./trace.js").PackedArray} PackedArray
 * @typedef {{ kind: string, map: PackedArray, distances: number[], mean: number[], min: number[], max: number[] }} Positions
 * @typedef {{ kind: string, d_model: number, learning_rate: number, warmup: number, steps: number[],
 *   learning_rates: number[] }} Schedule
 * @typedef {{ over: "all" | "others", classes: number, correct: number, other: number }} SmoothedTarget
 * @typedef {{ epsilon: number, over: "all" | "others", targets: SmoothedTarget[] }} Smoothing
 * @typedef {{ finished: boolean, steps: number | null, metric: string | null,
 *   train: { step: number, loss: number, learning_rate: number }[],
 *   valid: { step: number, loss: number, score: number | null, best: boolean }[] }} CurvesJson
 * @typedef {{ step: number, cross_attention: PackedArray, probabilities: number[] }} AlignmentJson
 * @typedef {{ positions: Positions | { kind: string, map: null }, schedule: Schedule, smoothing: Smoothing,
 *   curves: CurvesJson | null, checkpoints: number[], alignments?: AlignmentJson[],
 *   model?: import("./model_info.js").ModelInfo }} HistoryJson
 */

/** @type {Promise<HistoryJson> | null} a server has one model, so one history */
let cached = null;

/**
 * The history from the file, or from the server.
 *
 * @param {Pick<Context, "trace" | "api">} context
 * @returns {Promise<HistoryJson | null>} null if there is neither
 */
export async function loadHistory({ trace, api }) {
  if (trace.history) return trace.history;
  if (!api?.history) return null;
  cached ??= api.history();
  try {
    return await cached;
  } catch (error) {
    cached = null;
    throw error;
  }
}
