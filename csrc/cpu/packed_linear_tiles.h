// packed_linear's bf16 panels through matrix tiles. A step of a panel, [48 outputs, 2 inputs], is a row of
// three B tiles side by side, so panels are used as they lie. For packed_linear.cc only.
#pragma once

#include "cerberus/packed_linear.h"
#include "simd.h"
#include "tiles.h"

#if defined(CERBERUS_TILES)

namespace cerberus::CERBERUS_ISA {
namespace {

constexpr int64_t kTileSteps = kTileDepth / kStepDepth;
constexpr int64_t kTileColumns = 16;
constexpr int64_t kStepBytes = kStepDepth * kPanelWidth * 2;

// Elements between two rows of the bf16 copy of x, which is padded with zeros to whole tiles. The odd cache
// line keeps rows of power-of-two length out of the same cache sets.
CERBERUS_SIMD int64_t tile_x_stride(int64_t in_features) {
  return (in_features + kTileDepth - 1) / kTileDepth * kTileDepth + kTileDepth;
}

// `rows` rows are cut into so many groups of so many rows, all alike and at most a tile high.
CERBERUS_SIMD int64_t num_groups(int64_t rows) { return (rows + kTileHeight - 1) / kTileHeight; }
CERBERUS_SIMD int64_t group_rows(int64_t rows) { return (rows + num_groups(rows) - 1) / num_groups(rows); }

// Tiles 0-2 hold the sums of a group and a panel, 3 the group's inputs, 4-6 the panel's weights.
CERBERUS_SIMD void set_shapes(int64_t rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 4; ++tile) shapes.set(tile, rows, 64);
  for (int tile = 4; tile < 7; ++tile) shapes.set(tile, kTileSteps, 64);
  CERBERUS_TILE_SHAPES(shapes);
}

CERBERUS_SIMD void multiply_tiles(const BFloat16* x, int64_t x_stride, const BFloat16* steps) {
  CERBERUS_TILE_LOAD(3, x, x_stride * 2);
  CERBERUS_TILE_LOAD(4, steps, kStepBytes);
  CERBERUS_TILE_LOAD(5, steps + kStepDepth * kTileColumns, kStepBytes);
  CERBERUS_TILE_LOAD(6, steps + 2 * kStepDepth * kTileColumns, kStepBytes);
  CERBERUS_TILE_MULTIPLY(0, 3, 4);
  CERBERUS_TILE_MULTIPLY(1, 3, 5);
  CERBERUS_TILE_MULTIPLY(2, 3, 6);
}

// Adds `steps` steps of a panel to a group's sums in `total`, rows kPanelWidth floats apart. Meanwhile the
// next `ahead` bytes after `next` come near, a part per tile of inputs.
inline void tile_group(const BFloat16* x, int64_t x_stride, const BFloat16* panel, int64_t steps, bool first,
                       float* total, const char* next) {
  constexpr int64_t kTotalBytes = kPanelWidth * 4;
  if (first) {
    CERBERUS_TILE_CLEAR(0);
    CERBERUS_TILE_CLEAR(1);
    CERBERUS_TILE_CLEAR(2);
  } else {
    CERBERUS_TILE_LOAD(0, total, kTotalBytes);
    CERBERUS_TILE_LOAD(1, total + kTileColumns, kTotalBytes);
    CERBERUS_TILE_LOAD(2, total + 2 * kTileColumns, kTotalBytes);
  }
  int64_t step = 0;
  for (; step + kTileSteps <= steps; step += kTileSteps) {
    if (next) {
      const char* near = next + step * kStepBytes;
      for (int64_t line = 0; line < kTileSteps * kStepBytes; line += 64) __builtin_prefetch(near + line);
    }
    multiply_tiles(x + step * kStepDepth, x_stride, panel + step * kStepDepth * kPanelWidth);
  }
  if (step < steps) {  // what follows belongs to another panel
    alignas(64) BFloat16 rest[kTileDepth * kPanelWidth] = {};
    memcpy(rest, panel + step * kStepDepth * kPanelWidth, static_cast<size_t>((steps - step) * kStepBytes));
    multiply_tiles(x + step * kStepDepth, x_stride, rest);
  }
  CERBERUS_TILE_STORE(0, total, kTotalBytes);
  CERBERUS_TILE_STORE(1, total + kTileColumns, kTotalBytes);
  CERBERUS_TILE_STORE(2, total + 2 * kTileColumns, kTotalBytes);
}

// The block of `count` steps for `rows` rows of x, of which the rows up to a multiple of the group are there.
inline void tile_block(const BFloat16* x, int64_t x_stride, const BFloat16* block, int64_t count,
                       int64_t rows, bool first, float* total) {
  const int64_t group = group_rows(rows);
  const char* next = reinterpret_cast<const char*>(block) + count * kStepBytes;
  for (int64_t row = 0; row < rows; row += group) {
    tile_group(x + row * x_stride, x_stride, block, count, first, total + row * kPanelWidth, next);
    next = nullptr;
  }
}

}  // namespace
}  // namespace cerberus::CERBERUS_ISA

#endif  // CERBERUS_TILES
