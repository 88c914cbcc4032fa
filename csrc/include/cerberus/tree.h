// Draft trees as parent arrays: node 0 is the root, a parent comes before its child.
#pragma once

#include <cstdint>

#include "cerberus/platform.h"

namespace cerberus {

// Index of the first node that breaks the encoding (parents[0] == -1, 0 <= parents[i] < i), or -1 if none
// does.
CERBERUS_HD int32_t first_malformed_node(const int32_t* parents, int32_t num_nodes) {
  if (num_nodes > 0 && parents[0] != -1) return 0;
  for (int32_t node = 1; node < num_nodes; ++node) {
    if (parents[node] < 0 || parents[node] >= node) return node;
  }
  return -1;
}

CERBERUS_HD int32_t mask_words(int64_t num_nodes) { return static_cast<int32_t>((num_nodes + 31) / 32); }

}  // namespace cerberus
