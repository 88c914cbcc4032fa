// Matrix tiles for bf16 products (Intel AMX): eight registers of up to 16 rows of 64 bytes. tile_multiply()
// adds A [rows, 32] times B [32, columns] to C [rows, columns]; B lies as 16 rows of input pairs,
// [16, columns, 2].
//
// With CERBERUS_EMULATE_TILES the registers are memory and the instructions plain C++, so that the sources
// that use them can be tested on any processor.
#pragma once

#include <cstdint>
#include <cstring>

#include "cerberus/dtype.h"

#if defined(CERBERUS_TILES)

namespace cerberus::CERBERUS_ISA {

inline constexpr int64_t kTileHeight = 16;
inline constexpr int64_t kTileDepth = 32;

// The operand of the instruction that sets the shapes.
struct alignas(64) TileShapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(tile_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

#if defined(CERBERUS_EMULATE_TILES)

namespace {

struct Tiles {
  TileShapes shapes;
  unsigned char data[8][16][64];
};

thread_local Tiles tiles;

inline void tile_shapes(const TileShapes& shapes) {
  tiles.shapes = shapes;
  memset(tiles.data, 0, sizeof(tiles.data));
}

inline void tile_release() { tiles.shapes = TileShapes{}; }

inline void tile_clear(int tile) { memset(tiles.data[tile], 0, sizeof(tiles.data[tile])); }

inline void tile_load(int tile, const void* from, int64_t stride) {
  tile_clear(tile);
  for (int row = 0; row < tiles.shapes.rows[tile]; ++row) {
    memcpy(tiles.data[tile][row], static_cast<const char*>(from) + row * stride,
           tiles.shapes.row_bytes[tile]);
  }
}

inline void tile_store(int tile, void* to, int64_t stride) {
  for (int row = 0; row < tiles.shapes.rows[tile]; ++row) {
    memcpy(static_cast<char*>(to) + row * stride, tiles.data[tile][row], tiles.shapes.row_bytes[tile]);
  }
}

// A tile as floats, [rows, 32] bf16 numbers.
inline void tile_floats(int tile, float (&to)[16][32]) {
  for (int row = 0; row < tiles.shapes.rows[tile]; ++row) {
    for (int i = 0; i < tiles.shapes.row_bytes[tile] / 2; ++i) {
      BFloat16 value;
      memcpy(&value, tiles.data[tile][row] + 2 * i, sizeof(value));
      to[row][i] = to_float(value);
    }
  }
}

inline void tile_multiply(int c, int a, int b) {
  float left[16][32], right[16][32];
  tile_floats(a, left);
  tile_floats(b, right);
  for (int row = 0; row < tiles.shapes.rows[c]; ++row) {
    float sums[16];
    memcpy(sums, tiles.data[c][row], sizeof(sums));
    for (int k = 0; k < tiles.shapes.row_bytes[a] / 4; ++k) {
      for (int column = 0; column < tiles.shapes.row_bytes[c] / 4; ++column) {
        sums[column] += left[row][2 * k] * right[k][2 * column];
        sums[column] += left[row][2 * k + 1] * right[k][2 * column + 1];
      }
    }
    memcpy(tiles.data[c][row], sums, sizeof(sums));
  }
}

}  // namespace

#define CERBERUS_TILE_SHAPES(shapes) tile_shapes(shapes)
#define CERBERUS_TILE_RELEASE() tile_release()
#define CERBERUS_TILE_CLEAR(tile) tile_clear(tile)
#define CERBERUS_TILE_LOAD(tile, from, stride) tile_load(tile, from, stride)
#define CERBERUS_TILE_STORE(tile, to, stride) tile_store(tile, to, stride)
#define CERBERUS_TILE_MULTIPLY(c, a, b) tile_multiply(c, a, b)

#else

// Spelled out rather than as intrinsics: those of GCC do not tell the compiler that they touch memory, and a
// tile's number must be a literal anyway.
#define CERBERUS_TILE_SHAPES(shapes) __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory")
#define CERBERUS_TILE_RELEASE() __asm__ volatile("tilerelease" : : : "memory")
#define CERBERUS_TILE_CLEAR(tile) __asm__ volatile("tilezero %%tmm" #tile : : : "memory")
#define CERBERUS_TILE_LOAD(tile, from, stride)                                              \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile                                       \
                   :                                                                        \
                   : "r"(static_cast<const void*>(from)), "r"(static_cast<int64_t>(stride)) \
                   : "memory")
#define CERBERUS_TILE_STORE(tile, to, stride)                                       \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)"                           \
                   :                                                                \
                   : "r"(static_cast<void*>(to)), "r"(static_cast<int64_t>(stride)) \
                   : "memory")
#define CERBERUS_TILE_MULTIPLY(c, a, b) \
  __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : : : "memory")

#endif

}  // namespace cerberus::CERBERUS_ISA

#endif  // CERBERUS_TILES
