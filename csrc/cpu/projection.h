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

// kLanes elements of one of the two vectors of a step, as load_pair() orders them.
template <int kHalf, typename T>
CERBERUS_SIMD Floats load_half(const T* step) {
  return load(step + kHalf * kLanes);
}

template <int kHalf>
CERBERUS_SIMD Floats load_half(const BFloat16* step) {
  Words pairs;
  memcpy(&pairs, step, sizeof(pairs));
  return bit_cast<Floats>(kHalf == 0 ? pairs << 16 : upper_halves(pairs));
}

// sums[s][r] += half a step of packed row s * that of weight row r. Whichever side has fewer rows is held in
// registers.
template <int kHalf, typename T, int Rows, int WeightRows>
CERBERUS_SIMD void add_half_step(const float* packed, int64_t packed_stride, const T* weight,
                                 int64_t weight_stride, Floats (&sums)[Rows][WeightRows]) {
  if constexpr (Rows < WeightRows) {
    Floats x[Rows];
    for (int s = 0; s < Rows; ++s) x[s] = load(packed + s * packed_stride + kHalf * kLanes);
    for (int r = 0; r < WeightRows; ++r) {
      const Floats w = load_half<kHalf>(weight + r * weight_stride);
      for (int s = 0; s < Rows; ++s) add_product(sums[s][r], x[s], w);
    }
  } else {
    Floats w[WeightRows];
    for (int r = 0; r < WeightRows; ++r) w[r] = load_half<kHalf>(weight + r * weight_stride);
    for (int s = 0; s < Rows; ++s) {
      const Floats x = load(packed + s * packed_stride + kHalf * kLanes);
      for (int r = 0; r < WeightRows; ++r) add_product(sums[s][r], x, w[r]);
    }
  }
}

// out[s * out_stride + r] = packed row s · weight row r, for Rows rows of packed and WeightRows of the
// weight. Meanwhile the tile after the next one comes near; asking for the next would be too late.
template <typename T, int Rows, int WeightRows>
CERBERUS_SIMD void dot_tile(const float* packed, int64_t packed_stride, const T* weight,
                            int64_t weight_stride, int64_t width, float* out, int64_t out_stride) {
  Floats sums[Rows][WeightRows];
  for (int s = 0; s < Rows; ++s) {
    for (int r = 0; r < WeightRows; ++r) sums[s][r] = Floats{};
  }
  int64_t j = 0;
  for (; j + kStep <= width; j += kStep) {
    for (int r = 0; r < WeightRows; ++r) {
      __builtin_prefetch(weight + (2 * WeightRows + r) * weight_stride + j);
    }
    add_half_step<0>(packed + j, packed_stride, weight + j, weight_stride, sums);
    CERBERUS_OPAQUE(j);
    add_half_step<1>(packed + j, packed_stride, weight + j, weight_stride, sums);
  }
  if (j < width) {
    T tail[WeightRows * kStep] = {};
    for (int r = 0; r < WeightRows; ++r) {
      memcpy(tail + r * kStep, weight + r * weight_stride + j, static_cast<size_t>(width - j) * sizeof(T));
    }
    add_half_step<0>(packed + j, packed_stride, tail, kStep, sums);
    add_half_step<1>(packed + j, packed_stride, tail, kStep, sums);
  }
  // Through memory: taken by a variable index, the sums would have lived there all along.
  constexpr int kSums = Rows * WeightRows;
  Floats ended[(kSums + 3) / 4 * 4] = {};
  for (int s = 0; s < Rows; ++s) {
    for (int r = 0; r < WeightRows; ++r) ended[r * Rows + s] = sums[s][r];
  }
  for (int i = 0; i < kSums; i += 4) {
    const Quad four = horizontal_sums(ended[i], ended[i + 1], ended[i + 2], ended[i + 3]);
    for (int part = 0; part < 4 && i + part < kSums; ++part) {
      out[(i + part) % Rows * out_stride + (i + part) / Rows] = four[part];
    }
  }
}

// Weight rows of a tile: as many sums as hide the latency of a multiply-add and still leave registers for the
// operands. They divide the rows of a block of head_topk.
constexpr int weight_rows_for(int rows) {
#if defined(CERBERUS_LEVEL_avx512)
  return rows <= 3 ? 8 : rows == 4 ? 6 : 4;
#else
  return rows == 1 ? 8 : rows == 2 ? 6 : rows == 3 ? 4 : rows == 4 ? 3 : 2;
#endif
}

// out[s * out_stride + r] for Rows packed rows and `weight_rows` rows of the weight.
template <typename T, int Rows>
inline void dot_rows(const float* packed, int64_t packed_stride, const T* weight, int64_t weight_stride,
                     int64_t weight_rows, int64_t width, float* out, int64_t out_stride) {
  constexpr int kTile = weight_rows_for(Rows);
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
