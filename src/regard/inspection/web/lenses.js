/**
 * Lenses, as `page_data.py` writes them: what would be said at each depth, why a token and not another, and what makes
 * two sentences differ. They come from the file or from the server.
 *
 * @typedef {import("./render.js").Context} Context
 * @typedef {import("./trace.js").Candidate} Candidate
 * @typedef {import("./trace.js").PackedArray} PackedArray
 * @typedef {import("./trace.js").Token} Token
 * @typedef {{ outputs: Token[], depths: string[], candidates: Candidate[][][], probabilities: PackedArray,
 *   translations: string[] }} DepthLensJson [depth][position]; translations are those of the DecoderLens
 * @typedef {{ logit_lens: DepthLensJson, decoder_lens: DepthLensJson }} DepthLensesJson
 * @typedef {{ token: Token, foil: Token, position: number, difference: number, source_words: string[],
 *   target_words: string[], scores: Record<string, number[]>, agreement: [string, string, number][],
 *   completeness: number }} AttributionJson
 * @typedef {"encoder" | "decoder"} Stack
 * @typedef {{ texts: [string, string], tokens: [Token, Token], differences: [number, number], position: number,
 *   labels: Record<Stack, [Token, Token][]>, effects: Record<Stack, PackedArray> }} PatchingJson
 * @typedef {{ stages: string[], stream: PackedArray, hidden: PackedArray }} StackJson stream: [stage, position, d_model],
 *   the residual stream after each stage; hidden: [layer, position, d_ff], the neurons of the feed-forward networks
 * @typedef {Token & { cosine: number }} Neighbour
 * @typedef {{ tokens: Token[], points: PackedArray, variance: [number, number], size: number,
 *   neighbours: Record<string, Neighbour[]> }} EmbeddingsJson points: [token, 2]; neighbours by the id of a token
 * @typedef {{ d_model: number, d_ff: number, heads: number, d_k: number, pre_norm: boolean, activation: string,
 *   position: string, parameters: Record<string, number>, embeddings: Record<"source" | "target", EmbeddingsJson> }
 *   & Record<Stack, StackJson>} ArchitectureJson
 * @typedef {DepthLensesJson & { attributions: AttributionJson[], patching: PatchingJson | null,
 *   architecture: ArchitectureJson | null }} LensesJson
 * @typedef {[value: number, low: number, high: number]} Change of a score, with a 95% interval
 * @typedef {{ head: string, behaviour: { name: string, share: number }, bleu: Change, log_probability: Change,
 *   correct: Change | null }} HeadEffect head: SITE.LAYER.HEAD, counted from 0
 * @typedef {{ bleu: number, sentences: number, correct: [right: number, tested: number] | null, tested: string | null,
 *   heads: HeadEffect[] }} HeadTableJson bleu and correct: with all heads; tested: what is correct, such as pronouns
 * @typedef {{ problem: string | null, running: boolean, done: number, heads: number, table: HeadTableJson | null }}
 *   HeadTableState problem: why there is no table; done: of this many heads
 * @typedef {{ depth(q: string, outputs: number[]): Promise<DepthLensesJson>,
 *   architecture(q: string, outputs: number[]): Promise<ArchitectureJson>,
 *   attribution(q: string, outputs: number[], position: number, foil: number | null): Promise<AttributionJson>,
 *   patching(q: string, other: string): Promise<PatchingJson>,
 *   heads?(start: boolean): Promise<HeadTableState> }} LensApi of the server or of the model in the file, which has no
 *   data to measure heads on
 */

/** @type {Map<string, Promise<any>>} results of the server by request */
const cache = new Map();

/** @template T @param {string} key @param {() => Promise<T>} load @returns {Promise<T>} */
function cached(key, load) {
  const known = cache.get(key);
  if (known) return known;
  const loading = load();
  cache.set(key, loading);
  loading.catch(() => cache.delete(key));
  return loading;
}

/**
 * The lenses of a trace; a method returns null if neither the file nor the server has the result.
 *
 * @param {Pick<Context, "trace" | "api">} context
 */
