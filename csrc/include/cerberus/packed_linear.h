// packed_linear: x [rows, in] times a weight [out, in] packed into panels, for few rows.
#pragma once

#include <cstdint>

#include "cerberus/dtype.h"

namespace cerberus {

// A panel holds kPanelWidth outputs, stored along `in` in steps of kStepDepth inputs. A step lies as
// [kPanelWidth, kStepDepth] for bf16 and as [kStepDepth, kPanelWidth] for fp32 and fp16; padding is zero.
inline constexpr int64_t kPanelWidth = 48;
inline constexpr int64_t kStepDepth = 2;

CERBERUS_HD int64_t num_panels(int64_t out_features) {
  return (out_features + kPanelWidth - 1) / kPanelWidth;
}
CERBERUS_HD int64_t num_steps(int64_t in_features) { return (in_features + kStepDepth - 1) / kStepDepth; }

struct PackedLinearArgs {
  const void* x;  // [rows, in_features] of `dtype`, rows contiguous
  const void*
      panels;  // [num_panels(out_features), num_steps(in_features), kStepDepth * kPanelWidth] of `dtype`
  const void* bias;         // [out_features] of `dtype`, or null
  const void* norm_weight;  // [in_features] of `dtype`: x goes through RMS normalisation first; or null
  const void* residual;  // [rows, out_features] of `dtype`, contiguous, added to the rounded product; or null
  void* out;             // [rows, out_features] of `out_dtype`, contiguous, written whole
  float* scratch;        // packed_linear_scratch(rows, in_features) floats
  int64_t rows;
  int64_t in_features;
  int64_t out_features;
  int64_t x_stride;  // elements between two rows of x
  float eps;         // of the normalisation
  bool gated;        // x is [rows, 2 * in_features]: SiLU of a row's first half times its second goes in
  DType dtype;
  DType out_dtype;  // `dtype` or f32
};

// Floats between two rows of the copy of x: the odd cache line keeps rows of power-of-two length out of the
// same cache sets. The rest is room for a copy in bf16 padded to whole tiles of 32 inputs and 16 rows.
CERBERUS_HD int64_t packed_linear_scratch_stride(int64_t in_features) {
  return num_steps(in_features) * kStepDepth + 48;
}
CERBERUS_HD int64_t packed_linear_scratch(int64_t rows, int64_t in_features) {
  return rows * packed_linear_scratch_stride(in_features);
}

namespace cpu {
CERBERUS_EXPORT void packed_linear(const PackedLinearArgs& args);
}

}  // namespace cerberus
