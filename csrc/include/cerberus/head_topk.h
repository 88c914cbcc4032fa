// Candidates of the draft heads: projection onto the vocabulary, log-sum-exp and the k best rows. The
// specification is cerberus_kernels/ops/head_topk/reference.py.
#pragma once

#include <cstdint>

#include "cerberus/dtype.h"
#include "cerberus/platform.h"

namespace cerberus {

struct HeadTopkArgs {
  const void* states;  // [rows, width]
  const void* weight;  // [>= vocab, width]
  DType dtype;         // of both
  int64_t rows;
  int64_t width;
  int64_t vocab;          // rows of weight in use
  int64_t k;              // in [1, vocab]
  int64_t states_stride;  // elements from row to row
  int64_t weight_stride;
  const int32_t* token_map;  // [vocab] or null
  int32_t* tokens;           // [rows, k]
  float* log_probs;          // [rows, k]
  float* lse;                // [rows]
  int64_t shares;            // the vocabulary is split into so many; no result depends on it
  void* scratch;             // head_topk_scratch_bytes(args), aligned to 64
};

// The vocabulary is summed block by block and the blocks in order, so that no rounding depends on the shares.
// A block of the weight stays in a core's cache while every row of states passes over it.
CERBERUS_HD int64_t head_topk_block_rows(int64_t width) { return width <= 1024 ? 48 : 24; }
inline constexpr int64_t kHeadTopkMaxBlockRows = 48;

CERBERUS_HD int64_t head_topk_blocks(const HeadTopkArgs& args) {
  const int64_t block = head_topk_block_rows(args.width);
  return (args.vocab + block - 1) / block;
}

// Shares worth making for `threads` threads.
CERBERUS_HD int64_t head_topk_shares(const HeadTopkArgs& args, int64_t threads) {
  const int64_t blocks = head_topk_blocks(args);
  const int64_t most = blocks < threads ? blocks : threads;
  const int64_t worth = 1 + args.rows * args.vocab * args.width / (1 << 17);
  return most < 1 ? 1 : most < worth ? most : worth;
}

CERBERUS_HD int64_t head_topk_scratch_bytes(const HeadTopkArgs& args) {
  const int64_t packed = (args.width + 31) / 32 * 32;
  return 4 * args.rows * (packed + 2 * head_topk_blocks(args) + args.shares * (2 * args.k + 1));
}

// The best k of the (value, row) pairs pushed so far, as a heap with the worst on top. Greater values are
// better, equal ones by the lower row, so the set does not depend on the order of pushes.
struct CandidateHeap {
  float* values;
  int32_t* rows;
  int32_t count;
  int32_t capacity;
};

CERBERUS_HD bool candidate_better(float value, int32_t row, float other_value, int32_t other_row) {
  return value > other_value || (value == other_value && row < other_row);
}

// Put (value, row) where position `hole` is free and everything below it is already a heap.
CERBERUS_HD void candidate_sink(const CandidateHeap& heap, int32_t count, int32_t hole, float value,
                                int32_t row) {
  while (true) {
    int32_t child = 2 * hole + 1;
    if (child >= count) break;
    if (child + 1 < count && candidate_better(heap.values[child], heap.rows[child], heap.values[child + 1],
                                              heap.rows[child + 1])) {
      ++child;
    }
    if (!candidate_better(value, row, heap.values[child], heap.rows[child])) break;
    heap.values[hole] = heap.values[child];
    heap.rows[hole] = heap.rows[child];
    hole = child;
  }
  heap.values[hole] = value;
  heap.rows[hole] = row;
}

CERBERUS_HD void candidate_push(CandidateHeap& heap, float value, int32_t row) {
  if (heap.count < heap.capacity) {
    int32_t hole = heap.count++;
    while (hole > 0) {
      const int32_t parent = (hole - 1) / 2;
      if (!candidate_better(heap.values[parent], heap.rows[parent], value, row)) break;
      heap.values[hole] = heap.values[parent];
      heap.rows[hole] = heap.rows[parent];
      hole = parent;
    }
    heap.values[hole] = value;
    heap.rows[hole] = row;
  } else if (candidate_better(value, row, heap.values[0], heap.rows[0])) {
    candidate_sink(heap, heap.count, 0, value, row);
  }
}

// From a heap to descending order, best first.
CERBERUS_HD void candidate_sort(const CandidateHeap& heap) {
  for (int32_t last = heap.count - 1; last > 0; --last) {
    const float value = heap.values[last];
    const int32_t row = heap.rows[last];
    heap.values[last] = heap.values[0];
    heap.rows[last] = heap.rows[0];
    candidate_sink(heap, last, 0, value, row);
  }
}

namespace cpu {
CERBERUS_EXPORT void head_topk(const HeadTopkArgs& args);
}  // namespace cpu

}  // namespace cerberus
