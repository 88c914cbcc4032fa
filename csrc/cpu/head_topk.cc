// head_topk on the CPU: one pass over the weight. Each share of the vocabulary takes its blocks in order; a
// block's logits live on the stack, leave a maximum and a sum of exponentials behind, and the few that beat
// the share's k best enter its heap.
#include "cerberus/head_topk.h"

#include <math.h>

#include "head_topk_tiles.h"
#include "parallel.h"
#include "projection.h"

namespace cerberus::CERBERUS_ISA {
namespace {

struct Scratch {
  float* packed;         // [rows, packed_width]
  float* block_max;      // [rows, blocks]
  float* block_sum;      // [rows, blocks], of exp(logit - block_max)
  float* heap_values;    // [shares, rows, k]
  int32_t* heap_rows;    // [shares, rows, k]
  int32_t* heap_counts;  // [shares, rows]

  explicit Scratch(const HeadTopkArgs& args) {
    const int64_t blocks = head_topk_blocks(args);
    packed = static_cast<float*>(args.scratch);
    block_max = packed + args.rows * packed_width(args.width);
    block_sum = block_max + args.rows * blocks;
    heap_values = block_sum + args.rows * blocks;
    heap_rows = reinterpret_cast<int32_t*>(heap_values + args.shares * args.rows * args.k);
    heap_counts = heap_rows + args.shares * args.rows * args.k;
  }

