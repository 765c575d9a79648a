/**
 * Lenses that need no gradients, computed in the browser as logit_lens.py and patching.py compute them.
 *
 * @typedef {import("../lenses.js").DepthLensJson} DepthLensJson
 * @typedef {import("../lenses.js").DepthLensesJson} DepthLensesJson
 * @typedef {import("../lenses.js").PatchingJson} PatchingJson
 * @typedef {import("../lenses.js").Stack} Stack
 * @typedef {import("./translator.js").Translator} Translator
 * @typedef {{ source: number[], inputs: number[] }} Read ids that the encoder and the decoder read
 */

import { topK } from "./search.js";
import { BOS, EOS } from "./tokenizer.js";
import { packFloats, probabilitiesAt } from "./translator.js";

/** the most probable tokens recorded at each depth and position */
const CANDIDATES = 3;

/**
 * What would be said at each depth.
 *
 * @param {Translator} model
 * @param {string} text
 * @param {number[]} outputs ids of the translation
 * @returns {DepthLensesJson}
 */
export function depthLenses(model, text, outputs) {
  const { network } = model;
  const finished = outputs[outputs.length - 1] === EOS ? outputs : [...outputs, EOS];
  const source = model.encode(text);
  const inputs = [BOS, ...finished.slice(0, -1)];
  const [memory] = network.encode([[...source, EOS]]);
  const streams = recordStreams(model, "decoder", () => { network.decode([inputs], [memory]); });
  const logits = streams.map((stream) => network.logits(stream));
  const depths = Array.from({ length: network.config.encoder_layers + 1 }, (_, depth) => depth);
  const read = depths.map((depth) => network.decode([inputs], network.encode([[...source, EOS]], undefined, depth)));
  const translations = depths.map((depth) => {
    const { best } = model.search(source, [], { ...model.json.decoding, beam: 1, temperature: null }, depth);
    return model.decode(best.tokens, text);
  });
  return { logit_lens: lensJson(model, finished, logits, []), decoder_lens: lensJson(model, finished, read, translations) };
}

/**
 * @param {Translator} model
 * @param {number[]} outputs
 * @param {Float32Array[]} logits of each depth
 * @param {string[]} translations
 * @returns {DepthLensJson}
 */
function lensJson({ target }, outputs, logits, translations) {
  const probabilities = logits.map((one) => outputs.map((_, row) => probabilitiesAt(one, row, target.size)));
  return {
    outputs: target.tokens(outputs),
    depths: logits.map((_, depth) => (depth ? `layer ${depth}` : "embedding")),
    candidates: probabilities.map((rows) => rows.map((row) => topK(row, CANDIDATES)
      .map((id) => ({ ...target.tokens([id])[0], probability: row[id] })))),
    probabilities: packFloats(Float32Array.from(probabilities.flatMap((rows) => rows.map((row, i) => row[outputs[i]]))),
      [logits.length, outputs.length]),
    translations,
  };
}

/**
 * Activation patching: the effect of every place on the first token in which two translations differ.
 *
 * @param {Translator} model
 * @param {string} text
 * @param {string} other
 * @returns {PatchingJson}
 */
export function patching(model, text, other) {
  const sources = [text, other].map((one) => model.encode(one));
  if (sources[0].length !== sources[1].length) {
    throw new Error("Patching needs sentences with the same number of tokens: these have "
      + `${sources[0].length + 1} and ${sources[1].length + 1}.`);
  }
  const outputs = sources.map((source) => [...model.search(source, [], model.json.decoding).best.tokens, EOS]);
  const at = outputs[0].findIndex((id, i) => id !== outputs[1][i]);
  if (at < 0) throw new Error("Both sentences have the same translation.");
  const choice = outputs.map((ids) => ids[at]);
  /** @type {Read[]} */
  const reads = sources.map((source, i) => ({ source: [...source, EOS], inputs: [BOS, ...outputs[i].slice(0, at)] }));
  const differences = reads.map((read) => logOdds(model, read, choice));
  const total = differences[0] - differences[1];
  /** @param {Stack} stack */
  const effectsOf = (stack) => {
    const clean = recordStreams(model, stack, () => { logOdds(model, reads[0], choice); });
    const width = model.network.config.d_model;
    const positions = clean[0].length / width;
    return packFloats(Float32Array.from(clean.flatMap((stream, depth) => Array.from({ length: positions }, (_, position) => {
      model.network.visit = (visited, level, x) => {
        if (visited === stack && level === depth) {
          x.set(stream.subarray(position * width, (position + 1) * width), position * width);
        }
      };
      try {
        return (logOdds(model, reads[1], choice) - differences[1]) / total;
      } finally {
        model.network.visit = null;
      }
    }))), [clean.length, positions]);
  };
  const tokens = reads.map(({ source, inputs }) => ({ encoder: model.source.tokens(source), decoder: model.target.tokens(inputs) }));
  /** @param {Stack} stack @returns {PatchingJson["labels"][Stack]} */
  const labels = (stack) => tokens[0][stack].map((one, i) => [one, tokens[1][stack][i]]);
  const [first, second] = model.target.tokens(choice);
  return {
    texts: [text, other], tokens: [first, second], differences: [differences[0], differences[1]], position: at,
    labels: { encoder: labels("encoder"), decoder: labels("decoder") },
    effects: { encoder: effectsOf("encoder"), decoder: effectsOf("decoder") },
  };
}

/** @param {Translator} model @param {Read} read @param {number[]} choice log-odds of the first against the second at the end */
function logOdds({ network, target }, { source, inputs }, [first, second]) {
  const logits = network.decode([inputs], network.encode([source]));
  const last = (inputs.length - 1) * target.size;
  return logits[last + first] - logits[last + second];
}

/**
 * The residual stream at each depth.
 *
 * @param {Translator} model
 * @param {Stack} stack
 * @param {() => void} run
 */
function recordStreams({ network }, stack, run) {
  /** @type {Float32Array[]} */
  const streams = [];
  network.visit = (visited, depth, x) => {
    if (visited === stack) streams[depth] = x.slice();
  };
  try {
    run();
  } finally {
    network.visit = null;
  }
  return streams;
}
