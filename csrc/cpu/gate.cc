// gate on the CPU: entropy in two passes over each block of a row, the learned probability as one small
// product.
#include "cerberus/gate.h"

#include <math.h>

#include "parallel.h"
#include "projection.h"

namespace cerberus::CERBERUS_ISA {
namespace {

// Of a block of logits: its maximum m, the sum of e = exp(x - m), and the sum of e · (x - m).
struct Moments {
  float maximum, total, weighted;
};

CERBERUS_SIMD void add_moments(Floats x, float shift, Floats& total, Floats& weighted) {
  const Floats distance = x - shift;
  const Floats power = exponential(distance);
  total += power;
  weighted += power == 0.0f ? Floats{} : power * distance;
}

template <typename T>
inline Moments block_moments(const T* logits, int64_t count) {
  const int64_t whole = count / kStep * kStep;
  Floats first_max = splat(-INFINITY), second_max = first_max;
  Floats tail_a = first_max, tail_b = first_max;
  for (int64_t i = 0; i < whole; i += kStep) {
    Floats a, b;
    load_pair(logits + i, a, b);
    first_max = maximum(a, first_max);
    second_max = maximum(b, second_max);
  }
  if (whole < count) load_pair_tail(logits + whole, count - whole, from_float<T>(-INFINITY), tail_a, tail_b);
  first_max = maximum(tail_a, first_max);
  second_max = maximum(tail_b, second_max);
  const float greatest = horizontal_maximum(maximum(second_max, first_max));
  const float shift = shift_for(greatest);
  Floats total = splat(0.0f), weighted = total;
  for (int64_t i = 0; i < whole; i += kStep) {
    Floats a, b;
    load_pair(logits + i, a, b);
    add_moments(a, shift, total, weighted);
    add_moments(b, shift, total, weighted);
  }
  add_moments(tail_a, shift, total, weighted);
  add_moments(tail_b, shift, total, weighted);
  return {greatest, horizontal_sum(total), horizontal_sum(weighted)};
}

inline float merged_entropy(const Moments* blocks, int64_t count) {
  float maximum = -INFINITY;
  for (int64_t i = 0; i < count; ++i) maximum = blocks[i].maximum > maximum ? blocks[i].maximum : maximum;
  float total = 0.0f, weighted = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float distance = shift_for(blocks[i].maximum) - shift_for(maximum);
    const float factor = blocks[i].maximum == -INFINITY ? 1.0f : expf(distance);
    total += factor * blocks[i].total;
    if (factor != 0.0f) weighted += factor * (blocks[i].weighted + blocks[i].total * distance);
  }
  return logf(total) - weighted / total;
}

template <typename T>
inline void entropy_scores(const GateArgs& args) {
  Moments* moments = reinterpret_cast<Moments*>(args.scratch);
  const T* values = static_cast<const T*>(args.values);
  const int64_t blocks = gate_blocks(args.columns);
  cpu::parallel_for(args.batch * blocks, 4, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i % blocks * kGateBlockColumns;
      const int64_t left = args.columns - begin;
      moments[i] = block_moments(values + i / blocks * args.values_stride + begin,
                                 left < kGateBlockColumns ? left : kGateBlockColumns);
    }
  });
  for (int64_t b = 0; b < args.batch; ++b) args.score[b] = merged_entropy(moments + b * blocks, blocks);
}

// The row divided by its root mean square, in the order of weights of type W.
template <typename T, typename W>
inline void pack_normed(const T* hidden, int64_t width, float eps, float* packed) {
  float squares = 0.0f;
  Floats sum = splat(0.0f);
  int64_t j = 0;
  for (; j + kStep <= width; j += kStep) {
    Floats a, b;
    load_pair(hidden + j, a, b);
    sum += a * a;
    sum += b * b;
  }
  for (; j < width; ++j) squares += to_float(hidden[j]) * to_float(hidden[j]);
  squares += horizontal_sum(sum);
  const float scale = 1.0f / sqrtf(squares / static_cast<float>(width) + eps);
  pack_row<W>(hidden, width, scale, packed);
}

CERBERUS_SIMD float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

template <typename T, typename W>
inline void learned_scores(const GateArgs& args) {
  const T* hidden = static_cast<const T*>(args.values);
  const W* b1 = static_cast<const W*>(args.b1);
  const W* w2 = static_cast<const W*>(args.w2);
  const float b2 = to_float(*static_cast<const W*>(args.b2));
  const int64_t width = packed_width(args.columns);
  float* inner_rows = args.scratch + args.batch * width;
  const int64_t work_per_row = (1 + args.inner) * args.columns;
  cpu::parallel_for(args.batch, 1 + (1 << 17) / work_per_row, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      float* packed = args.scratch + b * width;
      float* inner = inner_rows + b * args.inner;
      pack_normed<T, W>(hidden + b * args.values_stride, args.columns, args.eps, packed);
      dot_rows<W, 1>(packed, width, static_cast<const W*>(args.w1), args.w1_stride, args.inner, args.columns,
                     inner, args.inner);
      float logit = 0.0f;
      for (int64_t m = 0; m < args.inner; ++m) {
        const float before = inner[m] + to_float(b1[m]);
        logit += to_float(w2[m]) * (before * sigmoid(before));
      }
      args.score[b] = sigmoid(logit + b2);
    }
  });
}

template <typename T>
inline void learned_scores_by_weights(const GateArgs& args) {
  switch (args.weights_dtype) {
    case DType::f32:
      return learned_scores<T, float>(args);
    case DType::f16:
      return learned_scores<T, Half>(args);
    case DType::bf16:
      return learned_scores<T, BFloat16>(args);
  }
}

template <typename T>
inline void scores(const GateArgs& args) {
  if (args.kind == GateScore::entropy) {
    entropy_scores<T>(args);
  } else {
    learned_scores_by_weights<T>(args);
  }
}

}  // namespace

void gate(const GateArgs& args) {
  if (args.kind == GateScore::given) {
    for (int64_t b = 0; b < args.batch; ++b) args.score[b] = args.entropy[b];
  } else {
    switch (args.values_dtype) {
      case DType::f32:
        scores<float>(args);
        break;
      case DType::f16:
        scores<Half>(args);
        break;
      case DType::bf16:
        scores<BFloat16>(args);
        break;
    }
  }
  for (int64_t b = 0; b < args.batch; ++b) args.open[b] = gate_opens(args, b, args.score[b]);
}

}  // namespace cerberus::CERBERUS_ISA
