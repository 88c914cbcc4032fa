// packed_linear on the CPU: threads split the panels; a panel is worked in blocks that stay in the
// first-level cache while every tile of rows passes over them. An output is summed by one thread, input after
// input, whatever the number of rows or threads, so a row's result depends on nothing but the row.
#include "cerberus/packed_linear.h"

#include <type_traits>

#include "packed_linear_tiles.h"
#include "parallel.h"
#include "simd.h"

namespace cerberus::CERBERUS_ISA {
namespace {

#if defined(CERBERUS_LEVEL_avx512)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif
// A full tile is kTileRows x kTileVectors sums; a single row takes more columns, or it would wait for its own
// sums.
constexpr int kTileVectors = 3;
constexpr int kPanelVectors = kPanelWidth / kLanes;
constexpr int kWideVectors = kPanelVectors < 6 ? kPanelVectors : 6;

constexpr int64_t kStepElements = kStepDepth * kPanelWidth;
// Whether products of this type go through matrix tiles.
#if defined(CERBERUS_TILES)
template <typename T>
constexpr bool kTiled = std::is_same<T, BFloat16>::value;
#else
template <typename T>
constexpr bool kTiled = false;
#endif
// Steps of a block: 18 KiB of 16-bit weights, or 36 KiB where the processors have 48 KiB to hold them in.
template <typename T>
constexpr int64_t kBlockSteps = kTiled<T> ? 192 : 96;
constexpr int64_t kRowBlock = 64;
constexpr int64_t kLineBytes = 64;

// kLanes weights of input kPhase of a step, from output `column` of the panel on.
template <int kPhase>
CERBERUS_SIMD Floats weights(const float* step, int64_t column) {
  return load(step + kPhase * kPanelWidth + column);
}

template <int kPhase>
CERBERUS_SIMD Floats weights(const BFloat16* step, int64_t column) {
  Words words;
  memcpy(&words, step + kStepDepth * column, sizeof(words));
  if (kPhase == 0) return bit_cast<Floats>(words << 16);
  return bit_cast<Floats>(upper_halves(words));
}

template <int kPhase>
CERBERUS_SIMD Floats weights(const Half* step, int64_t column) {
  return load(step + kPhase * kPanelWidth + column);
}

// A part of the next block to bring near while a tile is summed: `stride` bytes further at each step. Without
// it the first tile of a block waits for memory and the others leave it idle.
struct Ahead {
  const char* from;
  int64_t stride;
};

template <int kPhase, int kRows, int kVectors, typename T>
CERBERUS_SIMD void accumulate(const float* const (&x)[kRows], int64_t input, const T* step, int64_t column,
                              Floats (&sums)[kRows][kVectors]) {
  if (kRows < kVectors) {
    for (int v = 0; v < kVectors; ++v) {
      const Floats weight = weights<kPhase>(step, column + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        add_product(sums[r][v], weight, splat(x[r][input + kPhase]));
      }
    }
  } else {
    Floats weight[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      weight[v] = weights<kPhase>(step, column + v * kLanes);
    }
    for (int r = 0; r < kRows; ++r) {
      Floats value = splat(x[r][input + kPhase]);
      for (int v = 0; v < kVectors; ++v) {
        add_product(sums[r][v], weight[v], value);
      }
    }
  }
}

// Adds `steps` steps of a panel to kRows x (kVectors * kLanes) sums, which lie kPanelWidth apart.
template <int kRows, int kVectors, typename T>
CERBERUS_SIMD void tile(const float* x, int64_t x_stride, const T* panel, int64_t column, int64_t steps,
                        bool first, float* total, Ahead ahead) {
  // Enough for a block that only this tile passes over; with more tiles the stride is shorter and lines
  // repeat.
  constexpr int64_t kLines =
      (sizeof(T) * kStepElements * kVectors / kPanelVectors + kLineBytes - 1) / kLineBytes;
  const float* rows[kRows];
  Floats sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    rows[r] = x + r * x_stride;
    for (int v = 0; v < kVectors; ++v) {
      sums[r][v] = first ? Floats{} : load(total + r * kPanelWidth + column + v * kLanes);
    }
  }
  for (int64_t s = 0; s < steps; ++s) {
    for (int64_t line = 0; line < kLines; ++line) __builtin_prefetch(ahead.from + line * kLineBytes);
    ahead.from += ahead.stride;
    accumulate<0>(rows, kStepDepth * s, panel, column, sums);
    CERBERUS_OPAQUE(panel);
    accumulate<1>(rows, kStepDepth * s, panel, column, sums);
    panel += kStepElements;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(total + r * kPanelWidth + column + v * kLanes, sums[r][v]);
  }
}

constexpr int vectors_for(int rows) { return rows == 1 ? kWideVectors : kTileVectors; }

// kRows rows over a whole panel.
template <int kRows, typename T>
void panel_rows(const float* x, int64_t x_stride, const T* panel, int64_t steps, bool first, float* total,
                Ahead& ahead) {
  constexpr int kVectors = vectors_for(kRows);
  for (int v = 0; v < kPanelVectors; v += kVectors) {
    tile<kRows, kVectors>(x, x_stride, panel, v * kLanes, steps, first, total, ahead);
    ahead.from += ahead.stride * steps;
  }
}

template <typename T>
using PanelRows = void (*)(const float*, int64_t, const T*, int64_t, bool, float*, Ahead&);

template <typename T>
CERBERUS_SIMD PanelRows<T> panel_rows_for(int64_t rows) {
  switch (rows) {
    case 1:
      return panel_rows<1, T>;
    case 2:
      return panel_rows<2, T>;
    case 3:
      return panel_rows<3, T>;
#if defined(CERBERUS_LEVEL_avx512)
    case 4:
      return panel_rows<4, T>;
    case 5:
      return panel_rows<5, T>;
    case 6:
      return panel_rows<6, T>;
    case 7:
      return panel_rows<7, T>;
#endif
    default:
      return panel_rows<kTileRows, T>;
  }
}

// Passes over a block that `rows` rows take.
CERBERUS_SIMD int64_t num_passes(int64_t rows) {
  const int64_t rest = rows % kTileRows;
  const int64_t full = rows / kTileRows * (kPanelVectors / vectors_for(kTileRows));
  return full + (rest > 0 ? kPanelVectors / vectors_for(static_cast<int>(rest)) : 0);
}

// out[r, c] = round(total[r, c] + bias[c]), or round(that + residual[r, c]), for the panel's outputs.
template <typename T, typename Out>
CERBERUS_SIMD void write(const float* total, const T* bias, const Out* residual, int64_t rows,
                         int64_t columns, int64_t out_stride, Out* out) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int64_t count = columns - c;
      Floats sum = load(total + c);
      if (bias) sum += load_first(bias + c, count);
      if (residual) sum = rounded<Out>(sum) + load_first(residual + c, count);
      store_first(out + c, sum, count);
    }
    total += kPanelWidth;
    out += out_stride;
    if (residual) residual += out_stride;
  }
}

