// Facts about this build, and the switches that tests use.
#include <stdexcept>
#include <string>

#include "cerberus/isa.h"
#include "parallel.h"
#include "tensors.h"

namespace cerberus::ffi {
namespace {

tvm::ffi::String source_hash() { return CERBERUS_SOURCE_HASH; }
tvm::ffi::String thread_runtime() { return cpu::thread_runtime(); }
int64_t num_threads() { return cpu::num_threads(); }
tvm::ffi::String best_isa() { return cpu::isa_name(cpu::best_isa()); }

tvm::ffi::String active_isa() {
  try {
    return cpu::isa_name(cpu::active_isa());
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
  return "";
}

void set_isa(tvm::ffi::String name) {
  try {
    cpu::set_isa(name.c_str());
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
}

#ifdef CERBERUS_SANITIZE
// Undefined, on purpose, where the sum does not fit: shows that a sanitized build stops there.
int64_t unchecked_sum(int64_t a, int64_t b) { return a + b; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(unchecked_sum, unchecked_sum);
#endif

}  // namespace
TVM_FFI_DLL_EXPORT_TYPED_FUNC(source_hash, source_hash);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(thread_runtime, thread_runtime);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(num_threads, num_threads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(best_isa, best_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(active_isa, active_isa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_isa, set_isa);
}  // namespace cerberus::ffi
