// What the comparison of instruction-set levels rests on: seeded numbers, memory that faults when it is
// overrun, and the run of one case at every level.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cerberus/dtype.h"
#include "cerberus/isa.h"

namespace levels {

using cerberus::BFloat16;
using cerberus::DType;
using cerberus::Half;
using cerberus::Isa;

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t word() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t limit) { return static_cast<int64_t>(word() % static_cast<uint64_t>(limit)); }
  float uniform() { return static_cast<float>(word() >> 40) * 0x1p-24f; }
  // Bell-shaped, variance 1.
  float normal() { return (uniform() + uniform() + uniform() + uniform() - 2.0f) * 1.7320508f; }

  std::vector<float> normals(int64_t count, float scale = 1.0f) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = normal() * scale;
    return values;
  }
  // Whole numbers in [-limit, limit]: their sums of products are exact in any order.
  std::vector<float> whole(int64_t count, int64_t limit) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(below(2 * limit + 1) - limit);
    return values;
  }

 private:
  uint64_t state_;
};

inline int64_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }
inline const char* name_of(DType dtype) {
  return dtype == DType::f32 ? "fp32" : dtype == DType::f16 ? "fp16" : "bf16";
}

// How two levels must agree: in every bit (of integers, of floats), or within the tolerance of an element
// type.
enum class Agree { bits, f32_bits, f32, f16, bf16 };
inline Agree agree_as(DType dtype) {
  return dtype == DType::f32 ? Agree::f32 : dtype == DType::f16 ? Agree::f16 : Agree::bf16;
}

// An array that ends where memory ends, so that reading or writing past it is a fault.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes) {
    const int64_t page = sysconf(_SC_PAGESIZE);
    body_ = (bytes + page - 1) / page * page;
    void* start = mmap(nullptr, static_cast<size_t>(body_ + page), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) abort();
    start_ = static_cast<char*>(start);
    mapped_ = body_ + page;
    mprotect(start_ + body_, static_cast<size_t>(page), PROT_NONE);
  }
  ~Memory() {
    if (start_ != nullptr) munmap(start_, static_cast<size_t>(mapped_));
  }
  Memory(Memory&& other) noexcept
      : start_(other.start_), bytes_(other.bytes_), body_(other.body_), mapped_(other.mapped_) {
    other.start_ = nullptr;
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return start_ + body_ - bytes_; }
  int64_t bytes() const { return bytes_; }
  void make_read_only() {
    if (body_ > 0) mprotect(start_, static_cast<size_t>(body_), PROT_READ);
  }

 private:
  char* start_ = nullptr;
  int64_t bytes_, body_ = 0, mapped_ = 0;
};

struct Output {
  std::string name;
  Agree agree;
  int64_t element;  // bytes
  Memory memory;
  std::vector<char> initial;  // what it holds before the call; empty where the call writes all of it
  std::vector<char> baseline;

  double value(const char* at) const {
    if (agree == Agree::f32 || agree == Agree::f32_bits) return *reinterpret_cast<const float*>(at);
    if (agree == Agree::f16) return cerberus::to_float(*reinterpret_cast<const Half*>(at));
    if (agree == Agree::bf16) return cerberus::to_float(*reinterpret_cast<const BFloat16*>(at));
    uint64_t bits = 0;
    memcpy(&bits, at, static_cast<size_t>(element));
    return static_cast<double>(static_cast<int64_t>(bits << (64 - 8 * element)) >> (64 - 8 * element));
  }
  bool agrees(const char* actual, const char* expected) const {
    if (memcmp(actual, expected, static_cast<size_t>(element)) == 0) return true;
    if (agree == Agree::bits || agree == Agree::f32_bits) return false;
    // The table of cerberus_kernels/testing/tolerances.py.
    const double tolerance = agree == Agree::f32 ? 2e-5 : agree == Agree::f16 ? 2e-3 : 1.6e-2;
    const double a = value(actual), e = value(expected);
    if (std::isnan(a) || std::isnan(e)) return std::isnan(a) && std::isnan(e);
    if (std::isinf(a) || std::isinf(e)) return a == e;
    return std::fabs(a - e) <= tolerance + tolerance * std::fabs(e);
  }
};

inline std::vector<Isa> levels_here() {
  std::vector<Isa> levels;
  for (int32_t level = 0; level <= static_cast<int32_t>(cerberus::cpu::best_isa()); ++level) {
    levels.push_back(static_cast<Isa>(level));
  }
  return levels;
}

// What runs now, for the report of a memory fault.
inline char& running(int64_t index) {
  static char text[512];
  return text[index];
}

inline void report_fault(int signal_number) {
  const char* kind = signal_number == SIGILL    ? "illegal instruction in "
                     : signal_number == SIGSEGV ? "access outside an array in "
                                                : "signal in ";
  const char* text = &running(0);
  const bool written =
      write(2, kind, strlen(kind)) > 0 && write(2, text, strlen(text)) > 0 && write(2, "\n", 1) > 0;
  _exit(written ? 1 : 2);
}

// One set of inputs of one operator, and what comes of it at each level.
class Case {
 public:
  Case(std::string op, std::string label) : op_(std::move(op)), label_(std::move(label)) {}

