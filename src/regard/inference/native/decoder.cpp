// The native decoder: encoder, decoder and search of a Transformer with int8 weights, in one call from Python.
//
//   Python threads -> regard_search(job) -> each takes sentences from the job's queue -> results
//
// - Every thread works on its own sentences. It has up to job.capacity of them at a time; when some are finished, it
//   encodes the next ones, so that its matrix products stay large until the queue is empty.
// - There is no padding: rows are tokens of the encoder, or hypotheses of the decoder, of all its sentences.
// - Keys and values are in blocks of 16 slots (kernels.h), which belong to one sentence. The hypotheses of a sentence
//   share its slots; a bit mask says which slots a hypothesis attends to. Reordering a beam moves only masks.
// - No result depends on the other sentences of a call: every row is computed by the same operations in the same order.
//
// The search is that of decoding/beam_search.py and decoding/greedy_and_sampling.py, without logits processors.

#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cpuid.h>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "threads.h"

using namespace regard;

#define EXPORT extern "C" __attribute__((visibility("default")))

// ---------------------------------------------------------------------------------------------
// What Python passes; inference/native_decoder.py has the same structures

struct LinearSpec {
  const Linear* linear;
  float scale;
  int32_t zero_point;
};

struct NormSpec {
  int32_t kind;
  float epsilon;
  const float* weight;
  const float* bias;
};

struct EmbeddingSpec {
  const int8_t* weight;  // [vocabulary][width]
  const float* scale;    // [vocabulary]
};

struct LayerSpec {
  LinearSpec qkv, self_output, cross_query, cross_key_value, cross_output, inner, outer;
  NormSpec self_norm, cross_norm, feed_forward_norm;
};

struct ModelSpec {
  int32_t width, heads, features, hidden;  // hidden: inputs of the second map of the feed-forward network
  int32_t pre_norm, activation, gated;
  int32_t encoder_layers, decoder_layers, vocabulary;
  EmbeddingSpec source, target;
  const LayerSpec* encoder;
  const LayerSpec* decoder;
  NormSpec encoder_norm, decoder_norm;
  LinearSpec projection;
};

enum LengthRule { kGnmt = 0, kTransformers = 1, kCTranslate2 = 2 };

struct JobSpec {
  const ModelSpec* model;
  int32_t sentences, capacity, team;  // capacity: sentences at a time and thread; team: threads for one product
  const int32_t* tokens;              // of all sources, end to end, EOS included
  const int64_t* offsets;             // [sentences + 1]
  const int32_t* max_lengths;         // of the outputs, EOS not counted
  const float* source_positions;      // [longest source][width]
  const float* target_positions;      // [longest output + 1][width]
  int32_t start, eos, beam, nbest, rule;
  double length_penalty;
  const int32_t* suppressed;
  int32_t suppressed_count;
  const volatile uint8_t* interrupt;  // the search stops when it is not 0
};

// ---------------------------------------------------------------------------------------------
// The CPU

namespace {

bool has_os_support(uint64_t bits) {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (((uint64_t)high << 32 | low) & bits) == bits;
}

bool request_amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int request_permission = 0x1023, tile_data = 18;
  return has_os_support(3u << 17) && syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

const Kernels* best_kernels(int most) {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return nullptr;
  const bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
  if (!osxsave || !fma || !f16c || !has_os_support(6) || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return nullptr;
  const bool avx2 = b >> 5 & 1;
  const bool avx512 = (b >> 16 & 1) && (b >> 17 & 1) && (b >> 30 & 1) && (b >> 31 & 1) && has_os_support(0xe6);
  const bool vnni = c >> 11 & 1, amx = (d >> 24 & 1) && (d >> 25 & 1);
  if (most >= 3 && avx2 && avx512 && vnni && amx && request_amx()) return &kAmxKernels;
  if (most >= 2 && avx2 && avx512 && vnni) return &kAvx512Kernels;
  return avx2 ? &kAvx2Kernels : nullptr;
}

const Kernels* kernels = nullptr;

}  // namespace

// Select the kernels: the best that the CPU has, up to most (1: AVX2, 2: AVX-512 VNNI, 3: AMX). Returns their name, or
// null if the CPU has none of them.
EXPORT const char* regard_initialize(int32_t most) {
  kernels = best_kernels(most);
  return kernels ? kernels->name : nullptr;
}

EXPORT int32_t regard_levels() { return kernels->levels; }

// ---------------------------------------------------------------------------------------------
// Memory and threads

namespace {

template <class T>
T* aligned(size_t count) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, std::max<size_t>(count, 1) * sizeof(T))) throw std::bad_alloc();
  return (T*)memory;
}

template <class T>
struct Buffer {  // it grows, and loses its content when it does
  T* data = nullptr;
  size_t capacity = 0;
  ~Buffer() { free(data); }
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  T* reserve(size_t count) {
    if (count > capacity) {
      free(data);
      data = nullptr;
      capacity = 0;
      data = aligned<T>(count);
      memset((void*)data, 0, count * sizeof(T));
      capacity = count;
    }
    return data;
  }
};

