/**
 * How the model learned, as course.py tells it: from the functions that training itself uses.
 *
 * @typedef {import("./render.js").Context} Context
 * @typedef {import("./trace.js").Packed} Packed
 * @typedef {{ kind: string, map: Packed, distances: number[], mean: number[], least: number[], most: number[] }} Positions
 * @typedef {{ kind: string, width: number, rate: number, warmup: number, steps: number[], rates: number[] }} Schedule
 * @typedef {{ over: "all" | "others", classes: number, right: number, other: number }} Target
 * @typedef {{ epsilon: number, over: "all" | "others", targets: Target[] }} Smoothing
 * @typedef {{ finished: boolean, steps: number | null, measure: string | null,
 *   learned: { step: number, loss: number, rate: number }[],
 *   valid: { step: number, loss: number, score: number | null, best: boolean }[] }} CurvesJson
 * @typedef {{ step: number, cross: Packed, probabilities: number[] }} AlignmentJson
 * @typedef {{ positions: Positions | { kind: string, map: null }, schedule: Schedule, smoothing: Smoothing, curves: CurvesJson | null,
 *   checkpoints: number[], alignments?: AlignmentJson[] }} CourseJson
 */

/** @type {Promise<CourseJson> | null} of the server, which serves one model */
let known = null;

/**
 * The course: it stands in the file, or the server is asked for it once.
 *
 * @param {Pick<Context, "trace" | "api">} context
 * @returns {Promise<CourseJson | null>} null where there is neither
 */
export async function courseOf({ trace, api }) {
  if (trace.course) return trace.course;
  if (!api?.course) return null;
  known ??= api.course();
  try {
    return await known;
  } catch (error) {
    known = null;
    throw error;
  }
}
