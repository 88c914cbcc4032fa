// tree_attention on the CPU: online softmax over tiles of keys.
//
// A work item is one request, one key/value head, up to 64 rows (a row is a node and a query head of the
// group) and a share of the keys. Rows lie in the lanes of the vectors: with q transposed once, scores^T = K
// q^T and out += P V are one kernel that broadcasts scalars of its left factor, K needs no transposing, and
// the softmax has no horizontal step. A few rows alone (plain decoding) would leave lanes idle; they take
// head_dim as lanes instead. How keys are shared out depends only on the request's own lengths, never on
// threads or neighbours.
#include "cerberus/tree_attention.h"

#include "parallel.h"
#include "projection.h"
#include "simd.h"
#include "tree_attention_tiles.h"

namespace cerberus::CERBERUS_ISA {
namespace {

constexpr int kBlockRows = 6;  // register block: 6 x 2 accumulators, 2 vectors, a broadcast

// C[m][v] (+)= sum over k of A[m][k] * B[k][v] for a block of M rows and V vectors, k ascending.
template <int M, int V>
CERBERUS_SIMD void multiply_block(const float* a, int64_t a_row, int64_t a_step, const float* b,
                                  int64_t b_step, float* c, int64_t c_row, int64_t steps, bool keep) {
  Floats total[M][V];
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) total[m][v] = keep ? load(c + m * c_row + v * kLanes) : Floats{};
  }
  for (int64_t k = 0; k < steps; ++k) {
    Floats right[V];
    for (int v = 0; v < V; ++v) right[v] = load(b + k * b_step + v * kLanes);
    for (int m = 0; m < M; ++m) {
      const Floats left = splat(a[m * a_row + k * a_step]);
      for (int v = 0; v < V; ++v) total[m][v] = multiply_add(left, right[v], total[m][v]);
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int v = 0; v < V; ++v) store(c + m * c_row + v * kLanes, total[m][v]);
  }
}

template <int V>
CERBERUS_SIMD void multiply_rows(const float* a, int64_t a_row, int64_t a_step, const float* b,
                                 int64_t b_step, float* c, int64_t c_row, int64_t rows, int64_t steps,
                                 bool keep) {
  int64_t m = 0;
  for (; m + kBlockRows <= rows; m += kBlockRows) {
    multiply_block<kBlockRows, V>(a + m * a_row, a_row, a_step, b, b_step, c + m * c_row, c_row, steps, keep);
  }
  a += m * a_row;
  c += m * c_row;
  switch (rows - m) {
    case 1:
      return multiply_block<1, V>(a, a_row, a_step, b, b_step, c, c_row, steps, keep);
    case 2:
      return multiply_block<2, V>(a, a_row, a_step, b, b_step, c, c_row, steps, keep);
    case 3:
      return multiply_block<3, V>(a, a_row, a_step, b, b_step, c, c_row, steps, keep);
    case 4:
      return multiply_block<4, V>(a, a_row, a_step, b, b_step, c, c_row, steps, keep);
    case 5:
      return multiply_block<5, V>(a, a_row, a_step, b, b_step, c, c_row, steps, keep);
    default:
      return;
  }
}

// C [rows, columns] (+)= A [rows, steps] B [steps, columns]; columns a multiple of kLanes.
void multiply(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, float* c,
              int64_t c_row, int64_t rows, int64_t columns, int64_t steps, bool keep) {
  int64_t v = 0;
  for (; v + 2 * kLanes <= columns; v += 2 * kLanes) {
    multiply_rows<2>(a, a_row, a_step, b + v, b_step, c + v, c_row, rows, steps, keep);
  }
  if (v < columns) multiply_rows<1>(a, a_row, a_step, b + v, b_step, c + v, c_row, rows, steps, keep);
}

CERBERUS_SIMD Floats cap(Floats score, float softcap) {
  return softcap * hyperbolic_tangent(score / softcap);
}

// ---- many rows: lanes are rows ----

