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

void packed_linear(TensorView x, TensorView panels, Optional<TensorView> bias, TensorView out) {
  PackedLinearArgs args{};
  check_ndim(kOp, "x", x, 2);
  check_last_contiguous(kOp, "x", x);
  check_ndim(kOp, "out", out, 2);
  check_contiguous(kOp, "out", out);
  args.dtype = float_dtype(kOp, "x", x);
  args.out_dtype = float_dtype(kOp, "out", out);
  if (args.out_dtype != DType::f32) check_dtype("out", out, args.dtype);
  args.rows = x.size(0);
  args.in_features = x.size(1);
  args.out_features = out.size(1);
  args.x_stride = x.stride(0);
  check_size(kOp, "out", out, 0, args.rows);

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
