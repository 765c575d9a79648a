import assert from "node:assert/strict";
import test from "node:test";

import { gaussLegendre } from "../../../src/regard/inspection/web/model/attribution.js";
import { LogitDifference } from "../../../src/regard/inspection/web/model/gradients.js";
import { MatrixMemory } from "../../../src/regard/inspection/web/model/matmul.js";
import { uniformNumbers } from "../../../src/regard/inspection/web/model/random.js";
import { Transformer } from "../../../src/regard/inspection/web/model/transformer.js";
import { Weights } from "../../../src/regard/inspection/web/model/weights.js";

const WIDTH = 12;
const [SOURCES, INPUTS] = [4, 3];
const BASE = {
  d_model: WIDTH, heads: 2, key_value_heads: 2, d_k: 6, d_v: 6, encoder_layers: 2, decoder_layers: 2, pre_norm: false,
  norm: "layer", final_norm: false, activation: "gelu", position: "sinusoidal", max_distance: 2, max_length: 8, scale: 0.4,
};
const NETWORKS = {
  "post-norm, GELU, sinusoids": {},
  "pre-norm, SwiGLU, rotary positions, one head of keys": {
    pre_norm: true, final_norm: true, norm: "rms", activation: "swiglu", position: "rotary", key_value_heads: 1 },
  "batch norm, Swish, learned positions, narrow values": { norm: "batch", activation: "swish", position: "learned", d_v: 5 },
  "no norm, ReLU, relative positions": { norm: "none", activation: "relu", position: "relative" },
};

/** A network with random weights. @param {typeof BASE} config @param {boolean} allowWasm */
function randomNetwork(config, allowWasm) {
  const { heads, key_value_heads, d_k, d_v } = config;
  const shapes = new Map([["projection.weight", [7, WIDTH]]]);
  const vectors = new Map([["projection.bias", 7]]);
  const norm = (name) => {
    for (const part of ["weight", "bias", "running_mean", "running_var"]) vectors.set(`${name}.${part}`, WIDTH);
  };
  for (const stack of ["encoder", "decoder"]) {
    shapes.set(`${stack}.position.embedding`, [8, WIDTH]);
    norm(`${stack}.norm`);
    for (let layer = 0; layer < 2; layer++) {
      const name = `${stack}.layers.${layer}`;
      for (const attention of stack === "encoder" ? ["attention"] : ["attention", "cross_attention"]) {
        shapes.set(`${name}.${attention}.query.weight`, [heads * d_k, WIDTH]).set(`${name}.${attention}.key.weight`, [key_value_heads * d_k, WIDTH])
          .set(`${name}.${attention}.value.weight`, [key_value_heads * d_v, WIDTH]).set(`${name}.${attention}.output.weight`, [WIDTH, heads * d_v])
          .set(`${name}.${attention}.position.keys`, [5, d_k]).set(`${name}.${attention}.position.values`, [5, d_v]);
        norm(`${name}.${attention}_residual.norm`);
      }
      for (const part of ["inner", "gate"]) shapes.set(`${name}.feed_forward.${part}.weight`, [18, WIDTH]);
      shapes.set(`${name}.feed_forward.outer.weight`, [WIDTH, 18]);
      vectors.set(`${name}.feed_forward.inner.bias`, 18);
      norm(`${name}.feed_forward_residual.norm`);
    }
  }
  const random = randomNumbers(5);
  const memory = new MatrixMemory([...shapes.values()].map(([rows, columns]) => ({ rows, columns })), allowWasm);
  const matrices = new Map([...shapes].map(([name, [rows, columns]]) => {
    const matrix = memory.add({ rows, columns });
    for (let row = 0; row < rows; row++) memory.row(matrix, row).forEach((_, i, all) => { all[i] = random(); });
    return [name, matrix];
  }));
  const filled = new Map([...vectors].map(([name, length]) =>
    [name, Float32Array.from({ length }, () => (/weight|var/.test(name) ? 1 : 0) + random() / 4)]));
  return new Transformer(config, new Weights(memory, matrices, filled));
}

/** Numbers between -1/2 and 1/2. @param {number} seed */
function randomNumbers(seed) {
  const numbers = uniformNumbers(seed);
  return () => numbers() - 0.5;
}

for (const [name, changes] of Object.entries(NETWORKS)) {
  test(`gradients are those of finite differences: ${name}`, () => {
    for (const allowWasm of [true, false]) {
      const network = randomNetwork({ ...BASE, ...changes }, allowWasm);
      const explained = new LogitDifference(network, SOURCES, INPUTS, [2, 5]);
      const random = randomNumbers(9);
      const point = { encoder: vector(2 * SOURCES, random), decoder: vector(2 * INPUTS, random) }; // two sentences
      const { values, gradients } = explained.at(point);
      assert.equal(values.length, 2);
      const found = gradients();
      const sum = (encoder, decoder) => explained.at({ encoder, decoder }).values.reduce((a, b) => a + b, 0);
      for (let trial = 0; trial < 8; trial++) {
        const way = { encoder: vector(2 * SOURCES, random), decoder: vector(2 * INPUTS, random) };
        if (trial % 2) way[trial % 4 === 1 ? "encoder" : "decoder"].fill(0);
        const step = 2e-3;
        const moved = (size) => sum(...["encoder", "decoder"].map((stack) => point[stack].map((one, i) => one + size * way[stack][i])));
        const expected = (moved(step) - moved(-step)) / (2 * step);
        const slope = dot(found.encoder, way.encoder) + dot(found.decoder, way.decoder);
        assert.ok(Math.abs(slope - expected) < 2e-3 * Math.max(1, Math.abs(expected)), `${slope} is not ${expected}`);
      }
    }
  });
}

test("the difference is that of the logits", () => {
  const network = randomNetwork({ ...BASE }, true);
  const [source, inputs] = [[1, 2, 3, 4], [0, 5, 6]];
  const embedding = { rows: 7, columns: WIDTH };
  const memory = new MatrixMemory([embedding]);
  const matrix = memory.add(embedding);
  const random = randomNumbers(3);
  for (let row = 0; row < 7; row++) memory.row(matrix, row).forEach((_, i, all) => { all[i] = random(); });
  network.embed = (stack, ids, positions) => Float32Array.from(ids.flatMap((id, at) => {
    const added = network.positionVector(stack, positions[at]);
    return [...memory.row(matrix, id)].map((value, i) => value + added[i]);
  }));
  const logits = network.decode([inputs], network.encode([source])).slice(2 * 7);
  const rows = (ids) => Float32Array.from(ids.flatMap((id) => [...memory.row(matrix, id)]));
  const [value] = new LogitDifference(network, 4, 3, [2, 5]).at({ encoder: rows(source), decoder: rows(inputs) }).values;
  assert.ok(Math.abs(value - (logits[2] - logits[5])) < 1e-5);
});

test("Gauss-Legendre quadrature with n nodes is exact for polynomials of degree 2n - 1", () => {
  for (const count of [1, 2, 3, 16, 64]) {
    const nodes = gaussLegendre(count);
    for (const degree of [0, 1, 2 * count - 2, 2 * count - 1]) {
      const found = nodes.reduce((sum, { node, weight }) => sum + weight * node ** degree, 0);
      assert.ok(Math.abs(found - (degree % 2 ? 0 : 2 / (degree + 1))) < 1e-12, `${count} nodes, degree ${degree}`);
    }
  }
});

function vector(rows, random) {
  return Float32Array.from({ length: rows * WIDTH }, () => 2 * random());
}

function dot(a, b) {
  return a.reduce((sum, one, i) => sum + one * b[i], 0);
}
