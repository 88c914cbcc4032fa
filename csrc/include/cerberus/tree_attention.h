// tree_attention: nodes of a draft tree attend to the committed prefix, to their ancestors and to themselves.
#pragma once

#include <cstdint>

#include "cerberus/dtype.h"
#include "cerberus/tree.h"

namespace cerberus {

// Strides count elements; the last dimension of every tensor is contiguous. A contiguous cache is one block
// per request: block_table is null, block_size its slots and the block stride the distance between two
// requests.
struct TreeAttentionArgs {
  const void* q;               // [batch, nodes, q_heads, head_dim]
  const void* k_cache;         // [blocks, block_size, kv_heads, head_dim]
  const void* v_cache;         // as k_cache
  const uint32_t* mask;        // [nodes, mask_words] or [batch, nodes, mask_words]
  const int32_t* prefix_lens;  // [batch]
  const int32_t* block_table;  // [batch, max_blocks], or null
  const int32_t* num_nodes;    // [batch], or null when every row has all `nodes`
  void* out;                   // as q, written whole
  float* lse;                  // [batch, nodes, q_heads], written whole, or null
  DType dtype;                 // of q, the caches and out
  int64_t batch, nodes, q_heads, kv_heads, head_dim;
  int64_t block_size;
  int64_t q_stride[3], out_stride[3];  // batch, node, head
  int64_t lse_stride[2];               // batch, node
  int64_t k_stride[3], v_stride[3];    // block, slot, head
  int64_t mask_stride[2];              // batch (0 for one tree), node
  int64_t block_table_stride;
  float scale;
  float softcap;   // 0 for none
  int64_t window;  // keys at positions > own position - window are seen; 0 for no limit
};

CERBERUS_HD int64_t nodes_of(const TreeAttentionArgs& args, int64_t b) {
  return args.num_nodes ? args.num_nodes[b] : args.nodes;
}

// Bits of nodes 32 * word .. 32 * word + 31 that lie below num_nodes.
CERBERUS_HD uint32_t bits_in_use(int64_t word, int64_t num_nodes) {
  const int64_t count = num_nodes - 32 * word;
  return count >= 32 ? 0xffffffffu : count <= 0 ? 0u : (1u << count) - 1u;
}

// Depth of a node: the set bits of its mask row below num_nodes, less its own.
CERBERUS_HD int32_t depth_from_mask(const uint32_t* row, int64_t num_nodes) {
  int32_t depth = -1;
  for (int64_t word = 0; 32 * word < num_nodes; ++word) {
    for (uint32_t bits = row[word] & bits_in_use(word, num_nodes); bits != 0; bits &= bits - 1) ++depth;
  }
  return depth;
}

// Distance of logical slot `slot` of request b from the start of a cache with these strides. Divisions are of
// 32 bits, which cost half as much: slots are int32, and so are the blocks' sizes that divide them.
CERBERUS_HD int64_t slot_offset(const TreeAttentionArgs& args, const int64_t* stride, int64_t b,
                                int64_t slot) {
  if (!args.block_table) return b * stride[0] + slot * stride[1];
  const uint32_t size = static_cast<uint32_t>(args.block_size), at = static_cast<uint32_t>(slot);
  const uint32_t index = at / size;
  const int64_t block = args.block_table[b * args.block_table_stride + index];
  return block * stride[0] + static_cast<int64_t>(at - index * size) * stride[1];
}

// How many of the `count` slots from `slot` on lie a stride apart.
CERBERUS_HD int64_t run_length(const TreeAttentionArgs& args, int64_t slot, int64_t count) {
  if (!args.block_table) return count;
  const uint32_t size = static_cast<uint32_t>(args.block_size);
  const int64_t rest = size - static_cast<uint32_t>(slot) % size;
  return count < rest ? count : rest;
}

namespace cpu {
CERBERUS_EXPORT void tree_attention(const TreeAttentionArgs& args);
}

}  // namespace cerberus