// ---------------------------------------------------------------------------------------------
// Sentences in work

struct Finished {
  std::vector<int32_t> tokens;
  std::vector<float> log_probabilities;
  double total, score;
};

// One step of a sentence: where each of its hypotheses came from.
struct History {
  std::vector<int32_t> parents, tokens;
  std::vector<float> log_probabilities;
};

struct Sentence {
  int number = 0;                                    // in the job
  int length = 0;                                    // generated tokens
  int max_length = 0;
  int hypotheses = 1;
  int source_slots = 0;
  std::vector<Half*> source_blocks, blocks;          // each has all layers
  std::vector<uint16_t> source_masks;                // [source_blocks]
  std::vector<uint16_t> masks;                       // [hypotheses][mask_stride]
  int mask_stride = 0;
  std::vector<int> slots;                            // of the present step, for each hypothesis
  std::vector<int32_t> tokens;                       // last token of each hypothesis
  std::vector<double> totals;
  std::vector<History> history;
  std::vector<Finished> finished;
  std::vector<double> scores;                        // of hypotheses that ended with EOS, best first, at most beam
};

// The memory of a worker. It is kept for the next job: fresh memory is slow, above all in many threads at once.
struct Workspace {
  size_t block_size = 0;  // of a block, in elements
  std::vector<Half*> blocks;  // not in use
  Buffer<float> states, projected, gates, logits, scores;
  Buffer<uint8_t> inputs, hidden;
  Buffer<Half> encoder_blocks;
  Buffer<Candidate> candidates;

  ~Workspace() { clear(); }
  void clear() {
    for (Half* block : blocks) free(block);
    blocks.clear();
  }
  Half* take(size_t size) {
    if (size != block_size) clear();
    block_size = size;
    if (!blocks.empty()) {
      Half* block = blocks.back();
      blocks.pop_back();
      return block;
    }
    Half* block = aligned<Half>(size);
    memset(block, 0, size * sizeof(Half));
    return block;
  }
};

class Workspaces {
 public:
  std::unique_ptr<Workspace> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (unused_.empty()) return std::make_unique<Workspace>();
    auto workspace = std::move(unused_.back());
    unused_.pop_back();
    return workspace;
  }
  void give_back(std::unique_ptr<Workspace> workspace) {
    const size_t most = kMaxKept / std::max<size_t>(1, workspace->block_size * sizeof(Half));
    for (; workspace->blocks.size() > most; workspace->blocks.pop_back()) free(workspace->blocks.back());
    std::lock_guard<std::mutex> lock(mutex_);
    unused_.push_back(std::move(workspace));
  }

 private:
  static constexpr size_t kMaxKept = 32 << 20;  // bytes of blocks
  std::mutex mutex_;
  std::vector<std::unique_ptr<Workspace>> unused_;
};

Workspaces workspaces;

struct Extension {  // a hypothesis with one more token
  int hypothesis, token;
  float log_probability;
  double total;
};

}  // namespace

struct Job {
  JobSpec spec;
  std::atomic<bool> stopped{false};
  std::atomic<int> next{0};
  std::vector<std::vector<Finished>> results;
};

namespace {

double penalty(const JobSpec& job, int length) {
  double base = job.rule == kGnmt ? (5.0 + length) / 6.0 : (double)length;
  return pow(base, job.length_penalty);
}

// ---------------------------------------------------------------------------------------------
// A thread's work

class Worker {
 public:
  explicit Worker(Job& job)
      : job_(job), spec_(job.spec), model_(*job.spec.model), team_(std::max(1, job.spec.team)), memory_(workspaces.take()) {
    layer_size_ = (size_t)2 * kLanes * model_.width_of_heads();
  }
  ~Worker() {
    for (auto& sentence : active_) release(*sentence);
    workspaces.give_back(std::move(memory_));
  }

  // Returns false if it was interrupted.
  bool run() {
    const int refill = std::max(1, spec_.capacity / 4);
    while (true) {
      const int room = spec_.capacity - (int)active_.size();
      if (room >= refill || active_.empty()) encode(room);
      if (active_.empty()) return true;
      if (*spec_.interrupt || job_.stopped) return false;
      step();
      advance();
    }
  }

 private:
  struct Model : ModelSpec {
    explicit Model(const ModelSpec& spec) : ModelSpec(spec) {}
    int width_of_heads() const { return heads * features; }
  };

  static Quantization range(const LinearSpec& spec) { return {spec.scale, 1.0f / spec.scale, spec.zero_point}; }
  static Norm norm(const NormSpec& spec) { return {spec.kind, spec.epsilon, spec.weight, spec.bias}; }

  static int padded(int count) { return (count + 63) / 64 * 64; }

  uint8_t* quantized(Buffer<uint8_t>& buffer, int rows, int inputs) {
    const int multiple = kernels->row_multiple;
    return buffer.reserve((size_t)((rows + multiple - 1) / multiple * multiple) * padded(inputs) + 64);
  }