  CandidateHeap heap(const HeadTopkArgs& args, int64_t share, int64_t row) const {
    const int64_t at = share * args.rows + row;
    return {heap_values + at * args.k, heap_rows + at * args.k, heap_counts[at],
            static_cast<int32_t>(args.k)};
  }
};

CERBERUS_SIMD float max_of(const float* values, int64_t count) {
  Floats best = splat(-INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) best = maximum(load(values + i), best);
  float result = horizontal_maximum(best);
  for (; i < count; ++i) result = values[i] > result ? values[i] : result;
  return result;
}

// Sum of weights[i] · exp(values[i] - shift), where weights may be null for ones.
CERBERUS_SIMD float sum_exp(const float* values, const float* weights, int64_t count, float shift) {
  Floats sum = splat(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats power = exponential_below(load(values + i) - shift);
    sum += weights ? load(weights + i) * power : power;
  }
  if (i < count) {
    float tail[kLanes], tail_weights[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      tail[lane] = i + lane < count ? values[i + lane] : -INFINITY;
      tail_weights[lane] = i + lane >= count ? 0.0f : weights ? weights[i + lane] : 1.0f;
    }
    sum += load(tail_weights) * exponential_below(load(tail) - shift);
  }
  return horizontal_sum(sum);
}

template <typename T, int Rows>
inline void take_block(const HeadTopkArgs& args, const Scratch& scratch, int64_t share, int64_t row,
                       int64_t block) {
  const int64_t blocks = head_topk_blocks(args), block_rows = head_topk_block_rows(args.width);
  const int64_t first = block * block_rows;
  const int64_t count = first + block_rows <= args.vocab ? block_rows : args.vocab - first;
  const T* weight = static_cast<const T*>(args.weight) + first * args.weight_stride;
  float logits[Rows][kHeadTopkMaxBlockRows];
#if defined(CERBERUS_TILES)
  if constexpr (std::is_same<T, BFloat16>::value) {
    const int64_t stride = num_depths(args.width) * kTileDepth;
    tile_rows(reinterpret_cast<const BFloat16*>(scratch.packed) + row * stride, weight, args.weight_stride,
              count, args.width, Rows, logits[0], kHeadTopkMaxBlockRows);
  } else
#endif
  {
    const int64_t stride = packed_width(args.width);
    dot_rows<T, Rows>(scratch.packed + row * stride, stride, weight, args.weight_stride, count, args.width,
                      logits[0], kHeadTopkMaxBlockRows);
  }
  for (int s = 0; s < Rows; ++s) {
    const float maximum = max_of(logits[s], count);
    scratch.block_max[(row + s) * blocks + block] = maximum;
    scratch.block_sum[(row + s) * blocks + block] = sum_exp(logits[s], nullptr, count, shift_for(maximum));
    CandidateHeap heap = scratch.heap(args, share, row + s);
    if (heap.count == heap.capacity && !(maximum > heap.values[0])) continue;
    for (int64_t i = 0; i < count; ++i) {
      // Rows come in ascending order, so one that only equals the worst of the k best never enters.
      if (heap.count == heap.capacity && !(logits[s][i] > heap.values[0])) continue;
      candidate_push(heap, logits[s][i], static_cast<int32_t>(first + i));
    }
    scratch.heap_counts[share * args.rows + row + s] = heap.count;
  }
}

// Of `rows` rows that are left, how many one pass over a block takes.
CERBERUS_SIMD int64_t rows_of_pass(int64_t rows) { return rows <= 6 ? rows : 4; }

template <typename T>
inline void take_rows(const HeadTopkArgs& args, const Scratch& scratch, int64_t share, int64_t row,
                      int64_t block) {
  switch (rows_of_pass(args.rows - row)) {
    case 1:
      return take_block<T, 1>(args, scratch, share, row, block);
    case 2:
      return take_block<T, 2>(args, scratch, share, row, block);
    case 3:
      return take_block<T, 3>(args, scratch, share, row, block);
    case 4:
      return take_block<T, 4>(args, scratch, share, row, block);
    case 5:
      return take_block<T, 5>(args, scratch, share, row, block);
    default:
      return take_block<T, 6>(args, scratch, share, row, block);
  }
}

template <typename T>
inline void take_share(const HeadTopkArgs& args, const Scratch& scratch, int64_t share) {
  const int64_t blocks = head_topk_blocks(args);
  for (int64_t row = 0; row < args.rows; ++row) scratch.heap_counts[share * args.rows + row] = 0;
  for (int64_t block = blocks * share / args.shares; block < blocks * (share + 1) / args.shares; ++block) {
    for (int64_t row = 0; row < args.rows; row += rows_of_pass(args.rows - row)) {
      take_rows<T>(args, scratch, share, row, block);
    }
  }
}

inline void finish_row(const HeadTopkArgs& args, const Scratch& scratch, int64_t row) {
  const int64_t blocks = head_topk_blocks(args);
  const float* maxima = scratch.block_max + row * blocks;
  const float maximum = max_of(maxima, blocks);
  const float sum = sum_exp(maxima, scratch.block_sum + row * blocks, blocks, shift_for(maximum));
  const float lse = maximum + logf(sum);
  const bool usable = lse - lse == 0.0f;
  args.lse[row] = usable ? lse : NAN;
  CandidateHeap best = scratch.heap(args, 0, row);
  for (int64_t share = 1; share < args.shares; ++share) {
    const CandidateHeap other = scratch.heap(args, share, row);
    for (int32_t i = 0; i < other.count; ++i) candidate_push(best, other.values[i], other.rows[i]);
  }
  if (usable) candidate_sort(best);
  for (int64_t i = 0; i < args.k; ++i) {
    const int32_t vocab_row = usable ? best.rows[i] : static_cast<int32_t>(i);
    args.tokens[row * args.k + i] = args.token_map ? args.token_map[vocab_row] : vocab_row;
    args.log_probs[row * args.k + i] = usable ? best.values[i] - lse : NAN;
  }
}

// The states in the order in which the products take them.
template <typename T>
inline void pack(const HeadTopkArgs& args, const Scratch& scratch) {
  const T* states = static_cast<const T*>(args.states);
#if defined(CERBERUS_TILES)
  if constexpr (std::is_same<T, BFloat16>::value) {
    BFloat16* packed = reinterpret_cast<BFloat16*>(scratch.packed);
    for (int64_t row = 0; row < args.rows; row += rows_of_pass(args.rows - row)) {
      pack_states(states + row * args.states_stride, args.states_stride, rows_of_pass(args.rows - row),
                  args.width, packed + row * num_depths(args.width) * kTileDepth);
    }
    return;
  }
#endif
  for (int64_t row = 0; row < args.rows; ++row) {
    pack_row<T>(states + row * args.states_stride, args.width, 1.0f,
                scratch.packed + row * packed_width(args.width));
  }
}

template <typename T>
inline void run(const HeadTopkArgs& args) {
  const Scratch scratch(args);
  pack<T>(args, scratch);
  cpu::parallel_for(args.shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t share = first; share < last; ++share) take_share<T>(args, scratch, share);
#if defined(CERBERUS_TILES)
    if (std::is_same<T, BFloat16>::value) CERBERUS_TILE_RELEASE();
#endif
  });
  const int64_t work_per_row = head_topk_blocks(args) + args.shares * args.k;
  cpu::parallel_for(args.rows, 1 + 32768 / work_per_row, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) finish_row(args, scratch, row);
  });
}

}  // namespace

void head_topk(const HeadTopkArgs& args) {
  switch (args.dtype) {
    case DType::f32:
      return run<float>(args);
    case DType::f16:
      return run<Half>(args);
    case DType::bf16:
      return run<BFloat16>(args);
  }
}

}  // namespace cerberus::CERBERUS_ISA
