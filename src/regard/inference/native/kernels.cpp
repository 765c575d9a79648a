// See kernels.h. Compile with -DREGARD_AVX2, -DREGARD_AVX512 or -DREGARD_AMX and the options of that instruction set.
// Only plain functions here, no templates of the standard library: the linker would merge their instances, and the
// code for one instruction set would run on a CPU that lacks it.

#include "kernels.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

namespace regard {
namespace {

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
// Loops over arrays of vectors are unrolled, so that the arrays are in registers.
#define UNROLL _Pragma("GCC unroll 32")

// ---------------------------------------------------------------------------------------------
// Vectors of 16 floats or 16 sums of 8-bit products

#ifdef REGARD_AVX2

constexpr int kRegisters = 16;
constexpr int kLevels = 127;  // vpmaddubsw adds two products in 16 bits

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void save(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
INLINE F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F absolute(F x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
INLINE F copy_sign(F x, F y) {  // |x| with the sign of y
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(sign, x.a), _mm256_and_ps(sign, y.a)),
          _mm256_or_ps(_mm256_andnot_ps(sign, x.b), _mm256_and_ps(sign, y.b))};
}
INLINE uint32_t at_least(F x, F y) {  // a bit for each lane with x >= y
  return _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ)) |
         _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)) << 8;
}
INLINE __m256 mask_half(uint32_t mask, int shift) {
  __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i here = _mm256_and_si256(_mm256_set1_epi32(mask >> shift), bits);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(here, bits));
}
INLINE F where(uint32_t mask, F x, F y) {
  return {_mm256_blendv_ps(y.a, x.a, mask_half(mask, 0)), _mm256_blendv_ps(y.b, x.b, mask_half(mask, 8))};
}
INLINE float reduce_add(F x) {
  __m256 y = _mm256_add_ps(x.a, x.b);
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
}
INLINE float reduce_max(F x) {
  __m256 y = _mm256_max_ps(x.a, x.b);
  __m128 z = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_max_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_max_ss(z, _mm_shuffle_ps(z, z, 1)));
}
INLINE F rounded(F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
INLINE __m256 power_of_2(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE F times_power_of_2(F x, F n) {
  return {_mm256_mul_ps(x.a, power_of_2(n.a)), _mm256_mul_ps(x.b, power_of_2(n.b))};
}
INLINE F from_half(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
INLINE void save_half(Half* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, 0));
}
INLINE F from_int8(const int8_t* p) {
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
INLINE void save_quantized(uint8_t* p, F x) {  // x: quantized, not yet rounded and clipped
  __m256i high = _mm256_set1_epi32(kLevels);
  __m256i a = _mm256_min_epi32(_mm256_cvtps_epi32(x.a), high), b = _mm256_min_epi32(_mm256_cvtps_epi32(x.b), high);
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)p, bytes);
}
INLINE I no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
INLINE I load_weights(const int8_t* p) {
  return {_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)p + 1)};
}
INLINE I broadcast(const uint8_t* p) {
  int four;
  memcpy(&four, p, 4);
  __m256i x = _mm256_set1_epi32(four);
  return {x, x};
}
INLINE __m256i dot(__m256i sum, __m256i input, __m256i weight) {
  __m256i pairs = _mm256_maddubs_epi16(input, weight);
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE I dot(I sum, I input, I weight) { return {dot(sum.a, input.a, weight.a), dot(sum.b, input.b, weight.b)}; }
INLINE I load_sums(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
INLINE void save_sums(int32_t* p, I x) {
  _mm256_store_si256((__m256i*)p, x.a);
  _mm256_store_si256((__m256i*)p + 1, x.b);
}
INLINE I operator-(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
INLINE I times(I x, int y) {
  return {_mm256_mullo_epi32(x.a, _mm256_set1_epi32(y)), _mm256_mullo_epi32(x.b, _mm256_set1_epi32(y))};
}
INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

#else  // AVX-512

constexpr int kRegisters = 32;
constexpr int kLevels = 255;

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void save(float* p, F x) { _mm512_storeu_ps(p, x.v); }
INLINE F all(float x) { return {_mm512_set1_ps(x)}; }
INLINE F operator+(F x, F y) { return {_mm512_add_ps(x.v, y.v)}; }
INLINE F operator-(F x, F y) { return {_mm512_sub_ps(x.v, y.v)}; }
INLINE F operator*(F x, F y) { return {_mm512_mul_ps(x.v, y.v)}; }
INLINE F operator/(F x, F y) { return {_mm512_div_ps(x.v, y.v)}; }
INLINE F fma(F x, F y, F z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
INLINE F max(F x, F y) { return {_mm512_max_ps(x.v, y.v)}; }
INLINE F min(F x, F y) { return {_mm512_min_ps(x.v, y.v)}; }
INLINE F absolute(F x) { return {_mm512_abs_ps(x.v)}; }
INLINE F copy_sign(F x, F y) {  // |x| with the sign of y
  __m512 sign = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(sign, x.v), _mm512_and_ps(sign, y.v))};
}
INLINE uint32_t at_least(F x, F y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_GE_OQ); }
INLINE F where(uint32_t mask, F x, F y) { return {_mm512_mask_blend_ps((__mmask16)mask, y.v, x.v)}; }
INLINE float reduce_add(F x) { return _mm512_reduce_add_ps(x.v); }
INLINE float reduce_max(F x) { return _mm512_reduce_max_ps(x.v); }
INLINE F rounded(F x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
INLINE F times_power_of_2(F x, F n) { return {_mm512_scalef_ps(x.v, n.v)}; }
INLINE F from_half(const Half* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
INLINE void save_half(Half* p, F x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE F from_int8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
INLINE void save_quantized(uint8_t* p, F x) {  // x: quantized, not yet rounded and clipped
  __m512i integers = _mm512_max_epi32(_mm512_cvtps_epi32(x.v), _mm512_setzero_si512());
  _mm_storeu_si128((__m128i*)p, _mm512_cvtusepi32_epi8(integers));
}
INLINE I no_sums() { return {_mm512_setzero_si512()}; }
INLINE I load_weights(const int8_t* p) { return {_mm512_load_si512(p)}; }
INLINE I broadcast(const uint8_t* p) {
  int four;
  memcpy(&four, p, 4);
  return {_mm512_set1_epi32(four)};
}
INLINE I dot(I sum, I input, I weight) { return {_mm512_dpbusd_epi32(sum.v, input.v, weight.v)}; }
INLINE I load_sums(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
INLINE void save_sums(int32_t* p, I x) { _mm512_store_si512(p, x.v); }
INLINE I operator-(I x, I y) { return {_mm512_sub_epi32(x.v, y.v)}; }
INLINE I times(I x, int y) { return {_mm512_mullo_epi32(x.v, _mm512_set1_epi32(y))}; }
INLINE F to_float(I x) { return {_mm512_cvtepi32_ps(x.v)}; }

#endif

INLINE F quantized(F x, const Quantization& range) { return fma(x, all(range.inverse), all((float)range.zero_point)); }

// e to the x, with a relative error of about 1e-7; 0 below -87.
INLINE F exponential(F x) {
  F y = max(x, all(-87.3f));
  y = min(y, all(88.0f));
  F n = rounded(y * all(1.44269504f));
  F r = fma(n, all(-0.693359375f), y);
  r = fma(n, all(2.12194440e-4f), r);
  F p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r + all(1.0f));
  return where(at_least(x, all(-87.3f)), times_power_of_2(p, n), all(0.0f));
}

// The error function, with an absolute error below 2e-7 (Abramowitz and Stegun, formula 7.1.26).
INLINE F error_function(F x) {
  F size = absolute(x);
  F t = all(1.0f) / fma(size, all(0.3275911f), all(1.0f));
  F p = all(1.061405429f);
  p = fma(p, t, all(-1.453152027f));
  p = fma(p, t, all(1.421413741f));
  p = fma(p, t, all(-0.284496736f));
  p = fma(p, t, all(0.254829592f));
  F y = all(1.0f) - p * t * exponential(all(0.0f) - size * size);
  return copy_sign(y, x);
}

INLINE F swish(F x) { return x / (all(1.0f) + exponential(all(0.0f) - x)); }

INLINE F activate(F x, int activation) {
  if (activation == kRelu) return max(x, all(0.0f));
  if (activation == kGelu) return all(0.5f) * x * (all(1.0f) + error_function(x * all(0.70710678f)));
  if (activation == kSwish) return swish(x);
  return x;
}

// ---------------------------------------------------------------------------------------------
// Matrix products

// What is done with the sums of a block of 16 outputs.
struct Finish {
  F scale, bias;
  I correction;  // what the zero point of the inputs adds to the sums

  INLINE Finish(const Linear& linear, const Quantization& range, int block) {
    scale = load(linear.scale + block * kLanes) * all(range.scale);
    bias = load(linear.bias + block * kLanes);
    correction = times(load_sums(linear.sums + block * kLanes), range.zero_point);
  }

  INLINE F operator()(I sums) const { return fma(to_float(sums - correction), scale, bias); }
};

// Finish the sums of some rows of one block. distance: from the sums of one row to those of the next.
template <class Store>
INLINE void finish_rows(const int32_t* sums, int distance, int row, int rows, const Finish& finish, Store store) {
  for (int r = 0; r < rows; ++r) store(finish(load_sums(sums + r * distance)), row + r);
}

void finish_block(const int32_t* sums, int distance, int row, int rows, int block, const Linear& linear,
                  const Quantization& range, const Output& output) {
  const Finish finish(linear, range, block);
  const int column = block * kLanes, activation = output.activation;
  if (output.q) {
    const Quantization to = output.range;
    uint8_t* q = output.q + column;
    const int64_t stride = output.q_stride;
    if (activation == kRelu)
      finish_rows(sums, distance, row, rows, finish, [=](F y, int at) INLINE_LAMBDA {
        save_quantized(q + at * stride, quantized(max(y, all(0.0f)), to));
      });
    else
      finish_rows(sums, distance, row, rows, finish, [=](F y, int at) INLINE_LAMBDA {
        save_quantized(q + at * stride, quantized(activate(y, activation), to));
      });
    return;
  }
  float* to = output.y + column;
  const int64_t stride = output.y_stride;
  if (output.add)
    finish_rows(sums, distance, row, rows, finish,
                [=](F y, int at) INLINE_LAMBDA { save(to + at * stride, load(to + at * stride) + y); });
  else
    finish_rows(sums, distance, row, rows, finish,
                [=](F y, int at) INLINE_LAMBDA { save(to + at * stride, activate(y, activation)); });
}

// ROWS rows of inputs times BLOCKS blocks of weights, all sums in registers.
template <int ROWS, int BLOCKS>
INLINE void multiply_tile(const uint8_t* input, int64_t stride, int row, const Linear& linear, const int8_t* weight,
                          int block, const int8_t* next, const Quantization& range, const Output& output) {
  const int64_t block_size = (int64_t)linear.padded_inputs * kLanes;
  I sums[ROWS][BLOCKS];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int b = 0; b < BLOCKS; ++b) sums[r][b] = no_sums();
  // Pointers to every third row: with more of them, general registers would run out.
  const uint8_t* x[(ROWS + 2) / 3];
  UNROLL for (int r = 0; r < ROWS; r += 3) x[r / 3] = input + (row + r) * stride;
  for (int k = 0; k < linear.inputs; k += 4) {
    I weights[BLOCKS];
    UNROLL for (int b = 0; b < BLOCKS; ++b) weights[b] = load_weights(weight + b * block_size);
    if (next) {
      UNROLL for (int b = 0; b < BLOCKS; ++b) _mm_prefetch((const char*)(next + b * block_size), _MM_HINT_T1);
      next += 4 * kLanes;
    }
    UNROLL for (int r = 0; r < ROWS; ++r) {
      I inputs = broadcast(x[r / 3] + r % 3 * stride);
      UNROLL for (int b = 0; b < BLOCKS; ++b) sums[r][b] = dot(sums[r][b], inputs, weights[b]);
    }
    weight += 4 * kLanes;
    UNROLL for (int r = 0; r < ROWS; r += 3) x[r / 3] += 4;
  }
  // Through memory: with the sums in registers, the code that follows would be as long as there are sums.
  alignas(64) int32_t result[ROWS][BLOCKS][kLanes];
  UNROLL for (int r = 0; r < ROWS; ++r)
    UNROLL for (int b = 0; b < BLOCKS; ++b) save_sums(result[r][b], sums[r][b]);
  for (int b = 0; b < BLOCKS; ++b)
    finish_block(result[0][b], BLOCKS * kLanes, row, ROWS, block + b, linear, range, output);
}

#ifdef REGARD_AVX2
constexpr int kMaxRows = 4, kBlocks = 1;
#else
constexpr int kMaxRows = 12, kBlocks = 2;
#endif

template <int ROWS, int BLOCKS>
void multiply_rows(const uint8_t* input, int stride, int row, const Linear& linear, const int8_t* weight, int block,
                   const int8_t* next, const Quantization& range, const Output& output) {
  multiply_tile<ROWS, BLOCKS>(input, stride, row, linear, weight, block, next, range, output);
}

using MultiplyRows = void (*)(const uint8_t*, int, int, const Linear&, const int8_t*, int, const int8_t*,
                              const Quantization&, const Output&);

template <int BLOCKS>
MultiplyRows rows_kernel(int rows) {
  switch (rows) {
    case 1: return multiply_rows<1, BLOCKS>;
    case 2: return multiply_rows<2, BLOCKS>;
    case 3: return multiply_rows<3, BLOCKS>;
    case 4: return multiply_rows<4, BLOCKS>;
#ifndef REGARD_AVX2
    case 5: return multiply_rows<5, BLOCKS>;
    case 6: return multiply_rows<6, BLOCKS>;
    case 7: return multiply_rows<7, BLOCKS>;
    case 8: return multiply_rows<8, BLOCKS>;
    case 9: return multiply_rows<9, BLOCKS>;
    case 10: return multiply_rows<10, BLOCKS>;
    case 11: return multiply_rows<11, BLOCKS>;
    default: return multiply_rows<12, BLOCKS>;
#else
    default: return multiply_rows<4, BLOCKS>;
#endif
  }
}

template <int BLOCKS>
INLINE int multiply_blocks(const uint8_t* input, int stride, int rows, const Linear& linear, const Quantization& range,
                           int block, int end, const Output& output) {
  const int64_t block_size = (int64_t)linear.padded_inputs * kLanes;
  // Tiles of equal height, as far as possible.
  const int tiles = (rows + kMaxRows - 1) / kMaxRows;
  for (; block + BLOCKS <= end; block += BLOCKS) {
    const int8_t* weight = linear.weight + block * block_size;
    const int8_t* next = block + 2 * BLOCKS <= end ? weight + BLOCKS * block_size : nullptr;
    for (int tile = 0, row = 0; tile < tiles; ++tile) {
      int height = (rows - row + tiles - tile - 1) / (tiles - tile);
      rows_kernel<BLOCKS>(height)(input, stride, row, linear, weight, block, tile == 0 ? next : nullptr, range, output);
      row += height;
    }
  }
  return block;
}

void multiply_vectors(const uint8_t* input, int stride, int rows, const Linear& linear, const Quantization& range,
                      int begin, int end, const Output& output) {
  int block = begin;
#ifndef REGARD_AVX2
  if (rows <= 6) block = multiply_blocks<4>(input, stride, rows, linear, range, block, end, output);
  block = multiply_blocks<kBlocks>(input, stride, rows, linear, range, block, end, output);
#endif
  multiply_blocks<1>(input, stride, rows, linear, range, block, end, output);
}

#ifdef REGARD_AMX

// Tiles: 0 to 3 have sums of 2 x 2 blocks of 16 rows and 16 outputs, 4 and 5 inputs, 6 and 7 weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig kTileConfig;

constexpr int kMinTileRows = 3;  // with fewer rows, most of a tile would be empty

// Fetch what the next two blocks need at this step into the cache.
INLINE void prefetch_blocks(const int8_t* next, int64_t block_size, int k) {
  for (int line = 0; line < 1024; line += 64) {
    _mm_prefetch((const char*)(next + k * 1024 + line), _MM_HINT_T1);
    _mm_prefetch((const char*)(next + block_size + k * 1024 + line), _MM_HINT_T1);
  }
}

void multiply(const uint8_t* input, int stride, int rows, const Linear& linear, const Quantization& range, int begin,
              int end, const Output& output) {
  if (rows < kMinTileRows) return multiply_vectors(input, stride, rows, linear, range, begin, end, output);
  _tile_loadconfig(&kTileConfig);
  alignas(64) int32_t sums[4][256];
  const int64_t block_size = (int64_t)linear.padded_inputs * kLanes;
  const int steps = linear.padded_inputs / 64;
  for (int block = begin; block < end; block += 2) {
    const bool two_blocks = block + 1 < end;
    const int8_t* w0 = linear.weight + block * block_size;
    const int8_t* w1 = two_blocks ? w0 + block_size : w0;
    for (int row = 0; row < rows; row += 32) {
      const int8_t* next = row == 0 && block + 4 <= end ? w0 + 2 * block_size : nullptr;
      const uint8_t* x0 = input + (int64_t)row * stride;
      const uint8_t* x1 = x0 + (int64_t)16 * stride;
      const bool two_rows = row + 16 < rows;
      _tile_zero(0);
      _tile_zero(1);
      if (two_rows) {
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < steps; ++k) {
          if (next) prefetch_blocks(next, block_size, k);
          _tile_loadd(6, w0 + k * 1024, 64);
          _tile_loadd(4, x0 + k * 64, stride);
          _tile_dpbusd(0, 4, 6);
          _tile_loadd(7, w1 + k * 1024, 64);
          _tile_dpbusd(1, 4, 7);
          _tile_loadd(5, x1 + k * 64, stride);
          _tile_dpbusd(2, 5, 6);
          _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
      } else {
        for (int k = 0; k < steps; ++k) {
          if (next) prefetch_blocks(next, block_size, k);
          _tile_loadd(6, w0 + k * 1024, 64);
          _tile_loadd(4, x0 + k * 64, stride);
          _tile_dpbusd(0, 4, 6);
          _tile_loadd(7, w1 + k * 1024, 64);
          _tile_dpbusd(1, 4, 7);
        }
      }
      _tile_stored(0, sums[0], 64);
      _tile_stored(1, sums[1], 64);
      for (int tile = 0; tile < (two_rows ? 4 : 2); ++tile) {
        const int first = row + tile / 2 * 16;
        if (tile % 2 == 0 || two_blocks)
          finish_block(sums[tile], 16, first, rows - first < 16 ? rows - first : 16, block + tile % 2, linear, range,
                       output);
      }
    }
  }
  _tile_release();
}

constexpr int kRowMultiple = 16;  // a tile reads 16 rows

#else

constexpr auto multiply = multiply_vectors;
constexpr int kRowMultiple = 1;

#endif

// ---------------------------------------------------------------------------------------------
// Norms and embeddings

void normalize(const float* x, int width, const Norm& norm, float* y, uint8_t* q, const Quantization& range) {
  F mean = all(0.0f), factor = all(1.0f);
  if (norm.kind == kLayerNorm) {
    F sum = all(0.0f);
    for (int i = 0; i < width; i += kLanes) sum = sum + load(x + i);
    mean = all(reduce_add(sum) / width);
  }
  if (norm.kind != kNoNorm) {
    F squares = all(0.0f);
    for (int i = 0; i < width; i += kLanes) {
      F d = load(x + i) - mean;
      squares = fma(d, d, squares);
    }
    factor = all(1.0f / sqrtf(reduce_add(squares) / width + norm.epsilon));
  }
  for (int i = 0; i < width; i += kLanes) {
    F value = load(x + i);
    if (norm.kind != kNoNorm) {
      value = (value - mean) * factor * load(norm.weight + i);
      if (norm.bias) value = value + load(norm.bias + i);
    }
    if (y) save(y + i, value);
    if (q) save_quantized(q + i, quantized(value, range));
  }
}

void embed(const int8_t* token, float scale, const float* position, int width, float* y) {
  for (int i = 0; i < width; i += kLanes) save(y + i, fma(from_int8(token + i), all(scale), load(position + i)));
}

void gate(const float* gate_inner, int width, uint8_t* q, const Quantization& range) {
  int i = 0;
  for (; i + kLanes <= width; i += kLanes)
    save_quantized(q + i, quantized(swish(load(gate_inner + i)) * load(gate_inner + width + i), range));
  if (i < width) {  // the last few: padded with 0, so that nothing is read beyond the row
    float gates[kLanes] = {}, inner[kLanes] = {};
    uint8_t last[kLanes];
    for (int j = 0; j < width - i; ++j) gates[j] = gate_inner[i + j], inner[j] = gate_inner[width + i + j];
    save_quantized(last, quantized(swish(load(gates)) * load(inner), range));
    memcpy(q + i, last, width - i);
  }
}

// ---------------------------------------------------------------------------------------------
// Attention

void store(const float* key, const float* value, int heads, int features, Half* block, int slot) {
  for (int head = 0; head < heads; ++head) {
    Half* keys = block + head * 2 * kLanes * features;
    Half* values = keys + kLanes * features + slot * features;
    for (int i = 0; i < features; i += kLanes) {
      Half halves[kLanes];
      save_half(halves, load(key + head * features + i));
      for (int j = 0; j < kLanes; ++j) keys[(i + j) * kLanes + slot] = halves[j];
      save_half(values + i, load(value + head * features + i));
    }
  }
}

template <int QUERIES, int WIDTH>
INLINE void weighted_sum(const Half* const* blocks, int count, int64_t offset, int features, const uint16_t* used,
                         const float* weights, int row, const float* inverse, uint8_t* out, int out_stride,
                         const Quantization& range) {
  F sums[QUERIES][WIDTH];
  UNROLL for (int q = 0; q < QUERIES; ++q)
    UNROLL for (int w = 0; w < WIDTH; ++w) sums[q][w] = all(0.0f);
  for (int block = 0; block < count; ++block) {
    const Half* values = blocks[block] + offset;
    for (uint32_t bits = used[block]; bits; bits &= bits - 1) {
      const int slot = __builtin_ctz(bits);
      F value[WIDTH];
      UNROLL for (int w = 0; w < WIDTH; ++w) value[w] = from_half(values + slot * features + w * kLanes);
      UNROLL for (int q = 0; q < QUERIES; ++q) {
        F weight = all(weights[q * row + block * kLanes + slot]);
        UNROLL for (int w = 0; w < WIDTH; ++w) sums[q][w] = fma(weight, value[w], sums[q][w]);
      }
    }
  }
  UNROLL for (int q = 0; q < QUERIES; ++q)
    UNROLL for (int w = 0; w < WIDTH; ++w)
      save_quantized(out + q * out_stride + w * kLanes, quantized(sums[q][w] * all(inverse[q]), range));
}

constexpr int kMaxBlocks = 1 << 12;  // 65,536 slots

template <int QUERIES>
void attend_some(const float* query, int stride, const Half* const* blocks, int count, const uint16_t* masks,
                 int mask_stride, int heads, int features, float* scores, uint8_t* out, int out_stride,
                 const Quantization& range) {
  const int row = count * kLanes;
  uint16_t used[kMaxBlocks];
  for (int block = 0; block < count; ++block) {
    used[block] = 0;
    UNROLL for (int q = 0; q < QUERIES; ++q) used[block] |= masks[q * mask_stride + block];
  }
  for (int head = 0; head < heads; ++head) {
    const int64_t offset = (int64_t)head * 2 * kLanes * features;
    const float* x = query + head * features;
    F best[QUERIES];
    UNROLL for (int q = 0; q < QUERIES; ++q) best[q] = all(-INFINITY);
    for (int block = 0; block < count; ++block) {
      const Half* keys = blocks[block] + offset;
      F even[QUERIES], odd[QUERIES];
      UNROLL for (int q = 0; q < QUERIES; ++q) even[q] = odd[q] = all(0.0f);
      for (int i = 0; i < features; i += 2) {
        F first = from_half(keys + i * kLanes), second = from_half(keys + (i + 1) * kLanes);
        UNROLL for (int q = 0; q < QUERIES; ++q) {
          even[q] = fma(all(x[q * stride + i]), first, even[q]);
          odd[q] = fma(all(x[q * stride + i + 1]), second, odd[q]);
        }
      }
      UNROLL for (int q = 0; q < QUERIES; ++q) {
        F score = where(masks[q * mask_stride + block], even[q] + odd[q], all(-INFINITY));
        best[q] = max(best[q], score);
        save(scores + q * row + block * kLanes, score);
      }
    }
    float inverse[QUERIES];
    UNROLL for (int q = 0; q < QUERIES; ++q) {
      F top = all(reduce_max(best[q])), sum = all(0.0f);
      for (int i = 0; i < row; i += kLanes) {
        F weight = exponential(load(scores + q * row + i) - top);
        sum = sum + weight;
        save(scores + q * row + i, weight);
      }
      inverse[q] = 1.0f / reduce_add(sum);
    }
    constexpr int wide = kRegisters == 32 ? (QUERIES <= 5 ? 4 : 2) : 1;
    const int64_t values = offset + kLanes * features;
    int i = 0;
    for (; i + wide * kLanes <= features; i += wide * kLanes)
      weighted_sum<QUERIES, wide>(blocks, count, values + i, features, used, scores, row, inverse,
                                  out + head * features + i, out_stride, range);
    for (; i < features; i += kLanes)
      weighted_sum<QUERIES, 1>(blocks, count, values + i, features, used, scores, row, inverse,
                               out + head * features + i, out_stride, range);
  }
}

void attend(const float* query, int stride, int queries, const Half* const* blocks, int count, const uint16_t* masks,
            int mask_stride, int heads, int features, float* scores, uint8_t* out, int out_stride,
            const Quantization& range) {
  while (queries > 0) {
    // At most 5 at a time, and not 5 and 1.
    const int some = queries == 6 ? 3 : queries < 5 ? queries : 5;
#define ATTEND(n)                                                                                                    \
  attend_some<n>(query, stride, blocks, count, masks, mask_stride, heads, features, scores, out, out_stride, range)
    switch (some) {
      case 1: ATTEND(1); break;
      case 2: ATTEND(2); break;
      case 3: ATTEND(3); break;
      case 4: ATTEND(4); break;
      default: ATTEND(5); break;
    }
#undef ATTEND
    queries -= some;
    query += some * stride;
    out += some * out_stride;
    masks += some * mask_stride;
  }
}

// ---------------------------------------------------------------------------------------------
// The most probable tokens

int top(float* logits, int vocabulary, int wanted, Candidate* found) {
  constexpr int classes = 4 * kLanes;
  const int padded = (vocabulary + classes - 1) / classes * classes;
  for (int i = vocabulary; i < padded; ++i) logits[i] = -INFINITY;
  // The largest of each class of tokens with the same number modulo 64. The wanted-th largest of these 64 values is a
  // lower bound of the wanted-th largest of all.
  F largest[4];
  UNROLL for (int c = 0; c < 4; ++c) largest[c] = all(-INFINITY);
  for (int i = 0; i < padded; i += classes)
    UNROLL for (int c = 0; c < 4; ++c) largest[c] = max(largest[c], load(logits + i + c * kLanes));
  float values[classes], best = -INFINITY, bound = -INFINITY;
  UNROLL for (int c = 0; c < 4; ++c) save(values + c * kLanes, largest[c]);
  for (int c = 0; c < classes; ++c) best = values[c] > best ? values[c] : best;
  if (wanted <= classes) {
    float sorted[classes];  // the largest so far, by insertion
    int count = 0;
    for (int c = 0; c < classes; ++c) {
      if (count == wanted && !(values[c] > sorted[count - 1])) continue;
      int at = count < wanted ? count++ : count - 1;
      for (; at > 0 && sorted[at - 1] < values[c]; --at) sorted[at] = sorted[at - 1];
      sorted[at] = values[c];
    }
    bound = sorted[wanted - 1];
  }
  F sums[4], limit = all(bound), top_value = all(best);
  UNROLL for (int c = 0; c < 4; ++c) sums[c] = all(0.0f);
  int count = 0;
  for (int i = 0; i < padded; i += classes) {
    UNROLL for (int c = 0; c < 4; ++c) {
      F x = load(logits + i + c * kLanes);
      sums[c] = sums[c] + exponential(x - top_value);
      for (uint32_t bits = at_least(x, limit); bits; bits &= bits - 1) {
        const int token = i + c * kLanes + __builtin_ctz(bits);
        if (token < vocabulary && logits[token] > -INFINITY) found[count++] = {logits[token], token};
      }
    }
  }
  const float log_sum = logf(reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3])));
  for (int i = 0; i < count; ++i) found[i].log_probability = (found[i].log_probability - best) - log_sum;
  return count;
}

}  // namespace

#define KERNELS(name, variable)                                                                                        \
  extern const Kernels variable;                                                                                       \
  const Kernels variable = {name,  kLevels, kRowMultiple, multiply, normalize, embed, gate, store, attend, top}

#if defined(REGARD_AVX2)
KERNELS("AVX2", kAvx2Kernels);
#elif defined(REGARD_AVX512)
KERNELS("AVX-512 VNNI", kAvx512Kernels);
#elif defined(REGARD_AMX)
KERNELS("AMX", kAmxKernels);
#endif

}  // namespace regard