  void multiply(const uint8_t* input, int rows, const LinearSpec& spec, const Output& output) {
    const Linear& linear = *spec.linear;
    const int blocks = linear.padded_outputs / kLanes;
    const auto part = [&](int begin, int end) {
      kernels->multiply(input, linear.padded_inputs, rows, linear, range(spec), begin, end, output);
    };
    const int64_t work = (int64_t)linear.padded_inputs * linear.padded_outputs * (rows + 4);
    if (team_.size() == 1 || work < kTeamWork) return part(0, blocks);
    const int parts = 2 * team_.size();
    team_.run(parts, [&](int number) {
      part((int)((int64_t)blocks * number / parts), (int)((int64_t)blocks * (number + 1) / parts));
    });
  }

  // x or its norm, quantized as the linear map needs it; the norm replaces x if it is kept.
  uint8_t* prepare(float* x, int rows, const NormSpec& spec, bool keep, const LinearSpec& linear) {
    const int width = model_.width, stride = padded(width);
    uint8_t* q = quantized(memory_->inputs, rows, width);
    for (int row = 0; row < rows; ++row) {
      float* here = x + (size_t)row * width;
      kernels->normalize(here, width, norm(spec), keep ? here : nullptr, q + (size_t)row * stride, range(linear));
    }
    return q;
  }

  // The input of a sub-layer. Pre-norm: the sub-layer's own norm of x. Post-norm: the norm after the sub-layer before
  // it (none before the first), which also becomes x.
  uint8_t* sublayer_input(float* x, int rows, const NormSpec& own, const NormSpec* before, const LinearSpec& linear) {
    static const NormSpec none = {kNoNorm, 0, nullptr, nullptr};
    if (model_.pre_norm) return prepare(x, rows, own, false, linear);
    return before ? prepare(x, rows, *before, true, linear) : prepare(x, rows, none, false, linear);
  }

  void feed_forward(const uint8_t* input, int rows, const LayerSpec& layer, float* x) {
    const int stride = padded(model_.hidden);
    uint8_t* hidden = quantized(memory_->hidden, rows, model_.hidden);
    if (model_.gated) {
      const int columns = layer.inner.linear->padded_outputs;
      float* both = memory_->gates.reserve((size_t)rows * columns);
      Output to;
      to.y = both, to.y_stride = columns;
      multiply(input, rows, layer.inner, to);
      for (int row = 0; row < rows; ++row)
        kernels->gate(both + (size_t)row * columns, model_.hidden, hidden + (size_t)row * stride, range(layer.outer));
    } else {
      Output to;
      to.q = hidden, to.q_stride = stride, to.range = range(layer.outer), to.activation = model_.activation;
      multiply(input, rows, layer.inner, to);
    }
    add(hidden, rows, layer.outer, x);
  }

  // x += linear(input)
  void add(const uint8_t* input, int rows, const LinearSpec& linear, float* x) {
    Output to;
    to.y = x, to.y_stride = model_.width, to.add = true;
    multiply(input, rows, linear, to);
  }

  float* project(const uint8_t* input, int rows, const LinearSpec& linear, Buffer<float>& buffer) {
    const int columns = linear.linear->padded_outputs;
    Output to;
    to.y = buffer.reserve((size_t)rows * columns), to.y_stride = columns;
    multiply(input, rows, linear, to);
    return to.y;
  }

  Half* take_block() { return memory_->take(layer_size_ * model_.decoder_layers); }

  float* scores(int blocks) { return memory_->scores.reserve((size_t)8 * kLanes * blocks); }

  // Encoder

  void encode(int count) {
    std::vector<std::unique_ptr<Sentence>> added;
    int64_t tokens = 0;
    for (const auto& sentence : active_) tokens += sentence->source_slots;
    for (int i = 0; i < count; ++i) {
      // The sentences are sorted, so one that another thread leaves to this one is not longer than the next now.
      const int next = job_.next.load();
      if (next >= spec_.sentences || (tokens && tokens + source_length(next) > kTokens)) break;
      const int number = job_.next.fetch_add(1);
      if (number >= spec_.sentences) break;
      added.push_back(std::make_unique<Sentence>());
      added.back()->number = number;
      tokens += source_length(number);
    }
    // Long sources one after the other: their states would not fit into the cache together.
    for (size_t first = 0; first < added.size();) {
      size_t last = first;
      int64_t rows = 0;
      while (last < added.size() && (last == first || rows + source_length(added[last]->number) <= kEncoderRows))
        rows += source_length(added[last++]->number);
      encode(&added[first], (int)(last - first), (int)rows);
      first = last;
    }
    for (auto& sentence : added) active_.push_back(std::move(sentence));
  }

  int source_length(int number) const { return (int)(spec_.offsets[number + 1] - spec_.offsets[number]); }

