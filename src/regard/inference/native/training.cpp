// Kernels for training on a CPU: dropout, attention in packed rows, and cross-entropy. training/cpu_kernels.py calls them.
//
// - Compiled once for each instruction set, with -DREGARD_SET=avx2 or avx512; the exported functions are in the file that
//   is compiled without it.
// - Tensors are float32 or bfloat16; all computation is in float32. Matrix products with weights stay in oneDNN.
// - Dropout masks are hashes of a seed and an index, so the backward pass computes them again instead of storing them.
// - No result depends on the number of threads: each thread computes whole items, which do not overlap.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

namespace regard {

struct AttentionSpec {  // training/cpu_kernels.py has the same structure
  const void *query, *key, *value;          // [position][head][feature], with these strides of positions and heads
  int64_t query_stride, key_stride, value_stride;
  int64_t query_head, key_head, value_head;
  const int32_t *key_start, *key_end;       // [query]: the keys that it attends to
  float* log_sums;                          // [head][query]
  void* output;                             // [position][head][feature], contiguous
  const void* grad_output;                  // the same; only for the backward pass
  void *grad_query, *grad_key, *grad_value;  // contiguous, zero at the start
  int32_t queries, keys, heads, key_features, value_features;
  int32_t bfloat16;
  float scale, dropout;
  uint32_t seed;
};

// Some consecutive queries that attend to keys from the same first key on: those of one text.
struct Group {
  int32_t first_query, queries, first_key, keys;
};

struct CrossEntropySpec {
  void* logits;  // [label][class], or with two passes [pass][label][class]
  bool bfloat16;
  int64_t count, classes;
  const int64_t* labels;
  int64_t pad;  // labels without loss
  float epsilon, rdrop;
  bool two_passes, with_gradient;
  float* losses;  // [label]
};

struct TrainingKernels {
  void (*dropout)(const void* x, void* y, int64_t begin, int64_t end, bool bfloat16, uint32_t seed, float p);
  // Floats that attend and attend_backward need for a group.
  int64_t (*scratch)(const AttentionSpec&, const Group&);
  void (*attend)(const AttentionSpec&, const Group&, int head, float* scratch);
  void (*attend_backward)(const AttentionSpec&, const Group&, int head, float* scratch);
  // Labels begin to end: logits to their gradient, in place, and the loss of each label. scratch: room for two rows.
  void (*cross_entropy)(const CrossEntropySpec&, int64_t begin, int64_t end, float* scratch);
};

extern const TrainingKernels kTraining_avx2, kTraining_avx512;

#ifdef REGARD_SET

namespace {

#define INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;
typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef uint16_t H __attribute__((vector_size(32)));

INLINE int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }
INLINE F all(float x) { return x - F{}; }
INLINE F load(const float* p) {
  F x;
  memcpy(&x, p, sizeof(x));
  return x;
}
INLINE void save(float* p, F x) { memcpy(p, &x, sizeof(x)); }
INLINE F load(const uint16_t* p) {
  H x;
  memcpy(&x, p, sizeof(x));
  return (F)(__builtin_convertvector(x, U) << 16);
}
INLINE void save(uint16_t* p, F x) {  // rounded to the nearest bfloat16, ties to even
  U bits = (U)x;
  H y = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, H);
  memcpy(p, &y, sizeof(y));
}
INLINE float to_float(float x) { return x; }
INLINE float to_float(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, sizeof(y));
  return y;
}
INLINE F maximum(F x, F y) { return x > y ? x : y; }
INLINE F minimum(F x, F y) { return x < y ? x : y; }
INLINE float reduce_add(F x) {
  float sum = 0;
  for (int i = 0; i < kLanes / 2; i++) x[i] += x[i + kLanes / 2];
  for (int i = 0; i < kLanes / 2; i++) sum += x[i];
  return sum;
}
INLINE float reduce_max(F x) {
  float most = x[0];
  for (int i = 1; i < kLanes; i++) most = most > x[i] ? most : x[i];
  return most;
}