  template <typename T>
  const T* input(const std::vector<T>& values) {
    inputs_.emplace_back(static_cast<int64_t>(values.size() * sizeof(T)));
    if (!values.empty()) memcpy(inputs_.back().data(), values.data(), values.size() * sizeof(T));
    inputs_.back().make_read_only();
    return reinterpret_cast<const T*>(inputs_.back().data());
  }
  const void* floats(const std::vector<float>& values, DType dtype) { return input(encode(values, dtype)); }

  static std::vector<char> encode(const std::vector<float>& values, DType dtype) {
    std::vector<char> bytes(values.size() * static_cast<size_t>(size_of(dtype)));
    for (size_t i = 0; i < values.size(); ++i) {
      if (dtype == DType::f32) memcpy(&bytes[4 * i], &values[i], 4);
      const Half half = cerberus::from_float<Half>(values[i]);
      if (dtype == DType::f16) memcpy(&bytes[2 * i], &half, 2);
      const BFloat16 brain = cerberus::from_float<BFloat16>(values[i]);
      if (dtype == DType::bf16) memcpy(&bytes[2 * i], &brain, 2);
    }
    return bytes;
  }

  char* output(const char* name, int64_t count, int64_t element, Agree agree,
               std::vector<char> initial = {}) {
    outputs_.push_back({name, agree, element, Memory(count * element), std::move(initial), {}});
    return outputs_.back().memory.data();
  }
  template <typename T>
  T* output(const char* name, int64_t count, Agree agree = Agree::bits) {
    return reinterpret_cast<T*>(output(name, count, sizeof(T), agree));
  }
  char* floats_out(const char* name, int64_t count, DType dtype) {
    return output(name, count, size_of(dtype), agree_as(dtype));
  }
  // Working memory, aligned to 64, with garbage in it before every call.
  char* scratch(int64_t bytes) {
    scratch_.emplace_back((bytes + 63) / 64 * 64);
    return scratch_.back().data();
  }
  // Two outputs that must be the same bits at each level.
  void twins(const void* first, const void* second, int64_t bytes, const char* promise) {
    twins_.push_back({static_cast<const char*>(first), static_cast<const char*>(second), bytes, promise});
  }

  template <typename Call>
  void run(Call&& call) {
    for (const Isa level : levels_here()) {
      const char* level_name = cerberus::cpu::isa_name(level);
      cerberus::cpu::set_isa(level_name);
      snprintf(&running(0), 512, "%s, case %s, level %s", op_.c_str(), label_.c_str(), level_name);
      prepare('\xa5', '\xff');
      call();
      for (const Twins& pair : twins_) {
        for (int64_t i = 0; i < pair.bytes; ++i) {
          if (pair.first[i] != pair.second[i])
            fail(level_name, pair.promise, i, pair.first[i], pair.second[i]);
        }
      }
      std::vector<std::vector<char>> first;
      for (const Output& output : outputs_) first.push_back(copy(output.memory));
      // Once more over other garbage: what a call leaves unwritten, or takes from its scratch, differs.
      prepare('\x5a', '\0');
      call();
      for (size_t i = 0; i < outputs_.size(); ++i) {
        compare(outputs_[i], first[i], level_name, " (second call against the first)", Agree::bits);
        if (level == Isa::baseline) outputs_[i].baseline = first[i];
        compare(outputs_[i], outputs_[i].baseline, level_name, "", outputs_[i].agree);
      }
    }
    ++count();
  }

  static int64_t& count() {
    static int64_t cases = 0;
    return cases;
  }

 private:
  struct Twins {
    const char *first, *second;
    int64_t bytes;
    const char* promise;
  };

  static std::vector<char> copy(const Memory& memory) {
    return std::vector<char>(memory.data(), memory.data() + memory.bytes());
  }
  void prepare(char garbage, char scratch_garbage) {
    for (const Output& output : outputs_) {
      memset(output.memory.data(), garbage, static_cast<size_t>(output.memory.bytes()));
      if (!output.initial.empty()) memcpy(output.memory.data(), output.initial.data(), output.initial.size());
    }
    for (const Memory& memory : scratch_)
      memset(memory.data(), scratch_garbage, static_cast<size_t>(memory.bytes()));
  }
  void compare(const Output& output, const std::vector<char>& expected, const char* level, const char* what,
               Agree agree) const {
    for (int64_t at = 0; at < output.memory.bytes(); at += output.element) {
      const char* actual = output.memory.data() + at;
      if (memcmp(actual, &expected[at], static_cast<size_t>(output.element)) == 0) continue;
      if (agree != Agree::bits && output.agrees(actual, &expected[at])) continue;
      fail(level, (output.name + what).c_str(), at / output.element, output.value(actual),
           output.value(&expected[at]));
    }
  }
  [[noreturn]] void fail(const char* level, const char* what, int64_t index, double actual,
                         double expected) const {
    fprintf(stderr, "%s, case %s, level %s: %s[%lld] is %.9g, expected %.9g\n", op_.c_str(), label_.c_str(),
            level, what, static_cast<long long>(index), actual, expected);
    exit(1);
  }

  std::string op_, label_;
  std::vector<Memory> inputs_, scratch_;
  std::vector<Output> outputs_;
  std::vector<Twins> twins_;
};

// "name 3 name 5": labels of cases.
template <typename... Rest>
std::string label(const char* name, int64_t value, Rest... rest) {
  std::string text = std::string(name) + " " + std::to_string(value);
  if constexpr (sizeof...(rest) > 0) text += " " + label(rest...);
  return text;
}

}  // namespace levels
