// Dot products of fp32 rows with the rows of a weight in fp32, bf16 or fp16, for one instruction-set level:
// include only from sources compiled per level. A dot product's rounding depends on the two rows and the
// level alone, not on the tile it was computed in.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cerberus/dtype.h"
#include "simd.h"

namespace cerberus::CERBERUS_ISA {
namespace {

// Elements that one step of a dot product takes: two vectors of floats.
inline constexpr int64_t kStep = 2 * kLanes;

inline int64_t packed_width(int64_t width) { return (width + kStep - 1) / kStep * kStep; }

// Up to kStep elements, the rest filled with `padding`; nothing past `count` is read.
template <typename T>
CERBERUS_SIMD void load_pair_tail(const T* source, int64_t count, T padding, Floats& a, Floats& b) {
  T buffer[kStep];
  for (int64_t i = 0; i < kStep; ++i) buffer[i] = i < count ? source[i] : padding;
  load_pair(buffer, a, b);
}

// kStep floats in the order in which load_pair() hands out elements of type T.
template <typename T>
CERBERUS_SIMD void rearrange(const float* step, float* packed) {
  constexpr bool kEvenThenOdd = std::is_same<T, BFloat16>::value;
  for (int64_t i = 0; i < kLanes; ++i) {
    packed[i] = step[kEvenThenOdd ? 2 * i : i];
    packed[kLanes + i] = step[kEvenThenOdd ? 2 * i + 1 : kLanes + i];
  }
}

// scale · row as floats in the order of a weight of type W, padded with zeros to packed_width.
template <typename W, typename T>
inline void pack_row(const T* row, int64_t width, float scale, float* packed) {
  for (int64_t j = 0; j < width; j += kStep) {
    float step[kStep];
    for (int64_t i = 0; i < kStep; ++i) step[i] = j + i < width ? to_float(row[j + i]) * scale : 0.0f;
    rearrange<W>(step, packed + j);
  }
}

// out[s * out_stride + r] = packed row s · weight row r, for Rows rows of packed and WeightRows of the
// weight.
template <typename T, int Rows, int WeightRows>
CERBERUS_SIMD void dot_tile(const float* packed, int64_t packed_stride, const T* weight,
                            int64_t weight_stride, int64_t width, float* out, int64_t out_stride) {
  Floats sums[Rows][WeightRows];
  for (int s = 0; s < Rows; ++s) {
    for (int r = 0; r < WeightRows; ++r) sums[s][r] = splat(0.0f);
  }
  int64_t j = 0;
  for (; j + kStep <= width; j += kStep) {
    Floats a[WeightRows], b[WeightRows];
    for (int r = 0; r < WeightRows; ++r) load_pair(weight + r * weight_stride + j, a[r], b[r]);
    for (int s = 0; s < Rows; ++s) {
      const Floats x = load(packed + s * packed_stride + j);
      const Floats y = load(packed + s * packed_stride + j + kLanes);
      for (int r = 0; r < WeightRows; ++r) sums[s][r] += x * a[r];
      for (int r = 0; r < WeightRows; ++r) sums[s][r] += y * b[r];
    }
  }
  if (j < width) {
    for (int r = 0; r < WeightRows; ++r) {
      Floats a, b;
      load_pair_tail(weight + r * weight_stride + j, width - j, T{}, a, b);
      for (int s = 0; s < Rows; ++s) {
        sums[s][r] += load(packed + s * packed_stride + j) * a;
        sums[s][r] += load(packed + s * packed_stride + j + kLanes) * b;
      }
    }
  }
  for (int s = 0; s < Rows; ++s) {
    for (int r = 0; r < WeightRows; ++r) out[s * out_stride + r] = horizontal_sum(sums[s][r]);
  }
}

// out[s * out_stride + r] for Rows packed rows and `weight_rows` rows of the weight. Eight running sums hide
// the latency of a multiply-add and still leave registers for the operands.
template <typename T, int Rows>
inline void dot_rows(const float* packed, int64_t packed_stride, const T* weight, int64_t weight_stride,
                     int64_t weight_rows, int64_t width, float* out, int64_t out_stride) {
  constexpr int kTile = Rows >= 3 ? 2 : 4;
  int64_t r = 0;
  for (; r + kTile <= weight_rows; r += kTile) {
    dot_tile<T, Rows, kTile>(packed, packed_stride, weight + r * weight_stride, weight_stride, width, out + r,
                             out_stride);
  }
  for (; r < weight_rows; ++r) {
    dot_tile<T, Rows, 1>(packed, packed_stride, weight + r * weight_stride, weight_stride, width, out + r,
                         out_stride);
  }
}

}  // namespace
}  // namespace cerberus::CERBERUS_ISA
