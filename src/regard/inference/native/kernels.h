// The kernels of the native decoder. kernels.cpp is compiled once for each instruction set; decoder.cpp picks the best
// set that the CPU has.
//
// Inputs of matrix products are unsigned 8-bit integers with one scale and one zero point for each linear map, weights
// are signed 8-bit integers with one scale for each output, sums are 32-bit integers. All else is float32; cached keys
// and values are stored in half precision (float16).

#pragma once
#include <cstdint>

namespace regard {

constexpr int kLanes = 16;  // floats of a vector, outputs of a weight block, and slots of a key-value block

enum Activation { kNone = 0, kRelu = 1, kGelu = 2, kSwish = 3 };

// A linear map with packed weights: blocks of 16 outputs, each with rows of 4 inputs x 16 outputs (64 bytes).
struct Linear {
  int inputs, outputs;
  int padded_inputs;   // a multiple of 64
  int padded_outputs;  // a multiple of 16
  int8_t* weight;      // [padded_outputs / 16][padded_inputs / 4][16][4]
  float* scale;        // [padded_outputs]
  float* bias;         // [padded_outputs]
  int32_t* sums;       // [padded_outputs]: sum of the weights of each output
};

// How floats become 8-bit integers: round(x / scale) + zero_point.
struct Quantization {
  float scale, inverse;
  int zero_point;
};

// Where the results of a product go: to y, added to y, or quantized to q.
struct Output {
  float* y = nullptr;
  int y_stride = 0;
  bool add = false;
  uint8_t* q = nullptr;
  int q_stride = 0;
  Quantization range = {1, 1, 0};
  int activation = kNone;
};

enum NormKind { kNoNorm = 0, kLayerNorm = 1, kRmsNorm = 2 };

struct Norm {
  int kind;
  float epsilon;
  const float *weight, *bias;  // bias may be null
};

struct Candidate {
  float log_probability;
  int token;
};

// Keys and values of 16 slots, for all heads: for each head, keys [features][16], then values [16][features].
using Half = uint16_t;

struct Kernels {
  const char* name;
  int levels;  // the largest quantized input: 127 where sums of products of 8 bits would overflow
  int row_multiple;  // buffers of quantized inputs have room for this many rows, or a multiple of it

  // Outputs 16 * begin to 16 * end of a linear map, for rows of quantized inputs.
  void (*multiply)(const uint8_t* input, int stride, int rows, const Linear&, const Quantization&, int begin, int end,
                   const Output&);
  // A row of width floats to its norm (y, may be null or x itself) and its quantized norm (q, may be null).
  void (*normalize)(const float* x, int width, const Norm&, float* y, uint8_t* q, const Quantization&);
  // A row of the token embedding times its scale, plus the position.
  void (*embed)(const int8_t* token, float scale, const float* position, int width, float* y);
  // swish(gate) * inner, quantized; gate and inner are side by side.
  void (*gate)(const float* gate_inner, int width, uint8_t* q, const Quantization&);
  // Store a key and a value of all heads in a slot of a block.
  void (*store)(const float* key, const float* value, int heads, int features, Half* block, int slot);
  // Attention of some queries of a sentence to the slots of its blocks. masks[query * mask_stride + block] has a bit
  // for each slot; mask_stride 0: the same for all queries. scores: room for 8 * 16 * blocks floats.
  void (*attend)(const float* query, int stride, int queries, const Half* const* blocks, int count,
                 const uint16_t* masks, int mask_stride, int heads, int features, float* scores, uint8_t* out,
                 int out_stride, const Quantization&);
  // The most probable tokens of a row of logits, at least wanted of them if there are as many, in no order. logits
  // has room up to a multiple of 64. found: room for vocabulary candidates. Returns how many there are.
  int (*top)(float* logits, int vocabulary, int wanted, Candidate* found);
};

extern const Kernels kAvx2Kernels, kAvx512Kernels, kAmxKernels;

}  // namespace regard