template <typename T, typename Out>
void panels(const PackedLinearArgs& args, int64_t first_panel, int64_t last_panel) {
  const T* packed = static_cast<const T*>(args.panels);
  const T* bias = static_cast<const T*>(args.bias);
  Out* out = static_cast<Out*>(args.out);
  const Out* residual = static_cast<const Out*>(args.residual);
  const int64_t x_stride = packed_linear_scratch_stride(args.in_features);
  const int64_t steps = num_steps(args.in_features);
  alignas(64) float total[kRowBlock * kPanelWidth];

  for (int64_t p = first_panel; p < last_panel; ++p) {
    const int64_t column = p * kPanelWidth;
    const int64_t columns =
        args.out_features - column < kPanelWidth ? args.out_features - column : kPanelWidth;
    for (int64_t row = 0; row < args.rows; row += kRowBlock) {
      const int64_t rows = args.rows - row < kRowBlock ? args.rows - row : kRowBlock;
      const int64_t passes = num_passes(rows);
#if defined(CERBERUS_TILES)
      if (kTiled<T>) set_shapes(group_rows(rows));
#endif
      for (int64_t step = 0; step < steps; step += kBlockSteps<T>) {
        const int64_t count = steps - step < kBlockSteps<T> ? steps - step : kBlockSteps<T>;
        const T* block = packed + (p * steps + step) * kStepElements;
#if defined(CERBERUS_TILES)
        if constexpr (kTiled<T>) {
          const int64_t stride = tile_x_stride(args.in_features);
          const BFloat16* inputs = reinterpret_cast<const BFloat16*>(args.scratch) + row * stride;
          tile_block(inputs + step * kStepDepth, stride, block, count, rows, step == 0, total);
          continue;
        }
#endif
        Ahead ahead{reinterpret_cast<const char*>(block + count * kStepElements),
                    static_cast<int64_t>(sizeof(T)) * kStepElements / passes};
        const float* x = args.scratch + row * x_stride + step * kStepDepth;
        for (int64_t r = 0; r < rows; r += kTileRows) {
          panel_rows_for<T>(rows - r)(x + r * x_stride, x_stride, block, count, step == 0,
                                      total + r * kPanelWidth, ahead);
        }
      }
      const int64_t at = row * args.out_features + column;
      write(total, bias ? bias + column : bias, residual ? residual + at : residual, rows, columns,
            args.out_features, out + at);
    }
  }
#if defined(CERBERUS_TILES)
  if (kTiled<T>) CERBERUS_TILE_RELEASE();
#endif
}