  void encode(std::unique_ptr<Sentence>* sentences, int count, int rows) {
    const int width = model_.width, heads = model_.heads, features = model_.features;
    const int attended = model_.width_of_heads();
    float* x = memory_->states.reserve((size_t)rows * width);
    int row = 0;
    for (int i = 0; i < count; ++i) {
      Sentence& sentence = *sentences[i];
      const int32_t* tokens = spec_.tokens + spec_.offsets[sentence.number];
      const int length = source_length(sentence.number);
      for (int at = 0; at < length; ++at, ++row)
        kernels->embed(model_.source.weight + (size_t)tokens[at] * width, model_.source.scale[tokens[at]],
                       spec_.source_positions + (size_t)at * width, width, x + (size_t)row * width);
      sentence.source_slots = length;
      const int blocks = (length + kLanes - 1) / kLanes;
      sentence.source_masks.assign(blocks, 0xffff);
      if (length % kLanes) sentence.source_masks.back() = (uint16_t)((1u << length % kLanes) - 1);
      for (int block = 0; block < blocks; ++block)
        sentence.source_blocks.push_back(take_block());
    }
    const NormSpec* before = nullptr;
    for (int number = 0; number < model_.encoder_layers; ++number) {
      const LayerSpec& layer = model_.encoder[number];
      uint8_t* input = sublayer_input(x, rows, layer.self_norm, before, layer.qkv);
      const float* qkv = project(input, rows, layer.qkv, memory_->projected);
      const int stride = layer.qkv.linear->padded_outputs;
      uint8_t* context = quantized(memory_->inputs, rows, attended);
      row = 0;
      for (int i = 0; i < count; ++i) {
        const Sentence& sentence = *sentences[i];
        const int length = sentence.source_slots, blocks = (int)sentence.source_blocks.size();
        const float* here = qkv + (size_t)row * stride;
        Half* memory = memory_->encoder_blocks.reserve(layer_size_ * blocks);
        pointers_.clear();
        for (int block = 0; block < blocks; ++block) pointers_.push_back(memory + layer_size_ * block);
        for (int at = 0; at < length; ++at)
          kernels->store(here + (size_t)at * stride + attended, here + (size_t)at * stride + 2 * attended, heads,
                         features, memory + layer_size_ * (at / kLanes), at % kLanes);
        kernels->attend(here, stride, length, pointers_.data(), blocks, sentence.source_masks.data(), 0, heads,
                        features, scores(blocks), context + (size_t)row * padded(attended), padded(attended),
                        range(layer.self_output));
        row += length;
      }
      add(context, rows, layer.self_output, x);
      input = sublayer_input(x, rows, layer.feed_forward_norm, &layer.self_norm, layer.inner);
      feed_forward(input, rows, layer, x);
      before = &layer.feed_forward_norm;
    }
    finish(x, rows, before, model_.encoder_norm);
    for (int number = 0; number < model_.decoder_layers; ++number) {
      static const NormSpec none = {kNoNorm, 0, nullptr, nullptr};
      const LayerSpec& layer = model_.decoder[number];
      const float* kv = project(prepare(x, rows, none, false, layer.cross_key_value), rows, layer.cross_key_value,
                                memory_->projected);
      const int stride = layer.cross_key_value.linear->padded_outputs;
      row = 0;
      for (int i = 0; i < count; ++i)
        for (int at = 0; at < sentences[i]->source_slots; ++at, ++row)
          kernels->store(kv + (size_t)row * stride, kv + (size_t)row * stride + attended, heads, features,
                         sentences[i]->source_blocks[at / kLanes] + layer_size_ * number, at % kLanes);
    }
    for (int i = 0; i < count; ++i) {
      Sentence& sentence = *sentences[i];
      sentence.max_length = spec_.max_lengths[sentence.number];
      sentence.tokens = {spec_.start};
      sentence.totals = {0.0};
    }
  }

  // The norm of the last sub-layer (post-norm), then the final norm, in place.
  void finish(float* x, int rows, const NormSpec* before, const NormSpec& last) {
    const Quantization unused = {1, 1, 0};
    for (int row = 0; row < rows; ++row) {
      float* here = x + (size_t)row * model_.width;
      if (!model_.pre_norm && before) kernels->normalize(here, model_.width, norm(*before), here, nullptr, unused);
      if (last.kind != kNoNorm) kernels->normalize(here, model_.width, norm(last), here, nullptr, unused);
    }
  }

  // Decoder

