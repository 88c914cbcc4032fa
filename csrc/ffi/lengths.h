// Lengths and block ids that lead out of the caches. Rows with no nodes are not looked at.
#pragma once

#include "cerberus/tree_attention.h"
#include "tensors.h"

namespace cerberus::ffi {

inline void check_lengths(const char* op, const TreeAttentionArgs& args, int64_t blocks,
                          int64_t blocks_per_request) {
  const int64_t capacity = args.block_table ? blocks_per_request * args.block_size : args.block_size;
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t count = nodes_of(args, b);
    if (count < 0 || count > args.nodes) {
      TVM_FFI_THROW(ValueError) << op << ": num_nodes must be in [0, " << args.nodes << "], got " << count
                                << " in row " << b;
    }
    if (count == 0) continue;
    const int64_t prefix = args.prefix_lens[b];
    if (prefix < 0 || prefix > capacity - count) {
      TVM_FFI_THROW(ValueError) << op << ": prefix_lens must be in [0, " << capacity - count << "] for "
                                << count << " nodes in " << capacity << " slots, got " << prefix << " in row "
                                << b;
    }
    if (!args.block_table) continue;
    const int32_t* row = args.block_table + b * args.block_table_stride;
    for (int64_t i = 0; i * args.block_size < prefix + count; ++i) {
      if (row[i] < 0 || row[i] >= blocks) {
        TVM_FFI_THROW(ValueError) << op << ": block_table must be in [0, " << blocks
                                  << ") for blocks in use, got " << row[i] << " in row " << b;
      }
    }
  }
}

}  // namespace cerberus::ffi
