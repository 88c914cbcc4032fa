#include "cerberus/head_topk.h"

#include "parallel.h"
#include "scratch.h"
#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "head_topk";

void check_outputs(const char* name, const TensorView& tensor, int64_t count) {
  check_contiguous(kOp, name, tensor);
  if (tensor.numel() != count) {
    TVM_FFI_THROW(ValueError) << kOp << ": " << name << " must be of " << count << " elements, got "
                              << tensor.numel();
  }
}

void head_topk(TensorView states, TensorView vocab_weight, int64_t vocab_size, Optional<TensorView> token_map,
               TensorView tokens, TensorView log_probs, TensorView lse) {
  check_ndim(kOp, "states", states, 2);
  check_last_contiguous(kOp, "states", states);
  check_ndim(kOp, "vocab_weight", vocab_weight, 2);
  check_last_contiguous(kOp, "vocab_weight", vocab_weight);
  HeadTopkArgs args{};
  args.dtype = float_dtype(kOp, "states", states);
  if (float_dtype(kOp, "vocab_weight", vocab_weight) != args.dtype) {
    TVM_FFI_THROW(ValueError) << kOp << ": vocab_weight must have the element type of states";
  }
  args.states = states.data_ptr();
  args.weight = vocab_weight.data_ptr();
  args.rows = states.size(0);
  args.width = states.size(1);
  args.vocab = vocab_size;
  args.states_stride = states.stride(0);
  args.weight_stride = vocab_weight.stride(0);
  check_size(kOp, "vocab_weight", vocab_weight, 1, args.width);
  if (vocab_size < 1 || vocab_size > vocab_weight.size(0)) {
    TVM_FFI_THROW(ValueError) << kOp << ": vocab_size must be in [1, " << vocab_weight.size(0) << "], got "
                              << vocab_size;
  }
  args.token_map = optional_data<int32_t>(kOp, "token_map", token_map);
  if (token_map.has_value()) {
    check_ndim(kOp, "token_map", token_map.value(), 1);
    check_contiguous(kOp, "token_map", token_map.value());
    check_size(kOp, "token_map", token_map.value(), 0, vocab_size);
  }
  args.tokens = data<int32_t>(kOp, "tokens", tokens);
  args.log_probs = data<float>(kOp, "log_probs", log_probs);
  args.lse = data<float>(kOp, "lse", lse);
  // As states' leading dimensions, however these were folded into rows.
  args.k = tokens.ndim() > 0 ? tokens.size(tokens.ndim() - 1) : 0;
  if (args.k < 1 || args.k > vocab_size) {
    TVM_FFI_THROW(ValueError) << kOp << ": k must be in [1, " << vocab_size << "], got " << args.k;
  }
  check_outputs("tokens", tokens, args.rows * args.k);
  check_outputs("log_probs", log_probs, args.rows * args.k);
  check_outputs("lse", lse, args.rows);
  if (args.rows == 0) return;
  args.shares = head_topk_shares(args, cpu::num_threads());
  const Scratch scratch(head_topk_scratch_bytes(args));
  args.scratch = scratch.data();
  cpu::head_topk(args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(head_topk, head_topk);
}  // namespace cerberus::ffi