// q^T [head_dim, padded_rows], scaled; rows past the item's are zero.
template <typename T>
void transpose_queries(const TreeAttentionArgs& args, const Request& request, const Item& item,
                       int64_t padded_rows, Workspace& work) {
  const int64_t group = args.q_heads / args.kv_heads;
  const T* q = static_cast<const T*>(args.q) + request.b * args.q_stride[0];
  for (int64_t r = 0; r < padded_rows; ++r) {
    float* column = work.queries + r;
    if (r >= item.rows) {
      for (int64_t d = 0; d < args.head_dim; ++d) column[d * padded_rows] = 0.0f;
      continue;
    }
    const int64_t row = item.first_row + r;
    const T* from = q + row / group * args.q_stride[1] + (item.head * group + row % group) * args.q_stride[2];
    for (int64_t d = 0; d < args.head_dim; ++d) column[d * padded_rows] = to_float(from[d]) * args.scale;
  }
}

// A tile's rows as floats, kLanes at a time; the lanes past head_dim are zero.
template <typename T>
void widen_rows(const TreeAttentionArgs& args, const T* cache, const int64_t* stride, int64_t b,
                const Tile& tile, int64_t pitch, float* to) {
  for (int64_t key = 0; key < tile.count;) {
    const T* from = cache + slot_offset(args, stride, b, tile.slot + key);
    const int64_t end = key + run_length(args, tile.slot + key, tile.count - key);
    for (; key < end; ++key, from += stride[1], to += pitch) {
      for (int64_t d = 0; d < args.head_dim; d += kLanes) {
        store(to + d, load_first(from + d, args.head_dim - d));
      }
    }
  }
}

// Asks for a tile's rows of one head, which lie apart by a stride that hardware may not foresee, or in pages.
template <typename T>
CERBERUS_SIMD void bring_near(const TreeAttentionArgs& args, const void* cache, const int64_t* stride,
                              int64_t head, int64_t b, const Tile& tile) {
  constexpr int64_t kLine = 64;
  const T* rows = static_cast<const T*>(cache) + head * stride[2];
  const int64_t bytes = args.head_dim * static_cast<int64_t>(sizeof(T));
  for (int64_t key = 0; key < tile.count;) {
    const char* row = reinterpret_cast<const char*>(rows + slot_offset(args, stride, b, tile.slot + key));
    const int64_t end = key + run_length(args, tile.slot + key, tile.count - key);
    for (; key < end; ++key, row += stride[1] * static_cast<int64_t>(sizeof(T))) {
      for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at, 0, 2);
    }
  }
}

// Rows of a tile in fp32: in the cache itself where they already are, else widened into `to`.
template <typename T>
const float* tile_rows(const TreeAttentionArgs& args, const void* cache, const int64_t* stride,
                       const Item& item, int64_t b, const Tile& tile, int64_t pitch, float* to,
                       int64_t* row_stride) {
  const T* head = static_cast<const T*>(cache) + item.head * stride[2];
  const bool whole = run_length(args, tile.slot, tile.count) == tile.count;
  if (sizeof(T) == sizeof(float) && whole && args.head_dim % kLanes == 0) {
    *row_stride = stride[1];
    return reinterpret_cast<const float*>(head + slot_offset(args, stride, b, tile.slot));
  }
  widen_rows(args, head, stride, b, tile, pitch, to);
  *row_stride = pitch;
  return to;
}

void adjust_scores(const Tile& tile, float softcap, int64_t padded_rows, Workspace& work) {
  const bool masked = tile_needs_mask(tile, work);
  if (!masked && softcap == 0.0f) return;
  const Floats hidden = splat(-INFINITY);
  for (int64_t key = 0; key < tile.count; ++key) {
    float* scores = work.scores + key * padded_rows;
    for (int64_t c = 0; c < padded_rows; c += kLanes) {
      Floats score = load(scores + c);
      if (softcap > 0.0f) score = cap(score, softcap);
      if (tile.word >= 0) {
        const Words words = bit_cast<Words>(load_ints(reinterpret_cast<const int32_t*>(work.words) + c));
        score = select(bit_cast<Ints>(-(words >> static_cast<int>(key) & 1u)), score, hidden);
      } else if (masked) {
        const Ints first = load_ints(work.first_key + c);
        score = select(first <= splat_int(static_cast<int32_t>(tile.slot + key)), score, hidden);
      }
      store(scores + c, score);
    }
  }
}

