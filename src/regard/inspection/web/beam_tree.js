/**
 * The beam search as a tree: the layout of its nodes, and an explanation of what happened to each of them.
 *
 * @typedef {import("./trace.js").SearchNode} SearchNode
 * @typedef {import("./trace.js").Token} Token
 * @typedef {import("./trace.js").Trace} Trace
 * @typedef {Pick<Trace, "beam" | "tokens">} Beam
 * @typedef {{ node: SearchNode, token: Token, step: number, rank: number, children: TreeNode[],
 *   parent: TreeNode | null }} TreeNode a node with its place in the drawing: one column for each step, best on top
 */

const EOS = "</s>";

/**
 * The nodes with their places. The trace has them step by step, best first.
 *
 * @param {Beam} trace
 * @returns {TreeNode[]}
 */
export function layOutTree(trace) {
  /** @type {Map<number, TreeNode>} */
  const nodes = new Map();
  /** @type {number[]} */
  const counts = [];
  for (const node of trace.beam) {
    const parent = node.parent === null ? null : nodes.get(node.parent) ?? null;
    const step = parent ? parent.step + 1 : 0;
    counts[step] = (counts[step] ?? -1) + 1;
    const token = trace.tokens[node.token] ?? { id: node.token, text: `#${node.token}`, special: false };
    /** @type {TreeNode} */
    const treeNode = { node, token, step, rank: counts[step], children: [], parent };
    parent?.children.push(treeNode);
    nodes.set(node.id, treeNode);
  }
  return [...nodes.values()];
}

/**
 * The path from the first token to a node, without the root.
 *
 * @param {TreeNode} node
 * @returns {TreeNode[]}
 */
export function pathTo(node) {
  const path = [];
  for (let one = node; one.parent; one = one.parent) path.push(one);
  return path.reverse();
}

/**
 * The path from the root to the translation; empty if it is not in the tree.
 *
 * @param {Token[]} outputs
 * @param {TreeNode[]} nodes
 * @returns {Set<TreeNode>}
 */
export function bestPath(outputs, nodes) {
  const ids = outputs.map((token) => token.id).join(" ");
  const end = nodes.find((node) => node.step === outputs.length && node.node.token === outputs.at(-1)?.id
    && pathTo(node).map((one) => one.node.token).join(" ") === ids);
  return new Set(end ? [nodes[0], ...pathTo(end)] : []);
}

/**
 * The node to move to with an arrow key.
 *
 * @param {TreeNode[]} nodes
 * @param {TreeNode} current
 * @param {string} key
 * @returns {TreeNode | null | undefined}
 */
export function neighbour(nodes, current, key) {
  if (key === "ArrowLeft") return current.parent;
  if (key === "ArrowRight") return current.children.find((node) => node.node.state === "kept") ?? current.children[0];
  const step = { ArrowUp: -1, ArrowDown: 1 }[key];
  return step === undefined ? null : nodes.find((node) => node.step === current.step && node.rank === current.rank + step);
}

/**
 * The length penalty of the paper's search (Wu et al., 2016), by which the log-probability is divided.
 *
 * @param {number} length
 * @param {number} alpha
 */
export function lengthPenalty(length, alpha) {
  return ((5 + length) / 6) ** alpha;
}

/**
 * What happened to a hypothesis, in one or two sentences; decoding/beam_search.py has the rules.
 *
 * @param {number} beam
 * @param {TreeNode[]} nodes
 * @param {Set<TreeNode>} best
 * @param {TreeNode} hypothesis
 */
export function explain(beam, nodes, best, hypothesis) {
  const { node, token, step, rank } = hypothesis;
  if (node.state === "finished") return explainFinished(nodes, best, hypothesis);
  if (node.state === "kept" && node.id === [...best].at(-1)?.node.id) {
    return "The search reached its maximum length before any hypothesis ended. This one was the best and was cut off here.";
  }
  const candidates = nodes.filter((one) => one.step === step);
  const ranked = `Ranked ${rank + 1} of the ${candidates.length} candidates of step ${step}`;
  if (node.state === "kept") {
    const reason = rank < beam ? `within the beam of ${beam}` : `one of the ${beam} best candidates that do not end`;
    return `${ranked}: ${reason}, so it was continued.`;
  }
  if (token.text === EOS && rank >= beam) {
    return `${ranked}. A hypothesis can finish only if it is among the top ${beam}, so this one was pruned.`;
  }
  const better = candidates.filter((one) => one.rank < rank && one.node.state === "kept").length;
  if (better >= beam) return `${ranked}. The beam of ${beam} was filled by better candidates.`;
  return `${ranked}. The search ended at this step, so nothing was continued.`;
}

/** @param {TreeNode[]} nodes @param {Set<TreeNode>} best @param {TreeNode} hypothesis */
function explainFinished(nodes, best, hypothesis) {
  const finished = nodes.filter((one) => one.node.state === "finished");
  const better = finished.filter((one) => one.node.score > hypothesis.node.score).length;
  const rank = finished.length === 1
    ? "This is the only finished hypothesis"
    : `This hypothesis is finished and ranks ${better + 1} of ${finished.length} by score`;
  return `${rank}${best.has(hypothesis) ? ", so it is the translation" : ""}.`;
}

/**
 * Whether the length penalty changed the rank of a hypothesis.
 *
 * @param {number} alpha
 * @param {TreeNode[]} nodes
 * @param {TreeNode} hypothesis
 */
export function explainPenalty(alpha, nodes, { node }) {
  if (!alpha) return "No length penalty was used (α = 0).";
  if (node.state !== "finished") {
    return "All candidates of a step have the same length, so the length penalty does not change their order.";
  }
  const finished = nodes.filter((one) => one.node.state === "finished");
  const better = finished.filter((one) => one.node.score > node.score).length;
  const likelier = finished.filter((one) => one.node.total > node.total).length;
  if (finished.length === 1) return "The length penalty makes no difference: no other hypothesis finished.";
  if (likelier === better) {
    return "The length penalty makes no difference to its rank: by log-probability alone it would be the same.";
  }
  return `Without the length penalty, by log-probability alone, it would rank ${likelier + 1}${
    likelier ? "" : " and be the translation"}.`;
}
