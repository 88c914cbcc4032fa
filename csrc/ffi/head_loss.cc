#include "cerberus/head_loss.h"

#include "tensors.h"

namespace cerberus::ffi {
namespace {

constexpr const char* kOp = "head_loss";

void check_row_vector(const char* name, const TensorView& tensor, int64_t rows) {
  check_ndim(kOp, name, tensor, 1);
  check_size(kOp, name, tensor, 0, rows);
  check_contiguous(kOp, name, tensor);
}

void check_index(const char* name, const int64_t* values, int64_t rows, int64_t size) {
  for (int64_t row = 0; row < rows; ++row) {
    if (values[row] < 0 || values[row] >= size) {
      TVM_FFI_THROW(ValueError) << kOp << ": " << name << " must lie in [0, " << size << "), got "
                                << values[row] << " in row " << row;
    }
  }
}

void head_loss(TensorView logits, TensorView targets, TensorView scale, Optional<TensorView> teacher,
               Optional<TensorView> teacher_row, double soft_weight, bool needs_gradient, TensorView loss,
               TensorView correct) {
  HeadLossArgs args{};
  check_ndim(kOp, "logits", logits, 2);
  check_contiguous(kOp, "logits", logits);
  args.rows = logits.size(0);
  args.vocab = logits.size(1);
  args.logits = data<float>(kOp, "logits", logits);
  check_row_vector("targets", targets, args.rows);
  check_row_vector("scale", scale, args.rows);
  check_row_vector("loss", loss, args.rows);
  check_row_vector("correct", correct, args.rows);
  args.targets = data<int64_t>(kOp, "targets", targets);
  args.scale = data<float>(kOp, "scale", scale);
  args.loss = data<float>(kOp, "loss", loss);
  check_cpu(kOp, "correct", correct);
  if (!is_dtype(correct, kDLBool, 8)) TVM_FFI_THROW(ValueError) << kOp << ": correct must be bool";
  args.correct = static_cast<bool*>(correct.data_ptr());
  check_index("targets", args.targets, args.rows, args.vocab);
  if (teacher.has_value()) {
    if (!teacher_row.has_value()) TVM_FFI_THROW(ValueError) << kOp << ": teacher must come with teacher_row";
    check_ndim(kOp, "teacher", teacher.value(), 2);
    check_contiguous(kOp, "teacher", teacher.value());
    check_size(kOp, "teacher", teacher.value(), 1, args.vocab);
    check_row_vector("teacher_row", teacher_row.value(), args.rows);
    args.teacher = data<float>(kOp, "teacher", teacher.value());
    args.teacher_row = data<int64_t>(kOp, "teacher_row", teacher_row.value());
    check_index("teacher_row", args.teacher_row, args.rows, teacher.value().size(0));
  }
  args.soft_weight = static_cast<float>(soft_weight);
  args.needs_gradient = needs_gradient;
  cpu::head_loss(args);
}

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(head_loss, head_loss);
}  // namespace cerberus::ffi