  // A slot for the next token of each hypothesis.
  void allocate(Sentence& sentence) {
    const int count = sentence.hypotheses;
    sentence.slots.resize(count);
    std::vector<uint16_t>& used = used_;
    used.assign(sentence.blocks.size(), 0);
    for (int h = 0; h < count; ++h)
      for (size_t block = 0; block < used.size(); ++block)
        used[block] |= sentence.masks[(size_t)h * sentence.mask_stride + block];
    size_t block = 0;
    for (int h = 0; h < count; ++h) {
      while (block < used.size() && used[block] == 0xffff) ++block;
      if (block == used.size()) {
        sentence.blocks.push_back(take_block());
        used.push_back(0);
      }
      if ((int)used.size() > sentence.mask_stride) {
        const int stride = sentence.mask_stride + 4;
        std::vector<uint16_t> masks((size_t)count * stride, 0);
        for (int each = 0; each < count; ++each)
          std::copy_n(sentence.masks.begin() + (size_t)each * sentence.mask_stride, sentence.mask_stride,
                      masks.begin() + (size_t)each * stride);
        sentence.masks.swap(masks);
        sentence.mask_stride = stride;
      }
      const int bit = __builtin_ctz(~(uint32_t)used[block]);
      used[block] |= (uint16_t)(1u << bit);
      sentence.masks[(size_t)h * sentence.mask_stride + block] |= (uint16_t)(1u << bit);
      sentence.slots[h] = (int)block * kLanes + bit;
    }
  }

  void step() {
    const int width = model_.width, heads = model_.heads, features = model_.features;
    const int attended = model_.width_of_heads();
    int rows = 0;
    for (auto& sentence : active_) {
      allocate(*sentence);
      rows += sentence->hypotheses;
    }
    float* x = memory_->states.reserve((size_t)rows * width);
    int row = 0;
    for (auto& sentence : active_) {
      const float* position = spec_.target_positions + (size_t)sentence->length * width;
      for (int32_t token : sentence->tokens)
        kernels->embed(model_.target.weight + (size_t)token * width, model_.target.scale[token], position, width,
                       x + (size_t)row++ * width);
    }
    const NormSpec* before = nullptr;
    for (int number = 0; number < model_.decoder_layers; ++number) {
      const LayerSpec& layer = model_.decoder[number];
      uint8_t* input = sublayer_input(x, rows, layer.self_norm, before, layer.qkv);
      const float* qkv = project(input, rows, layer.qkv, memory_->projected);
      int stride = layer.qkv.linear->padded_outputs;
      uint8_t* context = quantized(memory_->inputs, rows, attended);
      row = 0;
      for (auto& sentence : active_) {
        const int count = sentence->hypotheses;
        const float* here = qkv + (size_t)row * stride;
        for (int h = 0; h < count; ++h)
          kernels->store(here + (size_t)h * stride + attended, here + (size_t)h * stride + 2 * attended, heads,
                         features, sentence->blocks[sentence->slots[h] / kLanes] + layer_size_ * number,
                         sentence->slots[h] % kLanes);
        attend(here, stride, count, sentence->blocks, sentence->masks.data(), sentence->mask_stride, number,
               context + (size_t)row * padded(attended), range(layer.self_output));
        row += count;
      }
      add(context, rows, layer.self_output, x);

      input = sublayer_input(x, rows, layer.cross_norm, &layer.self_norm, layer.cross_query);
      const float* query = project(input, rows, layer.cross_query, memory_->projected);
      stride = layer.cross_query.linear->padded_outputs;
      context = quantized(memory_->inputs, rows, attended);
      row = 0;
      for (auto& sentence : active_) {
        attend(query + (size_t)row * stride, stride, sentence->hypotheses, sentence->source_blocks,
               sentence->source_masks.data(), 0, number, context + (size_t)row * padded(attended),
               range(layer.cross_output));
        row += sentence->hypotheses;
      }
      add(context, rows, layer.cross_output, x);

      input = sublayer_input(x, rows, layer.feed_forward_norm, &layer.cross_norm, layer.inner);
      feed_forward(input, rows, layer, x);
      before = &layer.feed_forward_norm;
    }
    finish(x, rows, before, model_.decoder_norm);
    static const NormSpec none = {kNoNorm, 0, nullptr, nullptr};
    const uint8_t* input = prepare(x, rows, none, false, model_.projection);
    logits_stride_ = padded(model_.vocabulary);
    Output to;
    to.y = memory_->logits.reserve((size_t)rows * logits_stride_), to.y_stride = logits_stride_;
    multiply(input, rows, model_.projection, to);
  }

  void attend(const float* query, int stride, int queries, const std::vector<Half*>& blocks, const uint16_t* masks,
              int mask_stride, int layer, uint8_t* out, const Quantization& range) {
    pointers_.clear();
    for (Half* block : blocks) pointers_.push_back(block + layer_size_ * layer);
    kernels->attend(query, stride, queries, pointers_.data(), (int)blocks.size(), masks, mask_stride, model_.heads,
                    model_.features, scores((int)blocks.size()), out, padded(model_.width_of_heads()), range);
  }

  // Search

