// grow_tree: the likeliest nodes that independent candidates per depth can form, likeliest first.
#pragma once

#include <cmath>
#include <cstdint>

#include "cerberus/platform.h"

namespace cerberus {

// A node that may be taken next.
struct GrowCandidate {
  float score;
  int32_t depth;   // 1 below the root
  int32_t parent;  // its node
  int32_t rank;
};

struct GrowTreeArgs {
  const float* log_probs;  // [batch, heads, ranks], ranks contiguous, best first
  int64_t log_probs_batch_stride;
  int64_t log_probs_head_stride;
  const int32_t* tokens;  // as log_probs, or null
  int64_t tokens_batch_stride;
  int64_t tokens_head_stride;
  const int32_t* roots;  // [batch], with tokens
  const float* costs;    // [nodes] or null
  int64_t batch;
  int64_t heads;
  int64_t ranks;
  int64_t nodes;
  int32_t* parents;        // [batch, nodes]
  int32_t* slots;          // [batch, nodes, 2]
  float* score;            // [batch, nodes]
  int32_t* num_nodes;      // [batch]
  int32_t* draft_tokens;   // [batch, nodes] or null
  GrowCandidate* scratch;  // [batch, nodes + 1]
};

// The order of taking: greater score, then the shallower, the earlier parent, the better rank.
CERBERUS_HD bool taken_before(const GrowCandidate& a, const GrowCandidate& b) {
  if (a.score != b.score) return a.score > b.score;
  if (a.depth != b.depth) return a.depth < b.depth;
  if (a.parent != b.parent) return a.parent < b.parent;
  return a.rank < b.rank;
}

// A binary heap whose first element is taken first.
struct GrowHeap {
  GrowCandidate* items;
  int64_t size;

  CERBERUS_HD void push(const GrowCandidate& item) {
    int64_t place = size++;
    while (place > 0) {
      const int64_t above = (place - 1) / 2;
      if (!taken_before(item, items[above])) break;
      items[place] = items[above];
      place = above;
    }
    items[place] = item;
  }

  CERBERUS_HD GrowCandidate pop() {
    const GrowCandidate first = items[0];
    const GrowCandidate last = items[--size];
    int64_t place = 0;
    for (;;) {
      int64_t below = 2 * place + 1;
      if (below >= size) break;
      if (below + 1 < size && taken_before(items[below + 1], items[below])) ++below;
      if (!taken_before(items[below], last)) break;
      items[place] = items[below];
      place = below;
    }
    items[place] = last;
    return first;
  }
};

// Offer the candidate of a rank below a parent; a head's candidates end at its first that is NaN or -inf.
CERBERUS_HD void offer_candidate(const GrowTreeArgs& args, int64_t b, GrowHeap& heap, float parent_score,
                                 int32_t depth, int32_t parent, int32_t rank) {
  if (depth > args.heads || rank >= args.ranks) return;
  const float log_prob =
      args.log_probs[b * args.log_probs_batch_stride + (depth - 1) * args.log_probs_head_stride + rank];
  if (!(log_prob > -INFINITY)) return;
  heap.push({parent_score + (log_prob < 0.0f ? log_prob : 0.0f), depth, parent, rank});
}

// One request's tree. A node's next sibling and its first child are offered when it is taken, so that the
// heap never holds more than one candidate per node taken, and one more.
CERBERUS_HD void grow_one_tree(const GrowTreeArgs& args, int64_t b) {
  int32_t* parents = args.parents + b * args.nodes;
  int32_t* slots = args.slots + b * args.nodes * 2;
  float* score = args.score + b * args.nodes;
  int32_t* tokens = args.draft_tokens ? args.draft_tokens + b * args.nodes : nullptr;
  parents[0] = slots[0] = slots[1] = -1;
  score[0] = 0.0f;
  if (tokens) tokens[0] = args.roots[b];
  GrowHeap heap{args.scratch + b * (args.nodes + 1), 0};
  offer_candidate(args, b, heap, 0.0f, 1, 0, 0);
  int64_t count = 1;
  while (count < args.nodes && heap.size > 0) {
    const GrowCandidate taken = heap.pop();
    parents[count] = taken.parent;
    slots[2 * count] = taken.depth - 1;
    slots[2 * count + 1] = taken.rank;
    score[count] = taken.score;
    if (tokens) {
      tokens[count] = args.tokens[b * args.tokens_batch_stride + (taken.depth - 1) * args.tokens_head_stride +
                                  taken.rank];
    }
    offer_candidate(args, b, heap, score[taken.parent], taken.depth, taken.parent, taken.rank + 1);
    offer_candidate(args, b, heap, taken.score, taken.depth + 1, static_cast<int32_t>(count), 0);
    ++count;
  }
  int64_t best = count;
  if (args.costs) {
    double tokens_expected = 1.0, best_rate = 1.0 / args.costs[0];
    best = 1;
    for (int64_t node = 1; node < count; ++node) {
      tokens_expected += exp(static_cast<double>(score[node]));
      const double rate = tokens_expected / args.costs[node];
      if (rate > best_rate) {
        best_rate = rate;
        best = node + 1;
      }
    }
  }
  args.num_nodes[b] = static_cast<int32_t>(best);
  for (int64_t node = count; node < args.nodes; ++node) {
    parents[node] = slots[2 * node] = slots[2 * node + 1] = -1;
    score[node] = -INFINITY;
    if (tokens) tokens[node] = -1;
  }
}

namespace cpu {
CERBERUS_EXPORT void grow_tree(const GrowTreeArgs& args);
}

}  // namespace cerberus