INLINE F exponential(F x) {  // relative error below 2e-7; 0 below -87
  const F highest = all(88.0f), lowest = all(-87.0f);
  F inside = minimum(maximum(x, lowest), highest);
  F shifter = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  F n = (inside * 1.44269504f + shifter) - shifter;
  F r = inside - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  F p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  I power = (__builtin_convertvector(n, I) + 127) << 23;
  F y = p * (F)power;
  return x < lowest ? F{} : y;
}

const U kIota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// scale where a value is kept, 0 where it is dropped: a hash (Wellons' lowbias32) of the seed and the index.
INLINE F keep_factors(uint32_t index, uint32_t seed, uint32_t threshold, float scale) {
  U x = (kIota + index) ^ seed;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  x = x ^ (x >> 16);
  return x >= threshold ? all(scale) : F{};
}
INLINE uint32_t to_threshold(float p) { return (uint32_t)((double)p * 4294967296.0); }

template <class T>
void drop(const T* x, T* y, int64_t begin, int64_t end, uint32_t seed, float p) {
  uint32_t threshold = to_threshold(p);
  float scale = 1.0f / (1.0f - p);
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    // The upper half of a long index changes the seed.
    uint32_t high = (uint32_t)((uint64_t)i >> 32) * 0x9e3779b9u;
    save(y + i, load(x + i) * keep_factors((uint32_t)i, seed ^ high, threshold, scale));
  }
  if (i < end) {
    T in[kLanes] = {}, out[kLanes];
    memcpy(in, x + i, (end - i) * sizeof(T));
    uint32_t high = (uint32_t)((uint64_t)i >> 32) * 0x9e3779b9u;
    save(out, load(in) * keep_factors((uint32_t)i, seed ^ high, threshold, scale));
    memcpy(y + i, out, (end - i) * sizeof(T));
  }
}

void dropout(const void* x, void* y, int64_t begin, int64_t end, bool bfloat16, uint32_t seed, float p) {
  if (bfloat16)
    drop((const uint16_t*)x, (uint16_t*)y, begin, end, seed, p);
  else
    drop((const float*)x, (float*)y, begin, end, seed, p);
}

// ---------------------------------------------------------------------------------------------
// Attention

