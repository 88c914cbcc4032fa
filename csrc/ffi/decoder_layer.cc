#include "cerberus/decoder_layer.h"

#include <initializer_list>

#include "lengths.h"
#include "scratch.h"
#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "decoder_layer";

void check_sizes(const char* name, const TensorView& tensor, std::initializer_list<int64_t> sizes) {
  check_ndim(kOp, name, tensor, static_cast<int>(sizes.size()));
  int dim = 0;
  for (const int64_t size : sizes) check_size(kOp, name, tensor, dim++, size);
}

void check_dtype(const char* name, const TensorView& tensor, DType dtype) {
  if (float_dtype(kOp, name, tensor) != dtype) {
    TVM_FFI_THROW(ValueError) << kOp << ": " << name << " must be of hidden's dtype, got another";
  }
}

// A contiguous tensor of the layer's dtype and these sizes.
void* take(const char* name, const TensorView& tensor, DType dtype, std::initializer_list<int64_t> sizes) {
  check_dtype(name, tensor, dtype);
  check_sizes(name, tensor, sizes);
  check_contiguous(kOp, name, tensor);
  return tensor.data_ptr();
}

PackedLinearArgs take_linear(const char* name, const TensorView& panels, const Optional<TensorView>& bias,
                             DType dtype, int64_t rows, int64_t in_features, int64_t out_features) {
  PackedLinearArgs args{};
  args.dtype = args.out_dtype = dtype;
  args.rows = rows;
  args.in_features = args.x_stride = in_features;
  args.out_features = out_features;
  args.panels =
      take(name, panels, dtype, {num_panels(out_features), num_steps(in_features), kStepDepth * kPanelWidth});
  if (bias.has_value()) args.bias = take(name, bias.value(), dtype, {out_features});
  return args;
}

void take_norm(const char* name, const TensorView& weight, double eps, PackedLinearArgs* args) {
  args->norm_weight = take(name, weight, args->dtype, {args->in_features});
  if (!(eps >= 0)) TVM_FFI_THROW(ValueError) << kOp << ": " << name << "'s eps must be >= 0, got " << eps;
  args->eps = static_cast<float>(eps);
}

void take_caches(const TensorView& k_cache, const TensorView& v_cache, DType dtype, TreeAttentionArgs* args) {
  check_ndim(kOp, "k_cache", k_cache, 4);
  args->block_size = k_cache.size(1);
  args->kv_heads = k_cache.size(2);
  args->head_dim = k_cache.size(3);
  if (args->head_dim % 8 != 0 || args->head_dim < 8 || args->head_dim > 256) {
    TVM_FFI_THROW(ValueError) << kOp
                              << ": k_cache must be of a head size that is a multiple of 8 in [8, 256], got "
                              << args->head_dim;
  }
  check_sizes("v_cache", v_cache, {k_cache.size(0), args->block_size, args->kv_heads, args->head_dim});
  check_dtype("k_cache", k_cache, dtype);
  check_dtype("v_cache", v_cache, dtype);
  check_last_contiguous(kOp, "k_cache", k_cache);
  check_last_contiguous(kOp, "v_cache", v_cache);
  for (int i = 0; i < 3; ++i) {
    args->k_stride[i] = k_cache.stride(i);
    args->v_stride[i] = v_cache.stride(i);
  }
  args->k_cache = k_cache.data_ptr();
  args->v_cache = v_cache.data_ptr();
}

void take_mask(const TensorView& mask, TreeAttentionArgs* args) {
  const int64_t words = mask_words(args->nodes);
  if (mask.ndim() == 2) {
    check_sizes("mask", mask, {args->nodes, words});
  } else {
    check_sizes("mask", mask, {args->batch, args->nodes, words});
  }
  check_last_contiguous(kOp, "mask", mask);
  args->mask = reinterpret_cast<const uint32_t*>(data<int32_t>(kOp, "mask", mask));
  args->mask_stride[0] = mask.ndim() == 2 ? 0 : mask.stride(0);
  args->mask_stride[1] = mask.stride(mask.ndim() - 2);
}

// Buffers between the parts, one behind the other, and the working memory of the products.
void set_buffers(DecoderLayerArgs* args, char* next, float* scratch) {
  const int64_t element = args->qkv.dtype == DType::f32 ? 4 : 2;
  const auto buffer = [&](int64_t elements) {
    char* taken = next;
    next += (args->qkv.rows * elements * element + 63) / 64 * 64;
    return taken;
  };
  TreeAttentionArgs& attention = args->attention;
  args->qkv.out = buffer(args->qkv.out_features);
  attention.q = args->qkv.out;
  attention.out = buffer(args->output.in_features);
  args->output.x = attention.out;
  args->output.out = buffer(args->output.out_features);
  args->gate_up.x = args->down.residual = args->output.out;
  args->gate_up.out = buffer(args->gate_up.out_features);
  args->down.x = args->gate_up.out;
  const int64_t row[] = {args->qkv.out_features, args->output.in_features};
  attention.q_stride[0] = attention.nodes * row[0];
  attention.q_stride[1] = row[0];
  attention.out_stride[0] = attention.nodes * row[1];
  attention.out_stride[1] = row[1];
  attention.q_stride[2] = attention.out_stride[2] = attention.head_dim;
  for (PackedLinearArgs* linear : {&args->qkv, &args->output, &args->gate_up, &args->down}) {
    linear->scratch = scratch;
  }
}

