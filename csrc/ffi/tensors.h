// Tensors from tvm-ffi to raw pointers: the checks that keep a kernel from reading what it must not. The
// Python layer has already spoken to the user; these guard callers that come through the ffi directly.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <string>

#include "cerberus/dtype.h"

namespace cerberus::ffi {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline bool is_dtype(const TensorView& tensor, uint8_t code, uint8_t bits) {
  const DLDataType dtype = tensor.dtype();
  return dtype.code == code && dtype.bits == bits && dtype.lanes == 1;
}

inline void check_cpu(const char* op, const char* name, const TensorView& tensor) {
  if (tensor.device().device_type != kDLCPU) {
    TVM_FFI_THROW(ValueError) << op << ": " << name << " must be a CPU tensor, got device type "
                              << static_cast<int>(tensor.device().device_type);
  }
}

inline void check_ndim(const char* op, const char* name, const TensorView& tensor, int ndim) {
  if (tensor.ndim() != ndim) {
    TVM_FFI_THROW(ValueError) << op << ": " << name << " must have " << ndim << " dimensions, got "
                              << tensor.ndim();
  }
}

inline void check_size(const char* op, const char* name, const TensorView& tensor, int dim, int64_t size) {
  if (tensor.size(dim) != size) {
    TVM_FFI_THROW(ValueError) << op << ": " << name << " must have size " << size << " in dimension " << dim
                              << ", got " << tensor.size(dim);
  }
}

inline void check_last_contiguous(const char* op, const char* name, const TensorView& tensor) {
  const int last = tensor.ndim() - 1;
  if (last >= 0 && tensor.size(last) > 1 && tensor.stride(last) != 1) {
    TVM_FFI_THROW(ValueError) << op << ": " << name
                              << " must be contiguous in its last dimension, got stride "
                              << tensor.stride(last);
  }
}

inline void check_contiguous(const char* op, const char* name, const TensorView& tensor) {
  if (!tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << op << ": " << name << " must be contiguous, got a strided tensor";
  }
}

// Data pointer of a CPU tensor of element type T (int32_t, int64_t, uint8_t, float).
template <typename T>
T* data(const char* op, const char* name, const TensorView& tensor) {
  check_cpu(op, name, tensor);
  const uint8_t code = std::is_floating_point<T>::value ? kDLFloat
                       : std::is_signed<T>::value       ? kDLInt
                                                        : kDLUInt;
  if (!is_dtype(tensor, code, sizeof(T) * 8)) {
    const DLDataType dtype = tensor.dtype();
    TVM_FFI_THROW(ValueError) << op << ": " << name << " must have element type code " << int(code)
                              << " with " << sizeof(T) * 8 << " bits, got code " << int(dtype.code)
                              << " with " << int(dtype.bits) << " bits";
  }
  return static_cast<T*>(tensor.data_ptr());
}

template <typename T>
T* optional_data(const char* op, const char* name, const Optional<TensorView>& tensor) {
  return tensor.has_value() ? data<T>(op, name, tensor.value()) : nullptr;
}

// fp32, fp16 or bf16.
inline DType float_dtype(const char* op, const char* name, const TensorView& tensor) {
  check_cpu(op, name, tensor);
  if (is_dtype(tensor, kDLFloat, 32)) return DType::f32;
  if (is_dtype(tensor, kDLFloat, 16)) return DType::f16;
  if (is_dtype(tensor, kDLBfloat, 16)) return DType::bf16;
  TVM_FFI_THROW(ValueError) << op << ": " << name << " must be float32, float16 or bfloat16, got type code "
                            << static_cast<int>(tensor.dtype().code) << " with "
                            << static_cast<int>(tensor.dtype().bits) << " bits";
  return DType::f32;
}

}  // namespace cerberus::ffi
