#include "cerberus/head_states.h"

#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "head_states";

void head_states(TensorView hidden, TensorView weight, TensorView bias, Optional<TensorView> root,
                 TensorView scratch, TensorView out) {
  HeadStatesArgs args{};
  check_ndim(kOp, "hidden", hidden, 2);
  check_ndim(kOp, "weight", weight, 4);
  check_ndim(kOp, "bias", bias, 3);
  args.batch = hidden.size(0);
  args.width = hidden.size(1);
  args.blocks = weight.size(0);
  args.heads = weight.size(1);
  args.linked = args.width > 0 && weight.size(3) == 2 * args.width;
  check_size(kOp, "weight", weight, 2, args.width);
  check_size(kOp, "weight", weight, 3, args.linked ? 2 * args.width : args.width);
  check_size(kOp, "bias", bias, 0, args.blocks);
  check_size(kOp, "bias", bias, 1, args.heads);
  check_size(kOp, "bias", bias, 2, args.width);
  check_last_contiguous(kOp, "hidden", hidden);
  check_last_contiguous(kOp, "weight", weight);
  check_last_contiguous(kOp, "bias", bias);
  args.hidden = hidden.data_ptr();
  args.weight = weight.data_ptr();
  args.bias = bias.data_ptr();
  args.hidden_dtype = float_dtype(kOp, "hidden", hidden);
  args.weight_dtype = float_dtype(kOp, "weight", weight);
  args.bias_dtype = float_dtype(kOp, "bias", bias);
  args.hidden_stride = hidden.stride(0);
  for (int dim = 0; dim < 3; ++dim) args.weight_strides[dim] = weight.stride(dim);
  for (int dim = 0; dim < 2; ++dim) args.bias_strides[dim] = bias.stride(dim);
  if (root.has_value()) {
    const TensorView& link = root.value();
    check_ndim(kOp, "root_embedding", link, 2);
    check_size(kOp, "root_embedding", link, 0, args.batch);
    check_size(kOp, "root_embedding", link, 1, args.width);
    check_last_contiguous(kOp, "root_embedding", link);
    args.root = link.data_ptr();
    args.root_dtype = float_dtype(kOp, "root_embedding", link);
    args.root_stride = link.stride(0);
  }
  check_ndim(kOp, "scratch", scratch, 4);
  check_contiguous(kOp, "scratch", scratch);
  check_size(kOp, "scratch", scratch, 0, 2);
  check_size(kOp, "scratch", scratch, 1, args.batch);
  check_size(kOp, "scratch", scratch, 2, args.heads + 1);
  check_size(kOp, "scratch", scratch, 3, args.width);
  args.scratch = data<float>(kOp, "scratch", scratch);
  check_ndim(kOp, "out", out, 3);
  check_contiguous(kOp, "out", out);
  check_size(kOp, "out", out, 0, args.batch);
  check_size(kOp, "out", out, 1, args.heads);
  check_size(kOp, "out", out, 2, args.width);
  if (float_dtype(kOp, "out", out) != args.hidden_dtype) {
    TVM_FFI_THROW(ValueError) << kOp << ": out must have the type of hidden";
  }
  args.out = out.data_ptr();
  cpu::head_states(args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(head_states, head_states);
}  // namespace cerberus::ffi