  // The best extensions of a hypothesis, best first, as many as wanted if there are as many.
  void extend(const Sentence& sentence, int hypothesis, float* logits, int wanted, std::vector<Extension>& to) {
    const double total = sentence.totals[hypothesis];
    if (spec_.rule == kTransformers && sentence.length >= sentence.max_length) {  // EOS, which costs nothing
      to.push_back({hypothesis, spec_.eos, 0.0f, total});
      return;
    }
    Candidate* found = memory_->candidates.reserve(model_.vocabulary);
    int count = kernels->top(logits, model_.vocabulary, wanted + spec_.suppressed_count, found);
    count = (int)(std::remove_if(found, found + count, [&](const Candidate& one) {
                    return std::binary_search(spec_.suppressed, spec_.suppressed + spec_.suppressed_count, one.token);
                  }) - found);
    const auto better = [](const Candidate& one, const Candidate& other) {
      if (one.log_probability != other.log_probability) return one.log_probability > other.log_probability;
      return one.token < other.token;
    };
    const int kept = std::min(count, wanted);
    std::partial_sort(found, found + kept, found + count, better);
    for (int i = 0; i < kept; ++i)
      to.push_back({hypothesis, found[i].token, found[i].log_probability, total + (double)found[i].log_probability});
  }

  void advance() {
    int row = 0;
    size_t kept = 0;
    for (size_t i = 0; i < active_.size(); ++i) {
      Sentence& sentence = *active_[i];
      const int count = sentence.hypotheses;
      float* logits = memory_->logits.data + (size_t)row * logits_stride_;
      const bool done = spec_.beam == 1 ? greedy(sentence, logits) : beam_search(sentence, logits);
      row += count;
      if (done)
        complete(sentence);
      else
        active_[kept++].swap(active_[i]);
    }
    active_.resize(kept);
  }

  // One step of decoding/greedy_and_sampling.py. Returns whether the sentence is done.
  bool greedy(Sentence& sentence, float* logits) {
    extensions_.clear();
    extend(sentence, 0, logits, 1, extensions_);
    const int remaining = sentence.max_length - sentence.length;
    if (extensions_.empty()) {
      add_finished(sentence, 0, nullptr, false);
      return true;
    }
    const Extension& best = extensions_[0];
    if (best.token == spec_.eos) {
      add_finished(sentence, 0, &best, true);
    } else if (remaining <= 0) {
      add_finished(sentence, 0, nullptr, false);
    } else if (remaining == 1 && spec_.rule == kCTranslate2) {
      add_finished(sentence, 0, &best, false);
    } else {
      continue_with(sentence, extensions_);
      return false;
    }
    return true;
  }

  // One step of decoding/beam_search.py. Returns whether the sentence is done.
  bool beam_search(Sentence& sentence, float* logits) {
    const int beam = spec_.beam, wanted = 2 * beam, nbest = spec_.nbest;
    extensions_.clear();
    for (int h = 0; h < sentence.hypotheses; ++h)
      if (sentence.totals[h] > -INFINITY)
        extend(sentence, h, logits + (size_t)h * logits_stride_, wanted, extensions_);
    std::stable_sort(extensions_.begin(), extensions_.end(),
                     [](const Extension& one, const Extension& other) { return one.total > other.total; });
    if ((int)extensions_.size() > wanted) extensions_.resize(wanted);

    // EOS among the first extensions finishes a hypothesis; the first that are not EOS are continued.
    continued_.clear();
    for (int rank = 0; rank < (int)extensions_.size(); ++rank) {
      const Extension& one = extensions_[rank];
      if (one.token == spec_.eos) {
        if (rank < beam && one.total > -INFINITY) {
          const double score = add_finished(sentence, one.hypothesis, &one, true);
          auto at = std::upper_bound(sentence.scores.begin(), sentence.scores.end(), score, std::greater<double>());
          sentence.scores.insert(at, score);
          if ((int)sentence.scores.size() > beam) sentence.scores.pop_back();
        }
      } else if ((int)continued_.size() < beam) {
        continued_.push_back(one);
      }
    }
    const double best = continued_.empty() ? -INFINITY : continued_[0].total;
    const int remaining = sentence.max_length - sentence.length;
    bool done = remaining <= 0 || is_done(sentence, best);
    bool without_result = done && sentence.scores.empty();
    if (spec_.rule == kCTranslate2 && remaining == 1 && best > -INFINITY) {
      done = true;
      without_result = false;
      for (int rank = 0; rank < nbest && rank < (int)continued_.size(); ++rank)
        if (continued_[rank].total > -INFINITY)
          add_finished(sentence, continued_[rank].hypothesis, &continued_[rank], false);
    }
    if (without_result)
      for (int h = 0; h < sentence.hypotheses; ++h)
        if (isfinite(sentence.totals[h])) add_finished(sentence, h, nullptr, false);
    if (!done) {
      while ((int)continued_.size() < beam) continued_.push_back({0, spec_.eos, -INFINITY, -INFINITY});
      continue_with(sentence, continued_);
    }
    return done;
  }

