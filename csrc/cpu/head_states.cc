// head_states on the CPU: per block, one pass over its weights for all rows of the batch. Each thread takes
// groups of weight rows of any head; the states before the block are read and those after it written
// elsewhere, so heads need no order. The states of a batch row lie as [heads + 1, width] with c in front: a
// head's link is the vector before its own.
#include "cerberus/head_states.h"

#include "parallel.h"
#include "simd.h"

namespace cerberus::CERBERUS_ISA {
namespace {

constexpr int64_t kRows = 4;              // weight rows that share the loads of a state
constexpr int64_t kGrainBytes = 1 << 15;  // weights worth a thread

inline __attribute__((always_inline)) float silu(float value) {
  return value / (1.0f + __builtin_expf(-value));
}

template <typename T>
inline __attribute__((always_inline)) void read_vector(const void* from, int64_t offset, int64_t count,
                                                       float* to) {
  const T* source = static_cast<const T*>(from) + offset;
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(source[i]);
}

inline __attribute__((always_inline)) void read_vector(DType dtype, const void* from, int64_t offset,
                                                       int64_t count, float* to) {
  switch (dtype) {
    case DType::f32:
      return read_vector<float>(from, offset, count, to);
    case DType::f16:
      return read_vector<Half>(from, offset, count, to);
    case DType::bf16:
      return read_vector<BFloat16>(from, offset, count, to);
  }
}

template <typename T>
inline __attribute__((always_inline)) void write_vector(const float* from, int64_t count, void* to,
                                                        int64_t offset) {
  T* target = static_cast<T*>(to) + offset;
  for (int64_t i = 0; i < count; ++i) target[i] = from_float<T>(from[i]);
}

// sums[r][b] += weights[r] · states[b]: kRows weight rows (or fewer, `rows`), Batch states.
template <typename T, int Batch>
inline __attribute__((always_inline)) void accumulate(const T* weights, int64_t row_stride, int64_t rows,
                                                      const float* states, int64_t state_stride,
                                                      int64_t count, Floats (&sums)[kRows][Batch]) {
  const T* row[kRows];
  for (int64_t r = 0; r < kRows; ++r) row[r] = weights + (r < rows ? r : 0) * row_stride;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Floats state[Batch];
    for (int b = 0; b < Batch; ++b) state[b] = load(states + b * state_stride + i);
    for (int64_t r = 0; r < kRows; ++r) {
      const Floats weight = load(row[r] + i);
      for (int b = 0; b < Batch; ++b) sums[r][b] += weight * state[b];
    }
  }
  if (i == count) return;
  for (int64_t r = 0; r < kRows; ++r) {
    const Floats weight = load_first(row[r] + i, count - i);
    for (int b = 0; b < Batch; ++b)
      sums[r][b] += weight * load_first(states + b * state_stride + i, count - i);
  }
}

// Group `group` of kRows rows of head `head`, for states b .. b + Batch - 1.
template <typename T, int Batch>
inline __attribute__((always_inline)) void run_group(const HeadStatesArgs& args, int64_t block, int64_t head,
                                                     int64_t first_row, int64_t b, const float* before,
                                                     float* after) {
  const int64_t width = args.width;
  const int64_t rows = width - first_row < kRows ? width - first_row : kRows;
  const int64_t state_stride = (args.heads + 1) * width;
  const T* weights = static_cast<const T*>(args.weight) + block * args.weight_strides[0] +
                     head * args.weight_strides[1] + first_row * args.weight_strides[2];
  const float* own = before + b * state_stride + (head + 1) * width;
  Floats sums[kRows][Batch];
  for (int64_t r = 0; r < kRows; ++r) {
    for (int k = 0; k < Batch; ++k) sums[r][k] = Floats{};
  }
  accumulate<T, Batch>(weights, args.weight_strides[2], rows, own, state_stride, width, sums);
  if (args.linked) {
    accumulate<T, Batch>(weights + width, args.weight_strides[2], rows, own - width, state_stride, width,
                         sums);
  }
  float bias[kRows];
  read_vector(args.bias_dtype, args.bias,
              block * args.bias_strides[0] + head * args.bias_strides[1] + first_row, rows, bias);
  for (int64_t r = 0; r < rows; ++r) {
    for (int k = 0; k < Batch; ++k) {
      const int64_t at = k * state_stride + first_row + r;
      after[b * state_stride + (head + 1) * width + at] =
          own[at] + silu(horizontal_sum(sums[r][k]) + bias[r]);
    }
  }
}

template <typename T>
void run_block(const HeadStatesArgs& args, int64_t block, const float* before, float* after) {
  const int64_t groups = (args.width + kRows - 1) / kRows;
  const int64_t group_bytes = kRows * args.width * (args.linked ? 2 : 1) * static_cast<int64_t>(sizeof(T));
  cpu::parallel_for(args.heads * groups, 1 + kGrainBytes / (1 + group_bytes),
                    [&](int64_t first, int64_t last) {
                      for (int64_t item = first; item < last; ++item) {
                        const int64_t head = item / groups, first_row = item % groups * kRows;
                        int64_t b = 0;
                        for (; b + 2 <= args.batch; b += 2)
                          run_group<T, 2>(args, block, head, first_row, b, before, after);
                        if (b < args.batch) run_group<T, 1>(args, block, head, first_row, b, before, after);
                      }
                    });
}

}  // namespace

void head_states(const HeadStatesArgs& args) {
  const int64_t width = args.width, state_size = (args.heads + 1) * width;
  float* before = args.scratch;
  float* after = args.scratch + args.batch * state_size;
  for (int64_t b = 0; b < args.batch; ++b) {
    float* state = before + b * state_size;
    for (int64_t head = 0; head < args.heads; ++head) {
      read_vector(args.hidden_dtype, args.hidden, b * args.hidden_stride, width, state + (head + 1) * width);
    }
    if (args.root) {
      read_vector(args.root_dtype, args.root, b * args.root_stride, width, state);
    } else {
      read_vector(args.hidden_dtype, args.hidden, b * args.hidden_stride, width, state);
    }
    memcpy(after + b * state_size, state, width * sizeof(float));
  }
  for (int64_t block = 0; block < args.blocks; ++block) {
    switch (args.weight_dtype) {
      case DType::f32:
        run_block<float>(args, block, before, after);
        break;
      case DType::f16:
        run_block<Half>(args, block, before, after);
        break;
      case DType::bf16:
        run_block<BFloat16>(args, block, before, after);
        break;
    }
    float* written = after;
    after = before;
    before = written;
  }
  for (int64_t b = 0; b < args.batch; ++b) {
    const float* state = before + b * state_size + width;
    const int64_t count = args.heads * width;
    switch (args.hidden_dtype) {
      case DType::f32:
        write_vector<float>(state, count, args.out, b * count);
        break;
      case DType::f16:
        write_vector<Half>(state, count, args.out, b * count);
        break;
      case DType::bf16:
        write_vector<BFloat16>(state, count, args.out, b * count);
        break;
    }
  }
}

}  // namespace cerberus::CERBERUS_ISA
