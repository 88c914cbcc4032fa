// Whether drafting pays at this step. The specification is cerberus_kernels/ops/gate/reference.py.
#pragma once

#include <cstdint>

#include "cerberus/dtype.h"
#include "cerberus/platform.h"

namespace cerberus {

enum class GateScore : int32_t { given = 0, entropy = 1, learned = 2 };

struct GateArgs {
  GateScore kind;
  int64_t batch;
  const float* entropy;  // given: [batch]
  const void* values;    // entropy: logits or hidden, learned: hidden; [batch, columns]
  DType values_dtype;
  int64_t columns;
  int64_t values_stride;  // elements from row to row
  const void* w1;         // learned: [inner, columns]
  const void* b1;         // [inner]
  const void* w2;         // [inner]
  const void* b2;         // [1]
  DType weights_dtype;
  int64_t inner;
  int64_t w1_stride;
  float eps;
  const float* thresholds;  // [batch], or null for one
  float threshold;
  float* score;    // [batch]
  uint8_t* open;   // [batch], 0 or 1
  float* scratch;  // gate_scratch_floats(args), aligned to 64
};

// Entropy is summed over blocks of this many columns, and the blocks in order, so that no rounding depends on
// threads.
inline constexpr int64_t kGateBlockColumns = 4096;

CERBERUS_HD int64_t gate_blocks(int64_t columns) {
  return (columns + kGateBlockColumns - 1) / kGateBlockColumns;
}

CERBERUS_HD int64_t gate_scratch_floats(const GateArgs& args) {
  if (args.kind == GateScore::entropy) return args.batch * gate_blocks(args.columns) * 3;
  return args.kind == GateScore::learned ? args.batch * ((args.columns + 31) / 32 * 32 + args.inner) : 0;
}

// A comparison with NaN is false, so a NaN score never opens.
CERBERUS_HD bool gate_opens(const GateArgs& args, int64_t b, float score) {
  const float threshold = args.thresholds ? args.thresholds[b] : args.threshold;
  return args.kind == GateScore::learned ? score >= threshold : score < threshold;
}

namespace cpu {
CERBERUS_EXPORT void gate(const GateArgs& args);
}  // namespace cpu

}  // namespace cerberus
