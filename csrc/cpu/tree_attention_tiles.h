// How tree_attention's work is cut into items and tiles, and which keys a tile's rows see. For
// tree_attention.cc only.
#pragma once

#include <cstdlib>

#include "cerberus/tree_attention.h"
#include "simd.h"

namespace cerberus::CERBERUS_ISA {
namespace {

constexpr int64_t kKeys = 64;      // keys of a prefix tile
constexpr int64_t kTreeKeys = 32;  // keys of a tree tile: one mask word
constexpr int64_t kRows = 96;      // greatest rows of an item, a multiple of every kLanes
constexpr int64_t kFewRows = kLanes >= 8 ? 4 : 2;
constexpr int64_t kSplitKeys = 256;
constexpr int64_t kEnoughItems = 32;      // of one request: no need to split its keys further
constexpr int64_t kThreadCycles = 16000;  // work that pays for a thread

CERBERUS_SIMD int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
CERBERUS_SIMD int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
CERBERUS_SIMD int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

// Scratch memory, 64-byte aligned; the caller frees it. No C++ allocation here: its clean-up code would leave
// symbols that the levels share. A process that has no memory for it ends, as it would on touching
// overcommitted memory.
CERBERUS_SIMD float* allocate(int64_t floats) {
  const size_t bytes = static_cast<size_t>(floats / 16 + 1) * 64;
  float* taken = static_cast<float*>(aligned_alloc(64, bytes));
  if (!taken) __builtin_trap();
  return taken;
}

// How one request is cut into items.
struct Request {
  int64_t b, prefix, nodes;
  int64_t rows, tile_rows, row_tiles;
  int64_t prefix_tiles, tiles, splits;
};

struct Item {
  int64_t head, first_row, rows, first_tile, last_tile;
};

struct Tile {
  int64_t slot, count;
  int64_t word;  // mask word of a tree tile, -1 for a prefix tile
};

// Scratch of one thread. `pitch` is the distance between two rows of head_dim floats.
struct Workspace {
  int64_t pitch;
  float* queries;      // [head_dim, rows rounded up] of many rows, [rows, packed_width] of a few
  float* scores;       // [keys, rows rounded up] of many rows, [rows, kKeys] of a few
  float* outputs;      // [rows, pitch], not yet divided by `sum`
  float* widened;      // [kKeys, pitch]: a tile's keys, then its values
  float* maximum;      // [rows]: of the scores so far
  float* sum;          // [rows]: of exp(score - maximum)
  float* factor;       // [rows]
  int32_t* first_key;  // [rows]: first position that the window shows
  uint32_t* words;     // [rows]: a tree tile's visible keys
  int32_t least_first_key, greatest_first_key;

  static int64_t floats(int64_t pitch) { return kRows * (2 * pitch + kKeys + 5) + kKeys * pitch; }

