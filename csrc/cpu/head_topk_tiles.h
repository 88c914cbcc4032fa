// head_topk's bf16 products through matrix tiles: 16 rows of the weight are an A tile as they lie, the states
// are packed once into B tiles. A logit's sum takes the inputs in order, whatever the tile it is in. For
// head_topk.cc only.
#pragma once

#include "simd.h"
#include "tiles.h"

#if defined(CERBERUS_TILES)

namespace cerberus::CERBERUS_ISA {
namespace {

inline int64_t num_depths(int64_t width) { return (width + kTileDepth - 1) / kTileDepth; }

// `rows` rows of states as B tiles, [depths, 16 pairs, rows, 2], zeros past `width`.
inline void pack_states(const BFloat16* states, int64_t states_stride, int64_t rows, int64_t width,
                        BFloat16* packed) {
  for (int64_t pair = 0; pair < num_depths(width) * kTileDepth / 2; ++pair) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 2 * pair; i < 2 * pair + 2; ++i) {
        *packed++ = i < width ? states[row * states_stride + i] : BFloat16{};
      }
    }
  }
}

// Tiles 0-2 hold the sums of three tiles of weight rows, 3-5 these, 6 the states.
inline void set_shapes(int64_t weight_rows, int64_t rows) {
  TileShapes shapes;
  for (int tile = 0; tile < 3; ++tile) shapes.set(tile, weight_rows, 4 * rows);
  for (int tile = 3; tile < 6; ++tile) shapes.set(tile, weight_rows, 2 * kTileDepth);
  shapes.set(6, kTileDepth / 2, 4 * rows);
  CERBERUS_TILE_SHAPES(shapes);
}

// sums[i][row] of the tile of `height` weight rows that starts at each of `first`.
struct WeightTile {
  const BFloat16* first;
  alignas(64) float sums[kTileHeight * 16];
};

// The part of a tile past the last whole depth, with zeros behind it.
inline void copy_rest(const BFloat16* from, int64_t stride, int64_t height, int64_t count, BFloat16* rest) {
  memset(static_cast<void*>(rest), 0, sizeof(BFloat16) * kTileHeight * kTileDepth);
  for (int64_t i = 0; i < height; ++i) {
    memcpy(static_cast<void*>(rest + i * kTileDepth), from + i * stride,
           static_cast<size_t>(count) * sizeof(BFloat16));
  }
}

inline void multiply_three(WeightTile (&tiles)[3], int64_t stride, int64_t height, int64_t width,
                           const BFloat16* packed, int64_t rows) {
  CERBERUS_TILE_CLEAR(0);
  CERBERUS_TILE_CLEAR(1);
  CERBERUS_TILE_CLEAR(2);
  int64_t j = 0;
  for (; j + kTileDepth <= width; j += kTileDepth, packed += kTileDepth * rows) {
    CERBERUS_TILE_LOAD(6, packed, 4 * rows);
    CERBERUS_TILE_LOAD(3, tiles[0].first + j, 2 * stride);
    CERBERUS_TILE_MULTIPLY(0, 3, 6);
    CERBERUS_TILE_LOAD(4, tiles[1].first + j, 2 * stride);
    CERBERUS_TILE_MULTIPLY(1, 4, 6);
    CERBERUS_TILE_LOAD(5, tiles[2].first + j, 2 * stride);
    CERBERUS_TILE_MULTIPLY(2, 5, 6);
  }
  if (j < width) {
    alignas(64) BFloat16 rest[3][kTileHeight * kTileDepth];
    for (int tile = 0; tile < 3; ++tile) {
      copy_rest(tiles[tile].first + j, stride, height, width - j, rest[tile]);
    }
    CERBERUS_TILE_LOAD(6, packed, 4 * rows);
    CERBERUS_TILE_LOAD(3, rest[0], 2 * kTileDepth);
    CERBERUS_TILE_MULTIPLY(0, 3, 6);
    CERBERUS_TILE_LOAD(4, rest[1], 2 * kTileDepth);
    CERBERUS_TILE_MULTIPLY(1, 4, 6);
    CERBERUS_TILE_LOAD(5, rest[2], 2 * kTileDepth);
    CERBERUS_TILE_MULTIPLY(2, 5, 6);
  }
  CERBERUS_TILE_STORE(0, tiles[0].sums, 4 * rows);
  CERBERUS_TILE_STORE(1, tiles[1].sums, 4 * rows);
  CERBERUS_TILE_STORE(2, tiles[2].sums, 4 * rows);
}

// out[row * out_stride + r] of `rows` packed states and `count` rows of the weight.
inline void tile_rows(const BFloat16* packed, const BFloat16* weight, int64_t stride, int64_t count,
                      int64_t width, int64_t rows, float* out, int64_t out_stride) {
  const int64_t height = count < kTileHeight ? count : kTileHeight;
  set_shapes(height, rows);
  for (int64_t r = 0; r < count; r += 3 * kTileHeight) {
    WeightTile tiles[3];
    int64_t first[3];
    for (int tile = 0; tile < 3; ++tile) {
      // A tile that would reach past the end starts earlier and repeats some rows.
      const int64_t wanted = r + tile * kTileHeight;
      first[tile] = wanted + height <= count ? wanted : count - height;
      tiles[tile].first = weight + first[tile] * stride;
    }
    multiply_three(tiles, stride, height, width, packed, rows);
    for (int tile = 0; tile < 3; ++tile) {
      for (int64_t i = 0; i < height; ++i) {
        for (int64_t row = 0; row < rows; ++row) {
          out[row * out_stride + first[tile] + i] = tiles[tile].sums[i * rows + row];
        }
      }
    }
  }
}

}  // namespace
}  // namespace cerberus::CERBERUS_ISA

#endif  // CERBERUS_TILES