// c[m][n] = sum over k of a[m * am + k * ak] * b[k * n_stride + n], for a block of rows and vectors of n.
template <int ROWS, int VECTORS>
INLINE void multiply_block(const float* a, int64_t am, int64_t ak, int64_t depth, const float* b, int64_t stride,
                           float* c) {
  F sums[ROWS][VECTORS] = {};
  for (int64_t k = 0; k < depth; k++) {
    F right[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) right[v] = load(b + k * stride + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < ROWS; m++) {
      F left = all(a[m * am + k * ak]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) sums[m][v] += left * right[v];
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) save(c + m * stride + v * kLanes, sums[m][v]);
}

// The same for all rows; width, the stride of b and c, is a multiple of 16.
__attribute__((noinline)) void multiply(const float* a, int64_t am, int64_t ak, int64_t rows, int64_t depth,
                                        const float* b, int64_t width, float* c) {
  for (int64_t n = 0; n < width;) {
    int64_t vectors = (width - n) / kLanes;
    int64_t m = 0;
    if (vectors >= 4) {
      for (; m + 4 <= rows; m += 4) multiply_block<4, 4>(a + m * am, am, ak, depth, b + n, width, c + m * width + n);
      for (; m < rows; m++) multiply_block<1, 4>(a + m * am, am, ak, depth, b + n, width, c + m * width + n);
      n += 4 * kLanes;
    } else if (vectors >= 2) {
      for (; m + 6 <= rows; m += 6) multiply_block<6, 2>(a + m * am, am, ak, depth, b + n, width, c + m * width + n);
      for (; m < rows; m++) multiply_block<1, 2>(a + m * am, am, ak, depth, b + n, width, c + m * width + n);
      n += 2 * kLanes;
    } else {
      for (; m + 8 <= rows; m += 8) multiply_block<8, 1>(a + m * am, am, ak, depth, b + n, width, c + m * width + n);
      for (; m < rows; m++) multiply_block<1, 1>(a + m * am, am, ak, depth, b + n, width, c + m * width + n);
      n += kLanes;
    }
  }
}

// Rows of features to floats [row][width], with zeros after the last feature.
template <class T>
void read_rows(const T* x, int64_t stride, int64_t rows, int64_t features, int64_t width, float* y) {
  for (int64_t row = 0; row < rows; row++) {
    const T* from = x + row * stride;
    float* to = y + row * width;
    int64_t i = 0;
    for (; i + kLanes <= features; i += kLanes) save(to + i, load(from + i));
    for (; i < width; i++) to[i] = i < features ? to_float(from[i]) : 0.0f;
  }
}
void read_rows(const AttentionSpec& spec, const void* x, int64_t offset, int64_t stride, int64_t rows, int64_t features,
               int64_t width, float* y) {
  if (spec.bfloat16)
    read_rows((const uint16_t*)x + offset, stride, rows, features, width, y);
  else
    read_rows((const float*)x + offset, stride, rows, features, width, y);
}

template <class T>
void write_rows(const float* x, int64_t width, int64_t rows, int64_t features, T* y, int64_t stride) {
  for (int64_t row = 0; row < rows; row++) {
    const float* from = x + row * width;
    T* to = y + row * stride;
    int64_t i = 0;
    for (; i + kLanes <= features; i += kLanes) save(to + i, load(from + i));
    if (i < features) {
      T rest[kLanes];
      save(rest, load(from + i));
      memcpy(to + i, rest, (features - i) * sizeof(T));
    }
  }
}
void write_rows(const AttentionSpec& spec, const float* x, int64_t width, int64_t rows, int64_t features, void* y,
                int64_t offset, int64_t stride) {
  if (spec.bfloat16)
    write_rows(x, width, rows, features, (uint16_t*)y + offset, stride);
  else
    write_rows(x, width, rows, features, (float*)y + offset, stride);
}

// [rows][width] to [columns][padded], with zeros after the last row.
void transpose(const float* x, int64_t width, int64_t rows, int64_t columns, int64_t padded, float* y) {
  for (int64_t column = 0; column < columns; column++)
    for (int64_t row = 0; row < padded; row++) y[column * padded + row] = row < rows ? x[row * width + column] : 0.0f;
}

struct Sizes {
  int64_t queries, keys, key_width, value_width, padded_keys;
  Sizes(const AttentionSpec& spec, const Group& group)
      : queries(group.queries),
        keys(group.keys),
        key_width(round_up(spec.key_features)),
        value_width(round_up(spec.value_features)),
        padded_keys(round_up(group.keys)) {}
};

int64_t scratch(const AttentionSpec& spec, const Group& group) {
  Sizes s(spec, group);
  int64_t vectors = (s.queries + s.keys) * (2 * s.key_width + 2 * s.value_width);
  return vectors + 3 * s.queries * s.padded_keys + (s.key_width + s.value_width) * s.padded_keys;
}

// A different seed for each head, and the index of the first key of a query.
INLINE uint32_t head_seed(const AttentionSpec& spec, int head) { return spec.seed + 0x9e3779b9u * (uint32_t)(head + 1); }
INLINE uint32_t first_index(const Group& group, const Sizes& s, int64_t query) {
  return (uint32_t)(group.first_query + query) * 2654435761u;
}

void attend(const AttentionSpec& spec, const Group& group, int head, float* memory) {
  Sizes s(spec, group);
  float* query = memory;
  float* key = query + s.queries * s.key_width;
  float* value = key + s.keys * s.key_width;
  float* output = value + s.keys * s.value_width;
  float* key_t = output + s.queries * s.value_width;
  float* weights = key_t + s.key_width * s.padded_keys;
  read_rows(spec, spec.query, group.first_query * spec.query_stride + head * spec.query_head, spec.query_stride,
            s.queries, spec.key_features, s.key_width, query);
  read_rows(spec, spec.key, group.first_key * spec.key_stride + head * spec.key_head, spec.key_stride, s.keys,
            spec.key_features, s.key_width, key);
  read_rows(spec, spec.value, group.first_key * spec.value_stride + head * spec.value_head, spec.value_stride, s.keys,
            spec.value_features, s.value_width, value);
  transpose(key, s.key_width, s.keys, spec.key_features, s.padded_keys, key_t);
  multiply(query, s.key_width, 1, s.queries, spec.key_features, key_t, s.padded_keys, weights);
  uint32_t seed = head_seed(spec, head), threshold = to_threshold(spec.dropout);
  float kept = 1.0f / (1.0f - spec.dropout);
  for (int64_t i = 0; i < s.queries; i++) {
    float* row = weights + i * s.padded_keys;
    int64_t count = spec.key_end[group.first_query + i] - group.first_key;
    F most = all(-INFINITY);
    for (int64_t k = 0; k < s.padded_keys; k += kLanes) {
      I index = (I)kIota + (int32_t)k;
      F score = index < (int32_t)count ? load(row + k) * spec.scale : all(-INFINITY);
      save(row + k, score);
      most = maximum(most, score);
    }
    float highest = reduce_max(most);
    F sums = {};
    for (int64_t k = 0; k < s.padded_keys; k += kLanes) {
      F weight = exponential(load(row + k) - highest);
      save(row + k, weight);
      sums += weight;
    }
    float sum = reduce_add(sums);
    spec.log_sums[(int64_t)head * spec.queries + group.first_query + i] = highest + logf(sum);
    float inverse = 1.0f / sum;
    uint32_t start = first_index(group, s, i);
    for (int64_t k = 0; k < s.padded_keys; k += kLanes) {
      F weight = load(row + k) * inverse;
      if (spec.dropout > 0) weight *= keep_factors(start + (uint32_t)k, seed, threshold, kept);
      save(row + k, weight);
    }
  }
  multiply(weights, s.padded_keys, 1, s.queries, s.keys, value, s.value_width, output);
  int64_t stride = (int64_t)spec.heads * spec.value_features;
  write_rows(spec, output, s.value_width, s.queries, spec.value_features, spec.output,
             group.first_query * stride + head * spec.value_features, stride);
}

void attend_backward(const AttentionSpec& spec, const Group& group, int head, float* memory) {
  Sizes s(spec, group);
  float* query = memory;
  float* key = query + s.queries * s.key_width;
  float* value = key + s.keys * s.key_width;
  float* grad_output = value + s.keys * s.value_width;
  float* key_t = grad_output + s.queries * s.value_width;
  float* value_t = key_t + s.key_width * s.padded_keys;
  float* weights = value_t + s.value_width * s.padded_keys;
  float* dropped = weights + s.queries * s.padded_keys;
  float* grads = dropped + s.queries * s.padded_keys;
  float* result = grads + s.queries * s.padded_keys;  // of (queries or keys) x (key or value width)
  int64_t out_stride = (int64_t)spec.heads * spec.value_features;
  int64_t out_offset = group.first_query * out_stride + head * spec.value_features;
  read_rows(spec, spec.query, group.first_query * spec.query_stride + head * spec.query_head, spec.query_stride,
            s.queries, spec.key_features, s.key_width, query);
  read_rows(spec, spec.key, group.first_key * spec.key_stride + head * spec.key_head, spec.key_stride, s.keys,
            spec.key_features, s.key_width, key);
  read_rows(spec, spec.value, group.first_key * spec.value_stride + head * spec.value_head, spec.value_stride, s.keys,
            spec.value_features, s.value_width, value);
  read_rows(spec, spec.grad_output, out_offset, out_stride, s.queries, spec.value_features, s.value_width, grad_output);
  transpose(key, s.key_width, s.keys, spec.key_features, s.padded_keys, key_t);
  transpose(value, s.value_width, s.keys, spec.value_features, s.padded_keys, value_t);
  multiply(query, s.key_width, 1, s.queries, spec.key_features, key_t, s.padded_keys, weights);
  multiply(grad_output, s.value_width, 1, s.queries, spec.value_features, value_t, s.padded_keys, grads);
  uint32_t seed = head_seed(spec, head), threshold = to_threshold(spec.dropout);
  float kept = 1.0f / (1.0f - spec.dropout);
  for (int64_t i = 0; i < s.queries; i++) {
    float *weight_row = weights + i * s.padded_keys, *dropped_row = dropped + i * s.padded_keys;
    float* grad_row = grads + i * s.padded_keys;
    int64_t count = spec.key_end[group.first_query + i] - group.first_key;
    float log_sum = spec.log_sums[(int64_t)head * spec.queries + group.first_query + i];
    uint32_t start = first_index(group, s, i);
    F products = {};
    for (int64_t k = 0; k < s.padded_keys; k += kLanes) {
      I index = (I)kIota + (int32_t)k;
      F weight = index < (int32_t)count ? exponential(load(weight_row + k) * spec.scale - log_sum) : F{};
      F factors = spec.dropout > 0 ? keep_factors(start + (uint32_t)k, seed, threshold, kept) : all(1.0f);
      F grad = load(grad_row + k) * factors;
      save(dropped_row + k, weight * factors);
      save(weight_row + k, weight);
      save(grad_row + k, grad);
      products += grad * weight;
    }
    float mean = reduce_add(products);
    for (int64_t k = 0; k < s.padded_keys; k += kLanes)
      save(grad_row + k, load(weight_row + k) * (load(grad_row + k) - mean) * spec.scale);
  }
  int64_t key_stride = (int64_t)spec.heads * spec.key_features, head_key = (int64_t)head * spec.key_features;
  multiply(grads, s.padded_keys, 1, s.queries, s.keys, key, s.key_width, result);
  write_rows(spec, result, s.key_width, s.queries, spec.key_features, spec.grad_query,
             group.first_query * key_stride + head_key, key_stride);
  multiply(grads, 1, s.padded_keys, s.keys, s.queries, query, s.key_width, result);
  write_rows(spec, result, s.key_width, s.keys, spec.key_features, spec.grad_key,
             group.first_key * key_stride + head_key, key_stride);
  multiply(dropped, 1, s.padded_keys, s.keys, s.queries, grad_output, s.value_width, result);
  write_rows(spec, result, s.value_width, s.keys, spec.value_features, spec.grad_value,
             group.first_key * out_stride + head * spec.value_features, out_stride);
}

// ---------------------------------------------------------------------------------------------
// Cross-entropy

// The sums over a row of logits that its loss needs; exps gets the exponentials of logits - highest.
struct RowSums {
  float log_sum, sum, total;  // log sum exp; sum of exps; sum of the logits
};

template <class T>
RowSums sum_row(const T* logits, int64_t classes, float* exps) {
  F most = all(-INFINITY), totals = {};
  int64_t whole = classes / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    F x = load(logits + i);
    most = maximum(most, x);
    totals += x;
  }
  float highest = reduce_max(most), total = reduce_add(totals);
  for (int64_t i = whole; i < classes; i++) {
    float x = to_float(logits[i]);
    highest = highest > x ? highest : x;
    total += x;
  }
  F sums = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    F e = exponential(load(logits + i) - highest);
    save(exps + i, e);
    sums += e;
  }
  float sum = reduce_add(sums);
  if (whole < classes) {
    float rest[kLanes];
    for (int i = 0; i < kLanes; i++) rest[i] = whole + i < classes ? to_float(logits[whole + i]) : -INFINITY;
    F e = exponential(load(rest) - highest);
    save(exps + whole, e);
    sum += reduce_add(e);
  }
  return {highest + logf(sum), sum, total};
}