  // The stopping rules of decoding/length_penalty_and_stopping.py.
  bool is_done(const Sentence& sentence, double best) const {
    const auto score = [&](int rank) {
      return rank < (int)sentence.scores.size() ? sentence.scores[rank] : -INFINITY;
    };
    const double to_beat = score(spec_.nbest - 1), worst = score(spec_.beam - 1);
    const double now = best / penalty(spec_, sentence.length + 1);
    if (spec_.rule == kGnmt) {
      const bool hopeless = best / penalty(spec_, sentence.max_length + 1) <= to_beat;
      return hopeless || (worst > -INFINITY && !(now > to_beat));
    }
    if (spec_.rule == kTransformers) return best == -INFINITY || (worst > -INFINITY && now <= worst);
    if (spec_.length_penalty == 0) return best <= to_beat;
    return best == -INFINITY || worst > -INFINITY;
  }

  // Add a hypothesis, or its extension, to the finished ones; ended: the extension is EOS. Returns its score.
  double add_finished(Sentence& sentence, int hypothesis, const Extension* extension, bool ended) {
    Finished one;
    one.total = extension ? extension->total : sentence.totals[hypothesis];
    const int length = sentence.length + (extension ? 1 : 0);
    one.score = one.total / penalty(spec_, std::max(1, length));
    one.tokens.resize(sentence.length);
    one.log_probabilities.resize(sentence.length);
    for (int at = sentence.length - 1, here = hypothesis; at >= 0; --at) {
      const History& step = sentence.history[at];
      one.tokens[at] = step.tokens[here];
      one.log_probabilities[at] = step.log_probabilities[here];
      here = step.parents[here];
    }
    if (extension) one.log_probabilities.push_back(extension->log_probability);
    if (extension && !ended) one.tokens.push_back(extension->token);
    sentence.finished.push_back(std::move(one));
    return sentence.finished.back().score;
  }

  void continue_with(Sentence& sentence, const std::vector<Extension>& extensions) {
    const int count = (int)extensions.size(), stride = sentence.mask_stride;
    History step;
    masks_.resize((size_t)count * stride);
    sentence.tokens.resize(count);
    sentence.totals.resize(count);
    for (int h = 0; h < count; ++h) {
      const Extension& one = extensions[h];
      step.parents.push_back(one.hypothesis);
      step.tokens.push_back(one.token);
      step.log_probabilities.push_back(one.log_probability);
      std::copy_n(sentence.masks.begin() + (size_t)one.hypothesis * stride, stride, masks_.begin() + (size_t)h * stride);
      sentence.tokens[h] = one.token;
      sentence.totals[h] = one.total;
    }
    sentence.masks.swap(masks_);
    sentence.history.push_back(std::move(step));
    sentence.hypotheses = count;
    ++sentence.length;
  }

  void complete(Sentence& sentence) {
    std::vector<Finished>& found = sentence.finished;
    std::stable_sort(found.begin(), found.end(),
                     [](const Finished& one, const Finished& other) { return one.score > other.score; });
    if ((int)found.size() > spec_.nbest) found.resize(spec_.nbest);
    job_.results[sentence.number] = std::move(found);
    release(sentence);
  }

  void release(Sentence& sentence) {
    for (auto* blocks : {&sentence.source_blocks, &sentence.blocks}) {
      memory_->blocks.insert(memory_->blocks.end(), blocks->begin(), blocks->end());
      blocks->clear();
    }
  }

  static constexpr int kEncoderRows = 512;
  static constexpr int kTokens = 4096;  // source tokens of all sentences in work, to bound the memory
  static constexpr int64_t kTeamWork = 2 << 20;  // products smaller than this take less time than sharing them

  Job& job_;
  const JobSpec& spec_;
  Model model_;
  Team team_;
  size_t layer_size_;
  std::vector<std::unique_ptr<Sentence>> active_;
  std::unique_ptr<Workspace> memory_;
  std::vector<const Half*> pointers_;
  std::vector<uint16_t> used_, masks_;
  std::vector<Extension> extensions_, continued_;
  int logits_stride_ = 0;
};

}  // namespace

// ---------------------------------------------------------------------------------------------
// Linear maps

