#include "cerberus/gate.h"

#include <string>

#include "scratch.h"
#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "gate";

const void* take_vector(const char* name, const Optional<TensorView>& tensor, DType dtype, int64_t size) {
  check_ndim(kOp, name, tensor.value(), 1);
  check_size(kOp, name, tensor.value(), 0, size);
  check_contiguous(kOp, name, tensor.value());
  if (float_dtype(kOp, name, tensor.value()) != dtype) {
    TVM_FFI_THROW(ValueError) << kOp << ": " << name << " must have the element type of w1";
  }
  return tensor.value().data_ptr();
}

void take_values(const char* name, const TensorView& values, GateArgs& args) {
  check_ndim(kOp, name, values, 2);
  check_last_contiguous(kOp, name, values);
  args.values_dtype = float_dtype(kOp, name, values);
  args.values = values.data_ptr();
  args.batch = values.size(0);
  args.columns = values.size(1);
  args.values_stride = values.stride(0);
}

void gate(Optional<TensorView> hidden, Optional<TensorView> entropy, Optional<TensorView> logits,
          Optional<TensorView> thresholds, Optional<TensorView> w1, Optional<TensorView> b1,
          Optional<TensorView> w2, Optional<TensorView> b2, tvm::ffi::String kind, double threshold,
          int64_t vocab_size, double eps, TensorView score, TensorView open) {
  GateArgs args{};
  const std::string name = kind;
  if (name == "entropy" && entropy.has_value()) {
    args.kind = GateScore::given;
    check_ndim(kOp, "entropy", entropy.value(), 1);
    check_contiguous(kOp, "entropy", entropy.value());
    args.entropy = data<float>(kOp, "entropy", entropy.value());
    args.batch = entropy.value().size(0);
  } else if (name == "entropy" && logits.has_value()) {
    args.kind = GateScore::entropy;
    take_values("logits", logits.value(), args);
    if (vocab_size < 1 || vocab_size > args.columns) {
      TVM_FFI_THROW(ValueError) << kOp << ": vocab_size must be in [1, " << args.columns << "], got "
                                << vocab_size;
    }
    args.columns = vocab_size;
  } else if (name == "hidden_entropy" && hidden.has_value()) {
    args.kind = GateScore::entropy;
    take_values("hidden", hidden.value(), args);
  } else if (name == "learned" && hidden.has_value() && w1.has_value() && b1.has_value() && w2.has_value() &&
             b2.has_value()) {
    args.kind = GateScore::learned;
    take_values("hidden", hidden.value(), args);
    check_ndim(kOp, "w1", w1.value(), 2);
    check_last_contiguous(kOp, "w1", w1.value());
    check_size(kOp, "w1", w1.value(), 1, args.columns);
    args.weights_dtype = float_dtype(kOp, "w1", w1.value());
    args.w1 = w1.value().data_ptr();
    args.inner = w1.value().size(0);
    args.w1_stride = w1.value().stride(0);
    args.b1 = take_vector("b1", b1, args.weights_dtype, args.inner);
    args.w2 = take_vector("w2", w2, args.weights_dtype, args.inner);
    args.b2 = take_vector("b2", b2, args.weights_dtype, 1);
    args.eps = static_cast<float>(eps);
  } else {
    TVM_FFI_THROW(ValueError) << kOp
                              << ": kind must be entropy, hidden_entropy or learned with its inputs, got "
                              << name;
  }
  args.threshold = static_cast<float>(threshold);
  args.thresholds = optional_data<float>(kOp, "threshold", thresholds);
  if (thresholds.has_value()) {
    check_ndim(kOp, "threshold", thresholds.value(), 1);
    check_contiguous(kOp, "threshold", thresholds.value());
    check_size(kOp, "threshold", thresholds.value(), 0, args.batch);
  }
  args.score = data<float>(kOp, "score", score);
  args.open = data<uint8_t>(kOp, "open", open);
  for (const auto& [label, output] : {std::pair{"score", score}, std::pair{"open", open}}) {
    check_ndim(kOp, label, output, 1);
    check_contiguous(kOp, label, output);
    check_size(kOp, label, output, 0, args.batch);
  }
  const Scratch scratch(4 * gate_scratch_floats(args));
  args.scratch = static_cast<float*>(scratch.data());
  cpu::gate(args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gate, gate);
}  // namespace cerberus::ffi
