#include "cerberus/packed_linear.h"

#include "scratch.h"
#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "packed_linear";

void check_dtype(const char* name, const TensorView& tensor, DType dtype) {
  if (float_dtype(kOp, name, tensor) != dtype) {
    TVM_FFI_THROW(ValueError) << kOp << ": " << name << " must have the element type of x";
  }
}

// x is [.., in], out [.., out]: leading dimensions count as rows, which needs x contiguous where it has
// several. A gated x is [.., 2 * in].
void packed_linear(TensorView x, TensorView panels, Optional<TensorView> bias,
                   Optional<TensorView> norm_weight, double eps, bool gated, Optional<TensorView> residual,
                   TensorView out) {
  PackedLinearArgs args{};
  const int last = x.ndim() - 1;
  if (last < 0) TVM_FFI_THROW(ValueError) << kOp << ": x must have at least 1 dimension, got 0";
  if (last == 1) {
    check_last_contiguous(kOp, "x", x);
  } else {
    check_contiguous(kOp, "x", x);
  }
  check_ndim(kOp, "out", out, x.ndim());
  check_contiguous(kOp, "out", out);
  args.dtype = float_dtype(kOp, "x", x);
  args.out_dtype = float_dtype(kOp, "out", out);
  if (args.out_dtype != DType::f32) check_dtype("out", out, args.dtype);
  args.rows = 1;
  for (int dim = 0; dim < last; ++dim) {
    args.rows *= x.size(dim);
    check_size(kOp, "out", out, dim, x.size(dim));
  }
  if (gated && x.size(last) % 2 != 0) {
    TVM_FFI_THROW(ValueError) << kOp << ": x must be of even width if gated, got " << x.size(last);
  }
  args.gated = gated;
  args.in_features = gated ? x.size(last) / 2 : x.size(last);
  args.out_features = out.size(last);
  args.x_stride = last == 1 ? x.stride(0) : x.size(last);

  check_dtype("panels", panels, args.dtype);
  check_ndim(kOp, "panels", panels, 3);
  check_contiguous(kOp, "panels", panels);
  check_size(kOp, "panels", panels, 0, num_panels(args.out_features));
  check_size(kOp, "panels", panels, 1, num_steps(args.in_features));
  check_size(kOp, "panels", panels, 2, kStepDepth * kPanelWidth);
  if (bias.has_value()) {
    check_dtype("bias", bias.value(), args.dtype);
    check_ndim(kOp, "bias", bias.value(), 1);
    check_contiguous(kOp, "bias", bias.value());
    check_size(kOp, "bias", bias.value(), 0, args.out_features);
    args.bias = bias.value().data_ptr();
  }
  if (norm_weight.has_value()) {
    if (gated) TVM_FFI_THROW(ValueError) << kOp << ": norm_weight must be None with gated";
    check_dtype("norm_weight", norm_weight.value(), args.dtype);
    check_ndim(kOp, "norm_weight", norm_weight.value(), 1);
    check_contiguous(kOp, "norm_weight", norm_weight.value());
    check_size(kOp, "norm_weight", norm_weight.value(), 0, args.in_features);
    args.norm_weight = norm_weight.value().data_ptr();
    args.eps = static_cast<float>(eps);
    if (!(eps >= 0)) TVM_FFI_THROW(ValueError) << kOp << ": eps must be >= 0, got " << eps;
  }
  if (residual.has_value()) {
    const TensorView added = residual.value();
    check_dtype("residual", added, args.dtype);
    if (args.out_dtype != args.dtype) TVM_FFI_THROW(ValueError) << kOp << ": residual needs out_dtype of x";
    check_ndim(kOp, "residual", added, x.ndim());
    check_contiguous(kOp, "residual", added);
    for (int dim = 0; dim <= last; ++dim) check_size(kOp, "residual", added, dim, out.size(dim));
    args.residual = added.data_ptr();
  }
  args.x = x.data_ptr();
  args.panels = panels.data_ptr();
  args.out = out.data_ptr();
  if (args.rows == 0) return;
  const Scratch scratch(4 * packed_linear_scratch(args.rows, args.in_features));
  args.scratch = static_cast<float*>(scratch.data());
  cpu::packed_linear(args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_linear, packed_linear);
}  // namespace cerberus::ffi