// Pack a weight [outputs][inputs] with one scale for each output. bias may be null. Returns null if memory ran out.
EXPORT Linear* regard_linear_pack(const int8_t* weight, const float* scale, const float* bias, int32_t outputs,
                                  int32_t inputs) {
  try {
    auto linear = std::make_unique<Linear>();
    linear->inputs = inputs;
    linear->outputs = outputs;
    linear->padded_inputs = (inputs + 63) / 64 * 64;
    linear->padded_outputs = (outputs + kLanes - 1) / kLanes * kLanes;
    const size_t size = (size_t)linear->padded_inputs * linear->padded_outputs;
    linear->weight = aligned<int8_t>(size);
    linear->scale = aligned<float>(linear->padded_outputs);
    linear->bias = aligned<float>(linear->padded_outputs);
    linear->sums = aligned<int32_t>(linear->padded_outputs);
    memset(linear->weight, 0, size);
    for (int output = 0; output < linear->padded_outputs; ++output) {
      const bool real = output < outputs;
      linear->scale[output] = real ? scale[output] : 0.0f;
      linear->bias[output] = real && bias ? bias[output] : 0.0f;
      linear->sums[output] = 0;
      if (!real) continue;
      int8_t* block = linear->weight + (size_t)(output / kLanes) * linear->padded_inputs * kLanes;
      for (int input = 0; input < inputs; ++input) {
        const int8_t value = weight[(size_t)output * inputs + input];
        block[(size_t)(input / 4) * 64 + (output % kLanes) * 4 + input % 4] = value;
        linear->sums[output] += value;
      }
    }
    return linear.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

EXPORT void regard_linear_free(Linear* linear) {
  free(linear->weight);
  free(linear->scale);
  free(linear->bias);
  free(linear->sums);
  delete linear;
}

// y = activation(linear(x)) for rows of floats. Returns 0, or 2 if memory ran out.
EXPORT int32_t regard_linear_apply(const Linear* linear, const float* x, int32_t rows, float scale, int32_t zero_point,
                                   int32_t activation, float* y) {
  try {
    static thread_local Buffer<uint8_t> inputs;
    static thread_local Buffer<float> outputs;
    const Quantization range = {scale, 1.0f / scale, zero_point};
    const int stride = linear->padded_inputs, multiple = kernels->row_multiple;
    const int room = (rows + multiple - 1) / multiple * multiple;
    uint8_t* q = inputs.reserve((size_t)room * stride + 64);
    const int whole = linear->inputs / kLanes * kLanes;
    const Norm none = {kNoNorm, 0, nullptr, nullptr};
    for (int row = 0; row < rows; ++row) {
      const float* from = x + (size_t)row * linear->inputs;
      uint8_t* to = q + (size_t)row * stride;
      kernels->normalize(from, whole, none, nullptr, to, range);
      if (whole < linear->inputs) {
        float last[kLanes] = {};
        memcpy(last, from + whole, (linear->inputs - whole) * sizeof(float));
        kernels->normalize(last, kLanes, none, nullptr, to + whole, range);
      }
    }
    const bool direct = linear->padded_outputs == linear->outputs;
    Output output;
    output.y = direct ? y : outputs.reserve((size_t)rows * linear->padded_outputs);
    output.y_stride = linear->padded_outputs;
    output.activation = activation;
    kernels->multiply(q, stride, rows, *linear, range, 0, linear->padded_outputs / kLanes, output);
    if (!direct)
      for (int row = 0; row < rows; ++row)
        memcpy(y + (size_t)row * linear->outputs, output.y + (size_t)row * linear->padded_outputs,
               linear->outputs * sizeof(float));
    return 0;
  } catch (const std::bad_alloc&) {
    return 2;
  }
}

// ---------------------------------------------------------------------------------------------
// Jobs: a call of the search. Several threads may work on one job.

EXPORT Job* regard_job_new(const JobSpec* spec) {
  try {
    auto job = std::make_unique<Job>();
    job->spec = *spec;
    job->results.resize(spec->sentences);
    return job.release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

EXPORT void regard_job_free(Job* job) { delete job; }

// Let all threads that work on the job return soon.
EXPORT void regard_job_stop(Job* job) { job->stopped = true; }

// Take sentences from the job until there are none. Returns 0, 1 if it was interrupted, 2 if memory ran out.
EXPORT int32_t regard_job_run(Job* job) {
  try {
    return Worker(*job).run() ? 0 : 1;
  } catch (const std::bad_alloc&) {
    return 2;
  } catch (const std::system_error&) {  // no more threads
    return 2;
  }
}

// The number of hypotheses of each sentence, and of all hypotheses and log-probabilities.
EXPORT void regard_job_sizes(const Job* job, int32_t* hypotheses, int64_t* total_hypotheses, int64_t* total_tokens) {
  *total_hypotheses = *total_tokens = 0;
  for (size_t i = 0; i < job->results.size(); ++i) {
    hypotheses[i] = (int32_t)job->results[i].size();
    *total_hypotheses += hypotheses[i];
    for (const Finished& one : job->results[i]) *total_tokens += (int64_t)one.log_probabilities.size();
  }
}

// All hypotheses end to end. A hypothesis has lengths[i] log-probabilities; if it ended with EOS, the last of its
// tokens is EOS.
EXPORT void regard_job_results(const Job* job, int32_t* lengths, uint8_t* ended, double* scores, int32_t* tokens,
                               float* log_probabilities) {
  for (const auto& sentence : job->results)
    for (const Finished& one : sentence) {
      *lengths++ = (int32_t)one.log_probabilities.size();
      *ended++ = one.tokens.size() < one.log_probabilities.size();
      *scores++ = one.score;
      tokens = std::copy(one.tokens.begin(), one.tokens.end(), tokens);
      if (one.tokens.size() < one.log_probabilities.size()) *tokens++ = job->spec.eos;
      log_probabilities = std::copy(one.log_probabilities.begin(), one.log_probabilities.end(), log_probabilities);
    }
}