export function lensesOf({ trace, api }) {
  const { lenses } = trace;
  const outputs = trace.outputs.map((token) => token.id);
  const remote = api?.lenses;
  return {
    hasPatching: Boolean(remote?.patching),
    patching: lenses?.patching ?? null,
    hasFoils: Boolean(remote?.attribution),
    /** @returns {Promise<DepthLensesJson | null>} */
    depth: async () => lenses ?? (remote
      ? cached(JSON.stringify(["depth", trace.text, outputs]), () => remote.depth(trace.text, outputs)) : null),
    /** @returns {Promise<ArchitectureJson | null>} */
    architecture: async () => lenses?.architecture ?? (remote
      ? cached(JSON.stringify(["architecture", trace.text, outputs]), () => remote.architecture(trace.text, outputs)) : null),
    /** @param {number} position @param {number | null} foil @returns {Promise<AttributionJson | null>} */
    attribution: async (position, foil) => {
      const known = lenses?.attributions.find((one) => one.position === position);
      if (known && (foil === null || known.foil.id === foil)) return known;
      const load = remote?.attribution;
      if (!load) return null;
      return cached(JSON.stringify(["attribution", trace.text, outputs, position, foil]),
        () => load(trace.text, outputs, position, foil));
    },
    /** @param {string} other @returns {Promise<PatchingJson | null>} */
    patch: async (other) => {
      if (lenses?.patching?.texts[1] === other) return lenses.patching;
      const load = remote?.patching;
      if (!load) return null;
      return cached(JSON.stringify(["patching", trace.text, other]), () => load(trace.text, other));
    },
  };
}

/**
 * The depth from which on the generated token is the most probable one, for each position.
 *
 * @param {DepthLensJson} lens
 */
export function settledDepths({ candidates, outputs }) {
  return outputs.map((token, position) => {
    let depth = candidates.length;
    while (depth > 0 && candidates[depth - 1][position][0].id === token.id) depth--;
    return depth;
  });
}

/** effects that differ by less count as equal */
const SAME_EFFECT = 0.02;

/**
 * The place with the largest effect, the deepest of several, except the embedding and the position where the choice is
 * made; and the decoder layer in which that position takes the choice over.
 *
 * @param {PatchingJson} json
 * @param {Record<Stack, Float32Array>} effects
 * @returns {{ stack: Stack, depth: number, position: number, effect: number, takenOver: number | null }}
 */
export function strongestPlace(json, effects) {
  /** @type {{ stack: Stack, depth: number, position: number, effect: number }[]} */
  const places = [];
  for (const stack of /** @type {Stack[]} */ (["encoder", "decoder"])) {
    const [depths, positions] = json.effects[stack].shape;
    for (let depth = depths - 1; depth > 0; depth--) {
      for (let position = 0; position < positions - Number(stack === "decoder"); position++) {
        places.push({ stack, depth, position, effect: effects[stack][depth * positions + position] });
      }
    }
  }
  const [depths, positions] = json.effects.decoder.shape;
  const last = Array.from({ length: depths }, (_, depth) => effects.decoder[(depth + 1) * positions - 1]);
  const takenOver = last.findIndex((effect) => effect >= 0.5);
  const best = places.reduce((one, other) => (other.effect > one.effect + SAME_EFFECT ? other : one));
  return { ...best, takenOver: takenOver < 1 ? null : takenOver };
}

/**
 * The head whose loss costs the reference most probability first, as `HeadTable.ranked` in Python.
 *
 * @param {Pick<HeadTableJson, "heads">} table
 */
export function rankedHeads({ heads }) {
  return [...heads].sort((one, other) => one.log_probability[0] - other.log_probability[0]);
}

/**
 * The heads without which BLEU clearly falls (its interval is below 0), the largest loss first.
 *
 * @param {HeadEffect[]} heads
 */
export function clearHeads(heads) {
  return heads.filter(({ bleu: [, , high] }) => high < 0).sort((one, other) => one.bleu[0] - other.bleu[0]);
}