// A row of x after what goes before the product, as floats or exactly as it is, with zeros up to `stride`.
// Stores whole vectors: the scratch has room for them.
template <typename T, typename To>
CERBERUS_SIMD void prepare_row(const PackedLinearArgs& args, const T* from, int64_t stride, To* to) {
  const T* norm = static_cast<const T*>(args.norm_weight);
  float scale = 1.0f;
  if (norm) {
    Floats squares{};
    for (int64_t i = 0; i < args.in_features; i += kLanes) {
      const Floats x = load_first(from + i, args.in_features - i);
      squares = multiply_add(x, x, squares);
    }
    scale = 1.0f / sqrtf(horizontal_sum(squares) / static_cast<float>(args.in_features) + args.eps);
  }
  for (int64_t i = 0; i < args.in_features; i += kLanes) {
    const int64_t count = args.in_features - i;
    Floats x = load_first(from + i, count);
    if (args.gated) {
      const Floats silu = rounded<T>(x / (1.0f + exponential(-x)));
      x = rounded<T>(silu * load_first(from + args.in_features + i, count));
    }
    if (norm) x = rounded<T>(rounded<T>(x * scale) * load_first(norm + i, count));
    store(to + i, x);
  }
  for (int64_t i = args.in_features; i < stride; ++i) to[i] = To{};
}

template <typename T>
void run(const PackedLinearArgs& args) {
  using Input = typename std::conditional<kTiled<T>, T, float>::type;
#if defined(CERBERUS_TILES)
  const int64_t stride =
      kTiled<T> ? tile_x_stride(args.in_features) : packed_linear_scratch_stride(args.in_features);
#else
  const int64_t stride = packed_linear_scratch_stride(args.in_features);
#endif
  const int64_t row_work = args.in_features * (args.gated ? 8 : 1);
  cpu::parallel_for(args.rows, 1 + 32768 / row_work, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      prepare_row(args, static_cast<const T*>(args.x) + row * args.x_stride, stride,
                  reinterpret_cast<Input*>(args.scratch) + row * stride);
    }
  });
  // A thread is worth waking for some 32 thousand multiplications per row of x.
  const int64_t panel_work = args.in_features * kPanelWidth * (1 + args.rows / 4);
  cpu::parallel_for(num_panels(args.out_features), 1 + 32768 / panel_work, [&](int64_t first, int64_t last) {
    if (args.out_dtype == args.dtype) {
      panels<T, T>(args, first, last);
    } else {
      panels<T, float>(args, first, last);
    }
  });
}

}  // namespace

void packed_linear(const PackedLinearArgs& args) {
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