// Cross-entropy with label smoothing; the gradient is softmax minus the smoothed label.
template <class T>
float cross_entropy_row(const CrossEntropySpec& spec, T* logits, int64_t label, float* exps) {
  int64_t classes = spec.classes, whole = classes / kLanes * kLanes;
  RowSums s = sum_row(logits, classes, exps);
  float correct = to_float(logits[label]) - s.log_sum, mean = s.total / classes - s.log_sum;
  if (spec.with_gradient) {
    exps[label] -= (1.0f - spec.epsilon) * s.sum;
    float inverse = 1.0f / s.sum, spread = spec.epsilon / classes;
    for (int64_t i = 0; i < whole; i += kLanes) save(logits + i, load(exps + i) * inverse - spread);
    if (whole < classes) {
      T rest[kLanes];
      save(rest, load(exps + whole) * inverse - spread);
      memcpy(logits + whole, rest, (classes - whole) * sizeof(T));
    }
  }
  return -((1.0f - spec.epsilon) * correct + spec.epsilon * mean);
}

// The same with R-Drop: the mean over two passes a and b, and their divergence; see nn/loss.py for the formulas.
template <class T>
float rdrop_row(const CrossEntropySpec& spec, T* a, T* b, int64_t label, float* p, float* q) {
  int64_t classes = spec.classes, whole = classes / kLanes * kLanes;
  RowSums s = sum_row(a, classes, p), t = sum_row(b, classes, q);
  float scale_p = 1.0f / s.sum, scale_q = 1.0f / t.sum, shift = t.log_sum - s.log_sum;
  F pq = {}, qp = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    F ratio = load(a + i) - load(b + i) + shift;
    pq += load(p + i) * ratio;
    qp -= load(q + i) * ratio;
  }
  float kl_pq = reduce_add(pq), kl_qp = reduce_add(qp);
  for (int64_t i = whole; i < classes; i++) {
    float ratio = to_float(a[i]) - to_float(b[i]) + shift;
    kl_pq += p[i] * ratio;
    kl_qp -= q[i] * ratio;
  }
  kl_pq *= scale_p;
  kl_qp *= scale_q;
  float correct = to_float(a[label]) - s.log_sum + to_float(b[label]) - t.log_sum;
  float mean = (s.total + t.total) / classes - s.log_sum - t.log_sum;
  if (spec.with_gradient) {
    float weight = 0.25f * spec.rdrop, spread = 0.5f * spec.epsilon / classes, hit = 0.5f * (1.0f - spec.epsilon);
    for (int64_t i = 0; i < classes; i += kLanes) {
      T x[kLanes] = {}, y[kLanes] = {};
      int64_t size = (classes - i < kLanes ? classes - i : kLanes) * sizeof(T);
      memcpy(x, a + i, size);
      memcpy(y, b + i, size);
      F ratio = load(x) - load(y) + shift;
      F first = load(p + i) * scale_p, second = load(q + i) * scale_q, difference = first - second;
      F one = first * 0.5f - spread + (first * (ratio - kl_pq) + difference) * weight;
      F two = second * 0.5f - spread - (second * (ratio + kl_qp) + difference) * weight;
      F at_label = (I)kIota + (int32_t)i == (int32_t)label ? all(hit) : F{};
      save(x, one - at_label);
      save(y, two - at_label);
      memcpy(a + i, x, size);
      memcpy(b + i, y, size);
    }
  }
  return -0.5f * ((1.0f - spec.epsilon) * correct + spec.epsilon * mean) + 0.25f * spec.rdrop * (kl_pq + kl_qp);
}

