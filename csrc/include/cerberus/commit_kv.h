// commit_kv: the accepted nodes' keys and values move behind the committed prefix, in every layer at once.
#pragma once

#include <cstdint>

#include "cerberus/platform.h"

namespace cerberus {

// One layer's keys or values: [blocks, block_size, heads, row_bytes]. Strides count bytes.
struct KvPlane {
  unsigned char* data;
  int64_t block_stride, slot_stride, head_stride;
  int64_t heads, row_bytes;
};

// A contiguous cache is one block per request: block_table is null and block_size its slots.
struct CommitKvArgs {
  const KvPlane* planes;        // [num_planes]
  const int32_t* path;          // [batch, depth + 1]
  const int32_t* num_accepted;  // [batch]
  const int32_t* prefix_lens;   // [batch]
  const int32_t* block_table;   // [batch, max_blocks], or null
  int32_t* new_lens;            // [batch], written
  int64_t num_planes, batch;
  int64_t block_size;
  int64_t path_stride, block_table_stride;
};

// Distance in bytes of logical slot `slot` of request b from the start of a plane.
CERBERUS_HD int64_t plane_offset(const CommitKvArgs& args, const KvPlane& plane, int64_t b, int64_t slot) {
  if (!args.block_table) return b * plane.block_stride + slot * plane.slot_stride;
  const int64_t block = args.block_table[b * args.block_table_stride + slot / args.block_size];
  return block * plane.block_stride + slot % args.block_size * plane.slot_stride;
}

namespace cpu {
CERBERUS_EXPORT void commit_kv(const CommitKvArgs& args);
}

}  // namespace cerberus
