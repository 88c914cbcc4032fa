// decoder_layer: a Llama layer over the nodes of draft trees in one call: normalised query, key and value
// products, rotary embedding, keys and values into the caches, tree attention, output product, and the gated
// feed-forward part.
#pragma once

#include <cstdint>

#include "cerberus/packed_linear.h"
#include "cerberus/tree_attention.h"

namespace cerberus {

// The parts as their own operators take them, with the buffers between them set by the caller: qkv.out [rows,
// q_heads + 2 * kv_heads, head_dim] holds attention.q in front, attention.out is output.x, output.out is
// gate_up.x and down.residual, gate_up.out is down.x. Rows are batch * nodes, in order.
struct DecoderLayerArgs {
  PackedLinearArgs qkv, output, gate_up, down;
  TreeAttentionArgs attention;  // its caches are written: node j of request b into slot prefix_lens[b] + j
  const void* cos;              // [rows, head_dim] of the layer's dtype
  const void* sin;
};

namespace cpu {
CERBERUS_EXPORT void decoder_layer(const DecoderLayerArgs& args);
}

}  // namespace cerberus