// Scores to exp(score - maximum so far), in place; `factor` is what sums so far must be multiplied with.
void exponentiate_columns(int64_t count, int64_t padded_rows, Workspace& work) {
  for (int64_t c = 0; c < padded_rows; c += kLanes) {
    float* scores = work.scores + c;
    const Floats before = load(work.maximum + c);
    Floats maximum_now = before;
    for (int64_t key = 0; key < count; ++key) {
      maximum_now = maximum(load(scores + key * padded_rows), maximum_now);
    }
    // A row that has seen nothing yet: exp(-inf - 0) is 0 where exp(-inf + inf) would be NaN.
    const Floats base = select(maximum_now == splat(-INFINITY), Floats{}, maximum_now);
    const Floats factor = exponential_below(before - base);
    Floats sum = load(work.sum + c) * factor;
    for (int64_t key = 0; key < count; ++key) {
      const Floats weight = exponential_below(load(scores + key * padded_rows) - base);
      store(scores + key * padded_rows, weight);
      sum += weight;
    }
    store(work.maximum + c, maximum_now);
    store(work.factor + c, factor);
    store(work.sum + c, sum);
  }
}

template <typename T>
void attend_many(const TreeAttentionArgs& args, const Request& request, const Item& item,
                 const int32_t* depths, Workspace& work) {
  const int64_t pitch = work.pitch;
  const int64_t padded_rows = round_up_to_lanes(item.rows);
  transpose_queries<T>(args, request, item, padded_rows, work);
  memset(work.outputs, 0, static_cast<size_t>(item.rows * pitch) * sizeof(float));
  for (int64_t r = 0; r < padded_rows; ++r) {
    work.maximum[r] = -INFINITY;
    work.sum[r] = 0.0f;
  }
  for (int64_t index = item.first_tile; index < item.last_tile; ++index) {
    const Tile tile = tile_at(request, index);
    if (!tile_is_visible(args, request, item, tile, depths, work)) continue;
    int64_t k_row, v_row;
    const float* k =
        tile_rows<T>(args, args.k_cache, args.k_stride, item, request.b, tile, pitch, work.widened, &k_row);
    bring_near<T>(args, args.v_cache, args.v_stride, item.head, request.b, tile);
    multiply(k, k_row, 1, work.queries, padded_rows, work.scores, padded_rows, tile.count, padded_rows,
             args.head_dim, false);
    adjust_scores(tile, args.softcap, padded_rows, work);
    exponentiate_columns(tile.count, padded_rows, work);
    for (int64_t r = 0; r < item.rows; ++r) {
      if (work.factor[r] == 1.0f) continue;
      float* out = work.outputs + r * pitch;
      for (int64_t d = 0; d < pitch; d += kLanes) store(out + d, load(out + d) * work.factor[r]);
    }
    const float* v =
        tile_rows<T>(args, args.v_cache, args.v_stride, item, request.b, tile, pitch, work.widened, &v_row);
    if (index + 1 < item.last_tile) {
      bring_near<T>(args, args.k_cache, args.k_stride, item.head, request.b, tile_at(request, index + 1));
    }
    multiply(work.scores, 1, padded_rows, v, v_row, work.outputs, pitch, item.rows, pitch, tile.count, true);
  }
}

// ---- a few rows: lanes are the head dimension, caches are read in place ----

template <typename T, int R>
CERBERUS_SIMD void score_few(const TreeAttentionArgs& args, const T* k, int64_t b, const Tile& tile,
                             Workspace& work) {
  const int64_t packed = packed_width(args.head_dim);
  for (int64_t key = 0; key < tile.count;) {
    const int64_t run = run_length(args, tile.slot + key, tile.count - key);
    dot_rows<T, R>(work.queries, packed, k + slot_offset(args, args.k_stride, b, tile.slot + key),
                   args.k_stride[1], run, args.head_dim, work.scores + key, kKeys);
    key += run;
  }
}

