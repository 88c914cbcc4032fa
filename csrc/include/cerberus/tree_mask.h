// tree_mask: ancestor bits of every node of a draft tree.
#pragma once

#include <cstdint>

#include "cerberus/tree.h"

namespace cerberus {

struct TreeMaskArgs {
  const int32_t* parents;    // [batch, nodes], rows contiguous
  const int32_t* num_nodes;  // [batch], or null when every row has all `nodes`
  uint32_t* mask;            // [batch, nodes, mask_words(nodes)], contiguous, written whole
  int64_t batch;
  int64_t nodes;
  int64_t parents_stride;  // elements between two rows of `parents`
};

// Bits of one tree. Rows at and past `num_nodes` become zero.
CERBERUS_HD void write_tree_mask(const int32_t* parents, int32_t num_nodes, int32_t nodes, uint32_t* mask) {
  const int32_t words = mask_words(nodes);
  for (int32_t node = 0; node < nodes; ++node) {
    uint32_t* row = mask + static_cast<int64_t>(node) * words;
    const bool inherits = node > 0 && node < num_nodes;
    const uint32_t* parent_row = inherits ? mask + static_cast<int64_t>(parents[node]) * words : nullptr;
    for (int32_t word = 0; word < words; ++word) row[word] = inherits ? parent_row[word] : 0u;
    if (node < num_nodes) row[node / 32] |= 1u << (node % 32);
  }
}

namespace cpu {
CERBERUS_EXPORT void tree_mask(const TreeMaskArgs& args);
}

}  // namespace cerberus