  // Pieces of `floats(pitch)` floats from `next` on.
  Workspace(float* next, int64_t row_pitch) : pitch(row_pitch) {
    const auto take = [&next](int64_t count) __attribute__((always_inline)) {
      float* taken = next;
      next += count;
      return taken;
    };
    queries = take(kRows * pitch);
    scores = take(kRows * kKeys);
    outputs = take(kRows * pitch);
    widened = take(kKeys * pitch);
    maximum = take(kRows);
    sum = take(kRows);
    factor = take(kRows);
    first_key = reinterpret_cast<int32_t*>(take(kRows));
    words = reinterpret_cast<uint32_t*>(take(kRows));
  }
};

Request cut_request(const TreeAttentionArgs& args, int64_t b) {
  Request request{};
  request.b = b;
  request.nodes = nodes_of(args, b);
  if (request.nodes == 0) return request;
  request.prefix = args.prefix_lens[b];
  request.rows = request.nodes * (args.q_heads / args.kv_heads);
  const int64_t even_rows = divide_up(request.rows, divide_up(request.rows, kRows));
  request.tile_rows = request.rows <= kFewRows ? request.rows : round_up_to_lanes(even_rows);
  request.row_tiles = divide_up(request.rows, request.tile_rows);
  request.prefix_tiles = divide_up(request.prefix, kKeys);
  request.tiles = request.prefix_tiles + divide_up(request.nodes, kTreeKeys);
  const int64_t wanted = divide_up(request.prefix + request.nodes, kSplitKeys);
  const int64_t most = greatest(kEnoughItems / (request.row_tiles * args.kv_heads), 1);
  request.splits = least(least(wanted, most), request.tiles);
  return request;
}

Item cut_item(const Request& request, int64_t head, int64_t row_tile, int64_t split) {
  Item item{};
  item.head = head;
  item.first_row = row_tile * request.tile_rows;
  item.rows = least(request.tile_rows, request.rows - item.first_row);
  item.first_tile = request.tiles * split / request.splits;
  item.last_tile = request.tiles * (split + 1) / request.splits;
  return item;
}

Tile tile_at(const Request& request, int64_t index) {
  if (index < request.prefix_tiles) {
    const int64_t slot = index * kKeys;
    return {slot, least(kKeys, request.prefix - slot), -1};
  }
  const int64_t word = index - request.prefix_tiles;
  return {request.prefix + word * kTreeKeys, least(kTreeKeys, request.nodes - word * kTreeKeys), word};
}

// First position that each row's window shows; INT32_MIN without a window.
void find_first_keys(const TreeAttentionArgs& args, const Request& request, const Item& item,
                     const int32_t* depths, Workspace& work) {
  const int64_t group = args.q_heads / args.kv_heads;
  work.least_first_key = INT32_MAX;
  work.greatest_first_key = INT32_MIN;
  for (int64_t r = 0; r < item.rows; ++r) {
    int64_t first = INT32_MIN;
    if (depths) {
      const int64_t depth = depths[request.b * args.nodes + (item.first_row + r) / group];
      first = greatest(request.prefix + depth + 1 - args.window, INT32_MIN);
    }
    work.first_key[r] = static_cast<int32_t>(first);
    work.least_first_key = static_cast<int32_t>(least(work.least_first_key, first));
    work.greatest_first_key = static_cast<int32_t>(greatest(work.greatest_first_key, first));
  }
  for (int64_t r = item.rows; r < kRows; ++r) work.first_key[r] = INT32_MIN;
}

// Fills `words` for a tree tile. False if no row sees any of its keys.
bool find_words(const TreeAttentionArgs& args, const Request& request, const Item& item, const Tile& tile,
                const int32_t* depths, Workspace& work) {
  const int64_t group = args.q_heads / args.kv_heads;
  const uint32_t* mask = args.mask + request.b * args.mask_stride[0] + tile.word;
  const uint32_t in_use = bits_in_use(tile.word, request.nodes);
  const int32_t* tile_depths = depths ? depths + request.b * args.nodes + tile.word * kTreeKeys : nullptr;
  uint32_t any = 0;
  for (int64_t r = 0; r < item.rows; ++r) {
    const int64_t row = item.first_row + r;
    if (r > 0 && row % group != 0) {  // the same node as the row before
      work.words[r] = work.words[r - 1];
      continue;
    }
    uint32_t word = mask[row / group * args.mask_stride[1]] & in_use;
    if (depths) {
      for (int64_t j = 0; j < tile.count; ++j) {
        if (request.prefix + tile_depths[j] < work.first_key[r]) word &= ~(1u << j);
      }
    }
    work.words[r] = word;
    any |= word;
  }
  for (int64_t r = item.rows; r < kRows; ++r) work.words[r] = 0;
  return any != 0;
}

bool tile_is_visible(const TreeAttentionArgs& args, const Request& request, const Item& item,
                     const Tile& tile, const int32_t* depths, Workspace& work) {
  if (tile.word >= 0) return find_words(args, request, item, tile, depths, work);
  return work.least_first_key < tile.slot + tile.count;
}

CERBERUS_SIMD bool tile_needs_mask(const Tile& tile, const Workspace& work) {
  return tile.word >= 0 || work.greatest_first_key > tile.slot;
}

CERBERUS_SIMD bool key_is_visible(const Tile& tile, const Workspace& work, int64_t row, int64_t key) {
  return tile.word >= 0 ? (work.words[row] >> key & 1u) != 0 : work.first_key[row] <= tile.slot + key;
}

}  // namespace
}  // namespace cerberus::CERBERUS_ISA
