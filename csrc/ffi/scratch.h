// Working memory of one call, aligned to a cache line; freed with the object.
#pragma once

#include <cstdint>
#include <new>

namespace cerberus::ffi {

class Scratch {
 public:
  explicit Scratch(int64_t bytes) : data_(::operator new(static_cast<size_t>(bytes), kAlignment)) {}
  ~Scratch() { ::operator delete(data_, kAlignment); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* data() const { return data_; }

 private:
  static constexpr std::align_val_t kAlignment{64};
  void* data_;
};

}  // namespace cerberus::ffi