void run(DecoderLayerArgs* args) {
  const PackedLinearArgs* linears[] = {&args->qkv, &args->output, &args->gate_up, &args->down};
  int64_t floats = 0, elements = args->output.in_features;
  for (const PackedLinearArgs* linear : linears) {
    const int64_t needed = packed_linear_scratch(linear->rows, linear->in_features);
    floats = floats < needed ? needed : floats;
    elements += linear->out_features;
  }
  const Scratch scratch(4 * floats), buffers(4 * args->qkv.rows * elements + 4 * 64);
  set_buffers(args, static_cast<char*>(buffers.data()), static_cast<float*>(scratch.data()));
  cpu::decoder_layer(*args);
}

void decoder_layer(TensorView hidden, TensorView qkv, TensorView output, TensorView gate_up, TensorView down,
                   Optional<TensorView> qkv_bias, Optional<TensorView> output_bias,
                   Optional<TensorView> gate_up_bias, Optional<TensorView> down_bias, TensorView input_norm,
                   TensorView post_norm, double input_eps, double post_eps, int64_t q_heads, int64_t inner,
                   TensorView cos, TensorView sin, TensorView k_cache, TensorView v_cache, TensorView mask,
                   TensorView prefix_lens, Optional<TensorView> block_table, double scale, TensorView out) {
  DecoderLayerArgs args{};
  check_ndim(kOp, "hidden", hidden, 3);
  const int64_t width = hidden.size(2), rows = hidden.size(0) * hidden.size(1);
  const DType dtype = float_dtype(kOp, "hidden", hidden);
  TreeAttentionArgs& attention = args.attention;
  attention.dtype = dtype;
  attention.batch = hidden.size(0);
  attention.nodes = hidden.size(1);
  attention.q_heads = q_heads;
  attention.scale = static_cast<float>(scale);
  take_caches(k_cache, v_cache, dtype, &attention);
  if (attention.kv_heads == 0 || q_heads < 1 || q_heads % attention.kv_heads != 0 || inner < 1) {
    TVM_FFI_THROW(ValueError) << kOp << ": q_heads must be a multiple of k_cache's " << attention.kv_heads
                              << ", got " << q_heads;
  }
  if (!(scale - scale == 0)) TVM_FFI_THROW(ValueError) << kOp << ": scale must be finite, got " << scale;
  const int64_t head_dim = attention.head_dim, heads = q_heads + 2 * attention.kv_heads;
  take_mask(mask, &attention);
  check_sizes("prefix_lens", prefix_lens, {attention.batch});
  check_last_contiguous(kOp, "prefix_lens", prefix_lens);
  attention.prefix_lens = data<int32_t>(kOp, "prefix_lens", prefix_lens);
  int64_t blocks_per_request = 1;
  if (block_table.has_value()) {
    const TensorView table = block_table.value();
    check_ndim(kOp, "block_table", table, 2);
    check_size(kOp, "block_table", table, 0, attention.batch);
    check_last_contiguous(kOp, "block_table", table);
    attention.block_table = data<int32_t>(kOp, "block_table", table);
    attention.block_table_stride = table.stride(0);
    blocks_per_request = table.size(1);
  } else {
    check_size(kOp, "k_cache", k_cache, 0, attention.batch);
  }
  args.qkv = take_linear("qkv", qkv, qkv_bias, dtype, rows, width, heads * head_dim);
  args.output = take_linear("output", output, output_bias, dtype, rows, q_heads * head_dim, width);
  args.gate_up = take_linear("gate_up", gate_up, gate_up_bias, dtype, rows, width, 2 * inner);
  args.down = take_linear("down", down, down_bias, dtype, rows, inner, width);
  take_norm("input_norm", input_norm, input_eps, &args.qkv);
  take_norm("post_norm", post_norm, post_eps, &args.gate_up);
  args.down.gated = true;
  args.down.x_stride = 2 * inner;
  args.cos = take("cos", cos, dtype, {attention.batch, attention.nodes, head_dim});
  args.sin = take("sin", sin, dtype, {attention.batch, attention.nodes, head_dim});
  args.qkv.x = args.output.residual =
      take("hidden", hidden, dtype, {attention.batch, attention.nodes, width});
  args.down.out = take("out", out, dtype, {attention.batch, attention.nodes, width});
  check_lengths(kOp, attention, k_cache.size(0), blocks_per_request);
  if (rows > 0) run(&args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(decoder_layer, decoder_layer);
}  // namespace cerberus::ffi
