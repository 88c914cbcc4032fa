#include "cerberus/commit_kv.h"

#include <tvm/ffi/container/array.h>

#include <vector>

#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "commit_kv";
using Caches = tvm::ffi::Array<tvm::ffi::Tensor>;

// Adds the layers of one cache, [layers, rows, slots, heads, row] or without the first dimension.
void add_planes(const char* name, const tvm::ffi::Tensor& cache, int64_t rows, int64_t slots,
                std::vector<KvPlane>* planes) {
  const TensorView tensor(cache);
  check_cpu(kOp, name, tensor);
  if (tensor.ndim() != 4) check_ndim(kOp, name, tensor, 5);
  check_last_contiguous(kOp, name, tensor);
  const int first = tensor.ndim() - 4;
  check_size(kOp, name, tensor, first, rows);
  check_size(kOp, name, tensor, first + 1, slots);
  const int64_t bytes = (tensor.dtype().bits * tensor.dtype().lanes + 7) / 8;
  KvPlane plane{};
  plane.block_stride = tensor.stride(first) * bytes;
  plane.slot_stride = tensor.stride(first + 1) * bytes;
  plane.head_stride = tensor.stride(first + 2) * bytes;
  plane.heads = tensor.size(first + 2);
  plane.row_bytes = tensor.size(first + 3) * bytes;
  const int64_t layers = first == 1 ? tensor.size(0) : 1;
  for (int64_t layer = 0; layer < layers; ++layer) {
    plane.data =
        static_cast<unsigned char*>(tensor.data_ptr()) + (first == 1 ? layer * tensor.stride(0) * bytes : 0);
    planes->push_back(plane);
  }
}

// What would read or write outside a request's slots is refused before anything is written.
void check_path(const CommitKvArgs& args, int64_t depth, int64_t rows, int64_t capacity) {
  for (int64_t b = 0; b < args.batch; ++b) {
    const int64_t accepted = args.num_accepted[b];
    const int64_t prefix = args.prefix_lens[b];
    if (accepted < 0 || accepted > depth) {
      TVM_FFI_THROW(ValueError) << kOp << ": num_accepted must be in [0, " << depth << "], got " << accepted
                                << " in row " << b;
    }
    if (prefix < 0 || prefix >= capacity) {
      TVM_FFI_THROW(ValueError) << kOp << ": prefix_lens must be in [0, " << capacity << "), got " << prefix
                                << " in row " << b;
    }
    const int32_t* path = args.path + b * args.path_stride;
    for (int64_t step = 0; step <= accepted; ++step) {
      const bool fits =
          step == 0 ? path[0] == 0 : path[step] > path[step - 1] && path[step] < capacity - prefix;
      if (!fits) {
        TVM_FFI_THROW(ValueError) << kOp << ": path must be 0, then ascending node ids below "
                                  << capacity - prefix << ", got " << path[step] << " at step " << step
                                  << " in row " << b;
      }
    }
    if (!args.block_table) continue;
    const int32_t* table = args.block_table + b * args.block_table_stride;
    for (int64_t i = 0; i <= (prefix + path[accepted]) / args.block_size; ++i) {
      if (table[i] < 0 || table[i] >= rows) {
        TVM_FFI_THROW(ValueError) << kOp << ": block_table must be in [0, " << rows
                                  << ") for blocks in use, got " << table[i] << " in row " << b;
      }
    }
  }
}

const int32_t* take_vector(const char* name, const TensorView& tensor, int64_t size) {
  check_ndim(kOp, name, tensor, 1);
  check_size(kOp, name, tensor, 0, size);
  check_last_contiguous(kOp, name, tensor);
  return data<int32_t>(kOp, name, tensor);
}

void commit_kv(Caches k_caches, Caches v_caches, TensorView path, TensorView num_accepted,
               TensorView prefix_lens, Optional<TensorView> block_table, TensorView new_lens) {
  CommitKvArgs args{};
  check_ndim(kOp, "path", path, 2);
  check_last_contiguous(kOp, "path", path);
  if (k_caches.size() == 0 || path.size(1) == 0) {
    TVM_FFI_THROW(ValueError) << kOp << ": k_caches and path must be non-empty, got none";
  }
  args.batch = path.size(0);
  args.path = data<int32_t>(kOp, "path", path);
  args.path_stride = path.stride(0);
  args.num_accepted = take_vector("num_accepted", num_accepted, args.batch);
  args.prefix_lens = take_vector("prefix_lens", prefix_lens, args.batch);
  args.new_lens = const_cast<int32_t*>(take_vector("new_lens", new_lens, args.batch));
  const tvm::ffi::Tensor first = k_caches[0];
  const TensorView shape(first);
  if (shape.ndim() != 4) check_ndim(kOp, "k_caches", shape, 5);
  const int64_t rows = shape.size(shape.ndim() - 4);
  args.block_size = shape.size(shape.ndim() - 3);
  int64_t capacity = args.block_size;
  if (block_table.has_value()) {
    const TensorView table = block_table.value();
    check_ndim(kOp, "block_table", table, 2);
    check_size(kOp, "block_table", table, 0, args.batch);
    check_last_contiguous(kOp, "block_table", table);
    args.block_table = data<int32_t>(kOp, "block_table", table);
    args.block_table_stride = table.stride(0);
    capacity *= table.size(1);
  } else {
    check_size(kOp, "k_caches", shape, shape.ndim() - 4, args.batch);
  }
  std::vector<KvPlane> planes;
  for (const tvm::ffi::Tensor& cache : k_caches)
    add_planes("k_caches", cache, rows, args.block_size, &planes);
  for (const tvm::ffi::Tensor& cache : v_caches)
    add_planes("v_caches", cache, rows, args.block_size, &planes);
  args.planes = planes.data();
  args.num_planes = static_cast<int64_t>(planes.size());
  check_path(args, path.size(1) - 1, rows, capacity);
  cpu::commit_kv(args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(commit_kv, commit_kv);
}  // namespace cerberus::ffi
