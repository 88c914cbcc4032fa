// head_states: the draft heads' residual blocks.
#pragma once

#include <cstdint>

#include "cerberus/dtype.h"

namespace cerberus {

// Vectors may come in any of the three float types, each with its own. Strides are in elements; the last
// dimension is contiguous everywhere.
struct HeadStatesArgs {
  const void* hidden;  // [batch, width]
  const void* weight;  // [blocks, heads, width, columns], columns = 2 * width (linked) or width
  const void* bias;    // [blocks, heads, width]
  const void* root;    // [batch, width], or null: hidden stands left of the first head
  float* scratch;      // [2, batch, heads + 1, width], contiguous; content lost
  void* out;           // [batch, heads, width], contiguous, in the type of hidden
  DType hidden_dtype;
  DType weight_dtype;
  DType bias_dtype;
  DType root_dtype;
  int64_t batch;
  int64_t blocks;
  int64_t heads;
  int64_t width;
  bool linked;
  int64_t hidden_stride;
  int64_t root_stride;
  int64_t weight_strides[3];  // block, head, row
  int64_t bias_strides[2];    // block, head
};

namespace cpu {
CERBERUS_EXPORT void head_states(const HeadStatesArgs& args);
}

}  // namespace cerberus