template <class T>
void cross_entropy_rows(const CrossEntropySpec& spec, T* logits, int64_t begin, int64_t end, float* scratch) {
  int64_t classes = spec.classes, passes = spec.two_passes ? 2 : 1;
  for (int64_t row = begin; row < end; row++) {
    T *one = logits + row * classes, *two = one + spec.count * classes;
    if (spec.labels[row] == spec.pad) {
      spec.losses[row] = 0;
      for (int64_t pass = 0; pass < passes && spec.with_gradient; pass++)
        memset(pass ? two : one, 0, classes * sizeof(T));
    } else if (spec.two_passes) {
      spec.losses[row] = rdrop_row(spec, one, two, spec.labels[row], scratch, scratch + round_up(classes));
    } else {
      spec.losses[row] = cross_entropy_row(spec, one, spec.labels[row], scratch);
    }
  }
}

void cross_entropy(const CrossEntropySpec& spec, int64_t begin, int64_t end, float* scratch) {
  if (spec.bfloat16)
    cross_entropy_rows(spec, (uint16_t*)spec.logits, begin, end, scratch);
  else
    cross_entropy_rows(spec, (float*)spec.logits, begin, end, scratch);
}

}  // namespace

#define JOIN(a, b) a##b
#define NAME(set) JOIN(kTraining_, set)
extern const TrainingKernels NAME(REGARD_SET) = {dropout, scratch, attend, attend_backward, cross_entropy};