template <int R>
CERBERUS_SIMD void exponentiate_few(const TreeAttentionArgs& args, const Tile& tile, Workspace& work) {
  const bool masked = tile_needs_mask(tile, work);
  for (int r = 0; r < R; ++r) {
    float* scores = work.scores + r * kKeys;
    const int64_t padded = round_up_to_lanes(tile.count);
    for (int64_t key = tile.count; key < padded; ++key) scores[key] = -INFINITY;
    Floats greatest_score = splat(work.maximum[r]);
    for (int64_t key = 0; key < padded; key += kLanes) {
      if (args.softcap > 0.0f) store(scores + key, cap(load(scores + key), args.softcap));
      for (int64_t i = key; i < key + kLanes; ++i) {
        if (i >= tile.count || (masked && !key_is_visible(tile, work, r, i))) scores[i] = -INFINITY;
      }
      greatest_score = maximum(load(scores + key), greatest_score);
    }
    const float maximum_now = horizontal_maximum(greatest_score);
    const float base = maximum_now == -INFINITY ? 0.0f : maximum_now;
    work.factor[r] = exponential_below(splat(work.maximum[r] - base))[0];
    for (int64_t key = 0; key < padded; key += kLanes) {
      store(scores + key, exponential_below(load(scores + key) - base));
    }
    work.maximum[r] = maximum_now;
  }
  // Key after key, as the outputs are summed, so that equal values come out of the division exactly.
  float sum[R];
  for (int r = 0; r < R; ++r) sum[r] = work.sum[r] * work.factor[r];
  for (int64_t key = 0; key < tile.count; ++key) {
    for (int r = 0; r < R; ++r) sum[r] += work.scores[r * kKeys + key];
  }
  for (int r = 0; r < R; ++r) work.sum[r] = sum[r];
}

// Adds V vectors of the values' columns from d on.
template <typename T, int R, int V>
CERBERUS_SIMD void weigh_few(const TreeAttentionArgs& args, const T* v, int64_t b, const Tile& tile,
                             int64_t d, Workspace& work) {
  Floats total[R][V];
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < V; ++i) {
      total[r][i] = load(work.outputs + r * work.pitch + d + i * kLanes) * work.factor[r];
    }
  }
  for (int64_t key = 0; key < tile.count;) {
    const T* from = v + slot_offset(args, args.v_stride, b, tile.slot + key) + d;
    const int64_t end = key + run_length(args, tile.slot + key, tile.count - key);
    for (; key < end; ++key, from += args.v_stride[1]) {
      for (int i = 0; i < V; ++i) {
        // Only a lone last vector can be cut short.
        const Floats part = V > 1 ? load(from + i * kLanes) : load_first(from, args.head_dim - d);
        for (int r = 0; r < R; ++r) add_product(total[r][i], splat(work.scores[r * kKeys + key]), part);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < V; ++i) store(work.outputs + r * work.pitch + d + i * kLanes, total[r][i]);
  }
}

template <typename T, int R>
void attend_few(const TreeAttentionArgs& args, const Request& request, const Item& item,
                const int32_t* depths, Workspace& work) {
  constexpr int kVectors = R <= 3 ? 4 : 2;
  const int64_t group = args.q_heads / args.kv_heads;
  const T* q = static_cast<const T*>(args.q) + request.b * args.q_stride[0];
  for (int64_t r = 0; r < R; ++r) {
    const int64_t row = item.first_row + r;
    const T* from = q + row / group * args.q_stride[1] + (item.head * group + row % group) * args.q_stride[2];
    pack_row<T>(from, args.head_dim, args.scale, work.queries + r * packed_width(args.head_dim));
    for (int64_t d = 0; d < args.head_dim; d += kLanes) store(work.outputs + r * work.pitch + d, Floats{});
    work.maximum[r] = -INFINITY;
    work.sum[r] = 0.0f;
  }
  const T* k = static_cast<const T*>(args.k_cache) + item.head * args.k_stride[2];
  const T* v = static_cast<const T*>(args.v_cache) + item.head * args.v_stride[2];
  for (int64_t index = item.first_tile; index < item.last_tile; ++index) {
    const Tile tile = tile_at(request, index);
    if (!tile_is_visible(args, request, item, tile, depths, work)) continue;
    bring_near<T>(args, args.v_cache, args.v_stride, item.head, request.b, tile);
    score_few<T, R>(args, k, request.b, tile, work);
    exponentiate_few<R>(args, tile, work);
    if (index + 1 < item.last_tile) {
      bring_near<T>(args, args.k_cache, args.k_stride, item.head, request.b, tile_at(request, index + 1));
    }
    int64_t d = 0;
    for (; d + kVectors * kLanes <= args.head_dim; d += kVectors * kLanes) {
      weigh_few<T, R, kVectors>(args, v, request.b, tile, d, work);
    }
    for (; d < args.head_dim; d += kLanes) weigh_few<T, R, 1>(args, v, request.b, tile, d, work);
  }
}

