#include "cerberus/packed_linear.h"

#include <memory>

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
// several.
void packed_linear(TensorView x, TensorView panels, Optional<TensorView> bias, TensorView out) {
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
  args.in_features = x.size(last);
  args.out_features = out.size(last);
  args.x_stride = last == 1 ? x.stride(0) : args.in_features;

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
  args.x = x.data_ptr();
  args.panels = panels.data_ptr();
  args.out = out.data_ptr();
  if (args.rows == 0) return;
  const std::unique_ptr<float[]> scratch(new float[packed_linear_scratch(args.rows, args.in_features)]);
  args.scratch = scratch.get();
  cpu::packed_linear(args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(packed_linear, packed_linear);
}  // namespace cerberus::ffi