#endif  // REGARD_SET

}  // namespace regard

#ifndef REGARD_SET

#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "threads.h"

using namespace regard;

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const TrainingKernels& kernels() {
  static const TrainingKernels& best =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512vl")
          ? kTraining_avx512
          : kTraining_avx2;
  return best;
}

// The helpers of a thread of the program. They end with it, except in a forked process, which does not have them.
struct Helpers {
  Team* team = nullptr;
  pid_t owner = 0;
  ~Helpers() {
    if (team && owner == getpid()) delete team;
  }
  Team& of_size(int size) {
    if (!team || owner != getpid() || team->size() != size) {
      if (team && owner == getpid()) delete team;
      team = new Team(size);
      owner = getpid();
    }
    return *team;
  }
};
thread_local Helpers helpers;

// Calls function(begin, end) for parts of 0 … count, each a multiple of step, in up to this many threads.
template <class Function>
void in_parallel(int64_t count, int64_t step, int threads, const Function& function) {
  int64_t steps = (count + step - 1) / step;
  int64_t used = steps < threads ? steps : threads;
  if (used <= 1) {
    if (count) function(0, count);
    return;
  }
  auto bound = [&](int64_t part) { return part == used ? count : steps * part / used * step; };
  helpers.of_size(threads).run((int)used, [&](int part) { function(bound(part), bound(part + 1)); });
}

