/**
 * The random numbers of sampling, as numpy and torch compute them, so that a seed gives the same sample as in Python.
 */

/**
 * The seed of a sample: numpy's SeedSequence of the seed, the number of the sample and the source ids.
 *
 * @param {number} seed
 * @param {number[]} source
 */
export function sampleSeed(seed, source) {
  const high = Math.floor(seed / 2 ** 32); // numbers from 2^32 on are two words
  const entropy = [...(high ? [seed % 2 ** 32, high] : [seed]), 0, ...source];
  return seedSequence(entropy);
}

/** @param {number[]} entropy @returns {number} the first word of the state */
function seedSequence(entropy) {
  let constant = 0x43b0d7e5;
  /** @param {number} value */
  const hash = (value) => {
    let mixed = (value ^ constant) >>> 0;
    constant = Math.imul(constant, 0x931e8875) >>> 0;
    mixed = Math.imul(mixed, constant) >>> 0;
    return (mixed ^ (mixed >>> 16)) >>> 0;
  };
  /** @param {number} x @param {number} y */
  const mix = (x, y) => {
    const result = (Math.imul(0xca01f9dd, x) - Math.imul(0x4973f715, y)) >>> 0;
    return (result ^ (result >>> 16)) >>> 0;
  };
  const pool = [0, 1, 2, 3].map((i) => hash(entropy[i] ?? 0));
  for (let from = 0; from < 4; from++) {
    for (let to = 0; to < 4; to++) if (from !== to) pool[to] = mix(pool[to], hash(pool[from]));
  }
  for (const word of entropy.slice(4)) {
    for (let to = 0; to < 4; to++) pool[to] = mix(pool[to], hash(word));
  }
  let value = (pool[0] ^ 0x8b51f9dd) >>> 0;
  value = Math.imul(value, Math.imul(0x8b51f9dd, 0x58f38ded)) >>> 0;
  return (value ^ (value >>> 16)) >>> 0;
}

const [SIZE, MIDDLE] = [624, 397];

/**
 * Numbers from 0 to 1 with 53 random bits: the Mersenne Twister of torch's CPU generator.
 *
 * @param {number} seed
 * @returns {() => number}
 */
export function uniformNumbers(seed) {
  const state = new Uint32Array(SIZE);
  state[0] = seed;
  for (let i = 1; i < SIZE; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
  let next = SIZE;
  const refill = () => {
    for (let i = 0; i < SIZE; i++) {
      const bits = (state[i] & 0x80000000) | (state[(i + 1) % SIZE] & 0x7fffffff);
      state[i] = state[(i + MIDDLE) % SIZE] ^ (bits >>> 1) ^ (bits & 1 ? 0x9908b0df : 0);
    }
    next = 0;
  };
  const word = () => {
    if (next === SIZE) refill();
    let value = state[next++];
    value ^= value >>> 11;
    value ^= (value << 7) & 0x9d2c5680;
    value ^= (value << 15) & 0xefc60000;
    return (value ^ (value >>> 18)) >>> 0;
  };
  return () => {
    const [upper, lower] = [word(), word()];
    return ((upper & 0x1fffff) * 2 ** 32 + lower) / 2 ** 53;
  };
}
