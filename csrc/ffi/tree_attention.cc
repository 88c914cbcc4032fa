#include "cerberus/tree_attention.h"

#include <cmath>
#include <initializer_list>

#include "lengths.h"
#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "tree_attention";

void take_strides(const char* name, const TensorView& tensor, int64_t* strides, int count) {
  check_last_contiguous(kOp, name, tensor);
  for (int i = 0; i < count; ++i) strides[i] = tensor.stride(i);
}

void check_dtype(const char* name, const TensorView& tensor, DType dtype) {
  if (float_dtype(kOp, name, tensor) != dtype) {
    TVM_FFI_THROW(ValueError) << kOp << ": " << name << " must be of q's dtype, got another";
  }
}

void check_sizes(const char* name, const TensorView& tensor, std::initializer_list<int64_t> sizes) {
  check_ndim(kOp, name, tensor, static_cast<int>(sizes.size()));
  int dim = 0;
  for (const int64_t size : sizes) check_size(kOp, name, tensor, dim++, size);
}

void tree_attention(TensorView q, TensorView k_cache, TensorView v_cache, TensorView mask,
                    TensorView prefix_lens, Optional<TensorView> block_table, Optional<TensorView> num_nodes,
                    double scale, double softcap, int64_t window, TensorView out, Optional<TensorView> lse) {
  if (!(std::isfinite(scale) && softcap >= 0 && std::isfinite(softcap) && window >= 0)) {
    TVM_FFI_THROW(ValueError) << kOp << ": scale and softcap must be finite, softcap and window >= 0, got "
                              << scale << ", " << softcap << ", " << window;
  }
  TreeAttentionArgs args{};
  check_ndim(kOp, "q", q, 4);
  check_ndim(kOp, "k_cache", k_cache, 4);
  args.batch = q.size(0);
  args.nodes = q.size(1);
  args.q_heads = q.size(2);
  args.head_dim = q.size(3);
  args.block_size = k_cache.size(1);
  args.kv_heads = k_cache.size(2);
  const int64_t blocks = k_cache.size(0);
  if (args.head_dim % 8 != 0 || args.head_dim < 8 || args.head_dim > 256) {
    TVM_FFI_THROW(ValueError) << kOp << ": q must be of a head size that is a multiple of 8 in [8, 256], got "
                              << args.head_dim;
  }
  if (args.kv_heads == 0 || args.q_heads % args.kv_heads != 0) {
    TVM_FFI_THROW(ValueError) << kOp << ": q must be of a head count that is a multiple of k_cache's "
                              << args.kv_heads << ", got " << args.q_heads;
  }
  check_sizes("k_cache", k_cache,
              {block_table.has_value() ? blocks : args.batch, args.block_size, args.kv_heads, args.head_dim});
  check_sizes("v_cache", v_cache, {blocks, args.block_size, args.kv_heads, args.head_dim});
  check_sizes("out", out, {args.batch, args.nodes, args.q_heads, args.head_dim});
  check_sizes("prefix_lens", prefix_lens, {args.batch});
  const int64_t words = mask_words(args.nodes);
  if (mask.ndim() == 2) {
    check_sizes("mask", mask, {args.nodes, words});
  } else {
    check_sizes("mask", mask, {args.batch, args.nodes, words});
  }
  check_last_contiguous(kOp, "mask", mask);
  args.mask_stride[0] = mask.ndim() == 2 ? 0 : mask.stride(0);
  args.mask_stride[1] = mask.stride(mask.ndim() - 2);
  args.dtype = float_dtype(kOp, "q", q);
  check_dtype("k_cache", k_cache, args.dtype);
  check_dtype("v_cache", v_cache, args.dtype);
  check_dtype("out", out, args.dtype);
  take_strides("q", q, args.q_stride, 3);
  take_strides("k_cache", k_cache, args.k_stride, 3);
  take_strides("v_cache", v_cache, args.v_stride, 3);
  take_strides("out", out, args.out_stride, 3);
  args.q = q.data_ptr();
  args.k_cache = k_cache.data_ptr();
  args.v_cache = v_cache.data_ptr();
  args.out = out.data_ptr();
  args.mask = reinterpret_cast<const uint32_t*>(data<int32_t>(kOp, "mask", mask));
  check_last_contiguous(kOp, "prefix_lens", prefix_lens);
  args.prefix_lens = data<int32_t>(kOp, "prefix_lens", prefix_lens);
  if (lse.has_value()) {
    check_sizes("lse", lse.value(), {args.batch, args.nodes, args.q_heads});
    take_strides("lse", lse.value(), args.lse_stride, 2);
    args.lse = data<float>(kOp, "lse", lse.value());
  }
  if (num_nodes.has_value()) {
    check_sizes("num_nodes", num_nodes.value(), {args.batch});
    check_last_contiguous(kOp, "num_nodes", num_nodes.value());
    args.num_nodes = data<int32_t>(kOp, "num_nodes", num_nodes.value());
  }
  int64_t blocks_per_request = 1;
  if (block_table.has_value()) {
    const TensorView table = block_table.value();
    check_ndim(kOp, "block_table", table, 2);
    check_size(kOp, "block_table", table, 0, args.batch);
    check_last_contiguous(kOp, "block_table", table);
    args.block_table = data<int32_t>(kOp, "block_table", table);
    args.block_table_stride = table.stride(0);
    blocks_per_request = table.size(1);
  }
  args.scale = static_cast<float>(scale);
  args.softcap = static_cast<float>(softcap);
  args.window = window;
  check_lengths(kOp, args, blocks, blocks_per_request);
  cpu::tree_attention(args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(tree_attention, tree_attention);
}  // namespace cerberus::ffi