struct FreeMemory {
  void operator()(float* p) const { free(p); }
};
std::unique_ptr<float, FreeMemory> floats(int64_t count) {
  return std::unique_ptr<float, FreeMemory>((float*)aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
}

// The groups of queries of a packed row. Padding, which attends to nothing, is in no group.
std::vector<Group> find_groups(const AttentionSpec& spec) {
  std::vector<Group> groups;
  for (int32_t query = 0; query < spec.queries; query++) {
    int32_t start = spec.key_start[query], keys = spec.key_end[query] - start;
    if (keys <= 0) continue;
    Group* last = groups.empty() ? nullptr : &groups.back();
    if (last && last->first_key == start && last->first_query + last->queries == query) {
      last->queries++;
      last->keys = last->keys > keys ? last->keys : keys;
    } else {
      groups.push_back({query, 1, start, keys});
    }
  }
  return groups;
}

template <class Function>
void for_groups(const AttentionSpec& spec, int threads, const Function& function) {
  std::vector<Group> groups = find_groups(spec);
  int64_t most = 0;
  for (const Group& group : groups) {
    int64_t needed = kernels().scratch(spec, group);
    most = most > needed ? most : needed;
  }
  std::atomic<size_t> next{0};
  in_parallel(threads, 1, threads, [&](int64_t begin, int64_t end) {
    auto memory = floats(most);
    for (size_t item; (item = next++) < groups.size() * spec.heads;)
      function(groups[item / spec.heads], (int)(item % spec.heads), memory.get());
  });
}

}  // namespace

EXPORT void regard_dropout(const void* x, void* y, int64_t count, int32_t bfloat16, uint32_t seed, float p,
                           int32_t threads) {
  in_parallel(count, 1 << 17, threads, [&](int64_t begin, int64_t end) {
    kernels().dropout(x, y, begin, end, bfloat16, seed, p);
  });
}

EXPORT void regard_attention(const AttentionSpec* spec, int32_t threads) {
  for_groups(*spec, threads, [&](const Group& group, int head, float* memory) {
    kernels().attend(*spec, group, head, memory);
  });
}

EXPORT void regard_attention_backward(const AttentionSpec* spec, int32_t threads) {
  for_groups(*spec, threads, [&](const Group& group, int head, float* memory) {
    kernels().attend_backward(*spec, group, head, memory);
  });
}

EXPORT void regard_cross_entropy(void* logits, int32_t bfloat16, int64_t count, int64_t classes, const int64_t* labels,
                                 int64_t pad, float epsilon, float rdrop, int32_t two_passes, int32_t with_gradient,
                                 float* losses, int32_t threads) {
  CrossEntropySpec spec = {logits,  bfloat16 != 0, count, classes,         labels,
                           pad,     epsilon,       rdrop, two_passes != 0, with_gradient != 0,
                           losses};
  in_parallel(count, 1, threads, [&](int64_t begin, int64_t end) {
    auto scratch = floats(2 * (classes + 16));
    kernels().cross_entropy(spec, begin, end, scratch.get());
  });
}

#endif