template <typename T>
void attend(const TreeAttentionArgs& args, const Request& request, const Item& item, const int32_t* depths,
            Workspace& work) {
  find_first_keys(args, request, item, depths, work);
  if (request.rows > kFewRows) return attend_many<T>(args, request, item, depths, work);
  switch (item.rows) {
    case 1:
      return attend_few<T, 1>(args, request, item, depths, work);
    case 2:
      return attend_few<T, 2>(args, request, item, depths, work);
    case 3:
      return attend_few<T, 3>(args, request, item, depths, work);
    default:
      return attend_few<T, 4>(args, request, item, depths, work);
  }
}

// ---- results ----

template <typename T>
void write_rows(const TreeAttentionArgs& args, const Request& request, const Item& item, const float* outputs,
                const float* maximum, const float* sum, int64_t pitch) {
  const int64_t group = args.q_heads / args.kv_heads;
  for (int64_t r = 0; r < item.rows; ++r) {
    const int64_t node = (item.first_row + r) / group;
    const int64_t head = item.head * group + (item.first_row + r) % group;
    T* out = static_cast<T*>(args.out) + request.b * args.out_stride[0] + node * args.out_stride[1] +
             head * args.out_stride[2];
    const bool empty = sum[r] == 0.0f;
    const float divisor = empty ? 1.0f : sum[r];
    for (int64_t d = 0; d < args.head_dim; d += kLanes) {
      store_first(out + d, load(outputs + r * pitch + d) / divisor, args.head_dim - d);
    }
    if (!args.lse) continue;
    args.lse[request.b * args.lse_stride[0] + node * args.lse_stride[1] + head] =
        empty ? -INFINITY : maximum[r] + __builtin_logf(sum[r]);
  }
}

// Joins the splits of one request, head and row tile, in their order. A split is [rows, pitch] outputs,
// [rows] maxima, [rows] sums; the first one takes the result.
void merge_splits(const Item& item, int64_t splits, float* first, int64_t split_floats, int64_t partial_rows,
                  int64_t pitch) {
  float* maxima = first + partial_rows * pitch;
  float* sums = maxima + partial_rows;
  for (int64_t r = 0; r < item.rows; ++r) {
    for (int64_t split = 1; split < splits; ++split) {
      const float* other = first + split * split_floats;
      const float other_maximum = other[partial_rows * pitch + r];
      const float other_sum = other[partial_rows * pitch + partial_rows + r];
      if (other_sum == 0.0f) continue;  // it saw no key
      const float top = other_maximum > maxima[r] ? other_maximum : maxima[r];
      const float base = top == -INFINITY ? 0.0f : top;
      const float keep = exponential_below(splat(maxima[r] - base))[0];
      const float add = exponential_below(splat(other_maximum - base))[0];
      for (int64_t d = 0; d < pitch; d += kLanes) {
        float* out = first + r * pitch + d;
        store(out, load(out) * keep + load(other + r * pitch + d) * add);
      }
      sums[r] = sums[r] * keep + other_sum * add;
      maxima[r] = top;
    }
  }
}

// Rows past num_nodes.
template <typename T>
void clear_padding(const TreeAttentionArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t node = nodes_of(args, b); node < args.nodes; ++node) {
      T* out = static_cast<T*>(args.out) + b * args.out_stride[0] + node * args.out_stride[1];
      for (int64_t head = 0; head < args.q_heads; ++head) {
        memset(static_cast<void*>(out + head * args.out_stride[2]), 0,
               static_cast<size_t>(args.head_dim) * sizeof(T));
        if (args.lse) args.lse[b * args.lse_stride[0] + node * args.lse_stride[1] + head] = -INFINITY;
      }
    }
  }
}

void find_depths(const TreeAttentionArgs& args, int32_t* depths) {
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t node = 0; node < nodes_of(args, b); ++node) {
      depths[b * args.nodes + node] = depth_from_mask(
          args.mask + b * args.mask_stride[0] + node * args.mask_stride[1], nodes_of(args, b));
    }
  }
}

template <typename T>
void run(const TreeAttentionArgs& args) {
  clear_padding<T>(args);
  int64_t row_tiles = 0, splits = 0, partial_rows = 0, greatest_keys = 0;
  for (int64_t b = 0; b < args.batch; ++b) {
    const Request request = cut_request(args, b);
    row_tiles = greatest(row_tiles, request.row_tiles);
    splits = greatest(splits, request.splits);
    partial_rows = greatest(partial_rows, request.tile_rows);
    greatest_keys = greatest(greatest_keys, request.prefix + request.nodes);
  }
  const int64_t groups = args.batch * args.kv_heads * row_tiles;
  const int64_t items = groups * splits;
  if (items == 0) return;

  int32_t* depths = args.window > 0 ? reinterpret_cast<int32_t*>(allocate(args.batch * args.nodes)) : nullptr;
  if (depths) find_depths(args, depths);
  const int64_t pitch = round_up_to_lanes(args.head_dim);
  const int64_t split_floats = partial_rows * (pitch + 2);
  float* partials = splits > 1 ? allocate(items * split_floats) : nullptr;

  // Cheap and dear row tiles alternate, since a later tile of a long chain sees more keys.
  const auto cut_group = [&](int64_t index, int64_t* row_tile, int64_t* head) __attribute__((always_inline)) {
    const int64_t place = index % row_tiles;
    *row_tile = place % 2 ? row_tiles - 1 - place / 2 : place / 2;
    *head = index / row_tiles % args.kv_heads;
    return cut_request(args, index / row_tiles / args.kv_heads);
  };
  // Items in the order in which a thread takes them: what reads the same keys, then the same slots of other
  // heads, comes together. The item's own index has the splits innermost, so that they can be joined.
  const auto item_at = [&](int64_t place) __attribute__((always_inline)) {
    const int64_t row_tile = place % row_tiles, head = place / row_tiles % args.kv_heads;
    const int64_t rest = place / row_tiles / args.kv_heads;
    return (((rest / splits) * args.kv_heads + head) * row_tiles + row_tile) * splits + rest % splits;
  };
  const int64_t cycles = partial_rows * greatest_keys / splits * args.head_dim / kLanes + 1;
  cpu::parallel_for(items, divide_up(kThreadCycles, cycles), [&](int64_t first, int64_t last) {
    float* scratch = allocate(Workspace::floats(pitch));
    Workspace work(scratch, pitch);
    for (int64_t place = first; place < last; ++place) {
      const int64_t index = item_at(place);
      int64_t row_tile, head;
      const Request request = cut_group(index / splits, &row_tile, &head);
      const int64_t split = index % splits;
      if (row_tile >= request.row_tiles || split >= request.splits) continue;
      const Item item = cut_item(request, head, row_tile, split);
      attend<T>(args, request, item, depths, work);
      if (request.splits == 1) {
        write_rows<T>(args, request, item, work.outputs, work.maximum, work.sum, pitch);
        continue;
      }
      float* partial = partials + index * split_floats;
      memcpy(partial, work.outputs, static_cast<size_t>(item.rows * pitch) * sizeof(float));
      memcpy(partial + partial_rows * pitch, work.maximum, static_cast<size_t>(item.rows) * sizeof(float));
      memcpy(partial + partial_rows * (pitch + 1), work.sum, static_cast<size_t>(item.rows) * sizeof(float));
    }
    free(scratch);
  });
  free(depths);
  if (splits == 1) return;
  cpu::parallel_for(groups, divide_up(kThreadCycles, partial_rows * splits * pitch / kLanes + 1),
                    [&](int64_t first, int64_t last) {
                      for (int64_t index = first; index < last; ++index) {
                        int64_t row_tile, head;
                        const Request request = cut_group(index, &row_tile, &head);
                        if (row_tile >= request.row_tiles || request.splits == 1) continue;
                        const Item item = cut_item(request, head, row_tile, 0);
                        float* partial = partials + index * splits * split_floats;
                        merge_splits(item, request.splits, partial, split_floats, partial_rows, pitch);
                        const float* maxima = partial + partial_rows * pitch;
                        write_rows<T>(args, request, item, partial, maxima, maxima + partial_rows, pitch);
                      }
                    });
  free(partials);
}

}  // namespace

void tree_attention(const TreeAttentionArgs& args) {
  switch (args.dtype) {
    case DType::f32:
      return run<float>(args);
    case DType::f16:
      return run<Half>(args);
    case DType::bf16:
      return run<BFloat16>(args);
  }
}

}  // namespace cerberus::CERBERUS_ISA
